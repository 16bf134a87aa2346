import dataclasses

import pytest

from sprl.objective.correction import PRESETS
from sprl.objective.losses import VARIANTS
from sprl.settings import (
  REJECT_OPTIONS,
  Advantage,
  Correction,
  Loss,
  Model,
  Rollout,
  Run,
  SettingsError,
  check_objective,
  rejection_bounds,
)


def test_defaults_and_presets_are_honoured():
  check_objective(Run())
  for name, correction in PRESETS.items():
    check_objective(Run(correction=correction, loss=Loss(variant='reinforce' if name.startswith('pg_') else 'ppo')))


def test_bounds_are_read():
  correction = Correction(reject=('token_k1', 'seq_sum_k1', 'seq_mean_k3'), reject_bounds=('0.6_1.6', '4', '0.01'))
  assert rejection_bounds(correction) == {'token_k1': (0.6, 1.6), 'seq_sum_k1': (0.25, 4.0), 'seq_mean_k3': (0.0, 0.01)}
  one_for_all = Correction(reject=('seq_sum_k2', 'seq_max_k2'), reject_bounds=('2.5',))
  assert rejection_bounds(one_for_all) == {'seq_sum_k2': (0.0, 2.5), 'seq_max_k2': (0.0, 2.5)}
  assert rejection_bounds(Correction()) == {}


def test_an_unknown_option_is_refused_with_the_list_of_those_known():
  with pytest.raises(SettingsError, match="'seq_max_k1'") as error:
    rejection_bounds(Correction(reject=('seq_max_k1',), reject_bounds=('1.1',)))
  assert all(option in str(error.value) for option in REJECT_OPTIONS)


@pytest.mark.parametrize(
  ('reject', 'bounds', 'says'),
  [
    (('token_k1',), (), 'reject_bounds'),
    ((), ('2.0',), 'reject_bounds'),
    (('token_k1', 'token_k2', 'token_k3'), ('2.0', '0.1'), '3 in correction.reject'),
    (('token_k1',), ('two',), "'two'"),
    (('token_k1',), ('2.0_0.5',), 'low <= high'),
    (('token_k1',), ('0.5_1.0_2.0',), 'low_high'),
    (('token_k1',), ('0.9',), 'at least 1'),
    (('token_k1',), ('nan',), 'nan'),
    (('token_k1',), ('-1_2',), 'low'),
    (('seq_mean_k3',), ('0.5_2.0',), 'one number'),
    (('seq_mean_k3',), ('-0.1',), 'one number'),
    (('token_k2', 'token_k2'), ('0.1', '0.2'), 'twice'),
  ],
)
def test_bounds_that_cannot_be_honoured_are_refused(reject, bounds, says):
  with pytest.raises(SettingsError, match=says):
    check_objective(Run(correction=Correction(reject=reject, reject_bounds=bounds)))


@pytest.mark.parametrize(
  ('section', 'key'),
  [
    (Rollout(group=1), 'rollout.group'),
    (Advantage(epsilon=-1.0), 'advantage.epsilon'),
    (Advantage(clip=float('nan')), 'advantage.clip'),
    (Correction(cap=0.0), 'correction.cap'),
    (Correction(cap=float('inf')), 'correction.cap'),
    (Correction(weight='icepop', floor=3.0, cap=2.0), 'correction.floor'),
    (Correction(mask_low=2.0), 'correction.mask_low'),
    (Correction(veto=1.0), 'correction.veto'),
    (Correction(veto=-1e-4), 'correction.veto'),
    (Correction(max_sequence_error=0.5), 'correction.max_sequence_error'),
    (Correction(max_prob_diff=1.5), 'correction.max_prob_diff'),
    (Correction(mode='bypass'), 'correction.level'),
    (Loss(clip_low=1.0), 'loss.clip_low'),
    (Loss(dual_clip=0.5), 'loss.dual_clip'),
    (Loss(variant='tis', tis_low=2.0), 'loss.tis_low'),
    (Loss(dppo_delta=0.0), 'loss.dppo_delta'),
    (Loss(kl_clip=0.0), 'loss.kl_clip'),
    (Loss(kl_coef=-1.0), 'loss.kl_coef'),
  ],
  ids=lambda x: x if isinstance(x, str) else '',
)
def test_what_cannot_be_honoured_is_refused_by_name_and_value(section, key):
  run = Run(**{key.split('.')[0]: section})
  value = getattr(section, key.split('.')[1])
  with pytest.raises(SettingsError, match=f'^{key} = ') as error:
    check_objective(run)
  assert repr(value) in str(error.value)
  assert 'expected' in str(error.value)


def test_combinations():
  bypass = Correction(mode='bypass', level='off')
  check_objective(Run(correction=bypass))
  check_objective(Run(correction=dataclasses.replace(bypass, level='token'), loss=Loss(variant='reinforce')))
  check_objective(Run(loss=Loss(variant='cispo', clip_low=1.0)))  # canonical CISPO has no lower side
  check_objective(Run(rollout=Rollout(group=1), advantage=Advantage('reinforce')))
  check_objective(Run(correction=Correction(floor=3.0, cap=2.0)))  # truncation has no floor
  with pytest.raises(SettingsError, match=r'loss\.variant.*decoupled_ppo'):
    check_objective(Run(correction=bypass, loss=Loss(variant='decoupled_ppo')))


AHEAD = Rollout(async_ratio=1.0)


@pytest.mark.parametrize(
  ('correction', 'variant', 'key'),
  [
    (Correction(level='off'), 'ppo', 'correction.level'),
    (Correction(level='off', veto=0.9), 'decoupled_ppo', 'correction.level'),
    (Correction(level='off', reject=('token_k1',), reject_bounds=('2.0',), token_mask=True), 'gspo', 'correction.level'),
    (Correction(level='off'), 'vanilla', 'correction.level'),
    (Correction(mode='bypass', level='off'), 'vanilla', 'loss.variant'),
    (Correction(mode='bypass', level='off'), 'reinforce', 'correction.level'),
  ],
)
def test_rollouts_that_run_ahead_with_nothing_to_correct_for_it_are_refused(correction, variant, key):
  """async_rollouts 12.1: known before the run, which the sentinel would stop at its second step."""
  loss = Loss(variant=variant)
  check_objective(Run(correction=correction, loss=loss))
  with pytest.raises(SettingsError, match=rf'^{key} = .*rollout\.async_ratio = 1\.0') as error:
    check_objective(Run(correction=correction, loss=loss, rollout=AHEAD))
  assert 'nothing' in str(error.value)


def test_rollouts_may_run_ahead_of_a_weight_or_of_a_ratio_to_the_sampler():
  for variant in VARIANTS:
    check_objective(Run(loss=Loss(variant=variant), rollout=AHEAD))  # a weight
    bypass = Correction(mode='bypass', level='token' if variant == 'reinforce' else 'off')
    if variant not in ('vanilla', 'decoupled_ppo'):
      check_objective(Run(correction=bypass, loss=Loss(variant=variant), rollout=AHEAD))


def test_the_old_policy_s_routes_need_its_scoring_pass():
  bypass, r2 = Correction(mode='bypass', level='off'), Model(path='x', router_replay='R2')
  check_objective(Run(model=r2))
  check_objective(Run(model=dataclasses.replace(r2, router_replay='R3'), correction=bypass))
  with pytest.raises(
    SettingsError, match=r"model.router_replay = 'R2': expected 'none' or 'R3' under correction.mode = 'bypass'"
  ):
    check_objective(Run(model=r2, correction=bypass))
