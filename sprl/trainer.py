"""The loop: take rollouts, score, update, sync, log, save. Read top to bottom.

    prompt -> rollout -> reward -> dense scoring -> correction -> update -> sync -> (next) rollout

Rollouts are the scheduler's: it keeps engines, graders and environments busy and hands over a batch of groups as soon as the
staleness window and the order of the settings allow (sprl/rollout/scheduler.py). On devices shared with the learner the two take
turns; on devices of their own rollouts go on while the learner learns and sends its new weights. With `rollout.async_ratio = 0`
this is synchronous RL.

Everything that a step depends on is in the settings, the step's number, the groups that it consumes and the train state: a
group's number fixes its problem, and (seed, sequence, position) a token's random numbers. A synchronous run that is killed
anywhere and started again therefore writes the same metrics and ends in the same weights, bit for bit; an asynchronous one, in
which the clock decides what is generated when, loses no group and trains none twice.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from sprl import acting, ledger, settings
from sprl.cache.plan import CachePlan, never_evicts
from sprl.evaluation import evaluate
from sprl.io.checkpoint import Checkpoints
from sprl.io.config_file import config_differences, write_config
from sprl.io.metrics import RunLog, mean_of
from sprl.io.progress import Progress
from sprl.kernels.platform import can_run
from sprl.learner.state import TrainState, make_optimizer
from sprl.learner.update import Computation, make_update
from sprl.learning import Learned, Learning, Stopwatch, compile_ahead
from sprl.models.lora import network
from sprl.models.transformer import Params
from sprl.objective import diagnostics, guards, losses
from sprl.parallel.team import ALONE, Team
from sprl.parallel.transfer import Parked
from sprl.policy import Policy, abstract_state
from sprl.process import exclusive, signals
from sprl.rollout import collect
from sprl.rollout.agreed import AgreedEngine
from sprl.rollout.scheduler import Group, Scheduler
from sprl.rollout.sources import prompts
from sprl.rollout.timeline import Timeline
from sprl.sampler import calibrate
from sprl.sampler.served import Served, multiplies_codes, self_check, sync_metrics
from sprl.saved import check_base
from sprl.settings import GRADING_COSTS, Kernels, Run, SettingsError
from sprl.trajectory import Trajectory

log = logging.getLogger(__name__)

# What a resumed run may be told anew; on another mesh its numbers are the same to rounding.
MAY_CHANGE = ('steps', 'export', 'patience', 'eval', 'checkpoint', 'ledger', 'log', 'mesh', 'devices', *GRADING_COSTS)


class StopRun(RuntimeError):
  """The run cannot go on in good faith; the message is the report."""


@dataclass(frozen=True)
class Finished:
  """How a call of `train` ended."""

  step: int
  completed: bool  # False: a signal ended it early, with all of it saved
  policy: Policy
  params: Params  # those that were trained
  before: Mapping[str, Any]  # the held-out evaluation before the first update: metrics and samples
  after: Mapping[str, Any]  # that after the last; of a run that is not complete, nothing


def train(run: Run, workdir: Path, team: Team = ALONE) -> Finished:
  """Runs, or resumes, the run of `workdir` up to its last step.

  SIGTERM and SIGINT save and return early: after the update or evaluation that is under way, or out of the rollouts for the next
  update or the evaluation before the first, which are asked again.

  Every process of a team calls it. The first decides what does not follow from the settings, and alone writes to the folder, but
  for checkpoints, of which each writes its part.

  Raises SettingsError and its kin before any device work, StopRun where a sentinel says that training is broken.
  """
  # --- settings, files, problems: everything that can be wrong is found here ----------------------------------------
  _check_team(run, team)
  policy = Policy.open(run)
  plan = policy.plan(run.sampling, run.cache, run.quant, run.cache.masked_learner, run.model.router_replay == 'R3')
  here = {'computes in': str(policy.dtype), 'kernels': policy.kernels, '--workdir': str(workdir)}
  _check_alike('settings', settings.to_dict(run) | here, team)
  asked = acting.Asked.open(run, policy.tokenizer, team)
  _check_alike('problems', {'problems': asked.state()}, team)
  for remark in remarks(run, plan, policy.linears(run.quant), policy.config.max_positions):
    log.warning(remark)
  checkpoints = Checkpoints(workdir / 'checkpoints', run.checkpoint.keep_last, run.checkpoint.keep_best, team)
  if (done := team.agree('steps', checkpoints.latest) or 0) > run.steps:
    raise SettingsError(f'config.steps = {run.steps}: expected at least {done}, the steps that {workdir} has behind it')

  with ExitStack() as open_until_the_end:
    enter = open_until_the_end.enter_context
    stop = enter(signals())
    workers, source, held_out = asked.begin(enter)
    if team.leads:
      enter(exclusive(workdir))
      for difference in write_config(workdir, settings.to_dict(run), MAY_CHANGE, settings.to_dict(Run())):
        log.warning('settings changed since this run began: %s', difference)

    def stopped() -> str:
      return team.stopped(stop.received)

    def asked_first(number: int):
      return prompts(source, number, run.rollout.prompts)

    # --- state: from a checkpoint, or from the pretrained weights ---------------------------------------------------
    optimizer = make_optimizer(run.optimizer, run.steps * run.optimizer.updates)
    abstract = abstract_state(policy, optimizer, run.optimizer.offload)
    places = jax.tree.map(lambda a: a.sharding, abstract)
    base = policy.base()
    update = make_update(policy.graphdef, optimizer, Computation.of(run, policy.dtype))
    if done < run.steps:
      compile_ahead(update, run, policy, abstract, base)
    restored = checkpoints.restore(abstract)
    if restored is None:
      state = TrainState.create(policy.first(run.seed), optimizer, places)
      extra: dict[str, Any] = {'capped': 0, 'before': {}, 'after': {}}
    else:
      state, done, extra = restored.arrays, restored.step, restored.extra
      asked.check(extra['stream'], workdir)
      check_base(base, extra, run.model.path)
      log.info('resuming after step %d', done)
    capped, before, after = (extra[name] for name in ('capped', 'before', 'after'))
    reference = None
    if run.loss.kl_coef > 0:
      reference = policy.load(policy.dtype) if base is None else base.params
    largest = tuple(np.array(found, np.float32) for found in extra.get('largest', ()))

    # --- learner, engines, scheduler, and where to write ------------------------------------------------------------
    learning = Learning(run, policy, plan, update, state, reference, base, largest, extra.get('looked_at', -1))
    if not learning.renewed:  # a run that went to its end has not looked for what comes after
      learning.look_at(asked_first(extra.get('scheduler', {}).get('next', 0)), run.prefill)
    served = learning.serve()
    _check({}, _misserved(learning, served), 0, 0, run, done, workdir)  # before anything is sampled from it
    engines = acting.engines(run, policy, plan)
    timeline, trace = Timeline(time.perf_counter), workdir / 'trace.json'
    traced = team.leads and not (done == run.steps and trace.exists())
    if traced and trace.exists():  # of the steps before those to come
      trace.replace(workdir / f'trace_until_{done}.json')
    slots = [engine.open(served, done) for engine in engines]
    scheduler = Scheduler(
      [AgreedEngine(each, team) for each in slots], workers, source, run.rollout, time.perf_counter,
      run.steps * run.rollout.prompts, timeline, version=done,
    )  # fmt: skip
    if 'scheduler' in extra:
      scheduler.restore(extra['scheduler'])
    thread = None if policy.shares_devices else enter(ThreadPoolExecutor(1, 'learner'))
    run_log = RunLog(workdir, done if restored else None, run.log.tensorboard) if team.leads else None
    if run_log:
      open_until_the_end.callback(run_log.close)
    open_until_the_end.callback(checkpoints.close)
    progress = Progress(run.steps, show=partial(print, flush=True))
    warned: set[str] = set()
    older: ledger.Older = {}
    tracks = [f'engine {i}' for i in range(len(slots))]

    def evaluate_now(logged: bool = True, stopped: Callable[[], Any] = lambda: False):
      renewed = learning.largest and run.quant.kv_scale != 'first_forward'  # which are found before the rollout that they serve
      with timeline.span('controller', 'evaluate'):
        scales = served.scales if renewed else None
        result = evaluate(run, policy, learning.params, held_out, scales=scales, stopped=stopped, team=team)
      if result and logged and run_log:
        run_log.evaluation(done, result['metrics'])
      return result

    def save():
      extra = {
        'stream': asked.state(), 'scheduler': scheduler.state(), 'capped': capped, 'before': before, 'after': after,
        'largest': [found.tolist() for found in learning.largest], 'looked_at': learning.looked_at,
        'base': base and base.fingerprint,
      }  # fmt: skip
      checkpoints.save(done, learning.state, extra, after['metrics']['eval/avg@k'] if after else None)
      if traced:
        timeline.write(trace)

    def learn(step: int, trajectories: Sequence[Trajectory]) -> Learned:
      with timeline.span('learner', f'update {step}'):
        return learning.learn(trajectories)

    def serve(step: int, looked_at: Sequence[Int[np.ndarray, ' _']]) -> tuple[Served, list[Served]]:
      with timeline.span('learner', f'serve {step}'):
        if looked_at:
          learning.look_at(looked_at, run.prefill)
        served = jax.block_until_ready(learning.serve())
        return served, jax.block_until_ready([engine.place(served) for engine in engines])

    def beside[**A, R](work: Callable[A, R], *args: A.args, **kwargs: A.kwargs) -> R:
      return work(*args, **kwargs) if thread is None else _meanwhile(scheduler, thread.submit(work, *args, **kwargs), team)

    if not before:
      before = evaluate_now(stopped=stopped)

    for step in range(done + 1, run.steps + 1):
      if stopped():
        break
      times, since = Stopwatch(), timeline.now()

      # --- rollout: prompts to graded completions -------------------------------------------------------------------
      groups = scheduler.batch(stopped)
      if groups is None:
        break
      trajectories = [t for group in groups for t in group.trajectories]
      if thread is None:
        scheduler.quiesce()  # under the weights that are about to be taken
      times.lap('rollout')

      # --- the mismatch by its causes -------------------------------------------------------------------------------
      if ledger.may_want(step - 1, run):
        older = ledger.with_version(older, step - 1, learning.state.params, served.scales, run)
      if run.ledger.every and step % run.ledger.every == 0:
        version, probed = ledger.of_one_version(trajectories, run.ledger.groups * run.rollout.group)
        sampled_with, scales = None, served.scales
        if version < step - 1 and version in older:
          sampled_with, scales = network(jax.tree.map(Parked.back, older[version][0]), base), older[version][1]
        entries = ledger.ledger(run, policy, engines[0].engine, learning.params, scales, probed, sampled_with)
        if run_log:
          run_log.ledger(step, ledger.scalars(entries), ledger.histograms(entries), entries)
        times.lap('ledger')

      # --- pack, score, update: alone, or while rollouts go on ------------------------------------------------------
      probe, (used, host), (fates, waits) = served.probe, acting.usage(slots), scheduler.metrics()
      del served  # in float32 it shares the learner's arrays, which the update is given to write over

      if thread is None:
        for each in slots:
          each.unload()  # so that the update has the memory
      learned = beside(learn, step, trajectories)
      times.lap('learn')

      # --- sync: the new weights as the sampler multiplies them, and new scales for its cache -----------------------
      looks = learning.calibrates and run.quant.kv_scale == 'first_forward' and step < run.steps
      served, placed = beside(serve, step, asked_first(scheduler.next) if looks else ())
      scheduler.sync(placed)
      del placed  # which the engines have until they are unloaded
      times.lap('sync')
      idle = {'trainer_idle': timeline.idle(['learner'], since, timeline.now())}
      idle['rollout_idle'] = timeline.idle(tracks, since, timeline.now())

      # --- log, check, evaluate, save -------------------------------------------------------------------------------
      done, after = step, {}
      rollout = collect.metrics(trajectories, plan, sum(each.capacity for each in slots))
      capped = capped + 1 if rollout['completion/truncated'] == 1 else 0
      scalars = {
        **rollout, **used, **fates, **staleness(groups, step - 1),
        **mean_of(learned.measured), **mean_of(learned.packing), **sync_metrics(served, probe),
        'sparse/repetition': float(np.mean([diagnostics.repetition(t.tokens[t.mask]) for t in trajectories])),
      }  # fmt: skip
      times.lap('log')
      rate = sum(int(t.mask.sum()) for t in trajectories) / sum(times.seconds[name] for name in ('rollout', *_beside(thread)))
      clocked = {**times.seconds, **learned.seconds, **waits, **idle, 'tokens_per_second': rate, 'engine_host_share': host}
      if run_log:
        run_log.write(step, scalars, clocked, {'async/token_lag': lags(trajectories, step - 1)})
      if run.log.samples_every and step % run.log.samples_every == 0:
        shown = collect.sample_rows(trajectories, source.answer, policy.tokenizer, run.log.samples)  # all know the answers then
        if run_log:
          run_log.samples(step, shown)
      broken = _misserved(learning, served, last=step == run.steps)
      bad_streak = max((int(m['update/bad_streak']) for m in learned.measured), default=0)
      _check(scalars, broken, capped, bad_streak, run, step, workdir)
      for name, warning in guards.warnings(scalars).items():
        if name not in warned:
          log.warning('step %d: %s (said once a run)', step, warning)
          warned.add(name)
      if team.leads:
        progress.step(step, rollout['reward/mean'], rate)

      if step == run.steps or (run.eval.every and step % run.eval.every == 0):
        after = evaluate_now()
        save()
      elif run.checkpoint.every and step % run.checkpoint.every == 0:
        save()

    completed = done == run.steps
    if completed and not after:  # no step was left to take, and the checkpoint was saved when there were to be more
      after = before if done == 0 else evaluate_now(logged=False)
    save()  # where that is not done yet: a signal came between two checkpoints
    why = stopped()
  if not completed:
    log.warning('%s: saved after step %d of %d; the same command goes on from there', why, done, run.steps)
  return Finished(done, completed, policy, learning.state.params, before, after)


def _meanwhile[R](scheduler: Scheduler, work: Future[R], team: Team) -> R:
  """Rollouts go on until the learner, on devices of its own, is through with some work; or until they wait for it themselves."""
  while not scheduler.idle and not team.agree('learned', work.done):
    if work.done():
      work.result()  # which raises here where it failed here: the others' would wait for this one's for ever
    scheduler.pump(patience=0.05)
  return work.result()


def _beside(thread: ThreadPoolExecutor | None) -> tuple[str, ...]:
  """The parts of a step, beside its rollout, in which tokens are sampled."""
  return () if thread is None else ('learn', 'sync')


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
  """How old what an update of `version` consumes is: groups by the version they were started under, tokens by their own."""
  ages = [version - group.start_version for group in groups]
  lag = lags([t for group in groups for t in group.trajectories], version)
  return {
    'async/off_policy_ratio': float(np.mean(ages)),
    'async/age_max': float(max(ages)),
    'async/token_lag_mean': float(lag.mean()),
    'async/token_lag_max': float(lag.max()),
    'async/stale_tokens': float(np.mean(lag > 0)),
  }


def lags(trajectories: Sequence[Trajectory], version: int) -> Int[np.ndarray, ' tokens']:
  """The updates between each token drawn and an update of `version`."""
  return np.concatenate([version - t.version[t.mask] for t in trajectories])


def remarks(run: Run, plan: CachePlan, linears: Kernels, positions: int) -> list[str]:
  """What of the sampler's memory and formats may not be as its settings suggest.

  `linears` is what multiplies them, `positions` how many the model was made for.
  """
  found = [never_evicts(run.cache, plan.prompt, plan.positions - plan.prompt)]
  if plan.positions > positions:
    found.append(
      f'config.sampling.max_prompt and max_tokens allow sequences of {plan.positions} tokens; the model is made for {positions} '
      '(max_position_embeddings in its config.json)'
    )
  if 'w8a8' in run.quant.sampler and not multiplies_codes(run.quant, linears):
    found.append(f'FP8 linears are emulated: numbers rounded to FP8 are multiplied in {plan.dtype} (config.quant.arithmetic)')
  if 'w8a8' in run.quant.sampler and run.quant.arithmetic == 'blockwise' and not can_run(linears):
    found.append('FP8 linears are emulated: FP8 codes are multiplied as bfloat16, block by block (config.quant.arithmetic)')
  if plan.fp8 and not can_run(plan.kernels):
    found.append(f'the FP8 cache is emulated: it is held in FP8, and converted to {plan.dtype} as it is read')
  if run.quant.key_bias and plan.fp8 and run.cache.positions == 'in_cache':
    found.append("config.cache.positions = 'in_cache': biases of keys, where the model has them, go through FP8 like the rest")
  if run.cache.masked_learner and run.quant.sampler != 'bf16':
    found.append(f'the learner forgets as the sampler does, but what {run.quant.sampler} adds to their mismatch is not corrected')
  return [remark for remark in found if remark]


def _check_team(run: Run, team: Team) -> None:
  """Raises SettingsError where these settings are not for a run over several processes."""
  if team.processes > 1 and run.devices.engines > 1:
    raise SettingsError(
      f'config.devices.engines = {run.devices.engines}: expected 1 over SPRL_PROCESSES = {team.processes}, which have one '
      'engine together'
    )


def _check_alike(about: str, mine: Mapping[str, Any], team: Team) -> None:
  """Raises SettingsError where this process of a team was started as another run than the first, or would be one here."""
  if differences := config_differences(team.agree(about, lambda: mine), mine, {}):
    raise SettingsError(f'SPRL_PROCESS=0 -> SPRL_PROCESS={team.process}: expected the same run\n  ' + '\n  '.join(differences))


def _misserved(learning: Learning, served: Served, last: bool = False) -> list[str]:
  """What is wrong with what the sampler is served; after the `last` step nothing is sampled, and scales may be older."""
  run, wrong = learning.run, []
  if not calibrate.usable(learning.largest):
    wrong.append('queries, keys or values are not finite: the FP8 cache has no scales')
  if not last and not learning.renewed:
    wrong.append('the FP8 cache has scales that were found with older weights than it serves')
  if run.quant.sampler != 'bf16':
    wrong += self_check(learning.params, served, learning.policy.dtype, run.quant)
  return wrong


def _check(scalars, broken: list[str], capped: int, bad_streak: int, run: Run, step: int, workdir: Path) -> None:
  """Raises StopRun, with a report, where the run is broken."""
  weighted = losses.weighted(run.loss, run.correction.mode)
  reasons = [*broken, *guards.sentinels(scalars, capped if run.rollout.stop_when_capped else 0, weighted)]
  if bad_streak >= run.optimizer.max_bad_steps:
    reasons.append(
      f'{bad_streak} updates in a row had a gradient that is not finite (config.optimizer.max_bad_steps = '
      f'{run.optimizer.max_bad_steps}); the weights are those before them'
    )
  if reasons:
    raise StopRun(
      f'stopped at step {step}:\n  ' + '\n  '.join(reasons) + f'\nmetrics: {workdir / "metrics.jsonl"}\n'
      f'checkpoints before this step: {workdir / "checkpoints"}'
    )
