"""Settings of correction and loss: combinations that contradict each other are refused by name and value."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Cache, Correction, Loss, ModelSettings, Optimizer, Quant, Rollout, Run, SettingsError, Tis
from sprl.config_checks import BEHAVIOUR_LOSSES, REJECTIONS, rejection_bounds, validate
from sprl.config_reader import resolve
from sprl.objective.losses import VARIANTS, token_loss
from sprl.presets import CORRECTIONS
from sprl.types import LogProbs

DEFAULT = Correction()


def run_with(correction=DEFAULT, variant='ppo', ahead=0.0, **changes):
  """Return a run with a model, rollouts that evict, and these settings."""
  sections = {'loss': Loss(variant=variant), 'model': ModelSettings(path='x'), 'cache': Cache(budget=64)} | changes
  return Run(correction=correction, rollout=Rollout(async_ratio=ahead), **sections)


def refuses(key, value, *arguments, **changes):
  with pytest.raises(SettingsError) as error:
    validate(run_with(*arguments, **changes))
  assert str(error.value).startswith(f'config.{key} = {value!r}: expected '), error.value
  return str(error.value)


BYPASS = Correction(mode='bypass', level=None)


@pytest.mark.parametrize('name', CORRECTIONS)
def test_presets_of_corrections_are_accepted(name):
  validate(run_with(CORRECTIONS[name], 'reinforce' if name.startswith('pg_') else 'ppo'))


# --- rejections -------------------------------------------------------------------------------------------------------


def test_bounds_of_rejections_are_read_from_the_rules():
  rules = ('token_k1=0.6:1.6', 'seq_sum_k1=4', 'seq_mean_k3=0.01')
  assert rejection_bounds(Correction(reject=rules)) == {
    'token_k1': (0.6, 1.6),
    'seq_sum_k1': (0.25, 4.0),
    'seq_mean_k3': (0.0, 0.01),
  }
  assert rejection_bounds(Correction()) == {}


def test_an_unknown_rejection_is_refused_with_the_known_ones():
  message = refuses('correction.reject', ('seq_max_k1=1.1',), Correction(reject=('seq_max_k1=1.1',)))
  assert all(name in message for name in REJECTIONS)


@pytest.mark.parametrize(
  'rules',
  [
    ('token_k1',),
    ('token_k1=',),
    ('token_k1=two',),
    ('token_k1=2.0:0.5',),
    ('token_k1=0.5:1.0:2.0',),
    ('token_k1=0.9',),
    ('token_k1=nan',),
    ('token_k1=-1:2',),
    ('seq_mean_k3=0.5:2.0',),
    ('seq_mean_k3=-0.1',),
    ('token_k2=0.1', 'token_k2=0.2'),
  ],
)
def test_bounds_that_cannot_be_read_are_refused(rules):
  refuses('correction.reject', rules, Correction(reject=rules))


# --- combinations -----------------------------------------------------------------------------------------------------


def test_bounds_that_contradict_each_other_are_refused():
  assert 'config.correction.cap = 2.0' in refuses('correction.floor', 3.0, Correction(weight='icepop', floor=3.0, cap=2.0))
  validate(run_with(Correction(floor=3.0, cap=2.0)))  # truncation has no floor
  assert 'config.loss.tis.high = 1.0' in refuses('loss.tis.low', 2.0, loss=Loss(tis=Tis(low=2.0)))


def test_clip_low_leaves_ratios_a_lower_bound():
  refuses('loss.clip_low', 1.0, loss=Loss(clip_low=1.0))


def test_losses_that_bound_the_ratio_to_the_sampler_need_bypass_mode():
  """In decoupled mode all three would be the weight times REINFORCE, as the ratio to the old policy is 1 or nearly so."""
  for variant in ('tis', 'topr', 'cispo'):
    for optimizer in (Optimizer(), Optimizer(minibatches=4)):
      message = refuses('correction.mode', 'decoupled', variant=variant, optimizer=optimizer)
      assert "'bypass' (and config.correction.level = None)" in message
    validate(run_with(BYPASS, variant))


def test_the_error_of_a_behaviour_loss_names_an_arm_in_its_way():
  with pytest.raises(SettingsError, match=r'config\.correction\.level = None and config\.arm = None'):
    resolve({'model': {'path': 'x'}, 'arm': 'naive', 'cache': {'budget': 64}, 'loss': {'variant': 'topr'}})


@pytest.mark.parametrize('variant', ['gspo', 'segment', 'kimi15', 'dppo_kl'])
def test_a_loss_whose_ratio_would_always_be_1_is_refused(variant):
  assert "config.correction.mode = 'bypass'" in refuses('optimizer.minibatches', 1, variant=variant)
  validate(run_with(variant=variant, optimizer=Optimizer(minibatches=2)))
  validate(run_with(variant=variant, optimizer=Optimizer(epochs=2)))
  validate(run_with(BYPASS, variant))
  assert 'run ahead' in refuses('optimizer.minibatches', 1, BYPASS, variant, cache=Cache())  # sampler and learner are equal
  for differs in ({'ahead': 1.0}, {'quant': Quant(sampler='w8a8')}, {'optimizer': Optimizer(epochs=2)}):
    validate(run_with(BYPASS, variant, **{'cache': Cache(), **differs}))
  validate(run_with(variant='ppo'))  # with one update it is the plain policy gradient, which is what it is for


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('name', ['clip_low', 'clip_high', 'dual_clip'])
def test_a_bound_is_refused_by_a_loss_that_does_not_change_with_it(variant, name):
  """Ratios are 1/3 and 3 under advantages of both signs. Other bounds than None then change every loss that reads them."""
  value = 1.5 if name == 'dual_clip' else 0.01
  loss = Loss(variant=variant, **{name: value})
  log_r, A = jnp.log(jnp.array([[3.0], [1 / 3], [3.0], [1 / 3]])), jnp.array([[1.0], [1.0], [-1.0], [-1.0]])
  current = jnp.full((4, 1), -2.0)
  logprobs = LogProbs(sampler=current - log_r, current=current)
  ones, mask = jnp.ones((4, 1)), jnp.ones((4, 1), bool)

  def losses(s):
    return np.array(token_loss(logprobs, s, 'bypass', advantage=A, reward=jnp.zeros(4), weight=ones, mask=mask)[0])

  if np.array_equal(losses(loss), losses(Loss(variant=variant))):
    assert f'config.loss.variant = {variant!r}' in refuses(f'loss.{name}', value, BYPASS, loss=loss)
  else:
    validate(run_with(BYPASS, loss=loss))


def test_an_estimator_without_a_kl_term_is_refused():
  assert 'config.loss.kl_coef = 0' in refuses('loss.kl_estimator', 'k2', loss=Loss(kl_estimator='k2'))
  validate(run_with(loss=Loss(kl_estimator='k2', kl_coef=0.1)))


@pytest.mark.parametrize(
  ('name', 'value'), [('weight', 'clip'), ('weight', 'icepop'), ('normalise', 'global'), ('normalise', 'micro')]
)
def test_settings_of_a_weight_are_refused_without_one(name, value):
  changes = {name: value}
  for correction, variant in ((Correction(level=None, **changes), 'ppo'), (dataclasses.replace(BYPASS, **changes), 'reinforce')):
    assert 'config.correction.level = None' in refuses(f'correction.{name}', value, correction, variant)
  validate(run_with(Correction(level='token', **changes)))


def test_k1_is_refused_as_a_loss():
  with pytest.raises(SettingsError, match=r"config\.loss\.kl_estimator = 'k1': expected one of 'k2', 'k3'"):
    resolve({'model': {'path': 'x'}, 'loss': {'kl_coef': 0.1, 'kl_estimator': 'k1'}})


@pytest.mark.parametrize('variant', VARIANTS)
def test_bypass_has_either_a_weight_or_a_ratio(variant):
  weighted = dataclasses.replace(BYPASS, level='token')
  validate(run_with(BYPASS, variant))
  if variant == 'reinforce':
    validate(run_with(weighted, variant))
    refuses('correction.normalise', 'global', dataclasses.replace(weighted, normalise='global'), variant)
    validate(run_with(dataclasses.replace(weighted, normalise='micro'), variant))
  else:
    assert f'config.loss.variant = {variant!r}' in refuses('correction.level', 'token', weighted, variant)


@pytest.mark.parametrize(
  ('correction', 'variant'),
  [
    (Correction(level=None), 'ppo'),
    (Correction(level=None, veto=0.9), 'ppo'),
    (Correction(level=None, reject=('token_k1=2.0',)), 'ppo'),
    (Correction(level=None), 'reinforce'),
    (BYPASS, 'reinforce'),
  ],
)
def test_rollouts_that_run_ahead_uncorrected_are_refused(correction, variant):
  """Otherwise they drift from the learner until a guard stops the run."""
  validate(run_with(correction, variant))
  assert 'config.rollout.async_ratio = 1.0' in refuses('correction.level', None, correction, variant, ahead=1.0)


@pytest.mark.parametrize('variant', VARIANTS)
def test_rollouts_may_run_ahead_of_a_weight_or_a_ratio(variant):
  if variant not in BEHAVIOUR_LOSSES:
    validate(run_with(Correction(), variant, ahead=1.0, optimizer=Optimizer(minibatches=2)))
  bypass = dataclasses.replace(BYPASS, level='token' if variant == 'reinforce' else None)
  validate(run_with(bypass, variant, ahead=1.0))


def test_old_routes_need_the_scoring_pass_of_the_old_policy():
  validate(run_with(model=ModelSettings(path='x', router_replay='R2')))
  validate(run_with(BYPASS, model=ModelSettings(path='x', router_replay='R3')))
  refuses('model.router_replay', 'R2', BYPASS, model=ModelSettings(path='x', router_replay='R2'))
