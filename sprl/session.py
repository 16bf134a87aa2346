"""A running session: the calls of a step that are not the learner's, and the state between these calls.

If rollouts and learner share devices, they take turns. On separate devices, rollouts continue from the end of `Session.rollout`
to `Session.sync`: a second thread runs the scheduler while the loop's thread runs the learner.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from sprl.cache.layout import CacheLayout
from sprl.cache.scales import Scales
from sprl.config import Run, SettingsError
from sprl.distributed.signals import Stop
from sprl.distributed.team import Team
from sprl.foreign import reason
from sprl.io.checkpoint import Checkpoints
from sprl.io.metrics import RunLog
from sprl.io.progress import Progress
from sprl.io.run_state import RunState
from sprl.io.tokenizer import TokenizerError
from sprl.learner.batch import TrainBatch
from sprl.learner.learner import Learner
from sprl.model import Model
from sprl.models.transformer import Params
from sprl.planning import utilisation
from sprl.rollout import collect
from sprl.rollout.evaluate import evaluate
from sprl.rollout.prompts import Source, prompts
from sprl.rollout.scheduler import Group, Scheduler, Stalled
from sprl.rollout.setup import EvalSet, PlacedEngine, usage
from sprl.rollout.staleness import staleness
from sprl.rollout.timeline import Timeline
from sprl.sampler.engine import Engine
from sprl.sampler.weights import SamplerWeights, sync_metrics
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.problems import digest
from sprl.tasks.prompts import PromptStream
from sprl.types import Trajectory, sampled_tokens

log = logging.getLogger(__name__)

PACED = 8  # fewest steps over which the speed of rollouts that run ahead is the mean


class Stopwatch:
  """Seconds of the parts of a step, in the order in which they end."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def lap(self, name: str) -> None:
    """End part `name`."""
    now = time.perf_counter()
    self.seconds[name] = now - self._last
    self._last = now


class Pace:
  """Tokens per second of rollout.

  With rollouts that run ahead (`async_ratio` > 0) it is the mean over several steps: one step may draw the groups of all the
  window, and the next ones none.
  """

  def __init__(self, async_ratio: float):
    self._steps: deque[tuple[int, float]] = deque(maxlen=max(PACED, 1 + ceil(async_ratio)) if async_ratio else 1)

  def step(self, drawn: int, seconds: float) -> float:
    """Return the speed at the end of a step in which the engines drew so many tokens."""
    self._steps.append((drawn, seconds))
    tokens, taken = map(sum, zip(*self._steps))
    return tokens / taken


@dataclass(frozen=True)
class Finished:
  """How a call of `train` ended."""

  step: int
  completed: bool  # False: a signal ended it early, with all of it saved
  model: Model
  params: Params  # the trained weights
  base: str | None  # fingerprint of the frozen weights under adapters
  before: Mapping[str, Any]  # held-out evaluation before the first update: metrics and samples
  after: Mapping[str, Any]  # held-out evaluation after the last update; empty if the run is not complete


@dataclass(frozen=True)
class StepReport:
  """One step as the hooks at its end see it."""

  step: int
  trajectories: Sequence[Trajectory]
  metrics: Mapping[str, float]  # the scalars of one line of metrics.jsonl
  seconds: Mapping[str, float]  # the parts of the step, and shares of idle time
  tokens_per_second: float


@dataclass(frozen=True)
class StepInProgress:
  """What `Session.rollout` leaves for `sync` and `finish_step` of the same step."""

  times: Stopwatch
  began: float  # seconds on the timeline
  released: float  # seconds on the timeline: the learner was given the devices
  trajectories: Sequence[Trajectory]
  drawn: int  # tokens that the engines drew since the last step
  probe: Any  # of the weights that sampled the trajectories
  metrics: Mapping[str, float]  # of the rollouts
  seconds: Mapping[str, float]  # of the rollouts: parts of the step, and shares of time
  next_prompts: Sequence[Int[np.ndarray, ' P']]  # prompts of the coming rollouts, where the cache is calibrated on them


@dataclass
class Session:
  """Everything that `train.setup` opened. One thread calls it."""

  run: Run
  workdir: Path
  team: Team
  model: Model
  layout: CacheLayout
  learner: Learner
  weights: SamplerWeights | None  # None during an update, which needs their memory
  placed: Sequence[PlacedEngine]
  engines: Sequence[Engine]
  scheduler: Scheduler
  source: Source
  eval_set: EvalSet
  state: RunState
  checkpoints: Checkpoints
  timeline: Timeline
  trace: Path | None  # where the timeline is written; None: nowhere
  run_log: RunLog | None  # None in the processes that write no logs
  progress: Progress
  stop: Stop
  stream: PromptStream | None = None  # the order of the problems; None: conversations
  before_update: Sequence[Callable[['Session', int, Sequence[Trajectory], Scales | None], None]] = ()
  after_step: Sequence[Callable[['Session', StepReport], None]] = ()
  _step: StepInProgress | None = None  # from the end of its rollouts to that of `finish_step`
  _pump: 'Pump | None' = None
  _ahead: Sequence[Int[np.ndarray, ' P']] = ()  # the newest prompts that `_look_ahead` returned
  _pace: Pace = field(init=False)

  def __post_init__(self):
    self._pace = Pace(self.run.rollout.async_ratio)

  # --- the calls of a step -------------------------------------------------------------------------------------------

  def steps(self) -> Iterator[int]:
    """Make an evaluation that is still due; then yield the numbers of the steps that are left, until a signal comes.

    Raises SettingsError if no answer of the evaluation before the first step could be graded.
    """
    if not self.state.before:
      self.state.before = self.evaluate()
      check_graded(self.run, self.state.before)
    elif self.evaluates_after(self.state.step) and not self.state.after and not self.team.broadcast('evaluated', self._evaluated):
      self.state.after = self.evaluate()
      if self.state.after:
        self.save()  # adds the score to the checkpoint
    for step in range(self.state.step + 1, self.run.steps + 1):
      if self.stopped():
        return
      yield step

  def rollout(self, step: int) -> list[Trajectory] | None:
    """Return the trajectories of the step's groups, group by group, and hand the devices over to the learner.

    Returns None if a signal came; a resumed run asks for the same groups again. Errors save the steps before: `saved_on_error`.
    """
    times, began = Stopwatch(), self.timeline.now()
    groups = self._wait_for_groups()
    if groups is None:
      return None
    times.lap('rollout')
    trajectories = [t for group in groups for t in group.trajectories]
    assert self.weights is not None
    # Frees the memory of the weights for the ledger and the update.
    probe, scales, self.weights = self.weights.probe, self.weights.scales, None
    for hook in self.before_update:
      hook(self, step, trajectories, scales)
    if self.run.ledger.every:
      times.lap('ledger')
    metrics, seconds, drawn = self._measured(step, groups, trajectories)
    next_prompts = self._look_ahead(step)
    if not self.model.shares_devices:
      self._pump = Pump(self.scheduler, self.team)
    self._step = StepInProgress(
      times=times, began=began, released=self.timeline.now(), trajectories=trajectories, drawn=drawn, probe=probe,
      metrics=metrics, seconds=seconds, next_prompts=next_prompts,
    )  # fmt: skip
    return trajectories

  def sync(self, batches: Sequence[TrainBatch]) -> None:
    """Measure new scales for an FP8 cache, and give the new weights to the engines.

    Rollouts on separate devices continue until the weights are on those devices.
    """
    step, learned = self.state.step + 1, self.timeline.now()
    assert self._step is not None
    self.timeline.add('learner', f'update {step}', self._step.released, learned)
    self._step.times.lap('learn')
    self.learner.measure_scales(batches)
    if self._step.next_prompts:
      self.learner.measure_scales_on_prompts(self._step.next_prompts)
    self.weights = weights = jax.block_until_ready(self.learner.sampler_weights())
    placed = jax.block_until_ready([engine.place(weights) for engine in self.placed])
    self.timeline.add('learner', f'sync {step}', learned, self.timeline.now())
    if self._pump is not None:
      self._pump.stop()
      self._pump = None
    self.scheduler.sync(placed, self.stopped)
    self._step.times.lap('sync')

  def end_rollouts(self) -> None:
    """End the rollouts that continue during an update, if an error has ended the step before `sync`."""
    if self._pump is not None:
      self._pump.end()
      self._pump = None

  def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
    """End the step with the learner's metrics of it: the hooks log, check, evaluate and save."""
    assert self.weights is not None
    assert self._step is not None
    current, trajectories = self._step, self._step.trajectories
    counts = self._count(trajectories, current.metrics)
    metrics = {**current.metrics, **metrics, **sync_metrics(self.weights, current.probe), **counts}
    if self.learner.tokens.trained:
      metrics['optimizer/learning_rate'] = self.learner.learning_rate
    now, tracks = self.timeline.now(), [f'engine {i}' for i in range(len(self.engines))]
    idle = {'learner_idle': self.timeline.idle(['learner'], current.began, now)}
    idle['rollout_idle'] = self.timeline.idle(tracks, current.began, now)
    current.times.lap('log')
    machine = self._machine(now - current.began)
    seconds = {**current.times.seconds, **self.learner.seconds, **current.seconds, **idle, **machine}
    sampling = ('rollout',) if self.model.shares_devices else ('rollout', 'learn', 'sync')  # the parts in which tokens are drawn
    rate = self._pace.step(current.drawn, sum(seconds[part] for part in sampling))
    self.state.step, self.state.after = step, {}
    report = StepReport(step, trajectories, metrics, seconds, rate)
    for hook in self.after_step:
      hook(self, report)
    self._step = None

  def finish(self) -> Finished:
    """Evaluate and save if that is not done yet, and return how the run ended."""
    state, completed = self.state, bool(self.state.before) and self.state.step == self.run.steps
    if completed and not state.after:  # a signal ended it, or the last checkpoint was saved when more steps were to come
      state.after = state.before if state.step == 0 else {} if self.stopped() else self.evaluate()
      completed = bool(state.after)
    if state.step or state.before:
      self.save()
      if not completed:
        log.warning('%s: saved after step %d of %d; the same command resumes', self.stopped(), state.step, self.run.steps)
    else:  # a checkpoint of the first weights would only fix the settings
      log.warning('%s: ended before the first evaluation; nothing is saved, the same command begins again', self.stopped())
    return Finished(state.step, completed, self.model, self.learner.state.params, state.base, state.before, state.after)

  # --- what the hooks call ---------------------------------------------------------------------------------------------

  def stopped(self) -> str:
    """Return the name of the signal that asks the run to stop, or ''. All processes get the same answer."""
    return self.team.stopped(self.stop.received)

  def evaluates_after(self, step: int) -> bool:
    """Return whether the weights after a step are evaluated."""
    every = self.run.eval.every
    return step > 0 and (step == self.run.steps or bool(every and step % every == 0))

  def _evaluated(self) -> bool:
    """Return whether the log has the evaluation after the newest step. Only process 0 has a log."""
    return self.run_log is not None and self.state.step in self.run_log.evaluated

  def evaluate(self) -> dict[str, Any]:
    """Evaluate the newest weights on held-out problems, and log that once. Returns {} if a signal came meanwhile."""
    of_run = self.learner.scale_rule.measured_on != 'next prompts'  # else the evaluation measures its own prompts
    scales = self.weights.scales if self.learner.calibrates and of_run and self.weights is not None else None
    with self.timeline.span('controller', 'evaluate'):
      result = evaluate(
        self.run, self.model, self.learner.params, self.eval_set, scales=scales, synced=self.weights, stopped=self.stopped,
        team=self.team,
      )  # fmt: skip
    if result and self.run_log and not self._evaluated():
      self.run_log.evaluation(self.state.step, result['metrics'])
    return result

  def save(self) -> None:
    """Save a checkpoint of the step and the timeline. If there is one, the result of a later evaluation is added to it."""
    self.state.scheduler = self.scheduler.state()
    self.state.amax = [found.tolist() for found in self.learner.amax]
    self.state.calibrated_updates = self.learner.calibrated_updates
    score = self.state.after['metrics']['eval/avg@k'] if self.state.after else None
    measure = f'{digest(self.state.after.get("how", {}).get("own")):08x}' if self.state.after else ''
    self.checkpoints.save(self.state.step, self.learner.state, self.state.to_json(), score, measure)
    if self.trace is not None:
      self.timeline.write(self.trace)

  def save_whole(self) -> None:
    """Save, and wait in all processes until the checkpoint is complete: an error follows, which ends them."""
    self.save()
    self.checkpoints.wait()
    self.team.barrier()

  @contextmanager
  def saved_on_error(self) -> Iterator[None]:
    """Save the steps that are done if an error ends the run here: before the weights of the next step exist.

    Over several processes only Stalled is raised by all of them, as a save requires.
    """
    try:
      yield
    except Exception as error:
      # A run without a checkpoint may begin again with other settings.
      if self.state.step and (isinstance(error, Stalled) or self.team.processes == 1):
        try:
          self.save_whole()
        except Exception as failed:  # the first error ends the run
          log.error('step %d is not saved: %s', self.state.step, reason(failed))
      raise

  def _wait_for_groups(self) -> Sequence[Group] | None:
    """Wait for the groups of the step and return them, with the devices free for the learner; None if a signal came."""
    with self.saved_on_error():
      groups = self.scheduler.batch(self.stopped)
    if groups is not None and self.model.shares_devices:
      self.scheduler.quiesce(self.stopped)
      for engine in self.engines:
        engine.unload()  # frees their memory for the ledger and the update
    return groups

  def _measured(
    self, step: int, groups: Sequence[Group], trajectories: Sequence[Trajectory]
  ) -> tuple[dict[str, float], dict[str, float], int]:
    """Return metrics of the step's rollouts, their seconds and shares of time, and the tokens drawn since the last step."""
    engine_metrics, host_share, drawn = usage(self.engines)
    scheduler_metrics, waits = self.scheduler.metrics()
    metrics = {
      **collect.metrics(trajectories, self.layout, sum(engine.capacity for engine in self.engines)),
      **engine_metrics,
      **scheduler_metrics,
      **staleness(groups, step - 1),
      **(collect.by_source(trajectories, self.stream.sources, self.stream.source) if self.stream else {}),
    }
    return metrics, {**waits, 'engine_host_share': host_share}, drawn

  def _count(self, trajectories: Sequence[Trajectory], rollouts: Mapping[str, float]) -> dict[str, float]:
    """Add the tokens of this step to those of the run, and return both sums. `rollouts` are the metrics of its rollouts."""
    dropped = int(rollouts.get('async/dropped_tokens', 0))
    dropped += int(sum(t.metrics.get('agent/tokens_dropped', 0) for t in trajectories))
    self.state.tokens_sampled += sampled_tokens(trajectories) + dropped
    self.state.tokens_trained += self.learner.tokens.trained
    counts = {'tokens/sampled': float(self.state.tokens_sampled), 'tokens/trained': float(self.state.tokens_trained)}
    return counts if self.model.weights_seed is None else counts | {'policy/random_weights': 1.0}

  def _machine(self, seconds: float) -> dict[str, float]:
    """Return the MFU of the update and of the whole step, which takes so many seconds, and bytes of memory in use.

    The MFU is left out if the peak of the devices is unknown, or if the step trained no tokens.
    """
    model, run = self.model, self.run
    found: dict[str, float] = {}
    meshes = (model.mesh, *model.engine_meshes)
    if (peak := utilisation.peak(model.mesh.devices.flat[0], model.dtype)) is not None and self.learner.tokens.trained:
      flops = run.optimizer.epochs * utilisation.update_flops(model.config, run.lora, self.learner.tokens)
      found['mfu_update'] = flops / (self.learner.seconds['update'] * model.mesh.size * peak)
      found['mfu_step'] = flops / (seconds * len({device for mesh in meshes for device in mesh.devices.flat}) * peak)
    return found | utilisation.memory(utilisation.local_devices(meshes))

  def _look_ahead(self, step: int) -> Sequence[Int[np.ndarray, ' P']]:
    """Return the next prompts if the FP8 cache is calibrated on the prompts that it will serve, else ()."""
    if not self.learner.calibrates or self.learner.scale_rule.measured_on != 'next prompts' or step == self.run.steps:
      return ()
    try:
      self._ahead = prompts(self.source, self.scheduler.next, self.run.prefill)
    except (EnvironmentFault, TokenizerError) as error:  # a service may be back soon
      instead = 'is calibrated on the prompts of an earlier step' if self._ahead else 'keeps its scales'
      log.warning('the FP8 cache %s: %s', instead, error)
    return self._ahead


def check_graded(run: Run, result: Mapping[str, Any]) -> None:
  """Raise SettingsError if the rewards of a held-out set refuse every answer. It names the setting and the first failure."""
  task = run.task
  own = f'rewards = {task.rewards!r}' if task.rewards else 'mixture' if task.kind == 'mixture' else f'grader = {task.grader!r}'
  alone = ', and for a group of one answer (config.eval.samples = 1)' if run.eval.samples == 1 else ''
  for name, found in {'': result, **result.get('sets', {})}.items():
    if found.get('failure'):
      raise SettingsError(
        f'config.{f"eval.sets.{name}" if name else f"task.{own}"}: no answer of the first evaluation could be graded; expected '
        f'a grader that returns a number for each answer, also for one that it cannot read{alone}. The first failure: '
        f'{found["failure"]}'
      )


class Pump:
  """Runs the scheduler in a second thread until `stop`, or until its rollouts wait for the learner."""

  def __init__(self, scheduler: Scheduler, team: Team):
    self._scheduler, self._team = scheduler, team
    self._learned = threading.Event()
    self._error: BaseException | None = None
    # A daemon: over several processes nothing stops the thread if the learner raises, and the process must still exit.
    self._thread = threading.Thread(target=self._turn, name='rollouts', daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """End the thread between two turns, and raise the error that ended it before, if any."""
    self._learned.set()
    self._thread.join()
    error, self._error = self._error, None
    try:
      if error is not None:
        raise error
    finally:
      del error  # its traceback holds this frame: a cycle would keep the weights alive

  def end(self) -> None:
    """End the thread between two turns, after an error of the loop's thread. The error that ended it before is logged.

    Over several processes the thread may wait for a process that waits for this one. There the error ends the processes.
    """
    self._learned.set()
    if self._team.processes == 1:
      self._thread.join()
    if self._error is not None:
      log.warning('rollouts had failed before: %s', reason(self._error))
    self._error = None

  def _turn(self) -> None:
    try:
      # Process 0 says when the update is over, so that all processes turn their schedulers equally often.
      while not self._scheduler.idle and not self._team.broadcast('learned', self._learned.is_set):
        self._scheduler.pump(patience=0.05)
    except BaseException as error:  # reported by `stop`, in the loop's thread
      self._error = error
