"""Hooks of a step: the ledger before the update; logs, guards, evaluation and checkpoints after it.

A hook is a function of the session. `Session.before_update` holds the hooks that need the weights before an update.
`Session.after_step` holds the hooks at the end of a step. Hooks run in order.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

import jax

from sprl import ledger
from sprl.cache.scales import Scales
from sprl.guards.checks import NO_FP8, NO_FP8_CACHE, RATE, SCALES, History, tries, warnings
from sprl.guards.stop import Streaks, sentinels
from sprl.models.lora import network
from sprl.rollout import collect
from sprl.rollout.staleness import lags
from sprl.sampler import calibrate
from sprl.sampler.weights import self_check
from sprl.session import Session, StepReport
from sprl.sharding.transfer import Parked
from sprl.types import Trajectory, trained_on

log = logging.getLogger(__name__)


class StopRun(RuntimeError):
  """A guard found that training is broken. The message is the report."""


# --- before an update --------------------------------------------------------------------------------------------------


class LedgerHook:
  """Splits the mismatch by its causes every `run.ledger.every` steps (sprl/ledger.py).

  Keeps the weights of older versions that may have sampled, parked on the host.
  """

  def __init__(self):
    self._older: ledger.Older = {}

  def __call__(self, session: Session, step: int, trajectories: Sequence[Trajectory], scales: Scales | None) -> None:
    """Measure and log the ledger of this step, if it is due. `scales` are those of an FP8 cache under the newest weights."""
    run, learner = session.run, session.learner
    self._older = ledger.with_version(self._older, step - 1, learner.state.params, scales, run)
    if not run.ledger.every or step % run.ledger.every:
      return
    version, probed = ledger.of_one_version(trained_on(trajectories), ledger.GROUPS * run.rollout.group)
    sampled_with = None
    if version < step - 1 and version in self._older:
      parked, scales = self._older[version]
      sampled_with = network(jax.tree.map(Parked.back, parked), learner.base)
    engine_config = session.placed[0].config
    entries = ledger.ledger(
      run, session.model, engine_config, probed, params=learner.params, scales=scales, sampled_with=sampled_with
    )
    if session.run_log:
      session.run_log.ledger(step, ledger.scalars(entries), ledger.histograms(entries), entries)


# --- after a step ------------------------------------------------------------------------------------------------------


def log_step(session: Session, report: StepReport) -> None:
  """Write the line of metrics.jsonl, and a table of samples: of the first and last step, and every `log.samples_every` steps."""
  run, step = session.run, report.step
  if session.run_log:
    clocked = {**report.seconds, 'tokens_per_second': report.tokens_per_second}
    session.run_log.write(step, report.metrics, clocked, {'async/token_lag': lags(report.trajectories, step - 1)})
  if (every := run.log.samples_every) and (step % every == 0 or step in (1, run.steps)):
    # Every process asks for the answers, which the others may hold; process 0 writes.
    rows = collect.sample_rows(report.trajectories, session.source.answer, session.model.tokenizer, run.log.samples)
    if session.run_log:
      session.run_log.samples(step, rows)


def check_step(session: Session, report: StepReport) -> None:
  """Raise StopRun if a guard finds that training is broken."""
  state, run = session.state, session.run
  streaks = Streaks(state.capped, state.apart).after(report.metrics)
  state.capped, state.apart = streaks
  reasons = wrong_weights(session, last=report.step == run.steps)
  stop_if(reasons + sentinels(report.metrics, run, streaks), session)


class Warn:
  """Logs a warning about each symptom once in each start of a run. `earlier` are the metrics of the steps before this start."""

  def __init__(self, earlier: Iterable[Mapping[str, float]] = ()):
    self._history, self._said = reduce(History.after, earlier, History()), set()

  def __call__(self, session: Session, report: StepReport) -> None:
    """Log the warnings of this step that were not logged before. Only process 0 logs: the metrics of all processes are equal."""
    if not session.team.leads:
      return
    self._history = self._history.after(report.metrics)
    for symptom, warning in warnings(self._history, session.run).items():
      if symptom not in self._said:
        log.warning('step %d: %s (logged once; docs/troubleshooting.md)', report.step, warning)
        self._said.add(symptom)


def print_progress(session: Session, report: StepReport) -> None:
  """Print one line: step, reward, mismatch, tokens per second, time left."""
  if session.team.leads:
    k3 = report.metrics.get('rollout_corr/k3_kl')  # absent if the step had no update
    session.progress.step(report.step, report.metrics['reward/mean'], k3, report.tokens_per_second)


def evaluate_and_save(session: Session, report: StepReport) -> None:
  """Evaluate every `eval.every` steps and after the last; save then and every `checkpoint.every` steps.

  A signal or an error ends an evaluation. Then the step is saved without its evaluation (`Session.saved_on_error`), and a resumed
  run begins with that.
  """
  run, step = session.run, report.step
  if session.evaluates_after(step):
    with session.saved_on_error():
      session.state.after = session.evaluate()
    session.save()
  elif run.checkpoint.every and step % run.checkpoint.every == 0:
    session.save()


def after_step(earlier: Iterable[Mapping[str, float]] = ()) -> list[Callable[[Session, StepReport], None]]:
  """Return the hooks at the end of a step, in order.

  The guards follow the line and the warnings of the step, and precede the save, so that no broken state is saved. `earlier` are
  the metrics of the steps before this start.
  """
  return [log_step, Warn(earlier), print_progress, check_step, evaluate_and_save]


# --- guards ------------------------------------------------------------------------------------------------------------


def stop_if(reasons: Sequence[str], session: Session) -> None:
  """Raise StopRun with a report if there are reasons to stop."""
  if reasons:
    raise StopRun(
      f'stopped at step {session.state.step}:\n  ' + '\n  '.join(reasons) + f'\nmetrics: {session.workdir / "metrics.jsonl"}\n'
      f'checkpoints before this step: {session.workdir / "checkpoints"}'
    )


def wrong_weights(session: Session, last: bool = False) -> list[str]:
  """Return the faults of the sampler's weights and scales. After the `last` step nothing is sampled, and scales may be older."""
  learner, run, wrong = session.learner, session.run, []
  assert session.weights is not None
  if not calibrate.usable(learner.amax):
    wrong.append(
      f'queries, keys or values are not finite: the FP8 cache has no scales. {tries((RATE, NO_FP8_CACHE, NO_FP8), run)}'
    )
  if not last and not learner.scales_current:
    wrong.append(
      'the scales of the FP8 cache were found with older weights than the sampler has. '
      f'{tries((SCALES, NO_FP8_CACHE, NO_FP8), run)}'
    )
  if run.quant.sampler != 'none':
    wrong += self_check(learner.params, session.weights, session.model.dtype, run.quant, session.model.mesh)
  return wrong
