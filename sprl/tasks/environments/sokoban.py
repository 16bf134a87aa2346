"""Sokoban: push every box onto a target; boxes cannot be pulled.

    # wall   _ floor   . target   $ box   * box on a target   @ player   + player on a target

The model answers `<answer>Right</answer>`. Rewards: a box pushed onto a target 0.1, off it -0.1, the solved room 1 more, an
answer that is not a direction -0.15, else 0.

Rooms are made backwards: from the solved room the player walks and pulls the boxes away, in at most `max_actions` moves. The
reverse is a solution, so no room needs a search.
"""

from typing import Any

import numpy as np

from sprl.tasks import graders
from sprl.tasks.environments.frozen_lake import MOVES
from sprl.tasks.environments.turns import Turns

_WALLS = 0.15  # fraction of the inner cells
_PULL = 4.0  # weight of a move that pulls a box, against 1 of a move that does not
_AGGREGATION = {'success': 'last', 'boxes_on_target': 'last', 'valid_action': 'mean', 'effective_action': 'mean'}

Cell = tuple[int, int]


class Sokoban:
  """The game in a room of `size` cells a side, outer wall included, with `boxes` boxes and as many targets.

  Raises ValueError if an argument is out of range.
  """

  name = 'sokoban'

  def __init__(self, size: int = 6, boxes: int = 1, max_actions: int = 10, invalid_penalty: float = -0.15):
    if not 5 <= size <= 20:
      raise ValueError(f'size = {size}: expected 5 to 20 cells a side, the outer wall included')
    if not 1 <= boxes <= 4:
      raise ValueError(f'boxes = {boxes}: expected 1 to 4')
    self._size, self._count, self._penalty = size, boxes, invalid_penalty
    self._turns = Turns(max_actions)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """Draw the room of the seed. Returns rules and room."""
    rng = np.random.default_rng(seed)
    self._boxes = self._targets = frozenset()
    while self._boxes == self._targets:  # no box was pulled, or it was pulled back
      self._draw(rng)
      self._unplay(rng)
    self._turns.begin()
    rules = (
      'You are solving a Sokoban puzzle: push every box onto a target. You walk, and push a box by walking into it where the '
      'cell behind it is free; boxes cannot be pulled.\n'
      'Symbols: # wall, _ floor, . target, $ box, * box on a target, @ you, + you on a target.\n'
      f'Each turn, choose one of Left, Down, Right, Up. You have {self._turns.limit} turns.'
    )
    return f'{rules}\n\n{self._grid()}', {'suffix': _SUFFIX}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Walk or push by the last answer in `action`."""
    self._turns.take()
    told = (graders.last_tagged(action) or '').strip().lower()
    before, placed = self._player, len(self._boxes & self._targets)
    if told in MOVES:
      text, reward = self._walk(told), 0.0
    else:
      text, reward = 'This is no valid action: you stay where you are.', self._penalty
    reward += 0.1 * (len(self._boxes & self._targets) - placed)
    solved = self._boxes == self._targets
    if solved:
      text, reward = 'All boxes are on targets: the puzzle is solved.', reward + 1
    truncated = self._turns.end(solved)
    if truncated:
      text += ' You have no turns left.'
    metrics = {
      'success': solved,
      'boxes_on_target': len(self._boxes & self._targets),
      'valid_action': told in MOVES,
      'effective_action': self._player != before,
    }
    info = {'metrics': {k: float(v) for k, v in metrics.items()}, 'metrics_agg_mode': dict(_AGGREGATION)}
    if not (solved or truncated):
      info['suffix'] = _SUFFIX
    return f'{text}\n\n{self._grid()}', reward, solved, truncated, info

  def sample_random_action(self, rng: np.random.Generator | None = None) -> str:
    """Return a random direction as an answer."""
    direction = (rng or np.random.default_rng()).choice(sorted(MOVES))
    return f'<answer>{str(direction).capitalize()}</answer>'

  def _walk(self, direction: str) -> str:
    """Move the player, and the box in front if there is room. Return what happened."""
    to = _next(self._player, direction)
    if to in self._boxes:
      behind = _next(to, direction)
      if behind in self._walls or behind in self._boxes:
        return f'You cannot push {direction}: the box is blocked.'
      self._boxes, self._player = self._boxes - {to} | {behind}, to
      return f'You pushed a box {direction}.'
    if to in self._walls:
      return f'You cannot move {direction}: there is a wall.'
    self._player = to
    return f'You moved {direction}.'

  def _draw(self, rng: np.random.Generator) -> None:
    """Draw a room with every box on its target."""
    cells = [(row, column) for row in range(self._size) for column in range(self._size)]
    inner = [cell for cell in cells if min(cell) > 0 and max(cell) < self._size - 1]
    places = [inner[i] for i in rng.choice(len(inner), size=self._count + 1, replace=False)]
    self._player, self._boxes = places[0], frozenset(places[1:])
    self._targets = self._boxes
    inside = {cell for cell, draw in zip(inner, rng.random(len(inner)), strict=True) if cell in places or draw >= _WALLS}
    self._walls = frozenset(cells) - inside

  def _unplay(self, rng: np.random.Generator) -> None:
    """Play backwards: each step back pulls the box in front of the player, or leaves it."""
    for _ in range(self._turns.limit):
      choices = []  # (weight, player, boxes)
      for direction in MOVES:
        before, back = _next(self._player, direction), _next(self._player, _OPPOSITE[direction])
        if back in self._walls or back in self._boxes:
          continue
        choices.append((1.0, back, self._boxes))
        if before in self._boxes:
          choices.append((_PULL, back, self._boxes - {before} | {self._player}))
      if not choices:
        return
      weights = np.array([weight for weight, *_ in choices])
      _, self._player, self._boxes = choices[rng.choice(len(choices), p=weights / weights.sum())]

  def _grid(self) -> str:
    def symbol(cell: Cell) -> str:
      on_target = cell in self._targets
      if cell == self._player:
        return '+' if on_target else '@'
      if cell in self._boxes:
        return '*' if on_target else '$'
      return '#' if cell in self._walls else '.' if on_target else '_'

    return '\n'.join(' '.join(symbol((row, column)) for column in range(self._size)) for row in range(self._size))


_SUFFIX = 'Answer with <answer>Left</answer>, <answer>Down</answer>, <answer>Right</answer> or <answer>Up</answer>.'
_OPPOSITE = {'left': 'right', 'right': 'left', 'up': 'down', 'down': 'up'}


def _next(cell: Cell, direction: str) -> Cell:
  by = MOVES[direction]
  return cell[0] + by[0], cell[1] + by[1]
