"""What an experiment is: everything that decides its verdicts, written down before it runs.

An experiment is a file of benchmarks/claims/experiments/ that defines EXPERIMENT. It trains each arm from the same warm-started
models with the same seeds. The newest weights are evaluated on held-out problems, sampled with a dense, unquantised cache.
A claim compares arms. Its threshold is part of the plan: a result that was made under another plan is refused. Seed 0 is for
pilots, from which budgets and thresholds are chosen. Verdicts come from the other seeds, usually 1 to 8.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
BEFORE = 'before'  # in place of an arm: the model from which the other arm starts
RANDOM_VETO, PLAIN_KEYS = 'random_veto', 'plain_keys'  # settings of an arm that sprl does not have: controls.py
Records = Mapping[str, Mapping[int, Mapping[str, Any]]]  # arm -> seed -> the record of a run (worker.py)
ACCURACY = 'accuracy'  # the measure of held-out problems; other measures are means over the steps of a run
REWARD = 'reward/mean'  # a series that every experiment keeps
START, END = ' at the start', ' at the end'  # after the name of a series: its mean over the first or last fifth of the steps
SECONDS = 'log of the seconds to '  # before an accuracy; see `time_to`
ALL, OWN = 'all three papers', 'not in the paper'  # in place of a paper
UNDER = 'accuracy under '  # before the name of a sampler in `Experiment.inference`; see `under`


@dataclass(frozen=True)
class Comparison:
  """The statement that the measure of `arm` minus that of `against` is larger than `above`.

  With above = -0.03, "arm is at most 0.03 worse"; with above = 0.05, "arm is better by more than 0.05".
  """

  arm: str  # one of the two may be BEFORE
  against: str
  above: float
  measure: str = ACCURACY
  against_measure: str | None = None  # measure of `against`, if it differs

  @property
  def measures(self) -> tuple[str, str]:
    """The measures of both sides."""
    return self.measure, self.against_measure or self.measure


def arm_named(name: str) -> dict[str, Any]:
  """Return the settings of an arm of sprl, or of the control `random_veto`."""
  return {'arm': 'sparse_rl', RANDOM_VETO: True} if name == 'random_veto' else {'arm': name}


def at_start(series: str) -> str:
  """Return the measure that is the mean of a series over the first fifth of the steps."""
  return f'{series}{START}'


def at_end(series: str) -> str:
  """Return the measure that is the mean of a series over the last fifth of the steps."""
  return f'{series}{END}'


def growth(arm: str, series: str) -> Comparison:
  """Return the statement that the mean of a series over the last fifth of the steps is above that over the first."""
  return Comparison(arm, arm, 0.0, at_end(series), at_start(series))


def time_to(score: float) -> str:
  """Return the measure that is the logarithm of the seconds of training until the accuracy reaches `score`.

  The time of evaluations and of the first steps, which compile, does not count (`worker.clock`). A run that does not reach the
  score has no such time. The claim is then not decided.
  """
  return f'{SECONDS}{score:g}'


def under(name: str) -> str:
  """Return the measure of answers that are sampled with `Experiment.inference[name]`."""
  return f'{UNDER}{name}'


@dataclass(frozen=True)
class Claim:
  """A statement of a paper, and the comparisons that test it."""

  statement: str
  paper: str  # name and place, as in 'Sparse-RL, table 2'
  theirs: str  # the number or the words of the paper
  comparisons: tuple[Comparison, ...]  # the claim holds if all hold
  reason: str = ''  # why it does not hold; written after the runs
  expected: bool = False  # whether the paper itself expects that it does not hold
  given: Comparison | None = None  # the claim is decided only if this holds, as that the reference learns at all


@dataclass(frozen=True)
class Task:
  """A data set, a grader, and models that were fine-tuned to answer in its form."""

  name: str
  sentence: str  # model and problems, for pictures
  write: Callable[..., None]  # (folder, seed=, slips=): writes problems, grader and solutions to a folder
  warm: tuple[str, ...]  # folders or hub names of warm-started models; seed i begins from number i modulo their count
  settings: Mapping[str, Any]  # of every run, by key; {folder} stands for the folder of the problems
  chance: float = 0.0  # accuracy of a guess
  final: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # changes for the final evaluation

  def settings_in(self, folder: Path) -> dict[str, Any]:
    """Return the settings of a run whose problems are in this folder."""
    text = {key: value.replace('{folder}', str(folder)) for key, value in self.settings.items() if isinstance(value, str)}
    return {**self.settings, **text}


@dataclass(frozen=True)
class Experiment:
  """Arms, seeds and claims."""

  name: str
  question: str
  task: Task
  arms: Mapping[str, Mapping[str, Any]]  # name -> settings by key
  claims: tuple[Claim, ...]
  steps: int
  seeds: int = 8
  first_seed: int = 1
  stages: tuple[tuple[str, ...], ...] = ()  # arms in the order in which they run; by default all at once
  settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # of every arm
  series: tuple[str, ...] = ()  # metrics whose curves are kept, and whose means are measures
  shown: tuple[str, ...] = ()  # series that the picture shows
  inference: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))  # other samplers; see `under`
  asked: tuple[str, ...] = ()  # arms whose newest weights are also evaluated with each sampler of `inference`
  hours: float = 0.0  # estimated hours of `device` for all runs
  note: str = ''  # what a reader of the results should know of the design
  unplanned: Mapping[str, Comparison] = field(default_factory=lambda: MappingProxyType({}))  # shown by statement, without verdict
  device: Literal['one core', 'one H200', 'four H200s'] = 'one core'  # what a run needs

  def __post_init__(self):
    if unknown := {*self.shown} - {REWARD, *self.series}:
      raise ValueError(f'{self.name}: shown = {", ".join(sorted(unknown))}: expected some of {(REWARD, *self.series)}')
    if self.stages and sorted(arm for stage in self.stages for arm in stage) != sorted(self.arms):
      raise ValueError(f'{self.name}: stages = {self.stages}: expected each arm once; arms: {sorted(self.arms)}')
    if unknown := {*self.asked} - {*self.arms}:
      raise ValueError(f'{self.name}: asked = {", ".join(sorted(unknown))}: expected some of {sorted(self.arms)}')
    known = {*self.arms, BEFORE}
    measures = (ACCURACY, *map(under, self.inference), *self.series)
    for statement, each in self._compared():
      if unknown := {each.arm, each.against} - known:
        raise ValueError(f'{self.name}: {statement!r} compares {", ".join(sorted(unknown))}; expected some of {sorted(known)}')
      named = {name.removesuffix(START).removesuffix(END) for name in each.measures if not name.startswith(SECONDS)}
      if wrong := named - {*measures}:
        raise ValueError(f'{self.name}: {", ".join(sorted(wrong))}: no measure; expected one of {measures}')
      if each.measure.startswith(UNDER) and not {each.arm, each.against} <= {*self.asked}:
        raise ValueError(
          f'{self.name}: {each.arm} and {each.against} are compared by {each.measure!r}: expected both in asked = {self.asked}'
        )

  def _compared(self) -> list[tuple[str, Comparison]]:
    """All comparisons, with their statements."""
    planned = [
      (claim.statement, each) for claim in self.claims for each in (*claim.comparisons, *([claim.given] if claim.given else []))
    ]
    return [*planned, *self.unplanned.items()]

  @property
  def runs(self) -> list[tuple[str, int]]:
    """All pairs of arm and seed.

    A stage runs with all seeds before the next one begins, because a verdict needs all seeds. Within a stage a seed's arms follow
    each other, so that an interrupted experiment has whole pairs.
    """
    seeds = range(self.first_seed, self.first_seed + self.seeds)
    return [(arm, seed) for stage in self.stages or (tuple(self.arms),) for seed in seeds for arm in stage]

  def changes(self, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of a run that differ from the default, by key."""
    return self._run(self.arms[arm], seed, folder)

  def final(self, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of the final evaluation, from which the verdicts come: with a dense cache and all held-out problems."""
    return {**self.changes(arm, seed, folder), **self.task.final}

  def answers(self, name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of the final evaluation with the sampler `inference[name]`."""
    return {**self._run(self.inference[name], seed, folder), **self.task.final, 'eval.memory': 'sampler'}

  def _run(self, more: Mapping[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    start = {'seed': seed, 'steps': self.steps, 'model.path': self.task.warm[seed % len(self.task.warm)]}
    return {**self.task.settings_in(folder), **self.settings, **more, **start}

  def plan(self) -> str:
    """Return a fingerprint of what decides the runs and the verdicts. Statements may be reworded, and reasons added, later."""
    compared = [[_plain(each) for each in claim.comparisons] for claim in self.claims]
    given = [_plain(claim.given) for claim in self.claims if claim.given]
    settings: list[Any] = [dict(self.task.settings), dict(self.settings)]
    settings += [{name: dict(of) for name, of in several.items()} for several in (self.arms, self.inference)]
    weights = [
      hashlib.sha256(path.read_bytes()).hexdigest() for start in self.task.warm for path in Path(start).glob('*.safetensors')
    ]
    numbers = [
      self.steps,
      self.seeds,
      self.task.final.get('eval.problems'),
      self.series,
      self.asked,
      getattr(self.task.write, 'keywords', {}),
      *([self.first_seed] if self.first_seed != 1 else []),
    ]
    weights += [name for name in self.task.warm if not Path(name).is_absolute()]  # of the hub
    more = {key: value for key, value in self.task.final.items() if key not in ('eval.problems', 'sampling.rows')}
    text = json.dumps(
      [compared, settings, numbers, weights, *([more] if more else []), *([given] if given else [])], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(each: Comparison) -> dict[str, Any]:
  return {name: value for name, value in vars(each).items() if value is not None}


def count(records: Records) -> int:
  """Return the number of runs."""
  return sum(map(len, records.values()))


def names() -> list[str]:
  """Return the names of all experiments."""
  return sorted(path.stem for path in (HERE / 'experiments').glob('*.py'))


def find(name: str) -> Experiment:
  """Return the experiment of that name."""
  return importlib.import_module(f'claims.experiments.{name}').EXPERIMENT
