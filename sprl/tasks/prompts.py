"""The order of a run's prompts: endless, shuffled again in each epoch, the same in every process.

The order is a grain pipeline of index arithmetic, so position n is known without visiting the positions before it. There is no
iterator to replay and no thread to wait for, and the state is one number.

The order of a mixture has two levels. `grain.MapDataset.mix` decides which source has a position, in fixed proportions: after n
positions a source has had its share of n to within a few problems. Each source has its own endless order, so it repeats a
problem only when all of its problems have been asked. Where the weights change, a mix of other proportions is concatenated, in
which every source continues at its next problem.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grain

from sprl.config import MixtureSource, Task
from sprl.tasks.problems import Mixture, Problem

ENDLESS = 1 << 50  # positions of the last stage; more than any run asks


@dataclass(frozen=True)
class Mix:
  """What the order of a mixture depends on, beside the seed."""

  sizes: Mapping[str, int]  # name of a source -> number of its problems, in the order of `problems.Mixture`
  sources: Mapping[str, MixtureSource]  # name -> its settings
  prompts: int  # positions per step: the weights of step s hold from position s * prompts on

  @classmethod
  def of(cls, task: Task, problems: object, prompts: int) -> 'Mix | None':
    """Return the mix of a task's training problems, or None if they are no mixture. `prompts` are the problems per step."""
    # `object`: a run-time check of Sequence[Problem] would read a problem, which another process may hold.
    if not isinstance(problems, Mixture):
      return None
    sizes = {name: len(part) for name, part in problems.parts.items()}
    return cls(sizes, {name: task.mixture[name] for name in sizes}, prompts)

  def to_json(self) -> dict[str, Any]:
    """Return the mix as JSON values."""
    weights = {name: {str(step): weight for step, weight in source.stages.items()} for name, source in self.sources.items()}
    return {'sizes': [[name, size] for name, size in self.sizes.items()], 'weights': weights, 'prompts': self.prompts}


class PromptStream:
  """An endless stream of problems.

  Each epoch is a new permutation, which depends on `seed` and the epoch only. In a mixture every source has its own epochs.

  Args:
    problems: the problems.
    seed: the seed of the order.
    mix: how the sources of a mixture are mixed; None if the problems are no mixture.

  Raises ValueError if there are no problems.
  """

  def __init__(self, problems: Sequence[Problem], seed: int, mix: Mix | None = None):
    if not len(problems):
      raise ValueError('no problems: expected at least one')
    self._problems, self._mix, self._position = problems, mix, 0
    if mix is None:
      self._sources, order = None, _shuffled(len(problems), seed)
    else:
      self._sources = sources(mix)
      order = mixed_order(mix.sizes, self._sources, seed)
    self._order = cast(Sequence[int], order)
    self._made_of = {'problems': len(problems), 'seed': seed, 'mixture': mix and mix.to_json()}

  def index(self, position: int) -> int:
    """Return the index of the problem at a position of the order."""
    return int(self._order[position])

  def at(self, position: int) -> Problem:
    """Return the problem at a position of the order."""
    return self._problems[self.index(position)]

  def source(self, position: int) -> str | None:
    """Return the name of the source that has a position of the order, or None if the stream is no mixture."""
    if self._mix is None or self._sources is None:
      return None
    return list(self._mix.sizes)[cast(Any, self._sources)[position][0]]

  @property
  def sources(self) -> list[str]:
    """The names of the sources of a mixture."""
    return [] if self._mix is None else list(self._mix.sizes)

  def next(self, n: int) -> list[Problem]:
    """Return the next n problems."""
    start, self._position = self._position, self._position + n
    return [self.at(i) for i in range(start, self._position)]

  def state(self) -> dict[str, Any]:
    """Return the state as JSON values; `restore` of an equal stream continues at the next problem."""
    return {**self._made_of, 'position': self._position}

  def check(self, state: Mapping[str, Any]) -> None:
    """Raise ValueError if `state` belongs to a stream of other problems, another seed or another mixture."""
    for name, value in self._made_of.items():
      if state.get(name) != value:
        raise ValueError(f'the saved prompt stream has {name} = {state.get(name)}, this one {value}: positions of the two differ')

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continue from `state`. Raises ValueError if it belongs to another stream."""
    self.check(state)
    self._position = state['position']


def _shuffled(size: int, seed: int) -> grain.MapDataset:
  return grain.MapDataset.range(size).seed(seed).shuffle().repeat()


def mixed_order(sizes: Mapping[str, int], sources: grain.MapDataset, seed: int) -> grain.MapDataset:
  """Return the endless order of a mixture: the index of the problem at each position, over all sources one after another.

  Args:
    sizes: name of a source -> number of its problems.
    sources: which source has each position, as `sources` returns it.
    seed: the seed of the order. The order of a source depends on the seed and its name only.
  """
  orders = [cast(Any, _shuffled(size, seed_of(seed, name))) for name, size in sizes.items()]
  firsts = list(itertools.accumulate(sizes.values(), initial=0))
  return sources.map(lambda asked: firsts[asked[0]] + int(orders[asked[0]][asked[1]]))


def seed_of(seed: int, name: str) -> int:
  """Return the seed of the order of one source, so that two sources of one size have different orders."""
  return int.from_bytes(hashlib.sha256(f'{seed}/{name}'.encode()).digest()[:4])


def sources(mix: Mix) -> grain.MapDataset:
  """Return which source has each position: pairs (number of the source, how many problems of it came before).

  A stage holds the weights from one step to the next change. At a change every source continues where it was.
  """
  steps = sorted({step for source in mix.sources.values() for step in source.stages})
  counts = [0] * len(mix.sources)  # problems of each source in the stages so far
  found = []
  for step, end in itertools.zip_longest(steps, steps[1:]):
    weights = {i: weight for i, source in enumerate(mix.sources.values()) if (weight := source.weight_at(step))}
    ranges = [grain.MapDataset.range(counts[i], 2 * ENDLESS).map(lambda k, i=i: (i, int(k))) for i in weights]
    length = ENDLESS if end is None else (end - step) * mix.prompts
    stage = grain.MapDataset.mix(ranges, list(weights.values())).slice(slice(0, length))
    found.append(stage)
    if end is not None:
      counts = _counts_after(stage, length, counts, set(weights))
  return grain.MapDataset.concatenate(found)


def _counts_after(stage: Any, length: int, counts: list[int], active: set[int]) -> list[int]:
  """Return how many problems of each source were asked up to the end of a stage, from the last position of each source in it."""
  counts, missing = list(counts), set(active)
  for position in range(length - 1, -1, -1):
    source, before = stage[position]
    if source in missing:
      counts[source] = before + 1
      missing.remove(source)
    if not missing:
      break
  return counts
