"""The harness of the papers' claims (benchmarks/claims): intervals, verdicts, plans that stay fixed, the task, and the page."""

import dataclasses
import hashlib
import itertools
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from claims import command, controls, dictation, figure, page, totals
from claims.controls import PATCHES
from claims.experiment import (
  BEFORE,
  HERE,
  PLAIN_KEYS,
  RANDOM_VETO,
  Claim,
  Comparison,
  Experiment,
  at_end,
  at_start,
  find,
  names,
  time_to,
  under,
)
from claims.tasks import DICTATION, TOTALS
from claims.verdict import interval, judged, over_models, together, values, verdict
from claims.worker import averaged, clock
from common import ROOT
from scipy import stats

from sprl import model
from sprl.config import DENSE, Quant
from sprl.models.config import tiny
from sprl.objective import correction
from sprl.objective.correction import catastrophic

CLAIM = Claim('b is better than a.', 'Nobody, table 1', '+5', (Comparison('b', 'a', 0.05),))
EXPERIMENT = Experiment('example', 'Is b better?', TOTALS, {'a': {}, 'b': {'loss.kl_coef': 0.1}}, (CLAIM,), steps=3, seeds=2)


def a_run(arm, seed, scores):
  return {
    'arm': arm, 'seed': seed, 'machine': 'a CPU', 'commit': f'abc{seed % 2}', 'stopped': None,
    'before': [0.0] * len(scores), 'scores': scores,
    'measures': {}, 'under': {'small': [score / 2 for score in scores]},
    'accuracy': {'steps': [0, 3], 'mean': [0.0, float(np.mean(scores))]},
  }  # fmt: skip


def records(difference, seeds=2):
  """Return records in which b is better by `difference` on every problem."""
  return {
    arm: {seed: a_run(arm, seed, [more + seed / 10] * 4) for seed in range(1, seeds + 1)}
    for arm, more in (('a', 0.1), ('b', 0.1 + difference))
  }


# --- intervals and verdicts ------------------------------------------------------------------------------------------


def test_an_interval_by_hand():
  """Seeds: means 0.1, 0.4; mean square 3 x 0.045. Problems: means 0.1, 0.2, 0.45; mean square 2 x 0.0325. Residuals: 0.03 / 2."""
  found = interval(np.array([[0.0, 0.1, 0.2], [0.2, 0.3, 0.7]]))
  freedom = ((0.135 + 0.065 - 0.015) / 0.135) ** 2  # 1.88
  half = stats.t.ppf(0.975, freedom) * np.sqrt((0.135 + 0.065 - 0.015) / 6)
  np.testing.assert_allclose(found, (0.25, 0.25 - half, 0.25 + half), rtol=1e-6)
  alone = interval(np.array([[1.0], [3.0]]))  # a number per run: Student's interval over the seeds
  np.testing.assert_allclose(alone, (2.0, 2.0 - 12.7062, 2.0 + 12.7062), rtol=1e-4)
  assert interval(np.ones((1, 3))) == (1.0, -np.inf, np.inf)
  assert interval(np.ones((3, 2))) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize('deviations', [(0.05, 0.3, 0.4), (0.02, 0.0, 0.5), (0.1, 0.1, 0.1), (0.0, 0.3, 0.1)])
def test_intervals_cover_the_difference_over_new_seeds_and_new_problems(deviations):
  seed_sd, problem_sd, noise = deviations
  rng, truth, inside = np.random.default_rng(0), 0.1, 0
  for _ in range(1000):
    seeds, problems = rng.normal(0, seed_sd, (8, 1)), rng.normal(0, problem_sd, (1, 50))
    found = interval(truth + seeds + problems + rng.normal(0, noise, (8, 50)))
    inside += found.low < truth < found.high
  assert 0.93 < inside / 1000 < 0.985


@pytest.mark.parametrize(
  ('difference', 'expected'),
  [(0.2, 'holds'), (0.0, 'does not hold'), (0.05, 'cannot tell')],
  ids=['above', 'below', 'at the threshold'],
)
def test_a_verdict_needs_the_whole_interval(difference, expected):
  spread = np.array([[-0.001], [0.001], [0.0], [0.0]])
  assert verdict(interval(difference + spread), 0.05) == expected


def test_a_claim_of_several_comparisons_needs_a_wider_interval_to_be_refuted_but_not_to_hold():
  below = np.array([[-0.04], [0.0], [0.01], [-0.01]])  # 95 %: up to 0.0244; 97.5 %: up to 0.0351
  found, wider = interval(below), interval(below, 0.975)
  np.testing.assert_allclose([found.high, wider.high], [0.02437, 0.03511], atol=5e-5)
  assert verdict(found, 0.03) == 'does not hold'
  assert verdict(found, 0.03, wider) == 'cannot tell'
  assert verdict(found, 0.04, wider) == 'does not hold'
  assert verdict(interval(below + 0.1), 0.05, interval(below + 0.1, 0.975)) == verdict(interval(below + 0.1), 0.05)


def test_two_warm_starts_as_a_sample_of_models_have_one_degree_of_freedom():
  np.testing.assert_allclose(over_models([0.1, 0.3]), (0.2, 0.2 - 1.27062, 0.2 + 1.27062), rtol=1e-4)


def test_a_claim_holds_if_all_its_comparisons_hold():
  assert together(['holds', 'holds']) == 'holds'
  assert together(['holds', 'cannot tell']) == 'cannot tell'
  assert together(['cannot tell', 'does not hold', 'holds']) == 'does not hold'
  assert together([]) == 'cannot tell'


def test_only_seeds_of_both_arms_are_compared():
  found = records(0.2)
  found['a'][7] = a_run('a', 7, [0.9] * 4)

  def row(*comparison):
    return judged(dataclasses.replace(CLAIM, comparisons=(Comparison(*comparison),)), EXPERIMENT, found)[0]

  both = judged(CLAIM, EXPERIMENT, found)[0]
  assert (both['seeds'], both['verdict'], both['mean']) == (2, 'holds', pytest.approx(0.2))
  mean = (0.2 + 0.3 + 0.9) / 3
  assert (row('a', BEFORE, 0.5)['seeds'], row('a', BEFORE, 0.5)['mean']) == (3, pytest.approx(mean))
  assert row(BEFORE, 'a', 0.0)['mean'] == pytest.approx(-mean)
  assert row('b', 'a', 0.05, under('small'))['mean'] == pytest.approx(0.1)
  nothing = judged(CLAIM, EXPERIMENT, {})[0]
  assert (nothing['seeds'], nothing['verdict']) == (0, 'cannot tell')


def test_nothing_is_decided_before_all_seeds_have_run():
  more = dataclasses.replace(EXPERIMENT, seeds=3)
  assert judged(CLAIM, more, records(0.2, seeds=2))[0]['verdict'] == 'cannot tell'
  assert judged(CLAIM, more, records(0.2, seeds=3))[0]['verdict'] == 'holds'


def test_a_claim_that_takes_learning_as_given_is_open_without_it():
  claims = {above: dataclasses.replace(CLAIM, given=Comparison('b', 'a', above)) for above in (0.15, 0.25)}
  verdicts = {above: judged(claim, EXPERIMENT, records(0.2))[0]['verdict'] for above, claim in claims.items()}
  assert verdicts == {0.15: 'holds', 0.25: 'cannot tell'}
  plans = {dataclasses.replace(EXPERIMENT, claims=(claim,)).plan() for claim in (CLAIM, *claims.values())}
  assert len(plans) == 3
  line = page.line(claims[0.15], EXPERIMENT, records(0.2))
  assert '| b - a > +0.05<br>decided only if b - a > +0.15 |' in line


def test_comparisons_that_were_not_planned_have_no_verdict_and_change_no_plan():
  more = dataclasses.replace(EXPERIMENT, unplanned={'b, against a.': Comparison('b', 'a', 0.0)})
  assert more.plan() == EXPERIMENT.plan()
  *_, row = page.unplanned(more, records(0.2))
  assert row == '| b, against a. | b - a | +0.200 (+0.200 to +0.200; 2 seeds; by warm start +0.200, +0.200) |'
  assert not page.unplanned(EXPERIMENT, records(0.2))
  with pytest.raises(ValueError, match='c'):
    dataclasses.replace(EXPERIMENT, unplanned={'c, against a.': Comparison('c', 'a', 0.0)})


def test_a_claim_that_does_not_hold_as_the_paper_expects_counts_as_published():
  expected = dataclasses.replace(CLAIM, expected=True, comparisons=(Comparison('b', 'a', 0.5),))
  line = page.summary(dataclasses.replace(EXPERIMENT, claims=(expected,)), records(0.2))
  assert line.endswith(' | 1 | 0 | 0 | 0 of 0 | 4 of 4 |')


def test_a_difference_of_logarithms_is_shown_as_a_factor():
  each = Comparison('b', 'a', math.log(1.5), time_to(0.5))
  row = {'seeds': 8, 'mean': math.log(2), 'low': 0.0, 'high': math.log(4)}
  assert page.factor(each, row) == ', a factor of 2.00 (1.00 to 4.00)'
  assert not page.factor(CLAIM.comparisons[0], row)


def test_both_warm_starts_have_to_agree():
  """Seeds 2, 4, 6 and 8 begin from the first warm start. With it, b gains nothing."""
  found, more = records(0.4, seeds=8), dataclasses.replace(EXPERIMENT, seeds=8)
  (row,) = judged(CLAIM, more, found)
  assert (row['verdict'], row['by warm start']) == ('holds', pytest.approx([0.4, 0.4]))
  for seed in (2, 4, 6, 8):
    found['b'][seed] = a_run('b', seed, [0.12 + seed / 10] * 4)
  (row,) = judged(CLAIM, more, found)
  assert row['low'] > 0.02
  assert row['by warm start'] == pytest.approx([0.02, 0.4])
  low = dataclasses.replace(CLAIM, comparisons=(Comparison('b', 'a', 0.025),))
  assert judged(low, more, found)[0]['verdict'] == 'cannot tell'


def test_a_run_without_the_measure_leaves_the_claim_open():
  """It did not reach the score, or a guard stopped it before the series had a value."""
  found = records(0.2)
  for of in found.values():
    for run in of.values():
      run |= {'curves': {'k3': [1.0, 2.0]}, 'clock': [10.0], 'measures': {'k3': 1.5}}
  for measure in (time_to(0.25), at_end('k3'), 'k3'):
    claim = dataclasses.replace(CLAIM, comparisons=(Comparison('b', 'a', -1.0, measure),))
    assert judged(claim, EXPERIMENT, found)[0]['seeds'] == (1 if measure == time_to(0.25) else 2)
  found['b'][1] |= {'curves': {}, 'measures': {}}
  for measure in (at_end('k3'), 'k3'):
    claim = dataclasses.replace(CLAIM, comparisons=(Comparison('b', 'a', -1.0, measure),))
    row = judged(claim, EXPERIMENT, found)[0]
    assert (row['seeds'], row['verdict']) == (1, 'cannot tell')


def test_measures_of_a_curve_and_of_time():
  found = a_run('a', 0, [0.5] * 4) | {
    'curves': {'k3': [1.0, 3.0, None, 5.0, 9.0, 7.0]}, 'clock': [10.0, 20.0, 40.0],
    'accuracy': {'steps': [0, 5, 10, 15], 'mean': [0.9, 0.2, 0.6, 0.7]},
  }  # fmt: skip
  assert values(found, 'a', at_start('k3')) == [2.0]  # a fifth of 6 is 2, rounded up
  assert values(found, 'a', at_end('k3')) == [8.0]
  assert values(found, 'a', time_to(0.6)) == pytest.approx([np.log(20.0)])  # the accuracy before training does not count
  assert np.isnan(values(found, 'a', time_to(0.95)))  # never reached
  claim = dataclasses.replace(CLAIM, comparisons=(Comparison('a', 'a', 0.0, at_end('k3'), at_start('k3')),))
  (row,) = judged(claim, EXPERIMENT, {'a': {1: found}})
  assert (row['mean'], row['comparison']) == (6.0, 'a (k3 at the end) - a (k3 at the start)')


def test_the_clock_of_a_run_leaves_out_compilation_and_evaluation():
  records = [{'step': 0, 'kind': 'eval', 'eval/avg@k': 0.0}]
  for step in range(1, 7):
    records.append({'step': step, 'time': {'rollout': 100.0 if step == 1 else 2.0, 'learn': 1.0, 'sync': 0.5, 'eval': 50.0}})
  assert clock(records, np.array([2, 3, 6])) == [0.0, 3.5, 14.0]


def test_a_curve_has_a_value_for_each_ten_steps():
  assert averaged(np.arange(1, 25), np.arange(1.0, 25.0)) == [5.5, 15.5, 22.5]
  assert averaged(np.array([20, 40]), np.array([1.0, 2.0])) == [None, 1.0, None, 2.0]
  assert averaged(np.array([], int), np.array([])) == []


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_result_with_one_seed_is_json(tmp_path, monkeypatch):
  """Its intervals have no bounds, and JSON has no infinite numbers."""
  monkeypatch.setattr(command, 'SAVED', tmp_path)
  for arm, of in records(0.2).items():
    (tmp_path / f'{arm}-1.json').write_text(json.dumps(of[1]))
  command.collect(EXPERIMENT, {}, tmp_path)
  saved = json.loads((tmp_path / f'{EXPERIMENT.name}.json').read_text(), parse_constant=pytest.fail)
  assert [(row['low'], row['high']) for row in saved['rows']] == [(None, None)] * len(saved['rows'])


def test_a_result_of_another_plan_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(command, 'SAVED', tmp_path)
  for seed in (1, 2):
    for arm, of in records(0.2).items():
      (tmp_path / f'{arm}-{seed}.json').write_text(json.dumps(of[seed]))
  command.collect(EXPERIMENT, {}, tmp_path)
  assert command.saved(EXPERIMENT) == records(0.2)
  explained = dataclasses.replace(EXPERIMENT, claims=(dataclasses.replace(CLAIM, reason='Small models.'),))
  assert command.saved(explained) == records(0.2)
  easier = dataclasses.replace(CLAIM, comparisons=(Comparison('b', 'a', 0.01),))
  for other in ({'claims': (easier,)}, {'steps': 4}, {'seeds': 4}, {'arms': {'a': {}, 'b': {'loss.kl_coef': 0.2}}}):
    with pytest.raises(SystemExit, match='another plan'):
      command.saved(dataclasses.replace(EXPERIMENT, **other))


@pytest.mark.parametrize(
  ('wrong', 'message'),
  [
    (Comparison('c', 'a', 0.0), 'compares'),
    (Comparison('a', 'nothing', 0.0), 'compares'),
    (Comparison('a', 'b', 0.0, measure='reward'), 'no measure'),
    (Comparison('a', 'b', 0.0, under('small')), 'are compared'),  # neither is asked with other samplers
  ],
)
def test_an_experiment_names_its_arms_and_measures(wrong, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(EXPERIMENT, claims=(dataclasses.replace(CLAIM, comparisons=(wrong,)),), inference={'small': {}})


def test_an_experiment_asks_its_own_arms_only():
  with pytest.raises(ValueError, match='asked = c'):
    dataclasses.replace(EXPERIMENT, asked=('c',))


def test_a_seed_has_the_same_start_in_every_arm():
  changes = {(arm, seed): EXPERIMENT.changes(arm, seed, HERE) for arm, seed in EXPERIMENT.runs}
  assert changes['a', 1] | {'loss.kl_coef': 0.1} == changes['b', 1]
  assert [changes['a', seed]['model.path'] for seed in (2, 1)] == list(TOTALS.warm)
  assert EXPERIMENT.runs == [('a', 1), ('b', 1), ('a', 2), ('b', 2)]  # seed 0 is for pilots


def test_a_stage_runs_with_all_seeds_before_the_next_one():
  staged = dataclasses.replace(EXPERIMENT, stages=(('b',), ('a',)))
  assert staged.runs == [('b', 1), ('b', 2), ('a', 1), ('a', 2)]
  assert staged.plan() == EXPERIMENT.plan()  # the order changes no result
  with pytest.raises(ValueError, match=r'stages = .*: expected each arm once'):
    dataclasses.replace(EXPERIMENT, stages=(('a',), ('a',)))


@pytest.mark.parametrize('name', names())
def test_the_settings_of_all_arms_are_accepted(name, tmp_path):
  from sprl.config import default_config
  from sprl.config_reader import resolve

  experiment = find(name)
  assert experiment.name == name
  assert experiment.seeds >= 8
  assert len(experiment.task.warm) >= 2
  several = [each(arm, 1, tmp_path) for arm in experiment.arms for each in (experiment.changes, experiment.final)]
  for changes in several + [experiment.answers(name, 1, tmp_path) for name in experiment.inference]:
    config = default_config()
    config.update_from_flattened_dict({k: v for k, v in changes.items() if k not in PATCHES})
    assert resolve(config).steps == experiment.steps


def test_the_problems_of_saved_results_are_those_of_now(tmp_path):
  """A plan has the settings of a task, not its code."""
  for task, expected in ((TOTALS, 'de2e9ac9df57f0ab'), (DICTATION, 'd60b90a18c629278')):
    task.write(tmp_path / task.name)
    text = b''.join((tmp_path / task.name / name).read_bytes() for name in ('grader.py', 'test.jsonl'))
    assert hashlib.sha256(text).hexdigest()[:16] == expected


# --- task and control ------------------------------------------------------------------------------------------------


def test_running_totals_are_sums_and_a_slip_goes_on_to_the_end():
  rng = np.random.default_rng(0)
  longest = {'prompt': 0, 'solution': 0}
  for slips in (0, 1):
    for _ in range(300):
      found = totals.problem(rng, slips)
      digits = [int(digit) for digit in re.findall(r'[a-zA-Z](\d)', found['prompt'])]
      assert found['answer'] == str(sum(digits) % 10)
      steps = re.findall(r'([a-zA-Z])(\d)=(\d) ', found['solution'])
      assert [int(digit) for _, digit, _ in steps] == digits
      assert len({letter for letter, _, _ in steps}) == len(steps)
      off = [(int(total) - sum(digits[: i + 1])) % 10 for i, (_, _, total) in enumerate(steps)]
      assert sum(a != b for a, b in zip([0, *off], off)) == slips
      assert found['solution'].endswith(f' #{steps[-1][2]}')
      longest = {key: max(most, len(found[key])) for key, most in longest.items()}
  assert longest['prompt'] == totals.LONGEST_PROMPT
  assert longest['solution'] + 1 == totals.LONGEST_SOLUTION


def test_dictated_digits_are_answered_by_their_totals():
  env = dictation.Dictation(split='test', turns=5)
  seen, _ = env.reset(3)
  again = dictation.Dictation(split='test', turns=5)
  assert again.reset(3)[0] == seen
  total, rewards = 0, []
  for turn in range(5):
    assert seen[0] == 'abcde'[turn]
    total += int(seen[1])
    seen, reward, done, cut, _ = env.step(f'={total % 10}')
    rewards.append(reward)
    assert (done, cut) == (turn == 4, False)
  assert rewards == [0.0] * 4 + [1.0]
  assert [again.step('=0')[1] for _ in range(4)] == [0.0] * 4
  assert again.step(f'={(total + 1) % 10}')[1] == 0.0


def test_equal_episodes_in_two_processes_have_different_delays(monkeypatch):
  """Members of a group have equal seeds. Equal delays too would hide how a slow member delays its group."""

  def delays(process):
    monkeypatch.setattr(dictation, 'NUMBERS', itertools.count())  # as in a new process
    monkeypatch.setattr(dictation.os, 'getpid', lambda: process)
    env, slept = dictation.Dictation(turns=5), []
    monkeypatch.setattr(dictation.time, 'sleep', slept.append)
    seen = [env.reset(3)[0], *(env.step('=0')[0] for _ in range(4))]
    return seen, slept

  (seen, first), (seen_too, second) = delays(7), delays(8)
  assert seen == seen_too
  assert len(first) == len(second) == 5
  assert not set(first) & set(second)


def test_calls_raise_at_their_rate_but_never_the_last(monkeypatch):
  monkeypatch.setattr(dictation, 'NUMBERS', itertools.count())
  monkeypatch.setattr(dictation.os, 'getpid', lambda: 7)
  calls = failures = 0
  for seed in range(400):
    env = dictation.Dictation(split='test', turns=5, raising=0.05)
    try:
      calls += 1
      env.reset(seed)
      for _ in range(4):
        calls += 1
        env.step('=0')
    except RuntimeError:
      failures += 1
    else:
      assert env.step('=0')[2]
  assert failures / calls == pytest.approx(0.05, abs=0.015)  # three standard deviations


def test_supervised_dictation_has_the_form_of_the_episodes():
  rng = np.random.default_rng(0)
  for slips in (0, 1):
    found = dictation.conversation(rng, slips)
    lines = (found['prompt'] + found['solution']).split('\n')
    digits = [int(line[1:]) for line in lines[::2]]
    totals_of = [int(line[1:]) for line in lines[1::2]]
    assert len(digits) == len(totals_of) == dictation.TURNS
    off = [(total - sum(digits[: i + 1])) % 10 for i, total in enumerate(totals_of)]
    assert sum(a != b for a, b in zip([0, *off], off)) == slips
    assert all(len(line) == dictation.ANSWER for line in lines[1::2])


def test_the_random_veto_rejects_as_many_sequences_as_the_veto_and_others():
  rng = np.random.default_rng(0)
  mask = jnp.asarray(rng.random((64, 9)) < 0.8).at[60:].set(False)
  log_rho = jnp.where(mask, jnp.asarray(rng.normal(-6, 2, (64, 9)), jnp.float32), 0)
  rejected, drawn = (np.asarray(f(log_rho, mask, 1e-4).any(axis=1)) for f in (catastrophic, controls.at_random))
  assert 0 < rejected.sum() == drawn.sum() < 60
  assert not drawn[60:].any()
  assert (rejected != drawn).any()


def test_a_control_replaces_its_part_of_sprl_while_the_run_trains():
  def layout():
    return model.cache_layout(tiny('qwen2'), DENSE, Quant(sampler='kv8'), 8, 8, 'float32')

  assert layout().key_bias
  with controls.controlled({PLAIN_KEYS: True}):
    assert not layout().key_bias
    assert model.cache_layout is controls.plain_keys
  assert layout().key_bias
  with controls.controlled({RANDOM_VETO: True, 'seed': 3}):
    assert correction.catastrophic is controls.at_random
    assert layout().key_bias
  assert correction.catastrophic is catastrophic


# --- page ------------------------------------------------------------------------------------------------------------


def test_the_page_has_claim_figure_interval_and_verdict_and_counts_the_verdicts(monkeypatch):
  monkeypatch.setattr(page, 'find', lambda name: EXPERIMENT)
  text = page.text({'example': records(0.2)})
  ours = '+0.200 (+0.200 to +0.200; 2 seeds; by warm start +0.200, +0.200)'
  assert f'| b is better than a. | +5 (Nobody, table 1) | b - a > +0.05 | {ours} | **holds** |' in text
  assert f'| [{EXPERIMENT.question}](#{EXPERIMENT.name}) | 1 | 0 | 0 | 0 of 0 | 4 of 4 |' in text
  assert '4 runs on a CPU, at 2 commits of sprl.' in text
  noted = dataclasses.replace(EXPERIMENT, note='Both arms are short.')
  monkeypatch.setattr(page, 'find', lambda name: noted)
  assert '\n\nBoth arms are short.\n\n![' in page.text({'example': records(0.2)})
  assert 'Not run yet' not in text
  waiting = dataclasses.replace(EXPERIMENT, hours=8.0)
  monkeypatch.setattr(page, 'find', lambda name: waiting)
  assert '## Not run yet\n\n* `example`: Is b better? 4 runs, about 8 hours of one core.' in page.text({'example': {}})
  assert '* `example`: Is b better? 2 of 4 runs, about 4 hours of one core.' in page.text({'example': records(0.2, seeds=1)})


def test_the_overview_counts_claims_of_papers_apart():
  own, check = (dataclasses.replace(CLAIM, paper=paper) for paper in ('not in the paper', 'all three papers'))
  unmet = dataclasses.replace(own, comparisons=(Comparison('b', 'a', 0.5),))
  several = dataclasses.replace(EXPERIMENT, claims=(CLAIM, own, check, unmet))
  assert page.summary(several, records(0.2)).endswith(' | 1 | 0 | 0 | 2 of 3 | 4 of 4 |')


def test_a_claim_that_two_arms_are_equal_shows_the_share_that_is_kept():
  found = records(-0.05)  # a: 0.2 and 0.3, b: 0.15 and 0.25
  assert page.kept(Comparison('b', 'a', -0.1), found) == ', which is 80 % of `a`'
  for other in (Comparison('b', 'a', 0.0), Comparison('b', BEFORE, -0.1), Comparison('b', 'a', -0.1, under('small'))):
    assert page.kept(other, found) == ''
  assert page.kept(Comparison('b', 'a', -0.1), {}) == ''


def test_seeds_with_arms_of_several_commits_are_named():
  found = records(0.2)
  assert page.versions(found) == ', at 2 commits of sprl'
  found['b'][2]['commit'] = 'def'
  assert page.versions(found) == ', at 3 commits of sprl (of seed 2 different arms ran at different commits)'
  found['b'][1]['machine'] = 'another'
  assert page.versions(found).endswith('; of seed 1 different arms ran on different machines')
  assert page.versions({'a': {1: found['a'][1]}}) == ''


def test_the_table_of_means_has_the_lowest_seed():
  found = records(0.2)
  assert '<tr><td><code>b</code></td><td>0.5 / 0.4</td><td>0.4</td>' in page.means(EXPERIMENT, found)
  assert '<tr><td><code>b</code></td><td>- / -</td><td>-</td>' in page.means(EXPERIMENT, found | {'b': {}})


def test_all_numbers_of_simulated_gpus_are_on_the_page():
  rows = json.loads((ROOT / 'benchmarks/results/cluster_simulation.json').read_text())['rows']
  compared = [row for row in rows if row['verdict'] and row['published'] != 1]
  text = '\n'.join(page.simulated())
  assert text.count(' GPUs') == len(compared) > len(page.simulated())
  for row in compared:
    assert f'{row["gain"]:.2f} ({row["low"]:.2f} to {row["high"]:.2f}) on {row["GPUs"]} GPUs' in text


def test_a_small_difference_has_two_digits_on_the_page():
  row = {'above': 0.0, 'mean': 2.53e-4, 'low': -1e-5, 'high': 5.2e-4, 'seeds': 2, 'by warm start': [1e-4, 4e-4]}
  assert page.found(row) == '+0.00025 (-0.00001 to +0.00052; 2 seeds; by warm start +0.00010, +0.00040)'
  assert page.found(row | {'above': 0.05}) == '+0.000 (-0.000 to +0.001; 2 seeds; by warm start +0.000, +0.000)'
  assert page.found(row | {'mean': 0.25, 'seeds': 1}) == '+0.250 (one seed)'
  assert page.found(row | {'mean': float('nan'), 'seeds': 0}) == 'not run'


def test_a_panel_has_one_arm_of_each_method():
  arms = ['full', 'tis@kv8', 'tis@4 x', 'full@4 x']
  assert figure.arms_at('kv8', arms) == ['full', 'tis@kv8']
  assert figure.arms_at('4 x', arms) == ['tis@4 x', 'full@4 x']
  assert figure.arms_at('', ['dense', 'naive']) == ['dense', 'naive']


def test_the_committed_page_is_made_from_the_committed_results():
  assert page.PAGE.read_text(encoding='utf-8') == page.text({name: command.saved(find(name)) for name in names()})


README = (ROOT / 'README.md').read_text()


def row_of(start):
  """Return the cells of the row of README's tables that begins with `start`."""
  (row,) = (line for line in README.splitlines() if line.startswith(f'| {start}'))
  return [cell.strip() for cell in row.strip('|').split('|')]


def verdicts(name, start):
  """Return the verdicts of the experiment's claims whose statements begin with `start`, in their order."""
  experiment = find(name)
  records = command.saved(experiment)
  return [judged(claim, experiment, records)[0]['verdict'] for claim in experiment.claims if claim.statement.startswith(start)]


def mean(records, arm, name='scores'):
  return f'{np.mean([run[name] for run in records[arm].values()]):.3f}'


BUDGETS = (88, 96, 104, 112, 144)


@pytest.mark.parametrize(
  ('row', 'statement'),
  [
    ('Training on sparse rollouts collapses', 'Without a correction, training on sparse rollouts collapses'),
    ('The correction of Sparse-RL ends', 'With the correction, training on sparse rollouts ends higher'),
    ('With the correction, sparse', 'With the correction, sparse rollouts train nearly'),
  ],
)
def test_the_readme_has_the_verdicts_of_each_budget(row, statement):
  said = {}
  for part in row_of(row)[-1].split('; '):
    verdict, budgets = part.split(' with ')
    first, *last = map(int, budgets.split(' to '))
    said |= {budget: verdict for budget in BUDGETS if first <= budget <= (last or [first])[0]}
  assert said == dict(zip(BUDGETS, verdicts('sparse_rl_phases', statement), strict=True))


@pytest.mark.parametrize(
  ('row', 'name', 'statements'),
  [
    ('The same three claims with 2.3 M', 'sparse_rl_larger', ['Without a correction', 'With the correction']),
    ('The same three claims with SnapKV', 'sparse_rl_snapkv', ['Without a correction', 'With the correction']),
    ('If as many sequences', 'sparse_rl_phases', ['It matters which']),
    ('A budget of 112', 'sparse_rl_phases', ['A budget of 112']),
    ('An FP8 cache that rounds large', 'fp8_key_bias_again', ['An FP8 cache that rounds']),
    ('The same with biases in more', 'fp8_more_key_bias', ['With token-level MIS training ends at most']),
    ('A mixture of experts', 'mixture_replay', ['With R3']),
    ('Running ahead, and redundant', 'environments', ['Running ahead reaches', 'Redundant environments reach']),
    ('Both together reach it', 'environments', ['While rollouts run ahead']),
  ],
)
def test_the_readme_has_the_verdicts_of_an_experiment(row, name, statements):
  assert row_of(row)[-1] == '; '.join(verdict for start in statements for verdict in verdicts(name, start))


@pytest.mark.parametrize(
  ('row', 'statements'),
  [
    ('FP8 linears and an FP8 cache end lower', ['FP8 rollouts without a correction lower']),
    ('With token-level TIS they', ['With token-level TIS, FP8', 'With token-level TIS, and with']),
  ],
)
def test_the_readme_has_the_verdicts_of_both_learning_rates(row, statements):
  usual, four_times = (verdict for start in statements for verdict in verdicts('fp8_rl', start))
  assert row_of(row)[-1] == f'{usual}; {four_times} with 4 times the learning rate'


STALE = 'topr', 'tis', 'decoupled_ppo', 'cispo'
STALE_CASES = {'8, high': '8 high', '8, middle': '8 half', '4, high': '4 high'}  # with all seeds -> their names in README


def stale(row):
  return f'{row["mean"]:.3f} ({row["low"]:.3f} to {row["high"]:.3f})'


def rows_of_stale_samples():
  """Return the rows of the cases of `staleness` with all seeds, by case and loss, with their verdicts; and the other rows."""
  experiment, records = find('staleness'), command.saved(find('staleness'))
  claims = [judged(claim, experiment, records) for claim in experiment.claims if claim.given]
  whole, single = ([rows for rows in claims if rows[0]['seeds'] == seeds] for seeds in (8, 1))
  assert len(whole) + len(single) == len(claims)
  of_case = {}
  for rows in whole:
    for row in rows:
      loss, case = row['comparison'].partition(' - ')[0].split('@')
      of_case.setdefault(case, {})[loss] = row | {'verdict of the claim': rows[0]['verdict']}
  return of_case, single


def test_the_readme_has_what_is_known_of_stale_samples():
  whole, single = rows_of_stale_samples()
  assert sorted(whole) == sorted(STALE_CASES)
  corrected = []
  for case, name in STALE_CASES.items():
    means, lowest = [f'{whole[case][loss]["mean"]:.3f}' for loss in STALE], min(whole[case][loss]['low'] for loss in STALE)
    corrected.append(f'{name}: {", ".join(means)} ({lowest:.3f})')
  said = f'minus fresh, and the lowest bound of the four. {". ".join(corrected)}'
  assert row_of('TOPR, TIS, decoupled PPO and CISPO train')[-2] == said
  of_ppo = [f'{name}: {stale(whole[case]["ppo"])}' for case, name in STALE_CASES.items()]
  assert row_of('PPO, which is not made')[-2] == '. '.join(of_ppo)
  for beginning, loss in (('TOPR, TIS, decoupled PPO and CISPO train', 'tis'), ('PPO, which is not made', 'ppo')):
    assert row_of(beginning)[-1] == '; '.join(whole[case][loss]['verdict of the claim'] for case in STALE_CASES)
  found, other = [row['mean'] for rows in single for row in rows], row_of('The same in the other six')
  assert (len(single), {rows[0]['verdict'] for rows in single}) == (2 * 6, {other[-1]})
  assert other[2] == f'one seed of eight has run: {max(found):+.2f} to {min(found):+.2f}'


def test_the_readme_has_the_accuracies_of_the_results():
  fp8, again, more, larger, snapkv, mixture = (
    command.saved(find(name))
    for name in ('fp8_rl', 'fp8_key_bias_again', 'fp8_more_key_bias', 'sparse_rl_larger', 'sparse_rl_snapkv', 'mixture_replay')
  )
  assert row_of('FP8 linears and an FP8 cache end lower')[2] == f'{mean(fp8, "alone@both")}; float32 {mean(fp8, "full")}'
  fast = f'With 4 times the learning rate {mean(fp8, "tis@4 x")}; float32 {mean(fp8, "full@4 x")}'
  assert row_of('With token-level TIS they')[2] == f'{mean(fp8, "tis@both")}. {fast}'
  biased = f'{mean(again, "alone@plain")}; with TIS {mean(again, "tis@plain")}; float32 {mean(again, "full")}'
  assert row_of('An FP8 cache that rounds large')[2] == biased
  several = f'MIS {mean(more, "mis@plain")}, no correction {mean(more, "alone@plain")}, TIS {mean(more, "tis@plain")}'
  start = mean(more, 'full', 'before')
  assert row_of('The same with biases in more')[2] == f'{several}, float32 {mean(more, "full")}, before training {start}'
  replayed = f'R3 {mean(mixture, "R3@w8a8")}, float32 {mean(mixture, "none@full")}. Without replay {mean(mixture, "none@w8a8")}'
  assert row_of('A mixture of experts')[2] == f'{replayed}, so no need for replay is shown'
  for row, records in (('The same three claims with 2.3 M', larger), ('The same three claims with SnapKV', snapkv)):
    before, naive, ours, dense = (mean(records, *of) for of in (('dense', 'before'), ('naive',), ('sparse_rl',), ('dense',)))
    expected = f'before {before}; without the correction {naive}, with it {ours}, dense {dense}.'
    assert row_of(row)[2].startswith(expected)
    rejected = np.mean([run['measures']['sparse/veto_fraction'] for run in records['sparse_rl'].values()])
    assert f'The veto rejects {100 * rejected:.0f} % of the sequences' in row_of(row)[2]


def test_the_readme_has_the_differences_of_the_phases():
  experiment = find('sparse_rl_phases')
  records = command.saved(experiment)
  of = {claim.statement: judged(claim, experiment, records) for claim in experiment.claims}
  (veto,) = of['It matters which sequences are rejected.']
  assert row_of('If as many sequences')[2] == f'{-veto["mean"]:.3f} ({-veto["high"]:.3f} to {-veto["low"]:.3f})'
  _, tokens, _ = next(rows for statement, rows in of.items() if statement.startswith('A budget of 112'))
  assert row_of('A budget of 112')[2] == f'saves {100 * tokens["mean"]:.0f} %'


def test_the_readme_and_the_guide_have_the_accuracies_of_the_phases():
  guide, records = (ROOT / 'docs/cheap_rollouts.md').read_text(), command.saved(find('sparse_rl_phases'))
  naive, ours = ({budget: mean(records, f'{arm}@{budget}') for budget in BUDGETS} for arm in ('naive', 'sparse_rl'))
  before, dense = mean(records, 'dense', 'before'), mean(records, 'dense')
  collapse = row_of('Training on sparse rollouts collapses')[2]
  assert collapse == f'{before} before training; {", ".join(naive.values())} after it'
  assert row_of('The correction of Sparse-RL ends')[2] == f'with it {", ".join(ours.values())}'
  assert row_of('With the correction, sparse')[2] == f'dense {dense}'
  for budget in BUDGETS:
    assert f'R-KV to {budget} tokens, 500 steps' in guide
    assert f'| {before} | {naive[budget]} | {ours[budget]} (`sparse_rl`) | {dense} |' in guide


def test_the_readme_has_the_factors_and_the_accuracies_of_the_environments():
  experiment = find('environments')
  records = command.saved(experiment)
  rows = [row for claim in experiment.claims for row in judged(claim, experiment, records) if 'seconds' in row['comparison']]
  ahead, redundant, both = (
    '{:.2f} times ({:.2f} to {:.2f})'.format(*(np.exp(row[part]) for part in ('mean', 'low', 'high'))) for row in rows
  )
  assert row_of('Running ahead, and redundant')[2] == f'{ahead} and {redundant}'
  ends = [np.mean(run['scores']) for run in records['both'].values()]
  worst = f'one of eight seeds ends at {min(ends):.2f}, the mean is {np.mean(ends):.2f}, synchronous'
  assert row_of('Both together reach it')[2] == f'{both}; {worst} {float(mean(records, "synchronous")):.2f}'


def test_the_guide_has_the_differences_of_stale_samples():
  whole, guide = rows_of_stale_samples()[0], ' '.join((ROOT / 'docs/running_ahead.md').read_text().split())
  records = command.saved(find('staleness'))
  fresh = [mean(records, f'fresh@{rate}') for rate in ('high', 'middle')]
  assert f'fresh samples ({fresh[0]} with a learning rate of 1e-4, and {fresh[1]} with 5e-5)' in guide
  for loss in (*STALE, 'ppo'):
    assert f'| `{loss}` | {" | ".join(stale(whole[case][loss]) for case in STALE_CASES)} |' in guide


def test_the_limits_have_the_greedy_accuracies_before_and_after_training():
  def rows(name):
    return json.loads((ROOT / f'benchmarks/results/{name}.json').read_text())['rows']

  before, after = rows('warm_starts'), rows('greedy_after_staleness_fresh_high')
  found = {}
  for how in ('sampled', 'greedy'):
    first = [row[how] for row in before if row['task'] == 'totals']
    last = [np.mean([row[how] for row in after if row['model'] == f'totals-{i}']) for i in range(2)]
    found[how] = [f'{one:.2f} and {other:.2f}' for one, other in (first, last)]
  limits = ' '.join((ROOT / 'docs/limits.md').read_text().split())
  assert f'from {" to ".join(found["sampled"])}.' in limits
  assert f'was {found["greedy"][0]} before, and {found["greedy"][1]} after.' in limits
  assert len([row for row in before if row['greedy'] >= 0.965]) == len(before) - 1 == 11


def test_the_limits_count_the_experiments_that_have_not_run():
  missing = [name for name in names() if not (command.SAVED / f'{name}.json').exists()]
  assert f'**{len(missing)} of the {len(names())} experiments on' in (ROOT / 'docs/limits.md').read_text()


def test_each_verdict_that_contradicts_a_paper_has_a_reason_and_no_other_has_one():
  for experiment in map(find, names()):
    records = command.saved(experiment)
    for claim in experiment.claims:
      verdict = judged(claim, experiment, records)[0]['verdict']
      assert bool(claim.reason) == (verdict == 'does not hold'), f'{experiment.name}: {claim.statement}'
