"""Guards: the reasons to stop a run, and the warnings about one that goes on."""

import ast
import json
import math
import re
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl import hooks
from sprl.config import (
  Advantage,
  Cache,
  Correction,
  Ledger,
  Loss,
  MixtureSource,
  Optimizer,
  Quant,
  Rollout,
  Run,
  Sampling,
  SettingsError,
  Task,
)  # fmt: skip
from sprl.distributed.team import ALONE
from sprl.guards import checks
from sprl.guards.checks import CHECKS, FEW, FINITE, HEALTHY, WINDOW, History, gain, warnings
from sprl.guards.stop import Streaks, policies_differ, sentinels
from sprl.hooks import Warn
from sprl.io.progress import Progress
from sprl.io.run_state import RunState
from sprl.learner.learner import batch_advantages
from sprl.presets import ARMS, CORRECTIONS, RECIPES, with_arm, with_preset
from sprl.quant.block import quantise
from sprl.quant.joined import separated
from sprl.sampler.weights import sampler_weights
from sprl.session import Session, StepReport

ROOT = Path(__file__).parents[2]
STEP = {  # of a healthy run
  'reward/mean': 0.5,
  'reward/std': 0.4,
  'reward/groups_equal': 0.5,
  'completion/truncated': 0.1,
  'completion/turns_cut': 0.1,
  'grading/ok': 63.0,
  'grading/timeout': 1.0,
  'policy/entropy': 0.4,
  'policy/k3_kl': 1e-4,
  'policy/kl_ref': 0.01,
  'update/grad_norm': 0.2,
  'update/skipped': 0.0,
  'rollout_corr/probs_pearson': 0.001,
  'rollout_corr/kl': 0.002,
  'rollout_corr/rollout_is_mean': 1.0,
  'rollout_corr/rollout_is_eff_sample_size': 0.9,
  'rollout_corr/rollout_is_std': 0.1,
  'rollout_corr/rollout_rs_masked_fraction': 0.02,
  'rollout_corr/chi2_token': 0.01,
  'rollout_corr/token_mult_prob_error': 1.01,
  'sparse/agreement_p05': 0.95,
  'sparse/repetition': 0.1,
}
PLAIN = Run()  # dense, unquantised, synchronous
CHEAP = replace(  # evicts, stores and multiplies in FP8, runs ahead
  PLAIN,
  cache=Cache(budget=256),
  quant=Quant(sampler='w8a8_kv8'),
  rollout=Rollout(async_ratio=2.0),
  optimizer=Optimizer(minibatches=4),
  correction=Correction(level='sequence', veto=1e-4),
)


# --- stop ------------------------------------------------------------------------------------------------------------


def stops(metrics, run, capped=0, apart=0):
  """Return the reasons to stop after a step with these metrics. The streaks include this step."""
  return sentinels(metrics, run, Streaks(capped, apart))


def test_a_healthy_step_gives_no_reason_to_stop():
  assert stops(STEP, PLAIN, capped=1) == []


def test_a_metric_that_is_not_finite_stops_the_run_by_name():
  for bad in (math.nan, math.inf):
    (reason,) = stops(STEP | {'rollout_corr/probs_pearson': bad}, PLAIN)
    assert 'rollout_corr/probs_pearson' in reason
    assert 'config.optimizer.learning_rate (now 1e-06)' in reason
  assert stops(STEP | {'reward/mean': math.nan}, PLAIN) == []  # not a metric of log-probs


@pytest.mark.parametrize('name', ['fp8/kv_saturation', 'fp8/query_saturation'])
def test_saturated_fp8_stops_the_run(name):
  assert stops(STEP | {name: 9e-5}, CHEAP) == []
  (reason,) = stops(STEP | {name: 2e-4}, CHEAP)
  assert f'{name} = 0.0002' in reason
  assert "config.quant.kv_scale (now 'learner')" in reason


@pytest.mark.parametrize('name', ['fp8/kv_saturation', 'fp8/query_saturation'])
def test_saturation_of_frozen_scales_warns(name):
  frozen = replace(CHEAP, quant=Quant(sampler='w8a8_kv8', kv_scale='frozen'))
  assert stops(STEP | {name: 0.5}, frozen) == []
  assert "config.quant.kv_scale (now 'frozen')" in after([STEP | {name: 2e-4}], frozen)['numbers exceed the FP8 scales']
  assert after([STEP | {name: 9e-5}], frozen) == {}


def test_two_steps_of_different_policies_stop_the_run():
  assert not policies_differ(STEP | {'rollout_corr/kl': 0.99})
  assert not policies_differ({})
  for spike in (1.01, -1.01):
    step = STEP | {'rollout_corr/kl': spike}
    assert policies_differ(step)
    assert stops(step, CHEAP, apart=1) == []
    (reason,) = stops(step, CHEAP, apart=2)
    assert f'rollout_corr/kl = {spike}' in reason
    assert 'config.cache.budget (now 256)' in reason


# Older weights sampled tokens, and no correction weight differs from 1.
UNCORRECTED = STEP | {'async/stale_tokens': 0.4, 'rollout_corr/corrected_fraction': 0.0}


@pytest.mark.parametrize('deviation', [0.0, 0.03])  # of the ratio to the old policy, in later minibatches
def test_uncorrected_staleness_stops_the_run(deviation):
  """A ratio to recomputed log-probs does not correct for the weights that sampled (docs/methods/async.md, Traps)."""
  run = replace(PLAIN, correction=Correction(level='sequence'), rollout=Rollout(async_ratio=2.0))
  (reason,) = stops(UNCORRECTED | {'policy/ratio_deviation': deviation}, run)
  assert "Try a smaller config.rollout.async_ratio (now 2.0); config.correction.level = 'token'; " in reason
  assert "config.correction.mode = 'bypass' with config.correction.level = None" in reason
  (reason,) = stops(UNCORRECTED, replace(run, correction=Correction(level='token')))
  assert "config.correction.level = 'token'" not in reason


def test_weights_other_than_one_and_ratios_to_the_sampler_correct():
  assert stops(UNCORRECTED | {'rollout_corr/corrected_fraction': 1e-3}, PLAIN) == []
  bypass = Correction(mode='bypass', level=None)
  assert stops(UNCORRECTED, replace(PLAIN, correction=bypass)) == []
  assert stops(UNCORRECTED, replace(PLAIN, correction=bypass, loss=Loss(variant='reinforce'))) != []  # it has no ratio


def test_without_stale_tokens_no_correction_is_needed():
  assert stops(UNCORRECTED | {'async/stale_tokens': 0.0}, PLAIN) == []


@pytest.mark.parametrize('name', ['async/stale_tokens', 'rollout_corr/corrected_fraction'])
def test_a_missing_metric_stops_nothing(name):
  assert stops({n: v for n, v in UNCORRECTED.items() if n != name}, PLAIN) == []


def test_two_steps_at_the_length_limit_stop_the_run():
  assert stops(STEP, PLAIN, capped=1) == []
  (reason,) = stops(STEP, PLAIN, capped=2)
  assert 'length limit' in reason
  assert 'config.sampling.max_tokens (now 256)' in reason
  assert stops(STEP, replace(PLAIN, rollout=Rollout(stop_when_capped=False)), capped=2) == []


def test_a_streak_ends_at_a_step_without_the_sign():
  capped, far = {'completion/truncated': 1.0}, {'rollout_corr/kl': 1.5}
  found, streaks = [], Streaks()
  for step in (capped, capped | far, STEP | far, {}, capped):
    streaks = streaks.after(step)
    found.append(tuple(streaks))
  assert found == [(1, 0), (2, 1), (0, 2), (0, 0), (1, 0)]


def test_three_updates_without_a_finite_gradient_stop_the_run():
  assert stops(STEP | {'update/bad_streak': 2.0}, PLAIN) == []
  (reason,) = stops(STEP | {'update/bad_streak': 3.0}, PLAIN)
  assert 'config.optimizer.clip_norm (now 1.0)' in reason


# --- warn ------------------------------------------------------------------------------------------------------------


def history_of(steps):
  return reduce(History.after, steps, History())


def after(steps, run):
  """Return the warnings of the last step."""
  return warnings(history_of(steps), run)


def ever(steps, run):
  """Return each symptom that any step shows, with the number of the step that first shows it."""
  found, history = {}, History()
  for number, step in enumerate(steps, 1):
    history = history.after(step)
    found = dict.fromkeys(warnings(history, run), number) | found
  return found


FIRST = [STEP] * WINDOW
SIGNS = [  # symptom, the metrics that change, the number of steps that must show them
  ('sampler and learner differ much', {'rollout_corr/kl': 0.11}, 2),
  ('sampler and learner differ much', {'rollout_corr/kl': -0.11}, 2),
  ('sampler and learner differ much', {'rollout_corr/chi2_token': 1.1}, 2),
  ('sampler and learner differ much', {'rollout_corr/token_mult_prob_error': 1.06}, 2),
  ('sampler and learner differ much', {'sparse/agreement_p05': 0.85}, 2),
  ('the effective sample size is small', {'rollout_corr/rollout_is_eff_sample_size': 0.29}, 2),
  ('the correction weights vary much', {'rollout_corr/rollout_is_mean': 2.1}, 2),
  ('the correction weights vary much', {'rollout_corr/rollout_is_std': 1.1}, 2),
  ('rejection removes most tokens', {'rollout_corr/rollout_rs_masked_fraction': 0.51}, 2),
  ('numbers exceed the FP8 scales', {'fp8/kv_saturation': 2e-4}, 1),
  ('numbers exceed the FP8 scales', {'fp8/query_saturation': 2e-4}, 1),
  ('an update was skipped', {'update/skipped': 0.25}, 1),
  ('a metric is not finite', {'policy/entropy': math.nan}, 1),
  ('a step changes the policy much', {'policy/k3_kl': 0.11}, 2),
  ('the gradient norm has bursts', {'update/grad_norm': 1.01}, 3),
  ('the policy leaves the reference', {'policy/kl_ref': 0.51}, 6),
  ('the entropy collapsed', {'policy/entropy': 0.079}, 5),
  ('the entropy grew', {'policy/entropy': 0.81}, 5),
  ('the reward fell', {'reward/mean': 0.09}, 10),
  ('every reward is 0', {'reward/mean': 0.0, 'reward/std': 0.0}, 10),
  ('most groups have equal rewards', {'reward/groups_equal': 0.91}, 6),
  ('most answers are cut off', {'completion/truncated': 0.51}, 6),
  ('most answers are cut off', {'completion/turns_cut': 0.51}, 6),
  ('answers repeat themselves', {'sparse/repetition': 0.51}, 6),
  ('grading fails', {'grading/timeout': 6.0}, 2),
]


@pytest.mark.parametrize(('symptom', 'sign', 'steps'), SIGNS, ids=lambda x: str(x)[:40])
def test_a_symptom_is_found_after_as_many_steps_as_its_statistic_needs(symptom, sign, steps):
  """In a run that was healthy for 20 steps. A median of 3, 9 or 10 steps changes with the second, fifth or sixth."""
  run = replace(CHEAP, quant=Quant(sampler='w8a8_kv8', kv_scale='frozen'))
  found = ever([*FIRST, *FIRST, *[STEP | sign] * (WINDOW + 1)], run)
  assert found.pop(symptom) == 2 * WINDOW + steps
  assert set(found) <= {'the reward fell'}  # where every reward is 0


def session_of(team=ALONE):
  session = object.__new__(Session)
  session.run, session.team, session.state = PLAIN, team, RunState()
  return session


def test_a_resumed_run_compares_with_the_steps_before_it(caplog):
  """An entropy that collapsed before the resume is a symptom; without the earlier steps it looks like that of the beginning."""
  collapsed = STEP | {'policy/entropy': 0.01}
  session = session_of()
  for earlier, expected in ((), 0), ([*FIRST, *FIRST, *[collapsed] * 3], 1):
    warn = Warn(earlier)
    for step in range(24, 24 + 3 * WINDOW):
      warn(session, StepReport(step, (), collapsed, {}, 0.0))
    assert sum('entropy' in record.getMessage() for record in caplog.records) == expected


@pytest.mark.parametrize(
  ('entropies', 'symptom'),
  [
    ([1.0, 0.75, 0.5, 0.25, 0.01, 0.01], 'the entropy collapsed'),
    ([1.0, 0.3, 0.1, 0.03, 0.01, 0.01], 'the entropy collapsed'),
    ([1.0, 2.0, 3.0, 4.0, 5.0, 5.0], 'the entropy grew'),
    ([1.0, 1.5, 2.2, 3.3, 5.0, 5.0], 'the entropy grew'),
  ],
)
def test_an_entropy_that_changes_within_five_steps_is_found_at_the_sixth(entropies, symptom):
  steps = [STEP | {'policy/entropy': entropy} for entropy in entropies]
  assert ever(steps, PLAIN) == {symptom: 6}
  resumed = reduce(History.after, steps[3:], history_of(steps[:3]))
  assert set(warnings(resumed, PLAIN)) == {symptom}


def test_an_entropy_that_falls_within_five_steps_while_the_reward_rises_is_no_symptom():
  entropies, rewards = [1.0, 0.3, 0.1, 0.03, 0.01, 0.01], [0.1, 0.1, 0.2, 0.5, 0.8, 0.8]
  steps = [STEP | {'policy/entropy': e, 'reward/mean': r} for e, r in zip(entropies, rewards, strict=True)]
  assert ever([*steps, *[steps[-1]] * 20], PLAIN) == {}


def test_single_steps_of_another_entropy_are_noise_in_the_first_steps():
  """One step in three has another entropy, and so has one of the first three and one of the latest three."""
  for other in (0.01, 5.0):
    for offset in range(3):
      steps = [STEP | ({'policy/entropy': other} if i % 3 == offset else {}) for i in range(40)]
      assert ever(steps, PLAIN) == {}


def test_a_metric_that_is_not_finite_is_named_once_and_compared_with_nothing():
  for bad in (math.nan, math.inf):
    step = STEP | {'policy/entropy': bad, 'update/grad_norm': bad}
    found = after([*FIRST, *FIRST, step, step], PLAIN)
    assert list(found) == ['a metric is not finite']
    assert found['a metric is not finite'].startswith(f'a metric is not finite: update/grad_norm = {bad}. ')
    assert 'config.optimizer.learning_rate (now 1e-06); a larger config.optimizer.warmup_steps' in found['a metric is not finite']
    assert set(after([*FIRST, *FIRST, step, step | {'update/skipped': 1.0}], PLAIN)) == {'an update was skipped'}
    collapsed = STEP | {'policy/entropy': 0.01}
    assert set(after([*FIRST, *[step, collapsed, collapsed] * 3], PLAIN)) == {'the entropy collapsed'}  # of the finite steps


def test_only_the_leading_process_warns(caplog):
  for team, expected in ((SimpleNamespace(leads=False), 0), (ALONE, 1)):
    Warn()(session_of(team), StepReport(1, (), STEP | {'update/skipped': 1.0}, {}, 0.0))
    assert len(caplog.records) == expected


def test_the_warnings_and_the_line_of_a_step_precede_the_guard_that_stops_at_it(caplog, monkeypatch):
  lines = []
  session = session_of()
  session.run_log, session.workdir, session.progress = None, Path('run'), Progress(9, show=lines.append)
  monkeypatch.setattr(hooks, 'wrong_weights', lambda session, last: [])
  report = StepReport(3, (), STEP | {'update/skipped': 1.0, 'update/bad_streak': 3.0}, {}, 0.0)

  def end_step():
    for hook in hooks.after_step():
      hook(session, report)

  with pytest.raises(hooks.StopRun, match='the gradient of 3 updates in a row was not finite'):
    end_step()
  assert ['an update was skipped' in record.getMessage() for record in caplog.records] == [True]
  assert [line.split()[:2] for line in lines] == [['step', '3/9']]


def test_all_symptoms_are_tested():
  assert list(dict.fromkeys(symptom for symptom, _, _ in SIGNS)) == list(dict.fromkeys(check.symptom for check in CHECKS))


def test_single_steps_are_noise():
  """One step in three of a mismatch, one in five of a gradient, without a warning."""
  unwell = STEP | {'rollout_corr/chi2_token': 80.0, 'rollout_corr/token_mult_prob_error': 1e5, 'policy/entropy': 0.01}
  burst = {'update/grad_norm': 50.0}
  steps = [STEP, STEP, unwell] * 20
  steps = [step | burst if i % 5 == 0 else step for i, step in enumerate(steps)]
  assert ever([*FIRST, *steps], CHEAP) == {}


def test_before_the_windows_are_full_nothing_is_compared():
  collapsed = STEP | {'update/grad_norm': 90.0, 'reward/mean': 0.1}
  assert ever([*FIRST, *[collapsed] * (WINDOW - 1)], PLAIN) == {}


def test_a_policy_that_learns_may_lose_entropy_and_leave_the_reference():
  learned = STEP | {'policy/entropy': 0.02, 'policy/kl_ref': 2.0, 'reward/mean': 0.8}
  assert after([*FIRST, *[learned] * WINDOW], PLAIN) == {}
  unlearned = learned | {'reward/mean': 0.5}
  assert set(after([*FIRST, *[unlearned] * WINDOW], PLAIN)) == {'the policy leaves the reference', 'the entropy collapsed'}


def test_the_reward_is_compared_with_its_best_steps():
  rising, high = [STEP] * WINDOW, [STEP | {'reward/mean': 0.95, 'reward/std': 0.2}] * WINDOW
  assert ever([*rising, *high, *[STEP] * WINDOW], PLAIN) == {'the reward fell': 3 * WINDOW - 1}
  assert ever([*rising, *[STEP | {'reward/mean': 0.85}] * WINDOW, *rising], PLAIN) == {}  # by 0.9 standard deviations


def test_the_gain_is_in_standard_deviations_of_a_sample():
  assert gain([STEP | {'reward/mean': 0.9}], [STEP]) == pytest.approx(1.0)
  assert gain([STEP | {'reward/mean': 0.1, 'reward/std': 0.0}], [STEP]) == pytest.approx(-1.0)
  certain = STEP | {'reward/std': 0.0}
  assert gain([certain | {'reward/mean': 0.0}], [certain]) < -1e5
  assert gain([certain], [certain]) == 0.0


def test_a_few_wrong_answers_of_a_solved_task_and_a_few_lucky_ones_are_no_fall():
  """One of 64 samples differs in every fifth step; the standard deviation of most steps is 0."""
  for usual, rare in ((1.0, 63 / 64), (0.0, 1 / 64)):
    same = STEP | {'reward/mean': usual, 'reward/std': 0.0}
    other = STEP | {'reward/mean': rare, 'reward/std': (1 / 64 * 63 / 64) ** 0.5}
    solved_first = [*[same] * 20, *[same, same, same, same, other] * 4]
    lucky_first = [*[same, same, same, same, other] * 4, *[same] * 20]
    for steps in (solved_first, lucky_first):
      assert set(ever(steps, PLAIN)) <= {'every reward is 0'}
    collapsed = [step | {'policy/entropy': 0.01} for step in solved_first[20:]]
    assert 'the entropy collapsed' in ever([*solved_first[:20], *collapsed], PLAIN)


def test_history_keeps_the_first_the_best_and_the_latest_steps():
  means = [0.1] * 10 + [0.9] * 10 + [0.5] * 15
  history = history_of([{'reward/mean': mean, 'step': i} for i, mean in enumerate(means)])
  assert [step['step'] for step in history.first] == [*range(10)]
  assert [step['step'] for step in history.best] == [*range(10, 20)]
  assert [step['step'] for step in history.latest] == [*range(25, 35)]
  assert history.steps == 35


def test_steps_without_an_update_are_left_out():
  """A step whose groups were all skipped has rewards only."""
  bare = {name: STEP[name] for name in ('reward/mean', 'reward/std', 'reward/groups_equal')}
  assert ever([*FIRST, *[bare] * 30], PLAIN) == {}


def test_a_skipped_update_is_seen_at_its_own_step_only():
  """The steps behind it had no update."""
  skipped = STEP | {'update/skipped': 1.0}
  bare = {name: value for name, value in STEP.items() if not name.startswith(('update/', 'policy/'))}
  assert set(after([*FIRST, skipped], PLAIN)) == {'an update was skipped'}
  assert after([*FIRST, skipped, bare], PLAIN) == {}


def test_a_few_steps_without_an_update_do_not_hide_a_policy_that_leaves_the_reference():
  far = STEP | {'policy/kl_ref': 5.0}
  bare = {name: value for name, value in STEP.items() if not name.startswith(('update/', 'policy/'))}
  for without, symptoms in ((4, {'the policy leaves the reference'}), (5, set())):
    assert set(after([*FIRST, *[bare] * without, *[far] * (WINDOW - without)], PLAIN)) == symptoms


def test_advice_names_settings_that_the_task_reads():
  equal, failing = {'reward/groups_equal': 1.0}, {'grading/ok': 1.0, 'grading/error': 63.0}
  mixture = Task(kind='mixture', mixture={'a': MixtureSource(kind='gsm8k')})
  reasoning = Task(kind='reasoning_gym', name='chain_sum')
  for task, sign, named, other in (
    (Task(kind='gsm8k'), equal, ['task.filters'], ['task.args', 'task.mixture']),
    (reasoning, equal, ['task.args'], ['task.filters', 'task.mixture']),
    (mixture, equal, ['task.mixture'], ['task.filters', 'task.args']),
    (Task(kind='gsm8k'), failing, ['task.grader'], ['task.rewards', 'task.mixture']),
    (Task(kind='gsm8k', rewards=('math', 'exact=0.5')), failing, ['task.rewards'], ['task.grader', 'task.mixture']),
    (mixture, failing, ['task.mixture'], ['task.grader', 'task.rewards']),
    (replace(mixture, rewards=('math',)), failing, ['task.rewards'], ['task.grader', 'task.mixture']),
    (Task(kind='environment', name='frozen_lake'), failing, [], ['task.grader', 'task.rewards', 'task.mixture']),
  ):
    (warning,) = after([STEP | sign] * WINDOW, replace(PLAIN, task=task)).values()
    assert [f'config.{key}' in warning for key in (*named, *other)] == [True] * len(named) + [False] * len(other)


def test_checks_of_other_settings_do_not_apply():
  equal, light = STEP | {'reward/groups_equal': 1.0}, STEP | {'rollout_corr/rollout_is_eff_sample_size': 0.1}
  no_groups = replace(PLAIN, advantage=replace(PLAIN.advantage, estimator='reinforce_baseline'))
  assert after([equal] * WINDOW, no_groups) == {}
  assert after([light] * WINDOW, replace(PLAIN, correction=Correction(level=None))) == {}
  cut = STEP | {'completion/truncated': 1.0}
  assert after([cut] * WINDOW, replace(PLAIN, rollout=Rollout(stop_when_capped=False))) == {}
  moved, bypass = STEP | {'policy/k3_kl': 0.3}, Correction(mode='bypass', level=None)
  assert after([moved] * FEW, replace(PLAIN, correction=bypass)) == {}
  assert set(after([moved] * FEW, replace(CHEAP, correction=bypass))) == {'a step changes the policy much'}


# --- sentences -------------------------------------------------------------------------------------------------------


def sentences(run):
  return {check: check.warning(100 * check.healthy[1] if check.healthy[1] < math.inf else -100.0, run) for check in CHECKS}


@pytest.mark.parametrize(
  'run', [PLAIN, CHEAP, replace(PLAIN, task=Task(kind='environment'))], ids=['plain', 'cheap', 'environment']
)
def test_each_warning_names_the_metric_the_bound_and_settings(run):
  for check, sentence in sentences(run).items():
    if check.statistic is FINITE:
      continue  # it has no bound
    assert sentence.startswith(f'{check.symptom}: ')
    assert check.metric in sentence
    assert re.search(r', (above|below) -?[\d.e-]+\. [A-Z].* Try .*config\.\w+\.\w+.*\.$', sentence), sentence


def test_advice_is_that_of_the_run():
  plain, cheap = (
    after([STEP | {'rollout_corr/kl': 0.3}] * FEW, run)['sampler and learner differ much'] for run in (PLAIN, CHEAP)
  )
  assert plain.endswith(
    "Try config.model.dtype = 'float32'; with experts, config.model.router_replay = 'R3'; "
    'config.ledger.every = 1, which shows the cause.'
  )
  assert cheap.endswith(
    "Try a larger config.cache.budget (now 256); less FP8 in config.quant.sampler (now 'w8a8_kv8'), or 'none'; "
    'a smaller config.rollout.async_ratio (now 2.0); config.ledger.every = 1, which shows the cause.'
  )
  nothing = Correction(level=None, veto=None)
  uncorrected = replace(CHEAP, rollout=Rollout(), correction=nothing)
  for run, advice in (
    (
      uncorrected,
      "Try config.arm = 'sparse_rl', without a preset and settings of the correction: it corrects for the eviction; a larger",
    ),
    (replace(uncorrected, cache=Cache()), "Try config.correction.level = 'token', which corrects for it; less FP8"),
    (replace(PLAIN, quant=Quant(learner='w8a8'), correction=nothing), "for it; config.quant.learner = 'none'; config.ledger"),
  ):
    said = after([STEP | {'rollout_corr/kl': 0.3}] * FEW, run)['sampler and learner differ much']
    assert advice in said
  logged = after([STEP | {'rollout_corr/kl': 0.3}] * FEW, replace(CHEAP, ledger=Ledger(every=5)))
  assert 'config.ledger' not in logged['sampler and learner differ much']


def all_advice():
  return [each for each in vars(checks).values() if isinstance(each, checks.Advice)]


@pytest.mark.parametrize(
  'name', [*({'arm': arm} for arm in ARMS), *({'preset': preset} for preset in (*RECIPES, *CORRECTIONS))], ids=str
)
def test_advice_about_a_setting_of_an_arm_or_preset_names_it(name):
  """Such a setting is refused or ignored on the command line, so the advice must not suggest it without its source."""
  given = replace(PLAIN, **name, cache=Cache(budget=256), sampling=Sampling(max_prompt=128), quant=Quant(sampler='kv8'))
  run = with_arm(with_preset(replace(given, quant=Quant()) if 'fp8' in str(name) else given))
  for each in [each for each in all_advice() if each.helps(run)]:
    sentence = checks.tries((each,), run)
    for key in re.findall(r'config\.((?:\w+\.)+\w+)', each.text):
      source = f'config.{next(iter(name))} = {next(iter(name.values()))!r}'
      note = rf"config\.{re.escape(key)}(?: = [\w'.]+)? \((?:(?!config\.).)*set by {re.escape(source)}\)"
      assert is_refused(run, name, key) == bool(re.search(note, sentence)), (key, sentence)


def is_refused(run, name, key):
  """Return whether a run with this arm or preset does not take another value of a setting."""
  section, _, field = key.partition('.')
  other = object()
  try:
    changed = with_arm(with_preset(replace(PLAIN, **name, **{section: replace(getattr(PLAIN, section), **{field: other})})))
  except SettingsError:
    return True
  return getattr(getattr(changed, section), field) is not other


def test_the_ledger_is_no_advice_for_the_arm_that_refuses_it():
  masked = replace(CHEAP, arm='learner_mask', rollout=Rollout(), correction=Correction(level=None))
  assert 'config.ledger' not in after([STEP | {'rollout_corr/kl': 0.3}] * FEW, masked)['sampler and learner differ much']


def test_advice_suggests_another_value_than_the_current_one():
  exact = replace(PLAIN, model=replace(PLAIN.model, dtype='float32'))
  assert 'config.model.dtype' not in after([STEP | {'rollout_corr/kl': 0.3}] * FEW, exact)['sampler and learner differ much']
  both, cache = (stops(STEP | {'fp8/kv_saturation': 0.5}, replace(PLAIN, quant=Quant(sampler=s))) for s in ('w8a8_kv8', 'kv8'))
  assert "; config.quant.sampler = 'w8a8', which" in both[0]
  assert cache[0].endswith("Try another config.quant.kv_scale (now 'learner'); config.quant.sampler = 'none'.")
  frozen = replace(PLAIN, quant=Quant(sampler='kv8', kv_scale='frozen'))  # which needs an FP8 cache
  warning = after([STEP | {'fp8/kv_saturation': 0.5}], frozen)['numbers exceed the FP8 scales']
  assert warning.endswith("Try another config.quant.kv_scale (now 'frozen').")


@pytest.mark.parametrize('estimator', ['grpo', 'dr_grpo', 'rloo'])
@pytest.mark.parametrize('equal_groups', ['train', 'skip'])
def test_a_penalty_on_length_is_advised_with_the_replacement_of_groups_that_it_alone_would_decide(estimator, equal_groups):
  """Answers of 1 and 4 tokens of a group of equal rewards have advantages by the penalty, unless the group is left out."""
  rollout = Rollout(prompts=1, group=2, equal_groups=equal_groups)
  run = replace(PLAIN, advantage=Advantage(estimator), rollout=rollout, sampling=Sampling(max_tokens=4))
  penalised = replace(run, advantage=Advantage(estimator, overlong=1.0))
  answers = [replace(t, reward=0.0) for t in small.rollouts([(1, 4)], [3])]
  decided = bool(np.nan_to_num(batch_advantages(answers, penalised)).any())
  cut = [STEP | {'completion/truncated': 1.0}] * WINDOW
  warning = after(cut, run)['most answers are cut off']
  assert 'config.advantage.overlong = 0.2' in warning
  assert ("config.rollout.equal_groups = 'replace'" in warning) == decided
  assert 'overlong' not in after(cut, penalised)['most answers are cut off']


def test_a_setting_of_both_arm_and_preset_names_both():
  run = with_arm(with_preset(replace(PLAIN, arm='naive', preset='disabled', cache=Cache(budget=256))))
  assert "(now None; set by config.arm = 'naive' and config.preset = 'disabled')" in checks.tries(
    (checks.Advice('another config.correction.veto'),), run
  )


def test_every_setting_of_an_advice_exists():
  texts = [each.text for each in all_advice()]
  assert len(texts) > 20
  for setting in re.findall(r'config(?:\.\w+)+', ' '.join(texts)):
    reduce(getattr, setting.split('.')[1:], PLAIN)  # raises AttributeError


def test_health_ranges_are_those_of_single_metrics():
  assert HEALTHY['rollout_corr/kl'] == (-0.1, 0.1)
  assert not {'policy/entropy', 'update/grad_norm', 'reward/mean'} & set(HEALTHY)


# --- docs/troubleshooting.md -----------------------------------------------------------------------------------------


def section(heading):
  page = (ROOT / 'docs/troubleshooting.md').read_text()
  return page.partition(f'\n## {heading}\n')[2].partition('\n## ')[0]


def messages_of(heading):
  """Return the patterns of the messages in the first column of a table. `...` stands for any text."""
  cells = ' '.join(line.split('|')[1] for line in section(heading).splitlines() if line.startswith('| `'))
  return ['.*'.join(map(re.escape, phrase.split('...'))) for phrase in re.findall(r'`([^`]+)`', cells)]


def literals():
  """Return the texts in the code of sprl but its docstrings, each with `{}` for its values."""
  found = {(ROOT / 'launch/environment.sh').read_text()}
  for file in (ROOT / 'sprl').rglob('*.py'):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
      if isinstance(node, ast.JoinedStr):
        found.add(''.join(part.value if isinstance(part, ast.Constant) else '{}' for part in node.values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
        found.add(node.value)
  return found


def test_troubleshooting_has_a_heading_for_each_symptom_and_no_other():
  headings = re.findall(r'^### (.+)$', section('Warnings while a run trains'), re.MULTILINE)
  assert headings == [*dict.fromkeys(check.symptom for check in CHECKS)]


def faults_of_weights():
  """Return a reason to stop for each kind of fault in the weights and scales of the sampler. The linear `k` has other weights."""
  _, params = small.model('qwen2', num_hidden_layers=1)
  weights = sampler_weights(params, jnp.dtype('float32'), CHEAP.quant)
  whole = separated(weights.params)
  attention = whole['layers'][0]['attention']
  k, v = ({**attention[name], 'kernel': params['layers'][0]['attention'][name]['kernel']} for name in 'kv')
  k['kernel'] = quantise(jnp.flip(k['kernel'], 0), 'float32').emulated()
  layers = {**whole['layers'], 0: {**whole['layers'][0], 'attention': {**attention, 'k': k, 'v': v}}}
  embed = whole['embed'].at[0, 0].set(jnp.nan).astype('bfloat16')
  session = session_of()
  session.run, session.weights = CHEAP, weights._replace(params={**whole, 'layers': layers, 'embed': embed})
  session.learner = SimpleNamespace(amax=(np.full((3, 1), np.nan, np.float32),), scales_current=False, params=params)
  session.model = SimpleNamespace(dtype='float32', mesh=None)
  return hooks.wrong_weights(session)


def test_troubleshooting_has_the_words_of_each_reason_to_stop():
  bad = {'rollout_corr/probs_pearson': math.nan, 'rollout_corr/kl': 2.0, 'fp8/kv_saturation': 1.0, 'fp8/query_saturation': 1.0}
  reasons = stops(UNCORRECTED | bad | {'update/bad_streak': 3.0}, PLAIN, capped=2, apart=2)
  assert len(reasons) == 7
  assert len(faults := faults_of_weights()) == 6
  patterns = messages_of('A run that stops with status 3')
  assert [reason for reason in reasons + faults if not any(re.search(pattern, reason) for pattern in patterns)] == []
  bugs = 'quantised, against config.quant', 'expected the dtype'
  assert [reason for reason in reasons + faults if 'Try ' not in reason and not any(bug in reason for bug in bugs)] == []


HEADINGS = (
  'Installation and start', 'Settings', 'Remarks before the first step', 'Other messages while a run trains',
  'A run that stops with status 3', 'Files', 'Several processes',
)  # fmt: skip


@pytest.mark.parametrize('heading', HEADINGS)
def test_the_code_has_each_message_of_troubleshooting(heading):
  others = {re.escape(text) for text in ('No space left on device', 'No module named sprl', 'metrics.jsonl')}  # of others; a file
  others.add(re.escape('config.sampling.temperature = 0'))  # the message has the accepted range, as those of all numbers
  texts = literals()
  patterns = [pattern for pattern in messages_of(heading) if pattern not in others]
  assert patterns
  assert [pattern for pattern in patterns if not any(re.search(pattern, text) for text in texts)] == []


# --- recorded runs ---------------------------------------------------------------------------------------------------

RECORDED = json.loads((Path(__file__).parent / 'recorded_runs.json').read_text())


def steps_of(curves):
  """Return the metrics of each step; None marks those that a step without an update lacks."""
  rows = [dict(zip(curves, step, strict=True)) for step in zip(*curves.values(), strict=True)]
  return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_a_recorded_run_with_a_dense_cache_shows_nothing():
  """The mean reward of ten steps rises from 0.46 to 0.64, with 16 samples a step."""
  assert ever(steps_of(RECORDED['progressions']['curves']), PLAIN) == {}


def test_a_recorded_run_with_a_small_budget_shows_the_mismatch_and_that_the_task_is_learned():
  """Its entropy falls to 6 % while its mean reward rises from 0.65 to 0.98, so the entropy is no symptom."""
  steps = steps_of(RECORDED['sums']['curves'])
  settings = replace(PLAIN, cache=Cache(budget=24))
  assert set(ever(steps, settings)) == {'sampler and learner differ much', 'most groups have equal rewards'}
  unlearned = [step | {'reward/mean': 0.3} for step in steps]
  assert 'the entropy collapsed' in ever(unlearned, settings)


def test_a_recorded_run_whose_learner_sees_what_the_sampler_saw_shows_nothing():
  steps = steps_of(RECORDED['learner_mask']['curves'])
  assert len(steps) == 100
  rewards = [step | {'reward/std': (step['reward/mean'] * (1 - step['reward/mean'])) ** 0.5} for step in steps]
  assert ever(rewards, PLAIN) == {}  # a reward is 0 or 1
