"""Guess the number: after each guess the game says whether the number is higher or lower.

The model answers `<answer>37</answer>`. The reward is 1 for the right number, `invalid_penalty`
(default: -0.1) for an answer that is not a whole number in the range, and 0 otherwise.
"""

import re
from typing import Any

import numpy as np

from sprl.tasks import graders
from sprl.tasks.environments.turns import Turns

_WHOLE = re.compile(r'[-+]?[0-9]{1,12}')
_AGGREGATION = {'success': 'last', 'valid_action': 'mean'}


class GuessNumber:
  """The game on the whole numbers `low` to `high`, with `max_actions` guesses, invalid ones included.

  Raises ValueError unless low < high and both have at most 12 digits.
  """

  name = 'guess_number'

  def __init__(self, low: int = 1, high: int = 50, max_actions: int = 10, invalid_penalty: float = -0.1):
    if not -(10**12) < low < high < 10**12:
      raise ValueError(f'low = {low}, high = {high}: expected low below high, both of 12 digits at most')
    self._low, self._high, self._penalty = low, high, invalid_penalty
    self._turns = Turns(max_actions)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """Draw the number from the seed. Returns the rules."""
    self._number = int(np.random.default_rng(seed).integers(self._low, self._high, endpoint=True))
    self._turns.begin()
    rules = (
      f'Guess the whole number that I am thinking of: it is between {self._low} and {self._high}, both included. '
      f'After each guess I tell you whether it is higher or lower. You have {self._turns.limit} guesses.'
    )
    return rules, {'suffix': _SUFFIX}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Answer the last guess in `action`."""
    self._turns.take()
    told = (graders.last_tagged(action) or '').strip()
    guess = int(told) if _WHOLE.fullmatch(told) else None
    success = guess == self._number
    if guess is None or not self._low <= guess <= self._high:
      text, reward, valid = f'This is no whole number between {self._low} and {self._high}.', self._penalty, False
    elif success:
      text, reward, valid = f'Yes, it is {guess}.', 1.0, True
    else:
      text, reward, valid = f'No, it is {"higher" if self._number > guess else "lower"} than {guess}.', 0.0, True
    truncated = self._turns.end(success)
    if truncated:
      text += ' You have no guesses left.'
    metrics = {'success': float(success), 'valid_action': float(valid)}
    info: dict[str, Any] = {'metrics': metrics, 'metrics_agg_mode': dict(_AGGREGATION)}
    if not (success or truncated):
      info['suffix'] = _SUFFIX
    return text, reward, success, truncated, info

  def sample_random_action(self, rng: np.random.Generator | None = None) -> str:
    """Return a random number of the range as an answer."""
    return f'<answer>{(rng or np.random.default_rng()).integers(self._low, self._high, endpoint=True)}</answer>'


_SUFFIX = 'Answer with your guess in tags, such as <answer>7</answer>.'
