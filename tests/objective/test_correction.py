"""Corrections: weights, normalisation, rejection and presets, against values worked out by hand and the oracle."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.config import Correction
from sprl.config_checks import REJECTIONS
from sprl.objective.correction import reject, weigh
from sprl.presets import ARMS, CORRECTIONS
from sprl.types import LogProbs

BOUNDS = {'k1': '0.6:1.6', 'k2': '0.3', 'k3': '0.2'}


SHAPE = (5, 11)  # one shape for all batches, so that each operation compiles once


def corrected(x, s, micro=None):
  """Return what `weigh` and `reject` return for the batch `x`: `old`, `roll` and `mask`, each [B, T]. `micro` is [B], or None."""
  return SimpleNamespace(**both(s, *arguments(x, micro)))


def both(s, logprobs, mask, micro):
  """Return the fields of `weigh` and `reject` as one dictionary."""
  return vars(weigh(logprobs, mask, s, micro)) | reject(logprobs, mask, s)._asdict()


def arguments(x, micro):
  """Return log-probs, mask and microbatches of the batch `x` as arrays."""
  logprobs = LogProbs(sampler=jnp.float32(x['roll']), old=jnp.float32(x['old']))
  return logprobs, jnp.asarray(x['mask'], bool), None if micro is None else jnp.int32(micro)


def padded(rows):
  """Return a SHAPE array of zeros with `rows`, a list of rows of equal length, in its upper left corner."""
  rows = np.array(rows)
  out = np.zeros(SHAPE, rows.dtype)
  out[: rows.shape[0], : rows.shape[1]] = rows
  return out


def batch_with_ratios(rho):
  """Return a batch of SHAPE arrays whose ratios exp(old - roll) are `rho`, a list of rows of equal length.

  None in `rho` marks a token that the model did not write.
  """
  written = padded([[r is not None for r in row] for row in rho])
  log_rho = padded([[0.0 if r is None else math.log(r) for r in row] for row in rho])
  return {'old': log_rho - 2.0, 'roll': np.full(SHAPE, -2.0), 'mask': written}


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_match_hand_values_for_each_level_and_weight():
  x = batch_with_ratios([[0.5, 2.0, 4.0], [0.25, 1.0, None]])
  cube_root_of_4 = 4 ** (1 / 3)  # (0.5 * 2 * 4)^(1/3)
  hand = {
    ('token', 'truncate'): [[0.5, 2, 3], [0.25, 1, 0]],
    ('token', 'clip'): [[0.5, 2, 3], [0.4, 1, 0]],
    ('token', 'icepop'): [[0.5, 2, 0], [0, 1, 0]],
    ('sequence', 'truncate'): [[3, 3, 3], [0.25, 0.25, 0]],
    ('sequence', 'clip'): [[3, 3, 3], [0.4, 0.4, 0]],
    ('sequence', 'icepop'): [[0, 0, 0], [0, 0, 0]],
    ('geometric', 'truncate'): [[cube_root_of_4] * 3, [0.5, 0.5, 0]],
    ('geometric', 'clip'): [[cube_root_of_4] * 3, [0.5, 0.5, 0]],
    ('geometric', 'icepop'): [[cube_root_of_4] * 3, [0.5, 0.5, 0]],
    (None, 'truncate'): [[1, 1, 1], [1, 1, 0]],
  }
  for (level, weight), expected in hand.items():
    result = corrected(x, Correction(level=level, weight=weight, cap=3.0, floor=0.4))
    np.testing.assert_allclose(result.weight, padded(expected), rtol=1e-5, err_msg=f'{level} {weight}')
    np.testing.assert_array_equal(result.mask, x['mask'])  # weights do not change the mask


def test_segment_weight_is_the_geometric_mean_of_its_segment():
  result = corrected(batch_with_ratios([[0.5, 2.0, None, 0.25, None, 1.0, 0.25]]), Correction(level='segment', cap=9.0))
  np.testing.assert_allclose(result.weight, padded([[1, 1, 0, 0.25, 0, 0.5, 0.5]]), rtol=1e-5)


def test_a_sequence_weight_of_9000_tokens_is_clamped():
  old = np.full((2, 9000), -1.0)
  x = {'old': old, 'roll': old - np.array([[1e-3], [-1e-2]]), 'mask': np.ones((2, 9000), bool)}  # sums of +9 and -90
  result = corrected(x, Correction(level='sequence'))
  np.testing.assert_allclose(result.raw[0], math.exp(9), rtol=2e-3)
  np.testing.assert_allclose(result.raw[1], math.exp(-20), rtol=1e-5)
  np.testing.assert_allclose(result.weight[0], 2.0)


def test_normalisation_follows_truncation_and_counts_rejected_tokens():
  x = batch_with_ratios([[1.0, 3.0, 0.1], [0.4, None, None]])
  result = corrected(x, Correction(cap=1.5, normalise='global', reject=('token_k1=0.5:1.5',)))
  # Truncated: 1, 1.5, 0.1, 0.4, with mean 0.75, although two of them are masked out.
  np.testing.assert_allclose(result.weight, padded(np.array([[1, 1.5, 0.1], [0.4, 0, 0]]) / 0.75), rtol=1e-5)
  np.testing.assert_array_equal(result.mask, padded([[True, False, False], [False, False, False]]))


def test_sequence_weights_are_normalised_over_rows_with_tokens():
  x = batch_with_ratios([[1.0, 1.5, 1.0], [0.5, None, None], [None, None, None]])
  result = corrected(x, Correction(level='sequence', normalise='global'))
  np.testing.assert_allclose(result.weight[:3, 0], [1.5, 0.5, 0], rtol=1e-5)  # the mean over rows of 1.5 and 0.5 is 1


def test_normalise_micro_uses_the_mean_of_each_microbatch():
  x = batch_with_ratios([[1.0, 0.5], [1.0, 1.5], [0.25, 0.25]])
  s = Correction(normalise='micro')
  result = corrected(x, s, [0, 0, 2, 3, 3])
  np.testing.assert_allclose(result.weight, padded([[1, 0.5], [1, 1.5], [1, 1]]), rtol=1e-5)
  with pytest.raises(ValueError, match='normalise'):
    corrected(x, s)


def test_normalisation_is_skipped_where_the_mean_vanishes():
  result = corrected(batch_with_ratios([[9.0, 9.0]]), Correction(weight='icepop', normalise='global'))
  np.testing.assert_array_equal(result.weight, 0)


def test_a_nan_log_prob_has_no_weight_and_fails_every_bound():
  x = batch_with_ratios([[1.0, 1.0, None]])
  x['roll'][0, 1] = np.nan
  x['roll'][0, 2] = np.nan  # outside the mask: ignored
  for level in ('token', 'sequence'):
    result = corrected(x, Correction(level=level, reject=('token_k1=0.5:2.0',)))
    np.testing.assert_array_equal(result.weight, padded([[float(level == 'token'), 0, 0]]))
    np.testing.assert_array_equal(result.mask, padded([[True, False, False]]))


def test_an_infinite_gap_is_clamped():
  x = batch_with_ratios([[1.0, 1.0]])
  x['roll'][0, 0] = -np.inf
  np.testing.assert_allclose(corrected(x, Correction(cap=1e9)).weight[0, :2], [math.exp(20), 1], rtol=1e-5)


# --- rejection -------------------------------------------------------------------------------------------------------


def test_k1_bounds_are_on_rho_and_not_on_its_inverse():
  x = batch_with_ratios([[0.61, 1.59, 1.0, None], [0.59, 1.61, 1.0, None], [0.51, 1.99, 0.49, 2.01]])
  result = corrected(x, Correction(level=None, reject=('token_k1=0.6:1.6',)))
  np.testing.assert_array_equal(result.mask[:2, :3], [[True, True, True], [False, False, True]])
  one = corrected(x, Correction(level=None, reject=('token_k1=2.0',)))
  np.testing.assert_array_equal(one.mask[2, :4], [True, True, False, False])


def test_sequence_options_keep_or_drop_whole_rows():
  x = batch_with_ratios([[2.0, 0.5, 1.0], [1.1, 1.1, 1.1], [3.0, 1.0, None]])
  kept = {
    ('seq_sum_k1', '0.9:1.2'): [True, False, False],  # products 1, 1.331, 3
    ('seq_mean_k1', '0.9:1.2'): [True, True, False],  # geometric means 1, 1.1, sqrt 3
    ('seq_sum_k2', '0.1'): [False, True, False],  # log(2)^2 = 0.48; 1.5 log(1.1)^2 = 0.0136; 0.60
    ('seq_mean_k2', '0.17'): [True, True, False],  # 0.16, 0.0045, 0.30
    ('seq_max_k2', '0.25'): [True, True, False],  # 0.24, 0.0045, 0.60
    ('seq_sum_k3', '0.6'): [True, True, False],  # (2 - 1 - 0.693) + (0.5 - 1 + 0.693) = 0.5; 0.0141; 0.9014
    ('seq_mean_k3', '0.1'): [False, True, False],  # 0.1667, 0.0047, 0.4507
    ('seq_max_k3', '0.31'): [True, True, False],  # 0.3069, 0.0047, 0.9014
  }
  for (option, bounds), expected in kept.items():
    result = corrected(x, Correction(reject=(f'{option}={bounds}',)))
    np.testing.assert_array_equal(result.mask[:3], x['mask'][:3] & np.array(expected)[:, None], err_msg=option)
    np.testing.assert_allclose(result.weight, corrected(x, Correction()).weight)  # rejection does not change weights


def test_a_token_must_pass_every_rejection_rule():
  s = Correction(reject=('token_k1=0.5:2.0', 'token_k2=0.1'))
  result = corrected(batch_with_ratios([[1.9, 1.0, 0.4], [1.0, 1.0, 1.0]]), s)
  np.testing.assert_array_equal(result.mask, padded([[False, True, False], [True, True, True]]))
  assert list(result.rejections) == ['token_k1', 'token_k2']


def test_veto_compares_the_unclamped_ratio():
  x = batch_with_ratios([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
  x['old'][0, 0] += math.log(0.99e-4)
  x['old'][1, 0] += math.log(1.01e-4)
  result = corrected(x, Correction(veto=1e-4))
  np.testing.assert_array_equal(result.mask.any(axis=1)[:3], [False, True, True])
  x['old'][2, 0] -= 25.0
  # Log-ratio -25: below the veto. Clamped to -20 it would be above -24 and pass.
  assert not corrected(x, Correction(veto=math.exp(-24))).mask[2].any()


def test_a_vetoed_row_has_no_surviving_token_but_keeps_its_weights():
  result = corrected(batch_with_ratios([[1e-5, 1.2, 1.0], [0.9, 1.0, None]]), Correction(veto=1e-4))
  np.testing.assert_array_equal(result.mask, padded([[False] * 3, [True, True, False]]))
  np.testing.assert_allclose(result.weight, padded([[1e-5, 1.2, 1.0], [0.9, 1.0, 0]]), rtol=1e-4)


# --- against the oracle ----------------------------------------------------------------------------------------------


def corrections():
  yield from (
    Correction(level=level, weight=weight, cap=1.5, floor=0.8, normalise=normalise)
    for level in (None, 'token', 'segment', 'sequence', 'geometric')
    for weight in ('truncate', 'clip', 'icepop')
    for normalise in (None, 'global', 'micro')
  )
  yield from (Correction(reject=(f'{o}={BOUNDS[o[-2:]]}',)) for o in REJECTIONS)
  yield Correction(reject=('token_k1=0.4:1.9', 'seq_max_k3=2.0', 'token_k2=0.6'))
  yield Correction(reject=('token_k1=0.5:1.5',), veto=0.3)
  yield from CORRECTIONS.values()
  yield from (correction for correction in ARMS.values() if correction is not None)


@pytest.mark.parametrize('s', list(dict.fromkeys(corrections())), ids=oracle.name)
def test_corrections_agree_with_the_oracle(s):
  x = oracle.batch(3)
  micro = np.array([0, 1, 0, 1, 4])
  expected = oracle.correct(x['old'], x['roll'], x['mask'], s, micro)
  got = corrected(x, s, micro)
  for name, value in expected.items():
    np.testing.assert_allclose(np.asarray(getattr(got, name), float), value, rtol=2e-5, atol=1e-6, err_msg=name)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.floats(0.0, 8.0), st.sampled_from(list(CORRECTIONS.values())))
def test_weights_are_finite_and_bounded_and_the_mask_only_shrinks(seed, spread, s):
  x = oracle.batch(seed, spread=spread)
  result = corrected(x, s)
  weight = np.asarray(result.applied)
  assert np.isfinite(np.asarray(result.weight)).all()
  assert (weight >= 0).all()
  assert (weight <= max(s.cap, 1) * (1 + 1e-6)).all()
  assert not (np.asarray(result.mask) & ~x['mask']).any()
  assert (weight[~x['mask']] == 0).all()


def test_a_row_does_not_depend_on_the_other_rows():
  x, other = oracle.batch(5), oracle.batch(6)
  mixed = {key: np.where(np.arange(5)[:, None] == 2, x[key], other[key]) for key in ('old', 'roll', 'mask')}
  for s in CORRECTIONS.values():
    s = replace(s, normalise=None)
    one, two = corrected(x, s), corrected(mixed, s)
    np.testing.assert_array_equal(one.weight[2], two.weight[2])
    np.testing.assert_array_equal(one.mask[2], two.mask[2])


@pytest.mark.parametrize('name', sorted(CORRECTIONS))
def test_equal_policies_have_weights_of_1_and_lose_no_token(name):
  x = oracle.batch(1)
  result = corrected(x | {'roll': x['old']}, CORRECTIONS[name], np.arange(len(x['old'])) // 2)
  np.testing.assert_array_equal(result.weight, x['mask'])
  np.testing.assert_array_equal(result.mask, x['mask'])


def test_weights_and_rejections_compile_with_static_settings():
  x = oracle.batch(4)
  s = replace(ARMS['sparse_rl_code'], reject=('seq_mean_k3=0.5', 'token_k2=1.0'))
  inputs = arguments(x, jnp.arange(len(x['old'])) // 2)
  compiled = jax.jit(both, static_argnums=0)(s, *inputs)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), compiled, both(s, *inputs))


def test_no_gradient_flows_through_weights():
  x = oracle.batch(2)
  logprobs = LogProbs(sampler=jnp.float32(x['roll']), old=jnp.float32(x['old']))

  def weights(logprobs):
    return weigh(logprobs, jnp.asarray(x['mask']), Correction(level='sequence', normalise='global')).weight.sum()

  for g in jax.tree.leaves(jax.grad(weights)(logprobs)):
    np.testing.assert_array_equal(g, 0)


# --- names -----------------------------------------------------------------------------------------------------------


def test_presets_are_the_published_settings():
  assert CORRECTIONS['token_is'] == Correction()
  assert ARMS['sparse_rl'] == Correction(cap=1.5, normalise='global', veto=1e-4)
  assert ARMS['sparse_rl_code'] == Correction(cap=1.5, normalise='micro', veto=1e-4, reject=('token_k1=0.5:1.5',))
  assert CORRECTIONS['slime'] == Correction(cap=2.0, floor=0.5, normalise='global', veto=1e-4)
  assert CORRECTIONS['pg_geo_rs_seq_tis'] == Correction(mode='bypass', level='sequence', reject=('seq_mean_k1=0.999:1.001',))
  assert CORRECTIONS['token_mis'] == Correction(cap=2.0, reject=('token_k1=0.5:2.0',))
