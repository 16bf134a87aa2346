"""The prompts of a run in the order they are asked: shuffled anew each epoch, without end; all processes have the same.

The order is a grain pipeline of index arithmetic, so that position n is known without visiting the n before it: no iterator to
replay, no thread to wait for, and a state of one number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grain

from sprl.tasks.problems import Problem


class PromptStream:
  """An endless stream of problems.

  Each epoch is a new permutation that depends on `seed` and the epoch only.

  Raises ValueError where there are no problems.
  """

  def __init__(self, problems: Sequence[Problem], seed: int):
    if not len(problems):
      raise ValueError('there are no problems to ask: expected one at least')
    order = grain.MapDataset.range(len(problems)).seed(seed).shuffle().repeat()
    self._problems, self._order = problems, cast(Sequence[int], order)
    self._made_of = {'problems': len(problems), 'seed': seed}
    self._position = 0

  def index(self, position: int) -> int:
    """Which of the problems is at a place of the order."""
    return int(self._order[position])

  def at(self, position: int) -> Problem:
    """The problem at a place of the order."""
    return self._problems[self.index(position)]

  def next(self, n: int) -> list[Problem]:
    """The next n problems."""
    start, self._position = self._position, self._position + n
    return [self.at(i) for i in range(start, self._position)]

  def state(self) -> dict[str, Any]:
    """Where the stream stands, for JSON: `restore` of an equal stream continues at the exact next problem."""
    return {**self._made_of, 'position': self._position}

  def check(self, state: Mapping[str, Any]) -> None:
    """Raises ValueError where `state` is another stream's, whose places mean nothing here."""
    for name, value in self._made_of.items():
      if state[name] != value:
        raise ValueError(f'the saved prompt stream has {name} = {state[name]}, this one {value}: its place means nothing here')

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues where `state` stood. Raises ValueError where it is another stream's."""
    self.check(state)
    self._position = state['position']
