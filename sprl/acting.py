"""The rollout half of a run, made from its settings: what is asked, who grades or plays, and the engines on their devices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from sprl.cache.plan import CachePlan
from sprl.io.metrics import mean_of
from sprl.io.tokenizer import Tokenizer, TokenizerError
from sprl.parallel.reshard import reshard
from sprl.parallel.rules import shardings
from sprl.parallel.team import ALONE, Team
from sprl.policy import Policy
from sprl.rollout import collect
from sprl.rollout.agreed import AgreedProblems, AgreedSource, AgreedWorkers
from sprl.rollout.codec import ChatCodec, PlainCodec
from sprl.rollout.episodes import Limits
from sprl.rollout.lanes import Lanes
from sprl.rollout.scheduler import WorkersLike
from sprl.rollout.sources import Conversations, Problems, Source, prompts, seeds
from sprl.sampler.engine import Engine
from sprl.sampler.served import Served, served_axes
from sprl.sampler.slots import Slots, Usage
from sprl.settings import Environment, Run, SettingsError, Task
from sprl.tasks import graders, problems
from sprl.tasks.environments import registry
from sprl.tasks.environments.latency import delayed
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.executors import EXECUTORS, cpus
from sprl.tasks.grading_lanes import GradingLanes
from sprl.tasks.grading_pool import GradingPool
from sprl.tasks.problems import Problem, holder
from sprl.tasks.prompts import PromptStream

REFUSALS = SettingsError, TokenizerError, OSError  # of problems, which may be in one process's share alone
LOOKED_AHEAD = 10_000  # prompts whose lengths are checked before the first step; the engine checks all others


@dataclass(frozen=True)
class HeldOut:
  """What an evaluation asks: `count` groups, and who answers for them."""

  source: Callable[[int], Source]  # of the tokens that an answer may have
  workers: WorkersLike
  count: int


@dataclass(frozen=True)
class Asked:
  """What a run asks, checked before any process is started or device touched."""

  run: Run
  tokenizer: Tokenizer
  team: Team
  stream: PromptStream | None  # None: conversations
  test: Sequence[Problem]

  @classmethod
  def open(cls, run: Run, tokenizer: Tokenizer, team: Team = ALONE) -> 'Asked':
    """Reads the problems, of a team each process its share, or makes an environment to look at, of a team the first process.

    Raises, in all processes where in one, SettingsError: files, data sets, environments that cannot be used; prompts that are
    too long; or TokenizerError: a chat template that fails; or OSError: files that cannot be read.
    """
    asked, found = team.unless_refused('what is asked', lambda: cls._open(run, tokenizer, team), REFUSALS)
    for of_split in zip(*team.each('lengths', lambda: found)):
      collect.check_lengths(chain(*of_split), run.sampling.max_prompt)
    return asked

  @classmethod
  def _open(cls, run: Run, tokenizer: Tokenizer, team: Team) -> tuple['Asked', list[list[collect.Length]]]:
    """Also the lengths of this process's share of the prompts that are asked first, to evaluate and to train."""
    if run.task.kind == 'environment':
      asked = cls(run, tokenizer, team, None, ())
      source = asked._conversations(run.sampling.max_tokens, None)
      if team.leads:
        _check_beginning(run, source)
      return asked, []
    train, test = (problems.load(run.task, split, team.process, team.processes) for split in ('train', 'test'))
    stream = PromptStream(AgreedProblems(train, team), run.seed)

    def length(place: int, problem: Problem) -> collect.Length:
      return collect.Length(place, len(collect.encode(problem, tokenizer)), problem.id)

    ahead = min(run.steps * run.rollout.prompts, len(train), LOOKED_AHEAD)
    asked_first = (test, range(min(run.eval.problems, len(test)))), (train, map(stream.index, range(ahead)))
    lengths = [
      [length(place, some[i]) for place, i in enumerate(indices) if holder(i, team.processes) == team.process]
      for some, indices in asked_first
    ]
    return cls(run, tokenizer, team, stream, AgreedProblems(test, team)), lengths

  def begin(self, enter: Callable[[Any], Any]) -> tuple[WorkersLike, Source, HeldOut]:
    """Starts the processes or threads that work beside the run, within a context that `enter` enters; of a team the first
    process does."""
    run, task, team = self.run, self.run.task, self.team
    limit = run.sampling.max_tokens
    if self.stream is None:
      lanes, apart = (enter(self._lanes(held_out)) if team.leads else None for held_out in (False, True))

      def tested(limit: int) -> Source:
        return AgreedSource(self._conversations(limit, apart, held_out=True), team)

      source = AgreedSource(self._conversations(limit, lanes), team)
      return AgreedWorkers(lanes, team), source, HeldOut(tested, AgreedWorkers(apart, team), run.eval.problems)
    pool = AgreedWorkers(enter(grading(task)) if team.leads else None, team)
    test = self.test

    def held_out(limit: int) -> Source:
      return Problems(test.__getitem__, self.tokenizer, limit)

    return pool, Problems(self.stream.at, self.tokenizer, limit), HeldOut(held_out, pool, min(run.eval.problems, len(test)))

  def state(self) -> dict[str, Any]:
    """What the order of asking is made of, for a resumed run to be told that it is the same."""
    return self.stream.state() if self.stream else {}

  def check(self, saved: Mapping[str, Any], workdir: Path) -> None:
    """Raises SettingsError where the run of `workdir` began with other problems."""
    try:
      if self.stream:
        self.stream.check(saved)
    except ValueError as error:
      raise SettingsError(f'config.task: its problems are not those that the run of {workdir} began with: {error}') from error

  # --- conversations ---------------------------------------------------------------------------------------------------

  def _conversations(self, limit: int, lanes: Lanes | None, held_out: bool = False) -> Conversations:
    run, env = self.run, self.run.environment
    codec = ChatCodec(self.tokenizer, run.task.system) if run.task.chat else PlainCodec(self.tokenizer)
    limits = Limits(env.turns, env.turn_tokens, run.sampling.max_prompt, limit)
    seed = partial(seeds, run.task.seed, held_out=held_out, split=registry.takes(env.name, 'split'))
    release = (lambda key: None) if lanes is None else lanes.release
    sample = environment(env, held_out, 0) if self.team.leads else None
    return Conversations(seed, limits, codec, release, sample, env.time_limit)

  def _lanes(self, held_out: bool) -> Lanes:
    env, r = self.run.environment, self.run.rollout
    episodes = math.ceil((1 + r.async_ratio) * r.prompts + r.extra_prompts) * (r.group + r.extra_members)
    lanes = env.workers or (episodes if env.executor == 'threads' else cpus(env.executor))
    return Lanes(partial(environment, env, held_out), lanes, EXECUTORS[env.executor], env.time_limit)


def _check_beginning(run: Run, source: Source) -> None:
  """Raises SettingsError where no conversation begins, or the first with more than the model may be asked."""
  try:
    (first,) = prompts(source, 0, 1)
  except EnvironmentFault as error:
    raise SettingsError(f'config.environment.name = {run.environment.name!r}: it does not begin: {error}') from error
  if len(first) > run.sampling.max_prompt:
    raise SettingsError(
      f'config.sampling.max_prompt = {run.sampling.max_prompt}: expected at least {len(first)}, the tokens of what '
      f'{run.environment.name} says first'
    )


def grading(task: Task) -> GradingPool | GradingLanes:
  """Who grades the answers to a task's problems."""
  spec = graders.resolve(task)
  if task.grader_executor == 'processes':
    return GradingPool(spec, task.grader_workers, task.grader_timeout, task.grader_memory_gb)
  return GradingLanes(spec, task.grader_workers, task.grader_timeout, EXECUTORS[task.grader_executor])


def environment(settings: Environment, held_out: bool, salt: int) -> Any:
  """One environment; where it knows of test problems, those are what is held out."""
  split = {'split': 'test' if held_out else 'train'} if registry.takes(settings.name, 'split') else {}
  made = registry.make(settings.name, {**split, **settings.args})
  if settings.latency_mean or settings.latency_std:
    return delayed(made, settings.latency_mean, settings.latency_std, salt)
  return made


# --- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
  """An engine and the devices it is on: `mesh` is None where they have the weights as they are served."""

  engine: Engine
  mesh: Mesh | None

  def place(self, served: Served) -> Served:
    """The weights on the engine's devices, laid out for them."""
    if self.mesh is None:
      return served
    served = served._replace(probe=None)
    return reshard(served, shardings(self.mesh, served_axes(served, self.engine.config), served))

  def open(self, served: Served, version: int) -> Slots:
    """The engine at work."""
    return Slots(self.engine, self.place(served), version)


def engines(run: Run, policy: Policy, plan: CachePlan) -> list[Placed]:
  """The engines that the settings ask for."""
  engine = policy.engine(run.sampling, plan, run.engine_rows, run.prefill, run.seed)
  return [Placed(engine, None if mesh is policy.serving else mesh) for mesh in policy.engine_meshes]


def usage(slots: Sequence[Slots]) -> tuple[dict[str, float], float]:
  """What the engines were used for since the last call, and the host's share of their time; means over them."""
  found = [each.usage for each in slots]
  metrics = [used.metrics(each.capacity) for used, each in zip(found, slots)]
  for each in slots:
    each.usage = Usage()
  return mean_of(metrics), sum(used.host_overhead for used in found) / len(found)
