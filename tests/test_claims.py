"""The harness of the papers' claims (benchmarks/claims): intervals, verdicts, plans that stay fixed, the task, and the page."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from claims import command, controls, page, totals
from claims.experiment import BEFORE, HERE, RANDOM_VETO, Claim, Comparison, Experiment, find, names, under
from claims.tasks import TOTALS
from claims.verdict import judged, paired, together, verdict

from sprl.objective.correction import catastrophic

CLAIM = Claim('b is better than a.', 'Nobody, table 1', '+5', (Comparison('b', 'a', 0.05),))
EXPERIMENT = Experiment('example', 'Is b better?', TOTALS, {'a': {}, 'b': {'loss.kl_coef': 0.1}}, (CLAIM,), steps=3, seeds=2)


def a_run(arm, seed, scores):
  return {
    'arm': arm, 'seed': seed, 'cpu': 'a CPU', 'stopped': None, 'before': [0.0] * len(scores), 'scores': scores, 'measures': {},
    'under': {'small': [score / 2 for score in scores]},
    'accuracy': {'steps': [0, 3], 'mean': [0.0, float(np.mean(scores))]},
  }  # fmt: skip


def records(difference, seeds=2):
  """Return records in which b is better by `difference` on every problem."""
  return {
    arm: {seed: a_run(arm, seed, [more + seed / 10] * 4) for seed in range(seeds)}
    for arm, more in (('a', 0.1), ('b', 0.1 + difference))
  }


# --- intervals and verdicts ------------------------------------------------------------------------------------------


def test_an_interval_by_hand():
  """Seeds: means 0.1 and 0.3. Problems: means 0.1, 0.2 and 0.3. t(0.975, 1 degree of freedom) = 12.7062."""
  found = paired(np.array([[0.0, 0.1, 0.2], [0.2, 0.3, 0.4]]), np.zeros((2, 3)))
  half = 12.7062 * np.sqrt(0.02 / 2 + 0.01 / 3)
  np.testing.assert_allclose(found, (0.2, 0.2 - half, 0.2 + half, 2), rtol=1e-4)
  alone = paired(np.array([[1.0], [3.0]]), np.zeros((2, 1)))  # a number per run: only seeds vary
  np.testing.assert_allclose(alone[:3], (2.0, 2.0 - 12.7062, 2.0 + 12.7062), rtol=1e-4)
  assert paired(np.ones((1, 3)), np.zeros((1, 3)))[:3] == (1.0, -np.inf, np.inf)


def test_intervals_cover_the_difference_over_new_seeds_and_new_problems():
  rng, truth, inside = np.random.default_rng(0), 0.1, 0
  for _ in range(500):
    seeds, problems = rng.normal(0, 0.05, (8, 1)), rng.normal(0, 0.3, (1, 50))
    found = paired(truth + seeds + problems + rng.normal(0, 0.4, (8, 50)), np.zeros((8, 50)))
    inside += found.low < truth < found.high
  assert 0.94 < inside / 500 <= 1


@pytest.mark.parametrize(
  ('difference', 'expected'),
  [(0.2, 'holds'), (0.0, 'does not hold'), (0.05, 'cannot tell')],
  ids=['above', 'below', 'at the threshold'],
)
def test_a_verdict_needs_the_whole_interval(difference, expected):
  spread = np.array([[-0.001], [0.001], [0.0], [0.0]])
  assert verdict(paired(difference + spread, 0 * spread), 0.05) == expected


def test_a_claim_holds_if_all_its_comparisons_hold():
  assert together(['holds', 'holds']) == 'holds'
  assert together(['holds', 'cannot tell']) == 'cannot tell'
  assert together(['cannot tell', 'does not hold', 'holds']) == 'does not hold'
  assert together([]) == 'cannot tell'


def test_only_seeds_of_both_arms_are_compared():
  found = records(0.2)
  found['a'][7] = a_run('a', 7, [0.9] * 4)
  (row,) = judged(CLAIM, found)
  assert (row['seeds'], row['verdict']) == (2, 'holds')
  assert row['mean'] == pytest.approx(0.2)
  (row,) = judged(dataclasses.replace(CLAIM, comparisons=(Comparison('a', BEFORE, 0.5),)), found)
  assert (row['seeds'], row['mean']) == (3, pytest.approx((0.1 + 0.2 + 0.9) / 3))
  (row,) = judged(dataclasses.replace(CLAIM, comparisons=(Comparison(BEFORE, 'a', 0.0),)), found)
  assert (row['seeds'], row['mean']) == (3, pytest.approx(-(0.1 + 0.2 + 0.9) / 3))
  (row,) = judged(dataclasses.replace(CLAIM, comparisons=(Comparison('b', 'a', 0.05, under('small')),)), found)
  assert (row['seeds'], row['mean']) == (2, pytest.approx(0.1))
  (row,) = judged(CLAIM, {})
  assert (row['seeds'], row['verdict']) == (0, 'cannot tell')


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_result_of_another_plan_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(command, 'SAVED', tmp_path)
  for seed in (0, 1):
    for arm, of in records(0.2).items():
      (tmp_path / f'{arm}-{seed}.json').write_text(json.dumps(of[seed]))
  command.collect(EXPERIMENT, {}, tmp_path)
  assert command.saved(EXPERIMENT) == records(0.2)
  more = dataclasses.replace(EXPERIMENT, seeds=4, claims=(dataclasses.replace(CLAIM, reason='Small models.'),))
  assert command.saved(more) == records(0.2)
  easier = dataclasses.replace(CLAIM, comparisons=(Comparison('b', 'a', 0.01),))
  for other in ({'claims': (easier,)}, {'steps': 4}, {'arms': {'a': {}, 'b': {'loss.kl_coef': 0.2}}}):
    with pytest.raises(SystemExit, match='another plan'):
      command.saved(dataclasses.replace(EXPERIMENT, **other))


def test_an_experiment_names_its_arms_and_measures():
  for wrong in (Comparison('c', 'a', 0.0), Comparison('a', 'nothing', 0.0), Comparison('a', 'b', 0.0, measure='reward')):
    with pytest.raises(ValueError, match=r'compares|no measure'):
      dataclasses.replace(EXPERIMENT, claims=(dataclasses.replace(CLAIM, comparisons=(wrong,)),))


def test_a_seed_has_the_same_start_in_every_arm():
  changes = {(arm, seed): EXPERIMENT.changes(arm, seed, HERE) for arm, seed in EXPERIMENT.runs}
  assert changes['a', 0] | {'loss.kl_coef': 0.1} == changes['b', 0]
  assert [changes['a', seed]['model.path'] for seed in (0, 1)] == [str(folder) for folder in TOTALS.warm]
  assert EXPERIMENT.runs == [('a', 0), ('b', 0), ('a', 1), ('b', 1)]


@pytest.mark.parametrize('name', names())
def test_the_settings_of_all_arms_are_accepted(name, tmp_path):
  from sprl.config import default_config
  from sprl.config_reader import resolve

  experiment = find(name)
  assert experiment.name == name
  assert experiment.seeds >= 8
  assert len(experiment.task.warm) >= 2
  several = [experiment.changes(arm, 0, tmp_path) for arm in experiment.arms]
  for changes in several + [experiment.answers(name, 0, tmp_path) for name in experiment.inference]:
    config = default_config()
    config.update_from_flattened_dict({k: v for k, v in changes.items() if k != RANDOM_VETO})
    assert resolve(config).steps == experiment.steps


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


def test_the_random_veto_rejects_as_many_sequences_as_the_veto_and_others():
  rng = np.random.default_rng(0)
  mask = jnp.asarray(rng.random((64, 9)) < 0.8).at[60:].set(False)
  log_rho = jnp.where(mask, jnp.asarray(rng.normal(-6, 2, (64, 9)), jnp.float32), 0)
  rejected, drawn = (np.asarray(f(log_rho, mask, 1e-4).any(axis=1)) for f in (catastrophic, controls.at_random))
  assert 0 < rejected.sum() == drawn.sum() < 60
  assert not drawn[60:].any()
  assert (rejected != drawn).any()


# --- page ------------------------------------------------------------------------------------------------------------


def test_the_page_has_claim_figure_interval_and_verdict(monkeypatch):
  monkeypatch.setattr(page, 'find', lambda name: EXPERIMENT)
  text = page.text({'example': records(0.2)})
  assert '| b is better than a. | +5 (Nobody, table 1) | b - a +0.200 (+0.200 to +0.200) | **holds** |' in text
  assert 'b - a > +0.05' in text
  assert 'Not run yet' in page.text({'example': {}})


def test_the_committed_page_is_made_from_the_committed_results():
  assert page.PAGE.read_text(encoding='utf-8') == page.text({name: command.saved(find(name)) for name in names()})
