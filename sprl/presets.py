"""Settings of published methods by name: arms of Sparse-RL (config.arm) and presets (config.preset).

An experiment compares `ARMS` with each other (docs/methods/sparse.md, Arms). `CORRECTIONS` has corrections only. `RECIPES` has
whole methods, as settings by key (docs/methods/losses.md, Presets). `config.preset` accepts the names in `CORRECTIONS` and
`RECIPES`.

A name sets the choices that define its method, and refuses settings that contradict them. Model, data, learning rate, batch and
lengths stay the run's own.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sprl.config import Arm, Correction, Run, SettingsError

# --- arms -------------------------------------------------------------------------------------------------------------

_off, _token, _sequence = Correction(level=None), Correction(level='token'), Correction(level='sequence')
_reweighted = replace(_token, cap=1.5, normalise='global')

# Arm -> its correction; None: the arm leaves the correction to its settings. Every arm but `dense` evicts.
ARMS: dict[Arm, Correction | None] = {
  'dense': None,
  'naive': _off,
  'veto_only': replace(_off, veto=1e-4),
  'reweight_only': _reweighted,
  'sparse_rl': replace(_reweighted, veto=1e-4),  # as the paper (arXiv 2601.10079) describes it
  'sparse_rl_code': replace(_token, cap=1.5, normalise='micro', veto=1e-4, reject=('token_k1=0.5:1.5',)),  # as released
  'learner_mask': _off,  # nothing to correct: the learner's attention masks the tokens that the sampler evicted
}

# Arm -> other settings that belong to its method.
ARM_SETTINGS: dict[Arm, dict[str, Any]] = {
  'sparse_rl_code': {
    'cache.method': 'rkv',
    'cache.scope': 'global',
    'cache.rkv.mix': 0.1,
    'advantage.estimator': 'grpo',
    'loss.variant': 'ppo',
    'loss.aggregate': 'seq-mean-token-mean',
  }
}


def with_arm(run: Run, given: Collection[str] = ()) -> Run:
  """Return the run with the settings of its arm. A run with a preset has that preset's settings already.

  `given` are the keys that the user has set, as opposed to defaults.

  Raises SettingsError if a setting or the preset contradicts the arm.
  """
  if run.arm is None:
    return run
  if run.arm == 'dense':
    return replace(run, cache=replace(run.cache, budget=None))
  settings = _settings_of_arm(run)
  for key, value in _settings_of_preset(run).items():
    if settings.get(key, value) != value:
      of_preset = f'config.{key} = {value!r}, which config.preset = {run.preset!r} sets'
      raise SettingsError(f'config.arm = {run.arm!r}: expected None, or an arm with {of_preset}')
  run = _with(run, settings, f'config.arm = {run.arm!r}', given)
  shared = run.packing.share_prefix and not run.masked_learner  # samples evict different tokens of their prompt
  return replace(run, packing=replace(run.packing, share_prefix=shared))


def _settings_of_arm(run: Run) -> dict[str, Any]:
  if run.arm is None or (correction := ARMS[run.arm]) is None:
    return {}
  return _keys(correction) | ARM_SETTINGS.get(run.arm, {})


def with_task(run: Run) -> Run:
  """Return the run with the packing that its task needs: agents of one group may begin with different prompts."""
  if run.task.kind != 'agent':
    return run
  return replace(run, packing=replace(run.packing, share_prefix=False))


# --- corrections ------------------------------------------------------------------------------------------------------

_icepop = replace(_token, weight='icepop', floor=0.5, cap=5.0)


def _bypass(base: Correction) -> Correction:
  return replace(base, mode='bypass')


def _reject(base: Correction, rule: str) -> Correction:
  return replace(base, reject=(rule,))


def _geo(base: Correction) -> Correction:
  return _reject(base, 'seq_mean_k1=0.999:1.001')


def _k3(base: Correction) -> Correction:
  return _reject(base, 'seq_mean_k3=0.01')


# Origins: docs/methods/losses.md, Presets.
CORRECTIONS: dict[str, Correction] = {
  'disabled': _off,  # metrics only
  'token_is': _token,  # the default: token-level TIS
  'token_mis': _reject(_token, 'token_k1=0.5:2.0'),
  'seq_is': _sequence,
  'token_icepop': _icepop,
  'seq_is_rs': _reject(_sequence, 'seq_sum_k1=0.5:2.0'),  # Seq-MIS
  'geo_rs': _geo(_off),
  'geo_rs_seq_tis': _geo(_sequence),
  'geo_rs_token_tis': _geo(_token),
  'k3_rs': _k3(_off),
  'k3_rs_seq_tis': _k3(_sequence),
  'k3_rs_token_tis': _k3(_token),
  'ppo_clip': _bypass(_off),
  'ppo_clip_geo_rs': _bypass(_geo(_off)),
  'ppo_clip_k3_rs': _bypass(_k3(_off)),
  'pg_is': _bypass(_sequence),
  'pg_token_icepop': _bypass(_icepop),
  'pg_geo_rs': _bypass(_geo(_off)),
  'pg_geo_rs_seq_tis': _bypass(_geo(_sequence)),
  'pg_geo_rs_token_tis': _bypass(_geo(_token)),
  'seq_mask_tis': _reject(replace(_token, cap=1e9), 'seq_mean_k1=0.999:1.002'),  # NeMo-RL; S bounds rho below this cap
  'slime': replace(_token, normalise='global', veto=1e-4),
  'roll': replace(_token, cap=1.2),
  'areal': replace(_token, weight='icepop', floor=0.0, cap=5.0),  # AReaL, w above 5 becomes 0
  'areal_clamp': replace(_token, cap=5.0),  # AReaL, w above 5 becomes 5
}


# Beginning of a name -> the loss that its correction is made for. `reinforce` keeps its weight in bypass mode.
_LOSSES = {'pg_': 'reinforce', 'ppo_clip': 'ppo', 'areal': 'ppo'}


# --- recipes ----------------------------------------------------------------------------------------------------------

_DAPO = {  # arXiv 2503.14476: clip-higher, dynamic sampling, token-level loss, overlong reward shaping; no KL penalty
  'advantage.estimator': 'grpo',
  'advantage.overlong': 0.2,  # 4,096 of 20,480 tokens
  'loss.variant': 'ppo',
  'loss.clip_low': 0.2,
  'loss.clip_high': 0.28,
  'loss.aggregate': 'token-mean',
  'loss.kl_coef': 0.0,
  'rollout.equal_groups': 'replace',
  'optimizer.minibatches': 16,  # of 512 of 8,192 answers
}
_FP8_RL = _DAPO | {  # the recipe scripts of arXiv 2601.18150: DAPO with token-level TIS, one update a rollout batch
  'advantage.overlong': 0.025,  # 512 of 20,480 tokens
  'loss.dual_clip': 10.0,
  'correction.level': 'token',
  'correction.weight': 'truncate',
  'correction.cap': 2.0,
  'optimizer.minibatches': 1,
}

RECIPES: dict[str, dict[str, Any]] = {
  'dapo': _DAPO,
  'gspo': {  # arXiv 2507.18071: four updates a rollout batch; the variant's own clip range is the published one
    'advantage.estimator': 'grpo',
    'loss.variant': 'gspo',
    'loss.clip_low': 3e-4,
    'loss.clip_high': 4e-4,
    'loss.aggregate': 'seq-mean-token-mean',
    'optimizer.minibatches': 4,
  },
  'fp8_rl': _FP8_RL | {'quant.sampler': 'w8a8'},
  'fp8_rl_kv': _FP8_RL | {'quant.sampler': 'w8a8_kv8'},
  'fp8_rl_end_to_end': _FP8_RL | {'quant.sampler': 'w8a8', 'quant.learner': 'w8a8'},
  'fp8_rl_mis': _FP8_RL | {'quant.sampler': 'w8a8', 'correction.reject': ('token_k1=0.5:2.0',)},
}


def settings_of(name: str) -> dict[str, Any]:
  """Return the settings of a preset by key.

  Raises SettingsError, which lists the known names, if the name is unknown.
  """
  if name in RECIPES:
    return RECIPES[name]
  if name not in CORRECTIONS:
    raise SettingsError(f'config.preset = {name!r}: expected one of {", ".join([*RECIPES, *CORRECTIONS])}')
  return _keys(CORRECTIONS[name]) | next(
    ({'loss.variant': loss} for start, loss in _LOSSES.items() if name.startswith(start)), {}
  )


def sources(run: Run) -> dict[str, str]:
  """Return the keys that the run's preset and arm set, each with the setting that sets it, such as `config.arm = 'sparse_rl'`."""
  named = (
    (_settings_of_arm(run), f'config.arm = {run.arm!r}'),
    (_settings_of_preset(run), f'config.preset = {run.preset!r}'),
  )
  keys = {key for settings, _ in named for key in settings}
  return {key: ' and '.join(name for settings, name in named if key in settings) for key in keys}


def _settings_of_preset(run: Run) -> dict[str, Any]:
  return {} if run.preset is None else settings_of(run.preset)


def with_preset(run: Run, given: Collection[str] = ()) -> Run:
  """Return the run with the settings of its preset.

  Raises SettingsError if a setting that the preset sets has another value that is in `given`, or is not its default.
  """
  return _with(run, _settings_of_preset(run), f'config.preset = {run.preset!r}', given)


# --- settings by key --------------------------------------------------------------------------------------------------


def _keys(correction: Correction) -> dict[str, Any]:
  return {f'correction.{f.name}': getattr(correction, f.name) for f in dataclasses.fields(correction)}


def _with(run: Run, settings: dict[str, Any], source: str, given: Collection[str]) -> Run:
  """Return the run with these settings. `source` names the arm or preset, for the error.

  Raises SettingsError if a setting has another value that is in `given`, or is not its default.
  """
  for key, value in settings.items():
    found, default = _get(run, key), _get(Run(), key)
    if found != value and (found != default or key in given):
      raise SettingsError(f'config.{key} = {found!r}: expected {value!r}, which {source} sets')
    run = _set(run, key.split('.'), value)
  return run


def _get(section: Any, key: str) -> Any:
  for part in key.split('.'):
    section = getattr(section, part)
  return section


def _set(section: Any, path: list[str], value: Any) -> Any:
  first, *rest = path
  return replace(section, **{first: _set(getattr(section, first), rest, value) if rest else value})
