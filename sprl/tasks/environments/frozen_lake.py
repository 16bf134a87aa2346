"""FrozenLake: cross a frozen lake to the goal without falling into a hole.

    P player   _ ice   O hole   G goal   X player in a hole   √ player at the goal

The model answers `<answer>Right</answer>`. Rewards: the goal 1, an answer that is not a direction -0.01, else 0.
"""

from collections import deque
from typing import Any

import numpy as np

from sprl.tasks import graders
from sprl.tasks.environments.turns import Turns

MOVES = {'left': (0, -1), 'down': (1, 0), 'right': (0, 1), 'up': (-1, 0)}  # (row, column)
_AGGREGATION = {'success': 'last', 'valid_action': 'mean', 'effective_action': 'mean'}

Cell = tuple[int, int]


class FrozenLake:
  """The game on a square of `size` cells a side. Every map can be crossed within `max_actions`.

  `slippery`: a move goes in its direction one time in three, else to one of its two sides. `holes`: the fraction of cells that
  are holes, in [0, 0.5], before start and goal are cleared.

  Raises ValueError if an argument is out of range.
  """

  name = 'frozen_lake'

  def __init__(
    self,
    size: int = 4,
    max_actions: int = 10,
    holes: float = 0.2,
    slippery: bool = False,
    invalid_penalty: float = -0.01,
  ):
    if not 2 <= size <= 20:
      raise ValueError(f'size = {size}: expected 2 to 20 cells a side')
    if not 0 <= holes <= 0.5:
      raise ValueError(f'holes = {holes}: expected a part in [0, 0.5]')
    self._size, self._holes, self._slippery, self._penalty = size, holes, slippery, invalid_penalty
    self._turns = Turns(max_actions)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """Draw the map of the seed. Returns rules and map."""
    self._rng = np.random.default_rng(seed)
    while True:  # ends soon: two neighbouring cells always qualify
      self._player, self._goal, self._is_hole = self._draw()
      distance = shortest_path(self._is_hole, self._player, self._goal)
      if distance is not None and 1 <= distance <= self._turns.limit:
        break
    self._turns.begin()
    slips = ' The ice is slippery: you may slide to a side of where you wanted to go.' if self._slippery else ''
    rules = (
      f'You stand on a frozen lake and want to reach the goal without falling into a hole.{slips}\n'
      'Symbols: P you, _ ice, O hole, G goal, X you in a hole, √ you at the goal.\n'
      f'Each turn, choose one of Left, Down, Right, Up. You have {self._turns.limit} turns.'
    )
    return f'{rules}\n\n{self._grid()}', {'suffix': _SUFFIX}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Move the player by the last answer in `action`."""
    self._turns.take()
    told = (graders.last_tagged(action) or '').strip().lower()
    before, reward = self._player, 0.0
    if told in MOVES:
      direction = self._slip(told)
      self._player = self._neighbour(direction)
      text = f'You moved {direction}.' if self._player != before else f'You cannot move {direction}: you stay where you are.'
    else:
      reward, text = self._penalty, 'This is no valid action: you stay where you are.'
    success, fell = self._player == self._goal, bool(self._is_hole[self._player])
    if success:
      reward, text = 1.0, 'You have reached the goal.'
    elif fell:
      text = 'You have fallen into a hole.'
    terminated = success or fell
    truncated = self._turns.end(terminated)
    if truncated:
      text += ' You have no turns left.'
    metrics = {'success': success, 'valid_action': told in MOVES, 'effective_action': self._player != before}
    info = {'metrics': {k: float(v) for k, v in metrics.items()}, 'metrics_agg_mode': dict(_AGGREGATION)}
    if not (terminated or truncated):
      info['suffix'] = _SUFFIX
    return f'{text}\n\n{self._grid()}', reward, terminated, truncated, info

  def sample_random_action(self, rng: np.random.Generator | None = None) -> str:
    """Return a random direction as an answer."""
    direction = (rng or np.random.default_rng()).choice(sorted(MOVES))
    return f'<answer>{str(direction).capitalize()}</answer>'

  def _draw(self) -> tuple[Cell, Cell, np.ndarray]:
    start, goal = self._rng.choice(self._size**2, size=2, replace=False)
    is_hole = self._rng.random((self._size, self._size)) < self._holes
    is_hole.flat[[start, goal]] = False
    return divmod(int(start), self._size), divmod(int(goal), self._size), is_hole

  def _slip(self, direction: str) -> str:
    """Return the direction in which a move goes."""
    if not self._slippery:
      return direction
    order = list(MOVES)  # each direction stands between its two sides
    return order[(order.index(direction) + int(self._rng.integers(-1, 2))) % 4]

  def _neighbour(self, direction: str) -> Cell:
    row, column = (min(max(at + by, 0), self._size - 1) for at, by in zip(self._player, MOVES[direction], strict=True))
    return row, column

  def _grid(self) -> str:
    cells = np.where(self._is_hole, 'O', '_')
    cells[self._goal] = 'G'
    cells[self._player] = '√' if self._player == self._goal else 'X' if self._is_hole[self._player] else 'P'
    return '\n'.join(' '.join(row) for row in cells)


_SUFFIX = 'Answer with <answer>Left</answer>, <answer>Down</answer>, <answer>Right</answer> or <answer>Up</answer>.'


def shortest_path(is_hole: np.ndarray, start: Cell, goal: Cell) -> int | None:
  """Return the number of moves from start to goal around the holes, or None if there is no path."""
  reached, queue = {start: 0}, deque([start])
  while queue:
    cell = queue.popleft()
    if cell == goal:
      return reached[cell]
    for by in MOVES.values():
      row, column = cell[0] + by[0], cell[1] + by[1]
      inside = 0 <= row < is_hole.shape[0] and 0 <= column < is_hole.shape[1]
      if inside and not is_hole[row, column] and (row, column) not in reached:
        reached[row, column] = reached[cell] + 1
        queue.append((row, column))
  return None
