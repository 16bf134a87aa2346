"""Presets: each is accepted, sets what its paper states, and refuses settings that contradict it."""

import pytest

from sprl.api.settings import resolved
from sprl.config import Correction, Rollout, Run, SettingsError, default_config, to_dict
from sprl.config_reader import resolve
from sprl.presets import ARMS, CORRECTIONS, RECIPES, settings_of, with_preset

MODEL = {'path': 'x'}


@pytest.mark.parametrize('name', [*RECIPES, *CORRECTIONS])
def test_a_preset_is_accepted_and_sets_every_setting_that_it_names(name):
  run = resolve({'preset': name, 'model': MODEL, 'cache': {'budget': 64}})
  assert resolve(to_dict(run)) == run
  for key, value in settings_of(name).items():
    section, setting = key.split('.')
    assert getattr(getattr(run, section), setting) == value, key


def test_dapo_has_the_published_choices():
  run = resolve({'preset': 'dapo', 'model': MODEL})
  assert (run.loss.clip_low, run.loss.clip_high, run.loss.aggregate, run.loss.kl_coef) == (0.2, 0.28, 'token-mean', 0)
  assert run.rollout.equal_groups == 'replace'
  assert run.advantage.overlong * 20_480 == 4096
  assert run.optimizer.updates == 512 * 16 // 512


def test_gspo_has_the_published_clip_range_and_four_updates_a_batch():
  run = resolve({'preset': 'gspo', 'model': MODEL})
  assert (run.loss.variant, run.loss.clip_low, run.loss.clip_high) == ('gspo', 3e-4, 4e-4)
  assert run.optimizer.updates == 4


def test_fp8_rl_is_dapo_with_fp8_rollouts_and_a_token_correction():
  own = {'advantage.overlong': 512 / 20_480, 'loss.dual_clip': 10.0, 'optimizer.minibatches': 1}
  dapo = settings_of('dapo') | own
  for name, sampler, learner, reject in (
    ('fp8_rl', 'w8a8', 'none', ()),
    ('fp8_rl_kv', 'w8a8_kv8', 'none', ()),
    ('fp8_rl_end_to_end', 'w8a8', 'w8a8', ()),
    ('fp8_rl_mis', 'w8a8', 'none', ('token_k1=0.5:2.0',)),
  ):
    run = resolve({'preset': name, 'model': MODEL})
    assert settings_of(name).items() >= dapo.items()
    assert (run.quant.sampler, run.quant.learner) == (sampler, learner)
    assert run.correction == Correction(level='token', weight='truncate', cap=2.0, reject=reject)


def refusal(given):
  try:
    resolve(given)
  except SettingsError as error:
    return str(error)
  return None


# An arm that sets the correction goes with recipes that set none. `naive` and `learner_mask` only turn it off.
WITH_ARM = {
  'dense': (*RECIPES, *CORRECTIONS),
  'naive': ('dapo', 'gspo', 'disabled'),
  'learner_mask': ('dapo', 'gspo', 'disabled'),
  'veto_only': ('dapo', 'gspo'),
  'reweight_only': ('dapo', 'gspo'),
  'sparse_rl': ('dapo', 'gspo'),
  'sparse_rl_code': (),
}


def of_arm(arm, name):
  return {'preset': name, 'arm': arm, 'model': MODEL, 'cache': {'budget': 256}}


@pytest.mark.parametrize(('arm', 'name'), [(arm, name) for arm, names in WITH_ARM.items() for name in names])
def test_an_arm_keeps_the_settings_of_a_preset(arm, name):
  run = resolve(of_arm(arm, name))
  for key, value in settings_of(name).items():
    section, setting = key.split('.')
    assert getattr(getattr(run, section), setting) == value, key
  assert resolve(to_dict(run)) == run


@pytest.mark.parametrize('arm', ARMS)
def test_an_arm_refuses_a_preset_that_contradicts_it(arm):
  for name in {*RECIPES, *CORRECTIONS}.difference(WITH_ARM[arm]):
    reason = refusal(of_arm(arm, name))
    assert reason is not None, name
    assert f'config.preset = {name!r}' in reason or 'config.arm = None' in reason


def test_an_arm_is_no_preset():
  with pytest.raises(SettingsError, match=r"config\.preset = 'learner_mask': expected one of dapo"):
    resolve({'preset': 'learner_mask', 'model': MODEL, 'cache': {'budget': 64}})


@pytest.mark.parametrize(('name', 'variant'), [('ppo_clip', 'reinforce'), ('areal', 'reinforce'), ('pg_is', 'gspo')])
def test_a_correction_is_refused_with_a_loss_that_it_is_not_made_for(name, variant):
  with pytest.raises(SettingsError, match=r'config\.loss\.variant'):
    resolve({'preset': name, 'model': MODEL, 'cache': {'budget': 64}, 'loss': {'variant': variant}})


def test_a_preset_leaves_other_settings_to_the_run():
  run = resolve({'preset': 'dapo', 'model': MODEL, 'rollout': {'group': 16}, 'optimizer': {'learning_rate': 1e-5}})
  assert (run.rollout.group, run.optimizer.learning_rate) == (16, 1e-5)


def test_a_setting_that_contradicts_its_preset_is_refused():
  with pytest.raises(SettingsError, match=r"config\.loss\.clip_high = 0\.3: expected 0\.28, which config\.preset = 'dapo' sets"):
    resolve({'preset': 'dapo', 'model': MODEL, 'loss': {'clip_high': 0.3}})


@pytest.mark.parametrize(
  ('name', 'key', 'value'),
  [
    ('fp8_rl', 'quant.sampler', 'none'),
    ('dapo', 'rollout.equal_groups', 'train'),
    ('dapo', 'optimizer.minibatches', 1),
    ('token_is', 'correction.weight', 'icepop'),
  ],
)
def test_a_preset_changes_no_setting_that_the_user_has_set_even_to_its_default(name, key, value):
  section, setting = key.split('.')
  with pytest.raises(SettingsError, match=rf'config\.{key} = {value!r}: expected .* config\.preset = {name!r} sets'):
    resolved({'preset': name, 'model': MODEL, section: {setting: value}})
  config = default_config()
  config.preset, config.model.path = name, 'x'
  assert resolve(config).preset == name  # a file has a value for every setting
  config[section][setting] = value
  with pytest.raises(SettingsError, match=rf'config\.{key}'):
    resolve(config, {key})


def test_an_arm_changes_no_correction_that_the_user_has_set_even_to_its_default():
  with pytest.raises(SettingsError, match=r"config\.correction\.cap = 2\.0: expected 1\.5, which config\.arm = 'sparse_rl' sets"):
    resolved({'arm': 'sparse_rl', 'model': MODEL, 'cache': {'budget': 64}, 'correction': {'cap': 2.0}})


def test_an_unknown_preset_is_refused_with_the_known_ones():
  with pytest.raises(SettingsError, match=r"config\.preset = 'dpo': expected one of dapo, gspo.*token_mis"):
    resolve({'preset': 'dpo', 'model': MODEL})


def test_without_a_preset_nothing_changes():
  run = Run(rollout=Rollout(group=3))
  assert with_preset(run) is run
