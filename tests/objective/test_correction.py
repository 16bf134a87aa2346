import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.objective.correction import PRESETS, correct, preset
from sprl.settings import REJECT_OPTIONS, Correction, SettingsError

BOUNDS = {'k1': '0.6_1.6', 'k2': '0.3', 'k3': '0.2'}


def run(old, roll, mask, s, micro=None):
  micro = None if micro is None else jnp.int32(micro)
  return correct(jnp.float32(old), jnp.float32(roll), jnp.asarray(mask, bool), s, micro)


def of_rho(rho):
  """old and sampler log-probs with these ratios, on masked tokens; rho None: not written by the model."""
  mask = np.array([[r is not None for r in row] for row in rho])
  log_rho = np.log(np.array([[1.0 if r is None else r for r in row] for row in rho]))
  return -2.0 + log_rho, np.full(mask.shape, -2.0), mask


# --- weights ---------------------------------------------------------------------------------------------------------


def test_two_rows_of_three_tokens_by_hand():
  old, roll, mask = of_rho([[0.5, 2.0, 4.0], [0.25, 1.0, None]])
  third = 4 ** (1 / 3)  # (0.5 * 2 * 4)^(1/3)
  hand = {
    ('token', 'truncate'): [[0.5, 2, 3], [0.25, 1, 0]],
    ('token', 'clip'): [[0.5, 2, 3], [0.4, 1, 0]],
    ('token', 'icepop'): [[0.5, 2, 0], [0, 1, 0]],
    ('sequence', 'truncate'): [[3, 3, 3], [0.25, 0.25, 0]],
    ('sequence', 'clip'): [[3, 3, 3], [0.4, 0.4, 0]],
    ('sequence', 'icepop'): [[0, 0, 0], [0, 0, 0]],
    ('geometric', 'truncate'): [[third] * 3, [0.5, 0.5, 0]],
    ('geometric', 'clip'): [[third] * 3, [0.5, 0.5, 0]],
    ('geometric', 'icepop'): [[third] * 3, [0.5, 0.5, 0]],
    ('off', 'truncate'): [[1, 1, 1], [1, 1, 0]],
  }
  for (level, weight), expected in hand.items():
    result = run(old, roll, mask, Correction(level=level, weight=weight, cap=3.0, floor=0.4))
    np.testing.assert_allclose(result.weight, expected, rtol=1e-5, err_msg=f'{level} {weight}')
    np.testing.assert_array_equal(result.mask, mask)  # weights never touch the mask


def test_segment_weight_is_the_geometric_mean_of_each_contiguous_run():
  old, roll, mask = of_rho([[0.5, 2.0, None, 0.25, None, 1.0, 0.25]])
  result = run(old, roll, mask, Correction(level='segment', cap=9.0))
  np.testing.assert_allclose(result.weight, [[1, 1, 0, 0.25, 0, 0.5, 0.5]], rtol=1e-5)


def test_sequence_weight_of_nine_thousand_tokens_sits_at_its_clamp():
  old = np.full((2, 9000), -1.0)
  roll = old - np.array([[1e-3], [-1e-2]])  # sums of +9 and -90
  result = run(old, roll, np.ones((2, 9000), bool), Correction(level='sequence', cap=1e6))
  np.testing.assert_allclose(result.raw[0], math.exp(9), rtol=2e-3)
  np.testing.assert_allclose(result.raw[1], math.exp(-20), rtol=1e-5)
  np.testing.assert_allclose(run(old, roll, np.ones((2, 9000), bool), Correction(level='sequence')).weight[0], 2.0)


def test_normalisation_comes_after_truncation_and_counts_rejected_tokens():
  old, roll, mask = of_rho([[1.0, 3.0, 0.1], [0.4, None, None]])
  s = Correction(cap=1.5, normalise=True, token_mask=True)
  result = run(old, roll, mask, s)  # truncated: 1, 1.5, 0.1, 0.4, of mean 0.75, over tokens of which two are masked out
  np.testing.assert_allclose(result.weight, np.array([[1, 1.5, 0.1], [0.4, 0, 0]]) / 0.75, rtol=1e-5)
  np.testing.assert_array_equal(result.mask, [[True, False, False], [False, False, False]])
  np.testing.assert_allclose(result.norm, 0.75, rtol=1e-5)


def test_sequence_weights_are_normalised_over_the_sequences_that_have_tokens():
  old, roll, mask = of_rho([[1.0, 1.5, 1.0], [0.5, None, None], [None, None, None]])
  result = run(old, roll, mask, Correction(level='sequence', normalise=True))
  np.testing.assert_allclose(result.weight[:, 0], [1.5, 0.5, 0], rtol=1e-5)  # mean of 1.5 and 0.5 is 1, whatever their lengths


def test_micro_scope_normalises_each_microbatch_by_itself():
  old, roll, mask = of_rho([[1.0, 0.5], [1.0, 1.5], [0.25, 0.25]])
  s = Correction(normalise=True, norm_scope='micro')
  result = run(old, roll, mask, s, [0, 0, 2])
  np.testing.assert_allclose(result.weight, [[1, 0.5], [1, 1.5], [1, 1]], rtol=1e-5)
  with pytest.raises(ValueError, match='microbatch'):
    run(old, roll, mask, s)


def test_normalisation_is_skipped_where_the_mean_vanishes():
  old, roll, mask = of_rho([[9.0, 9.0]])
  result = run(old, roll, mask, Correction(weight='icepop', normalise=True))
  np.testing.assert_array_equal(result.weight, 0)
  np.testing.assert_array_equal(result.norm, 1)


def test_a_log_prob_that_is_not_a_number_has_no_weight_and_fails_every_bound():
  old, roll, mask = of_rho([[1.0, 1.0, None]])
  roll[0, 1] = np.nan
  roll[0, 2] = np.nan  # outside the mask: of no consequence
  for level in ('token', 'sequence'):
    s = Correction(level=level, reject=('token_k1',), reject_bounds=('0.5_2.0',))
    result = run(old, roll, mask, s)
    np.testing.assert_array_equal(result.weight[0], [level == 'token', 0, 0])
    np.testing.assert_array_equal(result.mask, [[True, False, False]])


def test_an_infinite_gap_is_clamped():
  old, roll, mask = of_rho([[1.0, 1.0]])
  roll[0, 0] = -np.inf
  np.testing.assert_allclose(run(old, roll, mask, Correction(cap=1e9)).weight[0], [math.exp(20), 1], rtol=1e-5)


# --- rejection -------------------------------------------------------------------------------------------------------


def test_k1_bounds_are_on_rho_and_not_on_its_inverse():
  old, roll, mask = of_rho([[0.61, 1.59, 1.0], [0.59, 1.61, 1.0]])
  result = run(old, roll, mask, Correction(level='off', reject=('token_k1',), reject_bounds=('0.6_1.6',)))
  np.testing.assert_array_equal(result.mask, [[True, True, True], [False, False, True]])
  one = run(*of_rho([[0.51, 1.99, 0.49, 2.01]]), Correction(level='off', reject=('token_k1',), reject_bounds=('2.0',)))
  np.testing.assert_array_equal(one.mask, [[True, True, False, False]])


def test_sequence_options_keep_or_drop_whole_rows():
  old, roll, mask = of_rho([[2.0, 0.5, 1.0], [1.1, 1.1, 1.1], [3.0, 1.0, None]])
  kept = {
    ('seq_sum_k1', '0.9_1.2'): [True, False, False],  # products 1, 1.331, 3
    ('seq_mean_k1', '0.9_1.2'): [True, True, False],  # geometric means 1, 1.1, sqrt 3
    ('seq_sum_k2', '0.1'): [False, True, False],  # log(2)^2 = 0.48; 1.5 log(1.1)^2 = 0.0136; 0.60
    ('seq_mean_k2', '0.17'): [True, True, False],  # 0.16, 0.0045, 0.30
    ('seq_max_k2', '0.25'): [True, True, False],  # 0.24, 0.0045, 0.60
    ('seq_sum_k3', '0.6'): [True, True, False],  # (2 - 1 - 0.693) + (0.5 - 1 + 0.693) = 0.5; 0.0141; 0.9014
    ('seq_mean_k3', '0.1'): [False, True, False],  # 0.1667, 0.0047, 0.4507
    ('seq_max_k3', '0.31'): [True, True, False],  # 0.3069, 0.0047, 0.9014
  }
  for (option, bounds), expected in kept.items():
    result = run(old, roll, mask, Correction(reject=(option,), reject_bounds=(bounds,)))
    np.testing.assert_array_equal(result.mask, mask & np.array(expected)[:, None], err_msg=option)
    np.testing.assert_array_equal(result.keep, expected, err_msg=option)
    np.testing.assert_allclose(result.weight, run(old, roll, mask, Correction()).weight)  # rejection never touches weights


def test_all_options_must_keep_and_an_option_named_twice_counts_once():
  old, roll, mask = of_rho([[1.9, 1.0, 0.4], [1.0, 1.0, 1.0]])
  s = Correction(reject=('token_k1', 'token_k2', 'token_k1'), reject_bounds=('0.5_2.0', '0.1', '0.5_2.0'))
  result = run(old, roll, mask, s)
  np.testing.assert_array_equal(result.mask, [[False, True, False], [True, True, True]])
  assert list(result.rejections) == ['token_k1', 'token_k2']


def test_veto_looks_at_the_unclamped_ratio():
  old, roll, mask = of_rho([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
  old[0, 0] += math.log(0.99e-4)
  old[1, 0] += math.log(1.01e-4)
  result = run(old, roll, mask, Correction(veto=1e-4))
  np.testing.assert_array_equal(result.keep, [False, True, True])
  old[2, 0] -= 25.0
  assert not run(old, roll, mask, Correction(veto=math.exp(-24))).keep[2]  # clamped at -20 it would pass


def test_a_vetoed_row_has_no_surviving_token_but_keeps_its_weights():
  old, roll, mask = of_rho([[1e-5, 1.2, 1.0], [0.9, 1.0, None]])
  result = run(old, roll, mask, Correction(veto=1e-4))
  np.testing.assert_array_equal(result.mask, [[False] * 3, [True, True, False]])
  np.testing.assert_allclose(result.weight, [[1e-5, 1.2, 1.0], [0.9, 1.0, 0]], rtol=1e-4)


def test_sequence_error_threshold_bounds_the_mean_multiplicative_error():
  old, roll, mask = of_rho([[0.5, 1.0, 1.0], [2.0, 1.2, 2.0]])  # means of 2, 1, 1 = 1.33 and of 2, 1.2, 2 = 1.73
  np.testing.assert_array_equal(run(old, roll, mask, Correction(max_sequence_error=1.5)).keep, [True, False])


def test_probability_difference_masks_tokens():
  old, roll = np.log([[0.6, 0.3, 0.5]]), np.log([[0.35, 0.31, 0.75]])
  result = run(old, roll, [[True, True, True]], Correction(level='off', max_prob_diff=0.2))
  np.testing.assert_array_equal(result.mask, [[False, True, False]])


# --- against the oracle ----------------------------------------------------------------------------------------------


def corrections():
  yield from (
    Correction(level=level, weight=weight, cap=1.5, floor=0.8, normalise=normalise, norm_scope=scope)
    for level in ('off', 'token', 'segment', 'sequence', 'geometric')
    for weight in ('truncate', 'clip', 'icepop')
    for normalise, scope in ((False, 'global'), (True, 'global'), (True, 'micro'))
  )
  yield from (Correction(reject=(o,), reject_bounds=(BOUNDS[o[-2:]],)) for o in REJECT_OPTIONS)
  yield Correction(reject=('token_k1', 'seq_max_k3', 'token_k2'), reject_bounds=('0.4_1.9', '2.0', '0.6'))
  yield Correction(token_mask=True, veto=0.3, max_sequence_error=1.7, max_prob_diff=0.3)
  yield from PRESETS.values()


@pytest.mark.parametrize('s', list(dict.fromkeys(corrections())), ids=oracle.name)
def test_agrees_with_the_oracle(s):
  x = oracle.batch(3)
  micro = np.array([0, 1, 0, 1, 4])
  expected = oracle.correct(x['old'], x['roll'], x['mask'], s, micro)
  got = run(x['old'], x['roll'], x['mask'], s, micro)
  for name, value in expected.items():
    np.testing.assert_allclose(np.asarray(getattr(got, name), float), value, rtol=2e-5, atol=1e-6, err_msg=name)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.0, 8.0), st.sampled_from(list(PRESETS.values())))
def test_what_comes_out_is_bounded_finite_and_inside_the_mask(seed, spread, s):
  x = oracle.batch(seed, B=3, T=6, spread=spread)
  result = run(x['old'], x['roll'], x['mask'], s)
  weight = np.asarray(result.applied)
  assert np.isfinite(np.asarray(result.weight)).all()
  assert (weight >= 0).all()
  assert (weight <= max(s.cap, 1) * (1 + 1e-6)).all()
  assert not (np.asarray(result.mask) & ~x['mask']).any()
  assert (weight[~x['mask']] == 0).all()


def test_a_row_does_not_depend_on_the_other_rows():
  x = oracle.batch(5)
  for s in PRESETS.values():
    s = replace(s, normalise=False)
    whole = run(x['old'], x['roll'], x['mask'], s)
    alone = run(x['old'][2:3], x['roll'][2:3], x['mask'][2:3], s)
    np.testing.assert_array_equal(whole.weight[2:3], alone.weight)
    np.testing.assert_array_equal(whole.mask[2:3], alone.mask)


@pytest.mark.parametrize('name', sorted(PRESETS))
def test_equal_policies_have_unit_weights_and_lose_nothing(name):
  x = oracle.batch(1)
  result = run(x['old'], x['old'], x['mask'], preset(name))
  np.testing.assert_array_equal(result.weight, x['mask'])
  np.testing.assert_array_equal(result.mask, x['mask'])
  assert result.keep.all()


def test_compiled_it_is_the_same_with_settings_static():
  x = oracle.batch(4)
  s = replace(preset('sparse_rl_code'), reject=('seq_mean_k3', 'token_k2'), reject_bounds=('0.5', '1.0'))
  compiled = jax.jit(correct, static_argnums=3)(jnp.float32(x['old']), jnp.float32(x['roll']), jnp.asarray(x['mask']), s)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), compiled, run(x['old'], x['roll'], x['mask'], s)
  )


def test_no_gradient_flows_through_weights():
  x = oracle.batch(2)

  mask = jnp.asarray(x['mask'])

  def weights(old, roll):
    return correct(old, roll, mask, Correction(level='sequence', normalise=True)).weight.sum()

  for g in jax.grad(weights, argnums=(0, 1))(jnp.float32(x['old']), jnp.float32(x['roll'])):
    np.testing.assert_array_equal(g, 0)


# --- names -----------------------------------------------------------------------------------------------------------


def test_presets_say_what_the_papers_say():
  assert preset('token_is') == Correction()
  assert preset('sparse_rl') == Correction(cap=1.5, normalise=True, veto=1e-4)
  assert preset('sparse_rl_code') == Correction(cap=1.5, normalise=True, veto=1e-4, token_mask=True, mask_low=0.5, mask_high=1.5)
  assert preset('slime') == Correction(cap=2.0, floor=0.5, normalise=True, veto=1e-4)
  assert preset('pg_geo_rs_seq_tis') == Correction(
    mode='bypass', level='sequence', reject=('seq_mean_k1',), reject_bounds=('0.999_1.001',)
  )
  with pytest.raises(SettingsError, match=r"'token_si'.*token_is, seq_is"):
    preset('token_si')
