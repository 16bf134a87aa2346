"""Sets up the rollouts of a run from its settings: problems, graders or environments, and engines on their devices.

With several processes the wrappers of sprl/rollout/broadcast.py are installed here, and nowhere else.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sprl.cache.layout import CacheLayout
from sprl.config import EPISODES, Run, SettingsError, Task, to_dict
from sprl.distributed.team import ALONE, Team
from sprl.foreign import attempt
from sprl.io.config_file import located
from sprl.io.metrics import mean_of
from sprl.io.tokenizer import Tokenizer, TokenizerError
from sprl.model import Model
from sprl.rollout import collect
from sprl.rollout.agent_setup import agent_digest, begin_agents, check_agents
from sprl.rollout.broadcast import BroadcastEngine, BroadcastProblems, BroadcastSource, BroadcastWorkers, across
from sprl.rollout.codec import ChatCodec, PlainCodec
from sprl.rollout.episodes import Limits
from sprl.rollout.interfaces import EngineLike, WorkersLike
from sprl.rollout.prompts import ConversationSource, ProblemSource, Source, different, prompts, seeds, shuffled
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.running import Usage
from sprl.sampler.weights import SamplerWeights, sampler_weight_axes
from sprl.sharding.reshard import reshard
from sprl.sharding.rules import shardings
from sprl.tasks import graders, in_memory, problems
from sprl.tasks.environment_pool import Kind, close, environment_pool, make_environment, rows_of, takes_split
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.grader_pool import GraderPool, grader_pool
from sprl.tasks.graders import Reward
from sprl.tasks.in_memory import Row
from sprl.tasks.problems import Mixture, Problem, holder
from sprl.tasks.prompts import Mix, PromptStream
from sprl.tasks.worker_pool import FAREWELL_SECONDS, WorkerPool
from sprl.tasks.workers import cpus, with_time_limit

log = logging.getLogger(__name__)

REFUSALS = SettingsError, TokenizerError, OSError  # errors of problems; possibly in one process only, whose share has them
GRADING_MEMORY_GB = 4.0  # address space that a grading process may add
STEP_SECONDS = 3600.0  # for a reset or step; then the environment counts as hung, and its member is tried again
LOOKED_INTO = 100  # problems of each split whose columns rewards may ask for
LOOKED_AHEAD = 10_000  # prompts whose lengths are checked before the first step; the engine checks all others


@dataclass(frozen=True)
class Inputs:
  """Python objects that a run uses where a command names files. A field that is None is left to the settings.

  Rewards and environments run in threads of this process. They need not be importable.
  """

  train: Sequence[Row] | None = None  # rows to train on, with task.kind = 'rows' (sprl/tasks/in_memory.py)
  test: Sequence[Row] | None = None  # held-out rows
  functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # NAME -> the reward that `python:NAME` stands for
  environment: Kind | None = None  # makes an environment from task.args; task.name is only its name in messages


FROM_SETTINGS = Inputs()


@dataclass(frozen=True)
class EvalSet:
  """The held-out groups: `count` of them, with numbers from 0 on."""

  source: Source
  workers: WorkersLike
  count: int
  samples: int | None = None  # of each group; None: eval.samples
  different: int | None = None  # groups before their problems repeat; None: unknown
  digest: int = 0  # checksum of the problems; 0: the settings decide them
  more: Mapping[str, 'EvalSet'] = field(default_factory=dict)  # sets that are evaluated after this one, by name

  def how(self, run: Run) -> dict[str, Any]:
    """Return what decides scores beside the weights and the rewards: settings, and checksums of the problems.

    own     for the scores of this set
    sets    for those of each other set, by name
    """
    asked = {name: value for name, value in located(to_dict(run))['eval'].items() if name != 'every'}
    sets = asked.pop('sets')
    more = {name: {**sets[name], 'problems': f'{each.digest:08x}'} for name, each in self.more.items()}
    return {'own': {'eval': asked, 'problems': f'{self.digest:08x}'}, 'sets': more}


@dataclass(frozen=True)
class HeldOut:
  """The problems of one held-out set."""

  problems: Sequence[Problem]
  order: Sequence[int]  # indices of the problems that are asked
  samples: int | None = None  # answers to each; None: eval.samples
  digest: int = 0  # checksum of the problems; 0: the settings decide them

  def problem(self, number: int) -> Problem:
    """Return the problem of a group."""
    return self.problems[self.order[number]]


@dataclass(frozen=True)
class RolloutSetup:
  """The problems or environments of a run, checked before any process is started and any device is used."""

  run: Run
  tokenizer: Tokenizer
  team: Team
  stream: PromptStream | None  # None: conversations, or evaluation only
  held_out: Mapping[str, HeldOut]  # '': the task's own; with conversations, it has none
  inputs: Inputs = FROM_SETTINGS
  rewards: tuple[Reward, ...] = ()  # () if no problem is graded
  columns: frozenset[str] = frozenset()  # of the rows of the first problems, for rewards
  digest: int = 0  # checksum of the problems for training; 0: the settings decide them
  lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # tokens of the first prompts of training and of evaluation

  @classmethod
  def open(
    cls, run: Run, tokenizer: Tokenizer, team: Team = ALONE, inputs: Inputs = FROM_SETTINGS, train: bool = True
  ) -> 'RolloutSetup':
    """Read this process's share of the problems, or make one environment in process 0 to check it.

    Without `train` only held-out problems are read, and only `begin_evaluation` may be called. If one process raises one of the
    following, all processes raise it:

    SettingsError    files, data sets or environments cannot be used, or prompts are too long
    TokenizerError   the chat template fails
    OSError          files cannot be read
    """
    check_inputs(run, inputs)
    asked, found = team.fail_together('problems', lambda: cls._open(run, tokenizer, team, inputs, train), REFUSALS)
    checked = [sorted(chain(*of_split)) for of_split in zip(*team.gather('lengths', lambda: found))]
    for of_split in checked:
      collect.check_lengths(of_split, run.sampling.max_prompt)
    tokens = [tuple(length.tokens for length in of_split) for of_split in checked]
    lengths = tokens[-1] if asked.stream is not None else (), tokens[0] if asked.held_out else ()
    return replace(asked, rewards=team.broadcast('rewards', lambda: asked.rewards), lengths=lengths)

  @classmethod
  def _open(
    cls, run: Run, tokenizer: Tokenizer, team: Team, inputs: Inputs, train: bool
  ) -> tuple['RolloutSetup', list[list[collect.Length]]]:
    """Return the setup, and the lengths of this process's share of the first prompts, for evaluation and for training."""
    stream, ahead, digest = None, [], agent_digest(run.task, 'train') if run.task.kind == 'agent' else 0
    if train and run.task.kind not in EPISODES:
      given = _problems(run, 'train', inputs, team)
      digest = given.digest
      stream = PromptStream(across(team, BroadcastProblems, given), run.seed, Mix.of(run.task, given, run.rollout.prompts))
      count = min(run.steps * run.rollout.prompts, len(given), LOOKED_AHEAD)
      ahead = [(given, [stream.index(i) for i in range(count)])]
    held_out = dict(_held_out(run, inputs, team))
    for name, some in held_out.items() if stream is not None and team.processes == 1 else ():
      assert isinstance(some.problems, problems.Problems | Mixture), 'read from files, by this process'
      if found := problems.shared(given, some.problems, some.order):
        of_set = f' of config.eval.sets.{name}' if name else ''
        log.warning('%d of %d held-out problems%s are also trained on', found, len(some.order), of_set)

    def length(place: int, problem: Problem) -> collect.Length:
      return collect.Length(place, len(collect.encode(problem, tokenizer)), problem.id)

    lengths = [
      [length(place, some[i]) for place, i in enumerate(indices) if holder(i, team.processes) == team.process]
      for some, indices in [*((some.problems, some.order) for some in held_out.values()), *ahead]
    ]
    rewards = graders.of_sources(problem_sources(run), inputs.functions) if team.leads else ()
    loaded = [*(some.problems for some in held_out.values()), *(given for given, _ in ahead)]
    held = [some[i] for some in loaded for i in _first(some) if holder(i, team.processes) == team.process]
    wrapped = {name: replace(some, problems=across(team, BroadcastProblems, some.problems)) for name, some in held_out.items()}
    columns = frozenset(chain(*(p.row for p in held))) | (set() if run.task.kind == 'rows' else {'answer'})  # rows: perhaps none
    opened = cls(run, tokenizer, team, stream, wrapped, inputs, rewards, columns, digest)
    if run.task.kind == 'agent':
      check_agents(run.task, tokenizer)
    if run.task.kind == 'environment' and team.leads:
      source, other = (_closed_at_the_end(opened._conversations(run.sampling.max_tokens, None)) for _ in range(2))
      with source as source, other as other:
        _check_equal_seeds(run, source, other)
        _check_first_observation(run, source)
    return opened, lengths

  def begin(self, enter: Callable[[Any], Any]) -> tuple[WorkersLike, Source, EvalSet]:
    """Start the workers in process 0. Returns workers and source for training, and the held-out groups.

    `enter` enters a context that ends the workers (ExitStack.enter_context).
    """
    limit = self.run.sampling.max_tokens
    if self.run.task.kind == 'agent':  # training and evaluation share one server
      workers, source, test, rows = begin_agents(self.run, self.tokenizer, self.team, enter)
      return workers, source, self._with_sets(enter, self._asked(workers, test, rows))
    held_out = self.begin_evaluation(enter)
    if self.stream is not None:
      return held_out.workers, self._problem_source(self.stream.at, limit), held_out
    workers, source, _ = self._begin_conversations(limit, enter, held_out=False)
    return workers, source, held_out

  def begin_evaluation(self, enter: Callable[[Any], Any]) -> EvalSet:
    """Start the workers of evaluation in process 0. Returns the held-out groups. `enter` is as in `begin`."""
    run = self.run
    if run.task.kind == 'environment':
      return self._with_sets(enter, self._asked(*self._begin_conversations(run.eval_sampling.max_tokens, enter, held_out=True)))
    if run.task.kind == 'agent':
      workers, _, test, rows = begin_agents(run, self.tokenizer, self.team, enter)
      return self._with_sets(enter, self._asked(workers, test, rows))
    return self._with_sets(enter, None)

  def _problem_source(self, problem: Callable[[int], Problem], max_tokens: int) -> ProblemSource:
    longest = self.run.sampling.max_prompt
    return ProblemSource(problem, self.tokenizer, self.rewards, max_prompt=longest, max_tokens=max_tokens)

  def _asked(self, workers: WorkersLike, source: Source, different: int | None) -> EvalSet:
    """Return the held-out groups of environments or agents: none twice, if it is known how many are `different`."""
    count = self.run.eval.problems if different is None else min(self.run.eval.problems, different)
    rows = agent_digest(self.run.task, 'test') if self.run.task.kind == 'agent' else 0
    return EvalSet(source, workers, count, different=different, digest=rows)

  def _with_sets(self, enter: Callable[[Any], Any], own: EvalSet | None) -> EvalSet:
    """Return `own`, the groups of the task itself (None: they are problems), with the sets of problems beside it."""
    sets: dict[str, EvalSet] = {} if own is None else {'': own}
    if self.held_out:
      workers = self._started(self._graders() if self.team.leads else None, enter)
      for name, some in self.held_out.items():
        source = self._problem_source(some.problem, self.run.eval_sampling.max_tokens)
        sets[name] = EvalSet(source, workers, len(some.order), some.samples, different=len(some.order), digest=some.digest)
    return replace(sets.pop(''), more=sets)

  def _started(self, pool: WorkerPool | GraderPool | None, enter: Callable[[Any], Any]) -> WorkersLike:
    return across(self.team, BroadcastWorkers, pool and enter(pool))

  def state(self) -> dict[str, Any]:
    """Return the state of the stream of problems, for a checkpoint."""
    state = self.stream.state() if self.stream else {}
    return {**state, 'rows': f'{self.digest:08x}'} if self.digest else state

  def check(self, saved: Mapping[str, Any], workdir: Path) -> None:
    """Raise SettingsError if the run of `workdir` began with other problems. `saved` is its `state` then; {}: there is none."""
    try:
      if self.stream and saved:
        self.stream.check(saved)
      own = self.state().get('rows')
      if saved.get('rows', own) != own:  # an older checkpoint has none
        raise ValueError('the rows differ from those of the steps before')
    except ValueError as error:
      raise SettingsError(
        f'config.task: the run of {workdir} began with other problems: {error}; expected those, or a new --workdir with '
        f'--from={workdir}, which keeps the weights'
      ) from error

  # --- conversations ---------------------------------------------------------------------------------------------------

  def _begin_conversations(
    self, limit: int, enter: Callable[[Any], Any], held_out: bool
  ) -> tuple[WorkersLike, Source, int | None]:
    """Return workers, a source, and how many of its held-out groups are different; None if the environment does not tell."""
    pool = self._environments(held_out) if self.team.leads else None
    workers = self._started(pool, enter)
    source = enter(_closed_at_the_end(self._conversations(limit, pool, held_out)))
    count = self.team.broadcast('episodes', lambda: source.different)
    return workers, across(self.team, BroadcastSource, source), count

  def _conversations(self, limit: int, pool: WorkerPool | None, held_out: bool = False) -> ConversationSource:
    run, task = self.run, self.run.task
    assert task.name, 'checked with the settings'
    codec = ChatCodec(self.tokenizer, task.system) if task.chat else PlainCodec(self.tokenizer)
    limits = Limits(task.turns, task.turn_tokens, run.sampling.max_prompt, limit)
    sample = make_environment(task, held_out, self.inputs.environment) if self.team.leads else None
    split, rows = takes_split(task, self.inputs.environment), rows_of(sample)
    count = None if rows is None else different(rows, split)

    def seed(number: int) -> int:
      return seeds(number if held_out else shuffled(number, run.seed, count), held_out, split, rows)

    release = (lambda call: None) if pool is None else pool.release
    return ConversationSource(seed, limits, codec, release, sample, task.time_limit or STEP_SECONDS, count)

  # --- workers ---------------------------------------------------------------------------------------------------------

  def _graders(self) -> GraderPool:
    task = grading_task(self.run)
    limits = task.time_limit, GRADING_MEMORY_GB
    return grader_pool(self.rewards, task.workers, *limits, task.executor or 'processes', columns=self.columns)

  def _environments(self, held_out: bool) -> WorkerPool:
    task, r, executor = self.run.task, self.run.rollout, self.run.task.executor or 'threads'
    episodes = math.ceil((1 + r.async_ratio) * r.prompts + r.extra_prompts) * (r.group + r.extra_members)
    workers = task.workers or (episodes if executor == 'threads' else cpus(executor))
    make = partial(make_environment, task, held_out, self.inputs.environment)
    return environment_pool(make, workers, task.time_limit or STEP_SECONDS, executor)


def check_inputs(run: Run, inputs: Inputs) -> None:
  """Raise SettingsError if the settings and the Python objects do not belong together."""
  task = run.task
  if (task.kind == 'rows') != (inputs.train is not None):
    raise SettingsError(f"config.task.kind = {task.kind!r}: 'rows' stands for rows in memory, which sprl.fit passes to a run")
  if inputs.environment is not None and task.kind != 'environment':
    raise SettingsError(f"config.task.kind = {task.kind!r}: expected 'environment' with an environment in memory")
  if inputs.environment is not None and task.executor not in (None, 'threads'):
    raise SettingsError(f'config.task.executor = {task.executor!r}: expected None: an environment in memory runs in threads')


def problem_sources(run: Run) -> dict[str, Task]:
  """Return the task of each source of problems, by the name with which its problems ask for its grader; '': the task's own."""
  task = run.task
  sources = {name: source.task(task, source.splits) for name, source in task.mixture.items()}
  if task.kind not in ('mixture', *EPISODES):
    sources[''] = task
  return sources | {f'eval/{name}': some.task(task, ('train', some.split)) for name, some in run.eval.sets.items()}


def grading_task(run: Run) -> Task:
  """Return the task whose settings limit graders. Those of environments and agents limit steps; graders have the defaults."""
  task = run.task
  return replace(task, workers=None, executor=None, time_limit=None) if task.kind in EPISODES else task


def _problems(run: Run, split: Literal['train', 'test'], inputs: Inputs, team: Team):
  """Return the task's own problems of a split: those in memory, or this process's share of those that the settings name."""
  if inputs.train is None:
    return problems.load(run.task, split, team.process, team.processes)
  rows = inputs.train if split == 'train' else inputs.test or ()
  return in_memory.load(run.task, rows, 'rows' if split == 'train' else 'test')


def _first(loaded: Any) -> Sequence[int]:
  """Return the indices of the first problems: of a mixture, of the first ones of each source."""
  count = LOOKED_INTO * (len(loaded.parts) if isinstance(loaded, Mixture) else 1)
  return loaded.in_turn(count) if isinstance(loaded, Mixture) else range(min(len(loaded), count))


def _held_out(run: Run, inputs: Inputs, team: Team) -> Iterator[tuple[str, HeldOut]]:
  """Yield the held-out sets by name, of which this process reads its share; '' is the task's own."""
  share = team.process, team.processes
  if run.task.kind not in EPISODES:
    own = _problems(run, 'test', inputs, team)
    order = own.in_turn(run.eval.problems) if isinstance(own, Mixture) else range(min(run.eval.problems, len(own)))
    yield '', HeldOut(own, order, digest=own.digest)
  for name, some in run.eval.sets.items():
    found = problems.load_source(f'eval.sets.{name}', some.task(run.task, ('train', some.split)), 'test', *share)
    posed = Mixture({f'eval/{name}': found})
    order = range(min(some.problems or run.eval.problems, len(posed)))
    yield name, HeldOut(posed, order, some.samples, found.digest)


@contextmanager
def _closed_at_the_end(source: ConversationSource) -> Iterator[ConversationSource]:
  """Close the environment that the source reads first observations from."""
  try:
    yield source
  finally:
    attempt(with_time_limit, FAREWELL_SECONDS, close, source.sample)


def _check_equal_seeds(run: Run, source: Source, other: Source) -> None:
  """Warn if two new environments with the same seed begin differently."""
  with suppress(EnvironmentFault, TokenizerError):  # one that fails now and then
    if not np.array_equal(source.prompt(0), other.prompt(0)):
      log.warning(
        'config.task.name = %r: two environments with the same seed gave different first observations; the answers of a group '
        'are compared, so equal seeds must give equal episodes', run.task.name,
      )  # fmt: skip


def _check_first_observation(run: Run, source: Source) -> None:
  """Raise SettingsError if no environment can be reset, or if the first observation is longer than `sampling.max_prompt`."""
  try:
    (first,) = prompts(source, 0, 1)
  except EnvironmentFault as error:
    raise SettingsError(f'config.task.name = {run.task.name!r}: no episode can begin: {error}') from error
  if len(first) > run.sampling.max_prompt:
    raise SettingsError(
      f'config.sampling.max_prompt = {run.sampling.max_prompt}: expected at least {len(first)}, the tokens of the first '
      f'observation of {run.task.name}'
    )


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedEngine:
  """An engine, and whether its mesh differs from the mesh of the sampler weights after a sync."""

  config: EngineConfig
  moves: bool

  def place(self, weights: SamplerWeights) -> SamplerWeights:
    """Return the weights on the engine's devices, laid out for its mesh."""
    mesh = self.config.mesh
    if not self.moves or mesh is None:
      return weights
    weights = weights._replace(probe=None)
    return reshard(weights, shardings(mesh, sampler_weight_axes(weights, self.config.model), weights))

  def open(self, weights: SamplerWeights, version: int) -> Engine:
    """Return the engine, ready to decode with weights of a version."""
    return Engine(self.config, self.place(weights), version)


def place_engines(run: Run, model: Model, layout: CacheLayout) -> list[PlacedEngine]:
  """Return the engines of a run, not yet opened."""
  config = model.engine_config(run.sampling, layout, run.engine_rows, run.prefill, run.seed)
  return [
    PlacedEngine(replace(config, mesh=mesh, record_support=True), moves=mesh is not model.sampler_mesh)
    for mesh in model.engine_meshes
  ]


def on_all_processes(team: Team, engines: Sequence[Engine]) -> list[EngineLike]:
  """Return the engines as the scheduler uses them."""
  return [across(team, BroadcastEngine, engine) for engine in engines]


def usage(opened: Sequence[Engine]) -> tuple[dict[str, float], float, int]:
  """Return the engines' metrics and the host's share of their time, both means over the engines, and the number of drawn tokens.

  All are since the last call.
  """
  found = [engine.usage for engine in opened]
  metrics = [used.metrics(engine.capacity) for used, engine in zip(found, opened)]
  for engine in opened:
    engine.usage = Usage()
  drawn = sum(used.tokens + used.first for used in found)
  return mean_of(metrics), sum(used.host_overhead for used in found) / len(found), drawn
