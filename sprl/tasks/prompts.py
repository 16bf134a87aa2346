"""The order of a run's prompts: endless, shuffled again in each epoch, the same in every process.

The order is a grain pipeline of index arithmetic, so position n is known without visiting the positions before it. There is no
iterator to replay and no thread to wait for, and the state is one number.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grain

from sprl.tasks.problems import Problem


class PromptStream:
  """An endless stream of problems.

  Each epoch is a new permutation, which depends on `seed` and the epoch only.

  Raises ValueError if there are no problems.
  """

  def __init__(self, problems: Sequence[Problem], seed: int):
    if not len(problems):
      raise ValueError('no problems: expected at least one')
    order = grain.MapDataset.range(len(problems)).seed(seed).shuffle().repeat()
    self._problems, self._order = problems, cast(Sequence[int], order)
    self._made_of = {'problems': len(problems), 'seed': seed}
    self._position = 0

  def index(self, position: int) -> int:
    """Return the index of the problem at a position of the order."""
    return int(self._order[position])

  def at(self, position: int) -> Problem:
    """Return the problem at a position of the order."""
    return self._problems[self.index(position)]

  def next(self, n: int) -> list[Problem]:
    """Return the next n problems."""
    start, self._position = self._position, self._position + n
    return [self.at(i) for i in range(start, self._position)]

  def state(self) -> dict[str, Any]:
    """Return the state as JSON values; `restore` of an equal stream continues at the next problem."""
    return {**self._made_of, 'position': self._position}

  def check(self, state: Mapping[str, Any]) -> None:
    """Raise ValueError if `state` belongs to a stream of other problems or another seed."""
    for name, value in self._made_of.items():
      if state[name] != value:
        raise ValueError(f'the saved prompt stream has {name} = {state[name]}, this one {value}: positions of the two differ')

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continue from `state`. Raises ValueError if it belongs to another stream."""
    self.check(state)
    self._position = state['position']
