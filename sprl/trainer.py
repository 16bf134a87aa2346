"""The loop: take rollouts, grade, pack, score, update, sync, log, save. Read top to bottom.

    prompt -> rollout -> reward -> dense scoring -> correction -> update -> sync -> (next) rollout

Everything that a step depends on is in the settings, the step's number and the train state: prompts come from a stream whose
place is one number, random numbers from (seed, request, token). A run that is killed anywhere and started again therefore
writes the same metrics and ends in the same weights, bit for bit.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from sprl import ledger, settings
from sprl.cache.plan import CachePlan, never_evicts
from sprl.evaluation import evaluate
from sprl.io.checkpoint import Checkpoints
from sprl.io.config_file import write_config
from sprl.io.metrics import RunLog
from sprl.io.progress import Progress
from sprl.learner.packing import pack, shape
from sprl.learner.score import score
from sprl.learner.state import TrainState, make_optimizer
from sprl.learner.update import Computation, make_update, scores_old
from sprl.models.transformer import Params
from sprl.objective import diagnostics, guards
from sprl.objective.advantages import advantages, equal_groups
from sprl.policy import Policy, abstract_state
from sprl.process import exclusive, return_free_memory, signals
from sprl.rollout import collect
from sprl.sampler import calibrate
from sprl.sampler.served import self_check, sync_metrics
from sprl.settings import GRADING_COSTS, Run, SettingsError
from sprl.tasks import graders, problems
from sprl.tasks.grading_pool import GradingPool
from sprl.tasks.prompts import PromptStream
from sprl.trajectory import Trajectory

log = logging.getLogger(__name__)

MAY_CHANGE = ('steps', 'export', 'eval', 'checkpoint', 'ledger', 'log', *GRADING_COSTS)  # what a resumed run may be told anew
LOOKED_AHEAD = 10_000  # prompts whose lengths are checked before the first step; the engine checks all others


class StopRun(RuntimeError):
  """The run cannot go on in good faith; the message is the report."""


@dataclass(frozen=True)
class Finished:
  """How a call of `train` ended."""

  step: int
  completed: bool  # False: a signal ended it early, with all of it saved
  policy: Policy
  params: Params
  before: Mapping[str, Any]  # the held-out evaluation before the first update: metrics and samples
  after: Mapping[str, Any]  # that after the last; of a run that is not complete, nothing


def train(run: Run, workdir: Path) -> Finished:
  """Runs, or resumes, the run of `workdir` up to its last step.

  SIGTERM and SIGINT save and return early, at the end of the step (or the evaluation before the first) that is under way.

  Raises SettingsError and its kin before any device work, StopRun where a sentinel says that training is broken.
  """
  # --- settings, files, problems: everything that can be wrong is found here ----------------------------------------
  train_set, test_set = problems.load(run.task, 'train'), problems.load(run.task, 'test')
  grader, task = graders.resolve(run.task), run.task
  policy = Policy.open(run)
  plan = policy.plan(run.sampling, run.cache, run.quant, record=run.cache.masked_learner)
  for remark in remarks(run, plan):
    log.warning(remark)
  updates = run.optimizer.minibatches * run.optimizer.epochs
  sizes = shape(run.sampling, run.rollout, run.packing, run.optimizer.minibatches)
  n = run.rollout.prompts * run.rollout.group
  checkpoints = Checkpoints(workdir / 'checkpoints', run.checkpoint.keep_last, run.checkpoint.keep_best)
  if (done := checkpoints.latest() or 0) > run.steps:
    raise SettingsError(f'config.steps = {run.steps}: expected at least {done}, the steps that {workdir} has behind it')
  ahead = min(run.steps * run.rollout.prompts, len(train_set), LOOKED_AHEAD)
  for asked in (test_set[: run.eval.problems], PromptStream(train_set, run.seed).next(ahead)):
    collect.check_lengths(asked, policy.tokenizer, run.sampling.max_prompt)

  with (
    signals() as stop,
    GradingPool(grader, task.grader_workers, task.grader_timeout, task.grader_memory_gb) as pool,
    exclusive(workdir),
  ):
    for difference in write_config(workdir, settings.to_dict(run), MAY_CHANGE, settings.to_dict(Run())):
      log.warning('settings changed since this run began: %s', difference)

    # --- state: from a checkpoint, or from the pretrained weights ---------------------------------------------------
    optimizer = make_optimizer(run.optimizer, run.steps * updates)
    stream = PromptStream(train_set, run.seed)
    abstract = abstract_state(policy, optimizer)
    restored = checkpoints.restore(abstract)
    if restored is None:
      state = jax.device_put(TrainState.create(policy.load(), optimizer), jax.tree.map(lambda a: a.sharding, abstract))
      done, capped, before, after, largest = 0, 0, {}, {}, ()
    else:
      state, done = restored.arrays, restored.step
      capped, before, after = (restored.extra[name] for name in ('capped', 'before', 'after'))
      largest = tuple(np.array(found, np.float32) for found in restored.extra.get('largest', ()))
      _restore_stream(stream, restored.extra['stream'], workdir)
      log.info('resuming after step %d', done)
    reference = policy.load(policy.dtype) if run.loss.kl_coef > 0 else None

    # --- the jitted functions, and where to write -------------------------------------------------------------------
    calibrates = plan.fp8 and run.quant.kv_scale != 'unit'
    chunk, temperature = run.packing.score_chunk, run.sampling.temperature
    computation = Computation(run.correction, run.loss, temperature, policy.dtype, chunk, run.model.remat == 'layer')
    update = make_update(policy.graphdef, optimizer, computation)
    rows = run.sampling.rows or n
    engine = policy.engine(run.sampling, plan, rows, min(run.rollout.prompts, -(-rows // run.rollout.group)), run.seed)
    run_log = RunLog(workdir, done if restored else None, run.log.tensorboard)
    progress = Progress(run.steps, show=partial(print, flush=True))
    warned: set[str] = set()

    def serve():
      return policy.serve(state.params, run.quant, calibrate.scales(largest, run.quant, plan.layers) if plan.fp8 else None)

    def evaluate_now(logged: bool = True):
      renewed = largest and run.quant.kv_scale != 'first_forward'  # whose scales are found before the rollout that they serve
      result = evaluate(run, policy, state.params, test_set, pool, scales=served.scales if renewed else None)
      if logged:
        run_log.evaluation(done, result['metrics'])
      return result

    def save():
      extra = {
        'stream': stream.state(), 'capped': capped, 'before': before, 'after': after,
        'largest': [found.tolist() for found in largest],
      }  # fmt: skip
      checkpoints.save(done, state, extra, after['metrics']['eval/avg@k'] if after else None)

    served = serve()
    if restored is None:
      before = evaluate_now()

    for step in range(done + 1, run.steps + 1):
      if stop.received:
        break
      times = _Stopwatch()

      # --- rollout: prompts to completions --------------------------------------------------------------------------
      asked = stream.next(run.rollout.prompts)
      requests = collect.requests(asked, policy.tokenizer, run.rollout.group, run.sampling.max_tokens, (step - 1) * n)
      if calibrates and (not largest or run.quant.kv_scale == 'first_forward'):
        prompts = [r.prompt for r in requests[:: run.rollout.group]]
        found = calibrate.amax_of_prompts(policy.graphdef, plan, state.params, prompts, engine.prefill, run.quant)
        largest = calibrate.remembered(largest, found, run.quant)
        served = served._replace(scales=calibrate.scales(largest, run.quant, plan.layers))
      trajectories = engine.generate(served, requests, version=int(jax.device_get(state.version)))
      times.lap('rollout')

      # --- the mismatch by its causes -------------------------------------------------------------------------------
      if run.ledger.every and step % run.ledger.every == 0:
        probed = trajectories[: run.ledger.groups * run.rollout.group]
        entries = ledger.ledger(run, policy, engine, state.params, served.scales, probed)
        run_log.ledger(step, ledger.scalars(entries), ledger.histograms(entries), entries)
        times.lap('ledger')

      # --- reward: completions to advantages ------------------------------------------------------------------------
      trajectories, graded = collect.grade(trajectories, asked, policy.tokenizer, pool)
      advantage = advantages_of(trajectories, run)
      times.lap('grade')

      # --- pack, score, update: one minibatch after the other -------------------------------------------------------
      packed = [
        pack(trajectories[part], advantage[part], sizes, run.packing.share_prefix)
        for part in _parts(n, run.optimizer.minibatches)
      ]
      minibatches = [(batch, metrics) for batch, metrics in packed if batch.used]  # all filtered out: no update
      probe = served.probe
      del served  # in float32 it shares the learner's arrays, which the update is given to write over
      return_free_memory()  # the update is where most is needed
      with jax.transfer_guard('disallow'):  # what goes to the device or comes back is said here: device_put, device_get
        batches = [jax.device_put(batch, policy.replicated) for batch, _ in minibatches]
        old = [
          score(policy.graphdef, state.params, batch, temperature, policy.dtype, chunk)
          if scores_old(run.correction, updates) else None
          for batch in batches
        ]  # fmt: skip
        ref = [
          score(policy.graphdef, reference, batch, temperature, policy.dtype, chunk) if reference is not None else None
          for batch in batches
        ]
        jax.block_until_ready((old, ref))
        times.lap('score')
        measured = []
        for _ in range(run.optimizer.epochs):
          for batch, old_logp, ref_logp in zip(batches, old, ref):
            state, metrics = update(state, batch, old_logp, ref_logp)
            measured.append(metrics)
        measured = jax.device_get(measured)
        times.lap('update')

        # --- sync: the new weights as the sampler multiplies them, and new scales for its cache ---------------------
        if calibrates and batches and run.quant.kv_scale != 'first_forward':
          found = [calibrate.amax_of_batch(policy.graphdef, plan, state.params, batch, run.quant.kv_batches) for batch in batches]
          largest = calibrate.remembered(largest, np.max(jax.device_get(found), axis=0), run.quant)
          times.lap('calibrate')
        served = jax.block_until_ready(serve())
        times.lap('sync')

      # --- log, check, evaluate, save -------------------------------------------------------------------------------
      done, after = step, {}
      rollout = collect.metrics(trajectories, plan, rows)
      capped = capped + 1 if rollout['completion/truncated'] == 1 else 0
      scalars = {
        **rollout, **graded, **_mean(measured), **_mean([metrics for _, metrics in minibatches]),
        **sync_metrics(served, probe),
        'sparse/repetition': float(np.mean([diagnostics.repetition(t.completion) for t in trajectories])),
      }  # fmt: skip
      times.lap('log')
      rate = sum(len(t.completion) for t in trajectories) / times.seconds['rollout']
      run_log.write(step, scalars, {**times.seconds, 'tokens_per_second': rate})
      if run.log.samples_every and step % run.log.samples_every == 0:
        run_log.samples(step, collect.sample_rows(trajectories, asked, policy.tokenizer, run.log.samples))
      broken = [] if calibrate.usable(largest) else ['queries, keys or values are not finite: the FP8 cache has no scales']
      broken += self_check(state.params, served, policy.dtype, run.quant) if run.quant.sampler != 'bf16' else []
      bad_streak = max((int(m['update/bad_streak']) for m in measured), default=0)
      _check(scalars, broken, capped, bad_streak, run, step, workdir)
      for name, warning in guards.warnings(scalars).items():
        if name not in warned:
          log.warning('step %d: %s (said once a run)', step, warning)
          warned.add(name)
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
    checkpoints.close()
    run_log.close()
  if not completed:
    log.warning('%s: saved after step %d of %d; the same command goes on from there', stop.received, done, run.steps)
  return Finished(done, completed, policy, state.params, before, after)


def _restore_stream(stream: PromptStream, state: Mapping[str, Any], workdir: Path) -> None:
  try:
    stream.restore(state)
  except ValueError as error:
    raise SettingsError(f'config.task: its problems are not those that the run of {workdir} began with: {error}') from error


def remarks(run: Run, plan: CachePlan) -> list[str]:
  """What of the sampler's memory and formats may not be as its settings suggest."""
  found = [never_evicts(run.cache, plan.prompt, plan.positions - plan.prompt)]
  if 'w8a8' in run.quant.sampler and run.quant.arithmetic == 'emulate':
    found.append(f'FP8 linears are emulated: numbers rounded to FP8 are multiplied in {plan.dtype} (config.quant.arithmetic)')
  if plan.fp8:
    found.append(f'the FP8 cache is emulated: it is held in FP8, and converted to {plan.dtype} as it is read')
  if run.quant.key_bias and plan.fp8 and run.cache.positions == 'in_cache':
    found.append("config.cache.positions = 'in_cache': biases of keys, where the model has them, go through FP8 like the rest")
  if run.cache.masked_learner and run.quant.sampler != 'bf16':
    found.append(f'the learner forgets as the sampler does, but what {run.quant.sampler} adds to their mismatch is not corrected')
  return [remark for remark in found if remark]


def advantages_of(trajectories: Sequence[Trajectory], run: Run) -> Float[np.ndarray, ' B']:
  """Group-relative advantages; NaN marks members of filtered groups, which are not trained on."""
  reward = jnp.array([t.reward for t in trajectories], jnp.float32)
  group = jnp.array([t.group for t in trajectories], jnp.int32)
  valid: Bool[np.ndarray, ' B'] = np.ones(len(trajectories), bool)
  if run.rollout.filter_equal:
    valid = ~np.asarray(equal_groups(reward, group, jnp.asarray(valid)))
  result = np.array(advantages(reward, group, jnp.asarray(valid), run.advantage), np.float32)
  result[~valid] = np.nan
  return result


def _parts(n: int, count: int) -> list[slice]:
  return [slice(i * n // count, (i + 1) * n // count) for i in range(count)]


def _mean(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """The mean of each metric over a step's updates."""
  return {name: float(np.mean([m[name] for m in metrics])) for name in (metrics[0] if metrics else ())}


def _check(scalars, broken: list[str], capped: int, bad_streak: int, run: Run, step: int, workdir: Path) -> None:
  """Raises StopRun, with a report, where the run is broken."""
  reasons = [*broken, *guards.sentinels(scalars, capped if run.rollout.stop_when_capped else 0)]
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


class _Stopwatch:
  """Seconds of a step's parts, in the order they end."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def lap(self, name: str) -> None:
    """Ends part `name`."""
    now = time.perf_counter()
    self.seconds[name] = now - self._last
    self._last = now
