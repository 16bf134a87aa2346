"""Set-up, then the loop: one step is six calls.

    rollout -> pack -> score -> update -> sync -> finish_step

The reward is part of `rollout`, and the correction part of `update`.

`setup` opens everything a run needs and finds every mistake before the first device computation. `train` is the loop. Rollouts
belong to the scheduler (sprl/rollout/scheduler.py), updates to the learner (sprl/learner/learner.py), and everything between
them to the session (sprl/session.py).

A step depends on the settings, its number, the groups it consumes and the train state. The number of a group fixes its problem;
(seed, sequence, attempt, position) fixes the random number of a token. A synchronous run that is killed and resumed therefore
writes the same metrics and ends with the same weights, bit for bit. In an asynchronous run the clock decides which weights draw
a token. A resumed run loses no group and trains on none twice.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sprl
from sprl import config as settings
from sprl.cache.layout import CacheLayout
from sprl.cache.scales import unit
from sprl.config import Quant, Run, SettingsError
from sprl.config_checks import GRADING_COSTS
from sprl.distributed.signals import signals
from sprl.distributed.team import ALONE, Team
from sprl.hooks import LedgerHook, after_step, stop_if, wrong_weights
from sprl.io.checkpoint import CheckpointError, Checkpoints, committed, newest_record
from sprl.io.config_file import check_config, config_differences, read_config, write_config
from sprl.io.files import local_folder
from sprl.io.huggingface import WeightsError, check_free
from sprl.io.metrics import RunLog, read_metrics
from sprl.io.progress import Progress
from sprl.io.provenance import provenance
from sprl.io.run_folder import exclusive
from sprl.io.run_state import RunState
from sprl.io.starts import PLAIN, Origin, Start, add_start, began, correct_start, read_starts
from sprl.io.trackers import Tracker, check_installed, open_trackers
from sprl.kernels.support import record_format
from sprl.learner.learner import Learner, compile_ahead
from sprl.learner.optimizer import make_optimizer
from sprl.learner.origin import find_origin, weights_of
from sprl.learner.restore import check_base
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, make_update
from sprl.model import Model, abstract_params
from sprl.models.lora import Base, network
from sprl.own_functions import check_own_functions, checksums
from sprl.planning.remat import as_stored, decided
from sprl.planning.room import check_caches_fit, check_evaluation_fits
from sprl.remarks import remarks
from sprl.rollout.evaluate import differences, eval_engine
from sprl.rollout.prompts import prompts
from sprl.rollout.scheduler import Scheduler
from sprl.rollout.setup import FROM_SETTINGS, EvalSet, Inputs, RolloutSetup, on_all_processes, place_engines
from sprl.rollout.timeline import Timeline
from sprl.sampler.compile_ahead import compile_engine, outputs
from sprl.sampler.engine_config import EngineConfig
from sprl.session import Finished, Session, StepReport
from sprl.sharding.rules import OnMesh
from sprl.tasks import graders

log = logging.getLogger(__name__)

AfterStep = Callable[[Session, StepReport], None]

# Settings that a resumed run may change. With other memory settings its numbers agree to rounding.
MEMORY = ('mesh', 'devices', 'model.remat', 'packing.score_chunk')  # where an update runs, and the memory that it takes
MAY_CHANGE = ('steps', 'export', 'patience', 'eval', 'checkpoint', 'ledger', 'log', *MEMORY, *GRADING_COSTS)


def train(
  run: Run,
  workdir: Path,
  team: Team = ALONE,
  start: Start = PLAIN,
  inputs: Inputs = FROM_SETTINGS,
  hooks: Sequence[AfterStep] = (),
  trackers: Sequence[Tracker] = (),
) -> Finished:
  """Train or resume the run of `workdir` up to its last step. `start` says how a new run begins (sprl/learner/origin.py).

  SIGTERM and SIGINT save the run and end it early: after the update in progress, or during rollouts or an evaluation, which a
  resumed run begins again.

  Every process of a team calls this function. Process 0 decides what the settings do not fix. Only process 0 writes to `workdir`,
  except for checkpoints: each process writes its part of those.

  `inputs` are problems, rewards and environments as Python objects. `hooks` are called at the end of each step, after those of
  sprl/hooks.py.

  Raises SettingsError and other errors of input before any device work, and StopRun if a guard finds that training is broken.
  """
  with ExitStack() as stack:
    session = setup(run, workdir, team, stack, start, inputs, hooks, trackers)
    stack.callback(session.end_rollouts)  # before the callbacks of `setup`, which end the workers
    learner = session.learner
    for step in session.steps():
      trajectories = session.rollout(step)
      if trajectories is None:
        break  # a signal came
      batches, packing = learner.pack(trajectories)
      batches, logprobs = learner.score(batches)
      metrics = learner.update(batches, logprobs)
      session.sync(batches)
      del batches, logprobs, trajectories  # evaluation and the next rollouts need their memory
      session.finish_step(step, metrics | packing)
    return session.finish()


def setup(
  run: Run,
  workdir: Path,
  team: Team,
  stack: ExitStack,
  start: Start = PLAIN,
  inputs: Inputs = FROM_SETTINGS,
  hooks: Sequence[AfterStep] = (),
  trackers: Sequence[Tracker] = (),
) -> Session:
  """Open the run; `stack` closes what it opens. The last arguments are those of `train`.

  Finds wrong settings and files before any device work. A resumed run compiles the update before it compares the checkpoint with
  its frozen weights.
  """
  # --- settings, model folder, problems ------------------------------------------------------------------------------
  local_folder('--workdir', workdir)
  check_processes(run, team)
  check_installed(run.log.trackers)
  check_own_functions(run)
  model = Model.open(run)
  record_format(run.sampling, model.config.vocab_size)  # raises if the filters of the rollouts cannot be recorded
  layout = model.cache_layout(run.sampling, run.cache, run.quant, run.masked_learner, run.model.router_replay == 'R3')
  check_caches_fit(run, layout, model.engine_meshes)
  here = {'computes in': str(model.dtype), 'kernels': model.kernels, '--workdir': str(workdir), '--from': start.source}
  own = checksums(run)
  if inputs.environment is not None:
    own[f'environment {run.task.name}'] = graders.of_callable(inputs.environment)
  check_alike('settings', settings.to_dict(run) | here | own, team)
  first_start = team.broadcast('time', lambda: began(workdir))  # a template that reads the clock gets this time
  model = model.at(first_start)
  saved = team.broadcast('checkpoints', lambda: committed(workdir / 'checkpoints'))
  run = team.broadcast('remat', lambda: decided(stored_choices(run, workdir) if saved else run, model))
  rollouts = RolloutSetup.open(run, model.tokenizer, team, inputs)
  check_alike('problems', {'problems': rollouts.state()}, team)
  for remark in remarks(run, layout, model.linears(run.quant), model.config.max_positions):
    log.warning(remark)

  # --- processes, threads, the work directory ------------------------------------------------------------------------
  origin = team.broadcast('origin', lambda: find_origin(start.source, run, model, workdir))
  chosen, defaults = settings.to_dict(run), settings.to_dict(Run())
  may_change = MAY_CHANGE if saved else None  # a run without a checkpoint begins again
  team.broadcast('config', lambda: check_config(workdir, chosen, may_change, defaults))
  team.broadcast('log', lambda: len(read_metrics(workdir)))  # a damaged log is an error now, not when all is loaded
  rollouts.check(team.broadcast('prompts', lambda: saved_prompts(workdir)), workdir)
  checkpoints = Checkpoints(workdir / 'checkpoints', run.checkpoint.keep_last, team=team)
  done = max(saved, default=0)
  if done > run.steps:
    raise SettingsError(f'config.steps = {run.steps}: expected at least {done}, the steps that {workdir} has done')
  stop = stack.enter_context(signals())
  workers, source, eval_set = rollouts.begin(stack.enter_context)
  check_evaluation_fits(run, model, eval_set)
  if team.leads:
    if run.export:
      try:
        check_free(workdir / 'export')  # now, not after the last step
      except WeightsError as error:
        raise SettingsError(f'config.export = True: {error}') from None
    stack.enter_context(exclusive(workdir))
    if committed(workdir / 'checkpoints') != saved:
      raise SettingsError(f'--workdir={workdir}: another process has saved a checkpoint meanwhile; start the command again')
    for difference in write_config(workdir, chosen, may_change, defaults):
      log.warning('settings changed since this run began: %s', difference)
    sources, starts = graders.checksums(rollouts.rewards) | own, read_starts(workdir)['starts']
    # Earlier steps used the graders of the newest start that a step followed.
    known = next((start.get('graders', {}) for start in reversed(starts) if start.get('step', done) < max(done, 1)), {})
    for name in sorted(name for name in sources if known.get(name, sources[name]) != sources[name]):
      log.warning(
        '%s has changed since an earlier start of this run: earlier steps used the old version, later steps use the new one', name
      )
    facts = {'step': done, 'command': start.command, **versions(), **provenance(), 'folder': str(Path.cwd())}
    add_start(workdir, origin, first_start, facts | {'graders': sources, 'rows': rollouts.state().get('rows')})
  stack.push(partial(close_checkpoints, checkpoints))

  # --- learner: from a checkpoint, or from the pretrained weights ----------------------------------------------------
  learner, state = open_learner(run, model, layout, checkpoints, saved, rollouts, eval_set, origin, team)
  if changes := differences(state.before, {'how': eval_set.how(run)}):
    log.warning('evaluations do not compare with those of earlier starts of this run: %s', '; '.join(changes))
  if team.leads and state.step < done:  # the newest checkpoint is damaged
    correct_start(workdir, state.step)
  if team.leads and state.step == run.steps and state.before and state.after:
    log.warning('%s: all %d steps are done; a larger config.steps continues the run', workdir, state.step)
  if not learner.scales_current:  # no step has measured the scales for these weights
    first = (state.scheduler or {}).get('next', 0)
    learner.measure_scales_on_prompts(prompts(source, first, run.prefill))
  weights = learner.sampler_weights()

  # --- engines, scheduler --------------------------------------------------------------------------------------------
  timeline = Timeline(time.perf_counter)
  placed = place_engines(run, model, layout)
  opened = [engine.open(weights, state.step) for engine in placed]
  groups = run.steps * run.rollout.prompts
  wrapped = on_all_processes(team, opened)
  scheduler = Scheduler(wrapped, workers, source, run.rollout, time.perf_counter, groups, timeline, version=state.step)
  if state.scheduler is not None:
    scheduler.restore(state.scheduler)

  # --- logs ----------------------------------------------------------------------------------------------------------
  run_log, earlier = None, ()
  if team.leads:
    resume_step = state.step if state.before else None  # the first evaluation, the first line, may be still to come
    run_log = RunLog(workdir, resume_step, [*open_trackers(run.log, workdir, resume_step), *trackers])
    stack.push(lambda kind, *_: run_log.close(failed=kind is not None))
    run_log.settings(settings.to_dict(run))
    earlier = [line for line in read_metrics(workdir) if line['kind'] == 'train']
  session = Session(
    run=run, workdir=workdir, team=team, model=model, layout=layout, learner=learner, weights=weights, placed=placed,
    engines=opened, scheduler=scheduler, source=source, eval_set=eval_set, state=state, checkpoints=checkpoints,
    timeline=timeline, trace=trace_file(workdir, state.step, run.steps) if team.leads else None, run_log=run_log,
    progress=Progress(run.steps, show=partial(print, flush=True)), stop=stop, stream=rollouts.stream,
    before_update=[LedgerHook()], after_step=[*after_step(earlier), *hooks],
  )  # fmt: skip
  stop_if(wrong_weights(session), session)  # before anything is sampled from them
  return session


def close_checkpoints(checkpoints: Checkpoints, kind: Any, error: BaseException | None, traceback: Any) -> None:
  """Close the checkpoints at the end of a run. If another error ends it, an error of the last save is only logged."""
  try:
    checkpoints.close()
  except CheckpointError as failed:
    if error is None:
      raise
    log.error('%s', failed)


def saved_prompts(workdir: Path) -> dict[str, Any]:
  """Return the state of the stream of problems in the newest checkpoint of a work directory; {} if there is none."""
  record = newest_record(workdir / 'checkpoints')
  return {} if record is None else record.extra.get('prompts', {})


def stored_choices(run: Run, workdir: Path) -> Run:
  """Return the run with the choices that an earlier start of it stored in its work directory, if there was one."""
  try:
    return as_stored(run, read_config(workdir))
  except FileNotFoundError:
    return run


def open_learner(
  run: Run,
  model: Model,
  layout: CacheLayout,
  checkpoints: Checkpoints,
  saved: Sequence[int],
  rollouts: RolloutSetup,
  eval_set: EvalSet,
  origin: Origin | None,
  team: Team,
) -> tuple[Learner, RunState]:
  """Return the learner and the run state, from the newest checkpoint or as they are before the first step.

  `saved` are the steps of the checkpoints. Before the first step the weights are those of `origin`, if there is one.

  Compiles its programs before it loads any weights, because compilation takes memory too.
  """
  optimizer = make_optimizer(run.optimizer, run.steps * run.optimizer.updates)
  abstract = abstract_state(abstract_params(model), optimizer, run.optimizer.offload)
  base = model.base()
  update = make_update(model.graphdef, optimizer, UpdateConfig.of(run, model.dtype), model.mesh)
  if max(saved, default=0) < run.steps:
    first = None if saved else eval_set  # a new run begins with an evaluation
    compile_programs(run, model, layout, update, abstract, base, first, team, rollouts.lengths)
  restored = checkpoints.restore(abstract)
  if restored is None:
    shardings = jax.tree.map(lambda a: a.sharding, abstract)
    params = model.first(run.seed) if origin is None else weights_of(origin, run, model, base, team)
    train_state = TrainState.create(params, optimizer, shardings)
    state = RunState(prompts=rollouts.state(), base=base and base.fingerprint)
  else:
    train_state, state = restored.arrays, RunState.from_json(restored.step, restored.extra)
    check_base(base, state.base, run.model.path)
    log.info('resuming after step %d', state.step)
  reference = None
  if run.loss.kl_coef:
    reference = model.load(model.dtype) if base is None else base.params
  learner = Learner(
    run=run, model=model, layout=layout, jitted_update=update, state=train_state, reference=reference, base=base,
    amax=tuple(np.array(found, np.float32) for found in state.amax), calibrated_updates=state.calibrated_updates,
  )  # fmt: skip
  return learner, state


def compile_programs(
  run: Run,
  model: Model,
  layout: CacheLayout,
  update: OnMesh,
  state: TrainState,
  base: Base | None,
  eval_set: EvalSet | None,
  team: Team,
  lengths: tuple[Sequence[int], Sequence[int]],
) -> None:
  """Compile the large programs for a state of these shapes and shardings: update, rollouts, and the evaluation of `eval_set`.

  `lengths` are the tokens of the first prompts of training and of evaluation.

  Engines on other devices than the learner's compile at their first call.
  """
  engine = place_engines(run, model, layout)[0]
  # Two threads, because XLA uses about one core for a program. All processes of a team compile in the same order.
  with ThreadPoolExecutor(1) as background:
    rollouts = (
      [] if engine.moves else [background.submit(compile_sampler, engine.config, run.quant, model, state, base, lengths[0])]
    )
    if team.processes > 1:
      wait(rollouts)
    compile_ahead(update, run, model, state, base)
    if eval_set is not None:
      compile_sampler(*eval_engine(run, model, eval_set), model, state, base, lengths[1])
    for compiled in rollouts:
      compiled.result()


def compile_sampler(
  config: EngineConfig, quant: Quant, model: Model, state: TrainState, base: Base | None, lengths: Sequence[int]
) -> None:
  """Compile the programs of an engine on the learner's devices, for the weights of a state of these shapes and shardings."""
  weights = outputs(model.sampler_weights_function(quant), network(state.params, base))
  scales = unit(config.layout.layers) if config.layout.fp8 else None
  compile_engine(config, weights._replace(scales=scales), lengths)


def trace_file(workdir: Path, done: int, steps: int) -> Path | None:
  """Return where to write the timeline, or None if the run is finished. Renames that of earlier steps to trace_until_N.json.

  If there is such a file already, the start before this one ended before its first step: its timeline is overwritten.
  """
  trace = workdir / 'trace.json'
  if trace.exists():
    if done == steps:
      return None
    if not (earlier := workdir / f'trace_until_{done}.json').exists():
      trace.replace(earlier)
  return trace


def versions() -> dict[str, str]:
  """Return what a start of a run ran on: the versions of sprl and jax, and the devices of all processes."""
  devices = jax.devices()
  return {'sprl': sprl.__version__, 'jax': jax.__version__, 'devices': f'{len(devices)} x {devices[0].device_kind}'}


# --- several processes ------------------------------------------------------------------------------------------------


def check_processes(run: Run, team: Team) -> None:
  """Raise SettingsError if these settings do not work over several processes."""
  if team.processes > 1 and run.devices.engines > 1:
    raise SettingsError(
      f'config.devices.engines = {run.devices.engines}: expected 1 over SPRL_PROCESSES = {team.processes}, which share one engine'
    )


def check_alike(about: str, mine: Mapping[str, Any], team: Team) -> None:
  """Raise SettingsError if this process was started with another run than process 0, or would resolve it differently."""
  if differences := config_differences(team.broadcast(about, lambda: mine), mine, {}):
    raise SettingsError(f'SPRL_PROCESS=0 -> SPRL_PROCESS={team.process}: expected the same run\n  ' + '\n  '.join(differences))
