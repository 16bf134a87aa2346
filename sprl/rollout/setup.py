"""Sets up the rollouts of a run from its settings: problems, graders or environments, and engines on their devices.

With several processes the wrappers of sprl/rollout/broadcast.py are installed here, and nowhere else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sprl.cache.layout import CacheLayout
from sprl.config import Run, SettingsError
from sprl.distributed.team import ALONE, Team
from sprl.io.metrics import mean_of
from sprl.io.tokenizer import Tokenizer, TokenizerError
from sprl.model import Model
from sprl.rollout import collect
from sprl.rollout.broadcast import BroadcastEngine, BroadcastProblems, BroadcastSource, BroadcastWorkers, across
from sprl.rollout.codec import ChatCodec, PlainCodec
from sprl.rollout.episodes import Limits
from sprl.rollout.interfaces import EngineLike, WorkersLike
from sprl.rollout.prompts import ConversationSource, ProblemSource, Source, prompts, seeds
from sprl.sampler.engine import Engine, EngineConfig, Usage
from sprl.sampler.weights import SamplerWeights, sampler_weight_axes
from sprl.sharding.reshard import reshard
from sprl.sharding.rules import shardings
from sprl.tasks import graders, in_memory, problems
from sprl.tasks.environment_pool import Kind, environment_pool, make_environment, takes_split
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.grader_pool import GraderPool, grader_pool
from sprl.tasks.graders import Reward
from sprl.tasks.in_memory import Row
from sprl.tasks.problems import Problem, holder
from sprl.tasks.prompts import PromptStream
from sprl.tasks.worker_pool import WorkerPool
from sprl.tasks.workers import cpus

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


@dataclass(frozen=True)
class RolloutSetup:
  """The problems or environments of a run, checked before any process is started and any device is used."""

  run: Run
  tokenizer: Tokenizer
  team: Team
  stream: PromptStream | None  # None: conversations
  test: Sequence[Problem]
  inputs: Inputs = FROM_SETTINGS
  rewards: tuple[Reward, ...] = ()  # () in conversations
  columns: frozenset[str] = frozenset()  # of the rows of the first problems, for rewards

  @classmethod
  def open(cls, run: Run, tokenizer: Tokenizer, team: Team = ALONE, inputs: Inputs = FROM_SETTINGS) -> 'RolloutSetup':
    """Read this process's share of the problems, or make one environment in process 0 to check it.

    If one process raises one of the following, all processes raise it:

    SettingsError    files, data sets or environments cannot be used, or prompts are too long
    TokenizerError   the chat template fails
    OSError          files cannot be read
    """
    check_inputs(run, inputs)
    asked, found = team.fail_together('problems', lambda: cls._open(run, tokenizer, team, inputs), REFUSALS)
    for of_split in zip(*team.gather('lengths', lambda: found)):
      collect.check_lengths(chain(*of_split), run.sampling.max_prompt)
    return replace(asked, rewards=team.broadcast('rewards', lambda: asked.rewards))

  @classmethod
  def _open(cls, run: Run, tokenizer: Tokenizer, team: Team, inputs: Inputs) -> tuple['RolloutSetup', list[list[collect.Length]]]:
    """Return the setup, and the lengths of this process's share of the first prompts, for evaluation and for training."""
    if run.task.kind == 'environment':
      asked = cls(run, tokenizer, team, None, (), inputs)
      if team.leads:
        _check_first_observation(run, asked._conversations(run.sampling.max_tokens, None))
      return asked, []
    if inputs.train is None:
      train, test = (problems.load(run.task, split, team.process, team.processes) for split in ('train', 'test'))
    else:
      train, test = in_memory.load(run.task, inputs.train, 'rows'), in_memory.load(run.task, inputs.test or (), 'test')
    stream = PromptStream(across(team, BroadcastProblems, train), run.seed)

    def length(place: int, problem: Problem) -> collect.Length:
      return collect.Length(place, len(collect.encode(problem, tokenizer)), problem.id)

    ahead = min(run.steps * run.rollout.prompts, len(train), LOOKED_AHEAD)
    asked_first = (test, range(min(run.eval.problems, len(test)))), (train, map(stream.index, range(ahead)))
    lengths = [
      [length(place, some[i]) for place, i in enumerate(indices) if holder(i, team.processes) == team.process]
      for some, indices in asked_first
    ]
    rewards = graders.rewards(run.task, inputs.functions) if team.leads else ()
    held = [some[i] for some in (train, test) for i in range(team.process, min(len(some), LOOKED_INTO), team.processes)]
    shared_test = across(team, BroadcastProblems, test)
    return cls(run, tokenizer, team, stream, shared_test, inputs, rewards, frozenset(chain(*(p.row for p in held)))), lengths

  def begin(self, enter: Callable[[Any], Any]) -> tuple[WorkersLike, Source, EvalSet]:
    """Start the workers in process 0. Returns workers and source for training, and the held-out groups.

    `enter` enters a context that ends the workers (ExitStack.enter_context).
    """
    run, team, limit = self.run, self.team, self.run.sampling.max_tokens
    eval_limit = run.eval.max_tokens or limit

    def started(pool: WorkerPool | GraderPool | None) -> WorkersLike:
      return across(team, BroadcastWorkers, pool and enter(pool))

    if self.stream is not None:
      workers = started(self._graders() if team.leads else None)
      test = ProblemSource(self.test.__getitem__, self.tokenizer, eval_limit, self.rewards)
      held_out = EvalSet(test, workers, min(run.eval.problems, len(self.test)))
      return workers, ProblemSource(self.stream.at, self.tokenizer, limit, self.rewards), held_out

    def conversations(limit: int, held_out: bool) -> tuple[WorkersLike, Source]:
      pool = self._environments(held_out) if team.leads else None
      return started(pool), across(team, BroadcastSource, self._conversations(limit, pool, held_out))

    workers, source = conversations(limit, held_out=False)
    test_workers, test = conversations(eval_limit, held_out=True)
    return workers, source, EvalSet(test, test_workers, run.eval.problems)

  def state(self) -> dict[str, Any]:
    """Return the state of the stream of problems, for a checkpoint."""
    state = self.stream.state() if self.stream else {}
    return state if self.inputs.train is None else {**state, 'rows': in_memory.fingerprint(self.inputs.train)}

  def check(self, saved: Mapping[str, Any], workdir: Path) -> None:
    """Raise SettingsError if the run of `workdir` began with other problems."""
    try:
      if self.stream:
        self.stream.check(saved)
      if saved.get('rows') != self.state().get('rows'):
        raise ValueError('the rows differ from those of the steps before')
    except ValueError as error:
      raise SettingsError(f'config.task: the run of {workdir} began with other problems: {error}') from error

  # --- conversations ---------------------------------------------------------------------------------------------------

  def _conversations(self, limit: int, pool: WorkerPool | None, held_out: bool = False) -> ConversationSource:
    run, task = self.run, self.run.task
    assert task.name, 'checked with the settings'
    codec = ChatCodec(self.tokenizer, task.system) if task.chat else PlainCodec(self.tokenizer)
    limits = Limits(task.turns, task.turn_tokens, run.sampling.max_prompt, limit)
    seed = partial(seeds, held_out=held_out, split=takes_split(task, self.inputs.environment))
    release = (lambda call: None) if pool is None else pool.release
    sample = make_environment(task, held_out, self.inputs.environment) if self.team.leads else None
    return ConversationSource(seed, limits, codec, release, sample, task.time_limit or STEP_SECONDS)

  # --- workers ---------------------------------------------------------------------------------------------------------

  def _graders(self) -> GraderPool:
    task = self.run.task
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


def usage(opened: Sequence[Engine]) -> tuple[dict[str, float], float]:
  """Return the engines' metrics since the last call, and the host's share of their time; both are means over the engines."""
  found = [engine.usage for engine in opened]
  metrics = [used.metrics(engine.capacity) for used, engine in zip(found, opened)]
  for engine in opened:
    engine.usage = Usage()
  return mean_of(metrics), sum(used.host_overhead for used in found) / len(found)
