"""Checks of a run that trains: the symptom of a problem, the metric that shows it, its meaning, and settings that usually help.

`CHECKS` is the table. A row compares a statistic of a metric with the range of a healthy run. One step is noisy, so most
statistics are of several steps, and some compare the latest steps with the first or the best ones. `History` holds these steps,
and `warnings` returns what the table says about it. `hooks.Warn` logs that.

docs/troubleshooting.md has a section for each symptom. docs/methods/losses.md, Health ranges, gives the origin of the ranges.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import fmean, median
from typing import NamedTuple

from sprl.config import EPISODES, Run
from sprl.config_checks import CLIPS, FILES
from sprl.presets import sources

FEW, WINDOW = 3, 10  # number of steps that a statistic uses
RISE = 0.2  # standard deviations of a sample by which a mean reward must exceed another one to count as risen
FAILED = ('timeout', 'crash', 'error', 'invalid')  # outcomes of grading other than 'ok'

Steps = Sequence[Mapping[str, float]]  # the metrics of steps


class History(NamedTuple):
  """The steps that the checks compare."""

  steps: int = 0  # steps seen
  first: Steps = ()  # the first WINDOW steps
  best: Steps = ()  # the block with the highest mean reward, of steps 1 to WINDOW, WINDOW + 1 to 2 * WINDOW, ...
  latest: Steps = ()  # the latest WINDOW steps

  def after(self, metrics: Mapping[str, float]) -> 'History':
    """Return the history with one more step."""
    steps, latest = self.steps + 1, (*self.latest, metrics)[-WINDOW:]
    if steps <= WINDOW:
      return History(steps, latest, latest, latest)
    better = steps % WINDOW == 0 and _reward(latest) > _reward(self.best)
    return History(steps, self.first, latest if better else self.best, latest)


# --- statistics: functions of a history and a metric; None if there are too few steps -------------------------------------


class Statistic(NamedTuple):
  """A number that is computed from the values of a metric."""

  text: str  # its name; `{}` is the name of the metric
  of: Callable[[History, str], float | None]


def _values(steps: Steps, metric: str) -> list[float]:
  """Return the finite values: a median of values with a NaN depends on their order. `FINITE` reports the others."""
  return [step[metric] for step in steps if math.isfinite(step.get(metric, math.nan))]


def _of_last_values(count: int, function: Callable[[Sequence[float]], float]) -> Callable[[History, str], float | None]:
  def of(history: History, metric: str) -> float | None:
    found = _values(history.latest, metric)[-count:]  # steps without an update have no value
    return function(found) if len(found) == count else None

  return of


def _of_window(function: Callable[[Sequence[float]], float]) -> Callable[[History, str], float | None]:
  def of(history: History, metric: str) -> float | None:
    found = _values(history.latest, metric)
    return function(found) if history.steps >= WINDOW and len(found) > WINDOW // 2 else None

  return of


def _now(history: History, metric: str) -> float | None:
  return next(iter(_values(history.latest[-1:], metric)), None)


def _growth(history: History, metric: str) -> float | None:
  """Return median of the latest / median of the first FEW, from step 2 * FEW on: a collapse can take fewer than WINDOW steps."""
  count = (half(history) - 1) | 1  # odd: with two low values of four, the median would be half way
  before, now = _values(history.first, metric)[:FEW], _values(history.latest[-count:], metric)
  if count < FEW or len(before) < FEW or len(now) <= count // 2:  # steps without an update have no value
    return None
  return median(now) / median(before) if median(before) > 0 else None


def _not_finite(history: History, metric: str) -> float | None:
  value = history.latest[-1].get(metric, 0.0)
  return None if math.isfinite(value) else value


def _over_first(function: Callable[[Sequence[float]], float]) -> Callable[[History, str], float | None]:
  def of(history: History, metric: str) -> float | None:
    before, now = _values(history.first, metric), _values(history.latest, metric)
    if history.steps < 2 * WINDOW or min(len(before), len(now)) <= WINDOW // 2:  # steps without an update have no value
      return None
    return function(now) / function(before) if function(before) > 0 else None

  return of


def _graded(history: History, metric: str) -> float | None:
  counts = {status: sum(_values(history.latest[-FEW:], f'grading/{status}')) for status in ('ok', *FAILED)}
  return counts['ok'] / sum(counts.values()) if history.steps >= FEW and any(counts.values()) else None


def _reward(steps: Steps) -> float:
  return fmean(_values(steps, 'reward/mean') or [0.0])


def half(history: History) -> int:
  """Return how many of the first and of the latest steps to compare, at most WINDOW, so that they do not overlap."""
  return min(WINDOW, history.steps // 2)


def gain(latest: Steps, since: Steps) -> float:
  """Return the difference of the mean rewards, in standard deviations of a sample."""
  spread = max(fmean(_values(steps, 'reward/std') or [math.inf]) for steps in (latest, since))
  return (_reward(latest) - _reward(since)) / max(spread, 1e-6)


NOW = Statistic('{}', _now)
SOME = Statistic(f'median of {{}} over {FEW} steps', _of_last_values(FEW, median))
MANY = Statistic(f'median of {{}} over {WINDOW} steps', _of_window(median))
LARGEST = Statistic(f'largest {{}} of {WINDOW} steps', _of_window(lambda found: max(map(abs, found))))
GRADED = Statistic(f'share of {{}} over {FEW} steps', _graded)
FINITE = Statistic('{}', _not_finite)
GROWTH = Statistic(f'median of {{}} over the latest {FEW} to {WINDOW - 1} steps, divided by that of the first {FEW},', _growth)
BURSTS = Statistic(
  f'third largest {{}} of {WINDOW} steps, divided by that of the first {WINDOW},', _over_first(lambda found: sorted(found)[-3])
)
FALL = Statistic(
  f'change of {{}} from the best {WINDOW} steps, in standard deviations of a sample,',
  lambda history, _: gain(history.latest, history.best) if history.steps >= 2 * WINDOW else None,
)


# --- advice: settings to change, with the condition under which that can help -----------------------------------------------


class Advice(NamedTuple):
  """A change of settings. `tries` adds the current value if the text names no new one, and the arm or preset that sets it."""

  text: str
  helps: Callable[[Run], bool] = lambda run: True


def corrects_nothing(run: Run) -> bool:
  """Return whether sampler and learner are different policies, and neither weights, rejection nor ratios account for that."""
  c = run.correction
  ratio = not run.loss.weighted(c.mode)
  return not (run.same_policy or run.masked_learner or ratio or c.level is not None or c.veto is not None or c.reject)


def needs_no_fp8_cache(run: Run) -> bool:
  """Return whether the other settings of the FP8 cache are accepted without one, too."""
  return run.quant.kv_scale != 'frozen' and run.quant.softmax == 'none'


def clips(run: Run) -> bool:
  """Return whether the loss clips ratios, and ratios differ from 1."""
  return run.loss.variant in CLIPS['clip_high'] and (run.optimizer.updates > 1 or run.correction.mode == 'bypass')


def ranks_equal_groups(run: Run) -> bool:
  """Return whether a penalty on length decides the advantages of a group of equal rewards."""
  return run.advantage.within_groups and run.rollout.equal_groups == 'train'


EVICTION_CORRECTED = Advice(
  "config.arm = 'sparse_rl', without a preset and settings of the correction: it corrects for the eviction",
  lambda run: corrects_nothing(run) and run.cache.budget is not None,
)
CORRECTED = Advice(
  "config.correction.level = 'token', which corrects for it", lambda run: corrects_nothing(run) and run.cache.budget is None
)
BUDGET = Advice('a larger config.cache.budget', lambda run: run.cache.budget is not None)
PRECISION = Advice("less FP8 in config.quant.sampler, or 'none'", lambda run: run.quant.sampler != 'none')
LEARNER_FP8 = Advice("config.quant.learner = 'none'", lambda run: run.quant.learner != 'none' and run.quant.sampler == 'none')
STALENESS = Advice('a smaller config.rollout.async_ratio', lambda run: run.rollout.async_ratio > 0)
FLOAT32 = Advice("config.model.dtype = 'float32'", lambda run: run.same_policy and run.model.dtype != 'float32')
REPLAY = Advice(
  "with experts, config.model.router_replay = 'R3'", lambda run: run.same_policy and run.model.router_replay != 'R3'
)
LEDGER = Advice('config.ledger.every = 1, which shows the cause', lambda run: not run.ledger.every and not run.masked_learner)
TOKEN_LEVEL = Advice("config.correction.level = 'token'", lambda run: run.correction.level != 'token')
BYPASS = Advice(
  "config.correction.mode = 'bypass' with config.correction.level = None, whose ratio is to the log-probs of the sampler",
  lambda run: run.correction.mode != 'bypass',
)
TOKEN_WEIGHTS = Advice("config.correction.level = 'token'", lambda run: run.correction.level == 'sequence')
REJECT = Advice('wider bounds in config.correction.reject', lambda run: bool(run.correction.reject))
VETO = Advice('a smaller config.correction.veto', lambda run: run.correction.veto is not None)
RATE = Advice('a lower config.optimizer.learning_rate')
WARMUP = Advice('a larger config.optimizer.warmup_steps')
MINIBATCHES = Advice('a smaller config.optimizer.minibatches', lambda run: run.optimizer.minibatches > 1)
EPOCHS = Advice('a smaller config.optimizer.epochs', lambda run: run.optimizer.epochs > 1)
CLIP_NORM = Advice('a smaller config.optimizer.clip_norm')
CLIP_HIGH = Advice('a larger config.loss.clip_high', clips)
ENTROPY = Advice('a larger config.loss.entropy_coef')
LESS_ENTROPY = Advice('a smaller config.loss.entropy_coef', lambda run: run.loss.entropy_coef > 0)
REFERENCE = Advice('a larger config.loss.kl_coef')
SCALES = Advice('another config.quant.kv_scale')
NO_FP8_CACHE = Advice(
  "config.quant.sampler = 'w8a8', which keeps the cache in the compute dtype",
  lambda run: run.quant.sampler == 'w8a8_kv8' and needs_no_fp8_cache(run),
)
NO_FP8 = Advice("config.quant.sampler = 'none'", lambda run: run.quant.sampler == 'kv8' and needs_no_fp8_cache(run))
TURN_TOKENS = Advice('a larger config.task.turn_tokens')
LENGTH = Advice('a larger config.sampling.max_tokens')
STOP = Advice('a string that ends an answer, in config.sampling.stop')
MEANT = Advice('config.rollout.stop_when_capped = False, if that is intended')
OVERLONG = Advice('config.advantage.overlong = 0.2', lambda run: run.advantage.overlong is None and not ranks_equal_groups(run))
OVERLONG_REPLACED = Advice(
  "config.advantage.overlong = 0.2 with config.rollout.equal_groups = 'replace', so that length alone decides no group",
  lambda run: run.advantage.overlong is None and ranks_equal_groups(run),
)
SUFFIX = Advice(
  'a config.task.suffix that asks for the form of answer that the grader reads', lambda run: run.task.kind not in EPISODES
)
SIMPLER = Advice('a simpler task by config.task.args', lambda run: run.task.kind in ('reasoning_gym', *EPISODES))
FINE_TUNING = Advice(
  'fine-tuning with sprl.sft first, and config.model.path = the fine-tuned model',
  lambda run: run.task.kind not in (*EPISODES, 'rows'),  # which have no worked solutions in files
)
PROBLEMS = Advice('problems that the model solves sometimes, by config.task.filters', lambda run: run.task.kind in FILES)
SOURCES = Advice('sources that the model solves sometimes, by config.task.mixture', lambda run: run.task.kind == 'mixture')
REPLACE = Advice("config.rollout.equal_groups = 'replace'", lambda run: run.rollout.equal_groups != 'replace')
GROUP = Advice('a larger config.rollout.group')
TIME_LIMIT = Advice('a larger config.task.time_limit')
GRADER = Advice(
  'a correction of the grader, config.task.grader',
  lambda run: not run.task.rewards and run.task.kind not in ('mixture', *EPISODES),
)
REWARDS = Advice(
  'a correction of the graders in config.task.rewards', lambda run: bool(run.task.rewards) and run.task.kind not in EPISODES
)
GRADERS = Advice(
  'a correction of the graders in config.task.mixture',
  lambda run: any(not run.task.rewards or source.grader != 'auto' for source in run.task.mixture.values()),
)

CLOSER = (EVICTION_CORRECTED, CORRECTED, BUDGET, PRECISION, LEARNER_FP8, STALENESS)
MATCHING = (*CLOSER, FLOAT32, REPLAY, LEDGER)


def tries(advice: Sequence[Advice], run: Run) -> str:
  """Return a sentence with the changes that can help the run, such as `Try a larger config.cache.budget (now 256).`"""

  fixed = sources(run)

  def with_notes(found: re.Match) -> str:
    key, given = found[1].removeprefix('config.'), found[2]
    notes = [] if given else [f'now {reprlib.repr(reduce(getattr, key.split("."), run))}']
    notes += [f'set by {fixed[key]}'] if key in fixed else []
    return found[0] + (f' ({"; ".join(notes)})' if notes else '')

  changes = [re.sub(r"(config(?:\.\w+)+)( = (?:'\w+'|[\w.]+))?", with_notes, each.text) for each in advice if each.helps(run)]
  return f'Try {"; ".join(changes)}.'


# --- the table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
  """A row of the table: the statistic of a metric, its healthy range, and what a value outside of the range means."""

  symptom: str  # the first words of the warning, and a heading of docs/troubleshooting.md
  metric: str
  statistic: Statistic
  healthy: tuple[float, float]  # lowest and highest value
  meaning: str
  advice: tuple[Advice, ...]
  applies: Callable[[History, Run], bool] = lambda history, run: True

  def outside(self, history: History, run: Run) -> float | None:
    """Return the value of the statistic if it is outside of the healthy range, else None."""
    value, (low, high) = self.statistic.of(history, self.metric), self.healthy
    healthy = value is None or (low <= value <= high and math.isfinite(value))
    return None if healthy or not self.applies(history, run) else value

  def warning(self, value: float, run: Run) -> str:
    """Return the warning about a value outside of the healthy range."""
    low, high = self.healthy
    bound = (f', below {low:g}' if value < low else f', above {high:g}') if math.isfinite(value) else ''
    of = self.statistic.text.format(self.metric)
    return f'{self.symptom}: {of} = {value:.3g}{bound}. {self.meaning} {tries(self.advice, run)}'


def no_gain(history: History, run: Run) -> bool:
  """Return whether the reward has not risen since the first steps. If it has, less entropy and more KL are normal."""
  count = half(history)
  return gain(history.latest[-count:], history.first[:count]) < RISE


def was_not_skipped(history: History, run: Run) -> bool:
  """Return whether the latest step applied its update. A skipped update has a warning of its own, for the same cause."""
  return not history.latest[-1].get('update/skipped')


def has_weights(history: History, run: Run) -> bool:
  """Return whether the correction uses importance weights."""
  return run.correction.level is not None


def moves(history: History, run: Run) -> bool:
  """Return whether the ratios measure the update, and not only the mismatch of sampler and learner."""
  return run.correction.mode == 'decoupled' or run.optimizer.updates > 1


def compares_groups(history: History, run: Run) -> bool:
  """Return whether a group of equal rewards learns nothing from them."""
  return run.advantage.within_groups


def cuts_by_mistake(history: History, run: Run) -> bool:
  """Return whether cut-off answers are a problem. `stop_when_capped = False` says that they are intended."""
  return run.rollout.stop_when_capped


ANY = math.inf
MISMATCH = 'sampler and learner differ much'
DIFFER = 'The tokens were drawn from a different distribution than the one that is trained, and a correction has limits.'
WEIGHTS = 'the correction weights vary much'
VARY = 'The weights that correct for the difference of sampler and learner add noise to the gradient.'
SATURATED = 'numbers exceed the FP8 scales'
CLAMPED = 'Keys, values or queries are clamped: the scales were found with other weights or texts.'

CHECKS = (
  Check(MISMATCH, 'rollout_corr/kl', SOME, (-0.1, 0.1), DIFFER, MATCHING),
  Check(MISMATCH, 'rollout_corr/chi2_token', SOME, (-ANY, 1.0), DIFFER, MATCHING),
  Check(MISMATCH, 'rollout_corr/token_mult_prob_error', SOME, (0.0, 1.05), DIFFER, MATCHING),
  Check(MISMATCH, 'sparse/agreement_p05', SOME, (0.86, ANY), DIFFER, MATCHING),
  Check(
    'the effective sample size is small', 'rollout_corr/rollout_is_eff_sample_size', SOME, (0.3, ANY),
    'A few tokens with large weights decide the update, because sampler and learner differ.', (*MATCHING, TOKEN_WEIGHTS),
    has_weights,
  ),
  Check(WEIGHTS, 'rollout_corr/rollout_is_mean', SOME, (0.5, 2.0), VARY, (*MATCHING, TOKEN_WEIGHTS), has_weights),
  Check(WEIGHTS, 'rollout_corr/rollout_is_std', SOME, (0.0, 1.0), VARY, (*MATCHING, TOKEN_WEIGHTS), has_weights),
  Check(
    'rejection removes most tokens', 'rollout_corr/rollout_rs_masked_fraction', SOME, (0.0, 0.5),
    'The update sees only the answers on which sampler and learner agree.', (*MATCHING, REJECT, VETO),
  ),
  Check(SATURATED, 'fp8/kv_saturation', NOW, (0.0, 1e-4), CLAMPED, (SCALES, NO_FP8_CACHE, NO_FP8)),
  Check(SATURATED, 'fp8/query_saturation', NOW, (0.0, 1e-4), CLAMPED, (SCALES, NO_FP8_CACHE, NO_FP8)),
  Check(
    'an update was skipped', 'update/skipped', NOW, (0.0, 0.0),
    'Its loss or gradient was not finite. Three in a row stop the run.', (RATE, WARMUP),
  ),
  *(
    Check(
      'a metric is not finite', metric, FINITE, (-ANY, ANY), 'The weights may have diverged.', (RATE, WARMUP), was_not_skipped,
    )
    for metric in ('update/grad_norm', 'policy/entropy', 'policy/k3_kl', 'policy/kl_ref', 'reward/mean')
  ),
  Check(
    'a step changes the policy much', 'policy/k3_kl', SOME, (0.0, 0.1),
    'The last updates of a step train on answers of a policy that is far away. The value is the mean over all its updates.',
    (RATE, MINIBATCHES, EPOCHS), moves,
  ),
  Check(
    'the gradient norm has bursts', 'update/grad_norm', BURSTS, (0.0, 5.0),
    'Some gradients are much larger than the first ones, which often precedes a collapse.', (RATE, CLIP_NORM, *CLOSER),
  ),
  Check(
    'the policy leaves the reference', 'policy/kl_ref', MANY, (-ANY, 0.5),
    'The policy is far from the reference model, and the reward has not risen.', (REFERENCE, RATE), no_gain,
  ),
  Check(
    'the entropy collapsed', 'policy/entropy', GROWTH, (0.2, ANY),
    'The policy writes the same answers again and again, and the reward has not risen.', (CLIP_HIGH, ENTROPY, RATE), no_gain,
  ),
  Check(
    'the entropy grew', 'policy/entropy', GROWTH, (0.0, 2.0), 'The policy becomes random, and the reward has not risen.',
    (RATE, LESS_ENTROPY, *CLOSER, REFERENCE), no_gain,
  ),
  Check(
    'the reward fell', 'reward/mean', FALL, (-1.0, ANY), 'The policy collapsed, unless the problems became harder.',
    (RATE, *CLOSER, REFERENCE),
  ),
  Check(
    'every reward is 0', 'reward/mean', LARGEST, (1e-9, ANY), 'There is nothing to learn from: samples/ shows the answers.',
    (SUFFIX, SIMPLER, LENGTH, FINE_TUNING),
  ),
  Check(
    'most groups have equal rewards', 'reward/groups_equal', MANY, (0.0, 0.9),
    'Their rewards teach nothing: problems are too easy or too hard, or the answers to a problem are all alike.',
    (PROBLEMS, SIMPLER, SOURCES, REPLACE, GROUP), compares_groups,
  ),
  Check(
    'most answers are cut off', 'completion/truncated', MANY, (0.0, 0.5), 'They reach the token limit before they end.',
    (LENGTH, STOP, OVERLONG, OVERLONG_REPLACED), cuts_by_mistake,
  ),
  Check(
    'most answers are cut off', 'completion/turns_cut', MANY, (0.0, 0.5), 'They reach the token limit of a turn before they end.',
    (TURN_TOKENS, STOP), cuts_by_mistake,
  ),
  Check(
    'answers repeat themselves', 'sparse/repetition', MANY, (0.0, 0.5), 'More than half of an answer is text that occurs twice.',
    (BUDGET, RATE, OVERLONG, OVERLONG_REPLACED),
  ),
  Check(
    'grading fails', 'grading/ok', GRADED, (0.95, ANY),
    'Answers that could not be graded do not train. The log has a warning with the reason.',
    (TIME_LIMIT, GRADER, REWARDS, GRADERS),
  ),
)  # fmt: skip

# metric -> (lowest, highest) of a healthy run, for the checks that do not compare with other steps
HEALTHY: dict[str, tuple[float, float]] = {check.metric: check.healthy for check in CHECKS if check.statistic in (NOW, SOME)}


def warnings(history: History, run: Run) -> dict[str, str]:
  """Return a warning for each symptom that the latest step of the history shows: symptom -> sentences."""
  found: dict[str, str] = {}
  for check in CHECKS:
    if check.symptom not in found and (value := check.outside(history, run)) is not None:
      found[check.symptom] = check.warning(value, run)
  return found
