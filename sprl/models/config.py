"""Sizes and variants of a model, read from a Hugging Face config.json. Features that the network does not compute are errors.

One network covers all families of sprl/models/families.py. Their config.json files share most keys. Both the keys of transformers
4 (`rope_theta`, `rope_scaling`, `num_experts`) and of transformers 5 (`rope_parameters`, `num_local_experts`) are read.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from sprl.kernels.rope import Rope
from sprl.models.families import FAMILIES, REFUSED, Activation, Family, Norms, QKNorm

ARCHITECTURES: dict[Family, str] = {family: traits.architecture for family, traits in FAMILIES.items()}

# Keys that change the computation, each with the only value that the network supports.
_ONLY = {
  'attention_bias': False,
  'mlp_bias': False,
  'use_sliding_window': False,
  'quantization_config': None,
  'partial_rotary_factor': 1.0,
  'attn_logit_softcapping': None,
  'final_logit_softcapping': None,
  'use_bidirectional_attention': False,
}
_ACTIVATIONS = {'silu': ('hidden_act', 'silu'), 'gelu_tanh': ('hidden_activation', 'gelu_pytorch_tanh')}  # key, its only value
MOST_LAYERS, MOST_EXPERTS = 1000, 1024  # larger numbers are damage; the table of a model's tensors has a row for each expert
_ROPE_KEYS = {
  'factor': 'factor',
  'original_max_position_embeddings': 'original_positions',
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'beta_fast': 'beta_fast',
  'beta_slow': 'beta_slow',
  'truncate': 'truncate',
  'attention_factor': 'attention_factor',
  'mscale': 'mscale',
  'mscale_all_dim': 'mscale_all_dim',
}
_ROPE_REQUIRED = {
  'default': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor'),
  'yarn': ('factor',),
}


class ConfigError(ValueError):
  """A config.json that the network does not support. The message names the key, its value and the accepted values."""


@dataclass(frozen=True)
class Experts:
  """The sizes of a model's mixtures of experts."""

  count: int  # X
  per_token: int  # experts that a token uses
  width: int  # F of an expert
  normalised: bool  # the gates of the chosen experts sum to 1; else they are the router's probabilities among all experts
  layers: tuple[int, ...]  # layers with experts instead of an MLP
  shared_width: int = 0  # F of the shared expert, which every token uses; 0: none


@dataclass(frozen=True)
class ModelConfig:
  """A decoder's sizes and variants. It is hashable, so it can be a static argument of jit. Equality ignores `raw`."""

  family: Family
  vocab_size: int  # V
  hidden_size: int  # E
  intermediate_size: int  # F of layers without experts
  num_layers: int  # L
  num_heads: int  # H
  num_kv_heads: int  # K
  head_dim: int  # D, not always E/H
  rms_norm_eps: float
  tie_embeddings: bool  # the head is the transposed embedding
  norms: Norms  # RMS norms before attention and MLP, after them, or both
  norm_offset: float  # added to the scale of every RMS norm
  qkv_bias: bool
  qk_norm: QKNorm | None  # RMS norm before the rotation: over each head of q and k, or over all heads together
  activation: Activation  # of the MLP's gate
  embed_scale: float  # factor of the embeddings
  query_scale: float  # factor of the rotated queries, beside attention's own 1 / sqrt(D)
  experts: Experts | None
  rope: Rope  # of layers that see all tokens
  sliding_rope: Rope  # of layers with a sliding window
  sliding_windows: tuple[int | None, ...]  # of each layer: the newest tokens that a query sees; None: all; (): no layer has one
  max_positions: int
  eos_token_ids: tuple[int, ...]
  bos_token_id: int | None
  pad_token_id: int | None
  raw: Mapping[str, Any] = field(compare=False, repr=False)  # config.json as read, for exports

  @classmethod
  def from_json(cls, raw: Mapping[str, Any]) -> 'ModelConfig':
    """Return the config described by the dictionary of a config.json.

    Raises ConfigError for an unknown architecture or rope type, a missing or impossible size, or an unsupported feature.
    """
    family = _family(raw)
    for key, accepted in _ONLY.items():
      if raw.get(key, accepted) not in (accepted, None):
        raise ConfigError(f'config.json: {key} = {raw[key]!r} is not supported; accepted: {json.dumps(accepted)}')
    traits = FAMILIES[family]
    key, accepted = _ACTIVATIONS[traits.activation]
    if raw.get(key, accepted) not in (accepted, None):
      raise ConfigError(f'config.json: {key} = {raw[key]!r} is not supported; accepted: {json.dumps(accepted)}')

    hidden_size, num_heads = _size(raw, 'hidden_size'), _size(raw, 'num_attention_heads')
    if raw.get('head_dim') is None and traits.head_dim is None and hidden_size % num_heads:
      raise ConfigError(f'config.json: hidden_size = {hidden_size}; accepted: a multiple of num_attention_heads = {num_heads}')
    head_dim = _size(raw, 'head_dim', traits.head_dim or hidden_size // num_heads)
    rope, sliding_rope = _ropes(raw, family)
    config = cls(
      family=family,
      vocab_size=_size(raw, 'vocab_size'),
      hidden_size=hidden_size,
      intermediate_size=_size(raw, 'intermediate_size'),
      num_layers=_size(raw, 'num_hidden_layers', most=MOST_LAYERS),
      num_heads=num_heads,
      num_kv_heads=_size(raw, 'num_key_value_heads', num_heads),
      head_dim=head_dim,
      rms_norm_eps=_positive('rms_norm_eps', raw.get('rms_norm_eps', traits.rms_norm_eps)),
      tie_embeddings=_flag(raw, 'tie_word_embeddings', traits.tie_word_embeddings),
      norms=traits.norms,
      norm_offset=traits.norm_offset,
      qkv_bias=_flag(raw, 'qkv_bias', True) if family == 'qwen2_moe' else traits.qkv_bias,
      qk_norm=traits.qk_norm,
      activation=traits.activation,
      embed_scale=math.sqrt(hidden_size) if traits.scaled_embeddings else 1.0,
      query_scale=_query_scale(raw, head_dim) if family == 'gemma3_text' else 1.0,
      experts=_experts(raw, family),
      rope=rope,
      sliding_rope=sliding_rope,
      sliding_windows=_sliding_windows(raw, family),
      max_positions=_size(raw, 'max_position_embeddings'),
      eos_token_ids=as_ids(raw.get('eos_token_id')),
      bos_token_id=_id(raw, 'bos_token_id'),
      pad_token_id=_id(raw, 'pad_token_id'),
      raw=dict(raw),
    )
    if num_heads % config.num_kv_heads:
      raise ConfigError(
        f'config.json: num_key_value_heads = {config.num_kv_heads}; accepted: a divisor of num_attention_heads = {num_heads}'
      )
    if config.head_dim % 2:
      raise ConfigError(f'config.json: head_dim = {config.head_dim}; accepted: an even number, which rotary embeddings need')
    return config

  def sliding_window(self, layer: int) -> int | None:
    """Return the newest tokens that a query of the layer sees, its own included; None: all tokens."""
    return self.sliding_windows[layer] if self.sliding_windows else None

  @classmethod
  def read(cls, folder: str | Path) -> 'ModelConfig':
    """Return the config of a Hugging Face folder.

    Raises ConfigError as `from_json`, if the file is missing or is not JSON, and if it has the settings of a run.
    """
    path = Path(folder) / 'config.json'
    try:
      raw = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
      raise ConfigError(f'{path}: no such file; a Hugging Face model folder has a config.json') from None
    except (ValueError, RecursionError) as error:
      raise ConfigError(f'{path}: not JSON ({error})') from None
    if not isinstance(raw, dict):
      raise ConfigError(f'{path}: not a JSON object')
    if 'model_type' not in raw and {'model', 'task', 'sampling'} <= raw.keys():  # the settings of a run
      raise ConfigError(
        f'config.model.path = {str(folder)!r}: the work directory of a run; expected a Hugging Face folder: export the run with '
        f'python -m sprl.export --workdir={folder} --out=FOLDER, or start a run from its weights with --from={folder}'
      )
    return cls.from_json(raw)


def tiny(family: Family, **changes: Any) -> ModelConfig:
  """Return a small config for tests. `changes` are keys of config.json, as in `tiny('llama', num_hidden_layers=3)`."""
  raw = {
    'architectures': [ARCHITECTURES[family]],
    'model_type': family,
    'vocab_size': 259,  # 3 special tokens and 256 bytes, as in `sprl.io.tokenizer.write_tiny`
    'hidden_size': 64,
    'intermediate_size': 96,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 24 if FAMILIES[family].qk_norm == 'head' else 16,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 10_000.0,
    'rope_scaling': None,
    'max_position_embeddings': 512,
    'tie_word_embeddings': family == 'qwen2',
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
  }
  if family.endswith('_moe'):
    raw |= {'num_experts': 6, 'num_experts_per_tok': 2, 'moe_intermediate_size': 40, 'norm_topk_prob': family == 'qwen3_moe'}
    raw |= {'decoder_sparse_step': 1, 'mlp_only_layers': []}
  if family == 'qwen2_moe':
    raw |= {'shared_expert_intermediate_size': 48, 'qkv_bias': True}
  if family == 'mistral':
    raw |= {'sliding_window': 6}
  if family == 'gemma3_text':
    del raw['hidden_act']
    raw |= {'hidden_activation': 'gelu_pytorch_tanh', 'query_pre_attn_scalar': 20, 'tie_word_embeddings': True}
    raw |= {'num_hidden_layers': 3, 'sliding_window': 6, 'sliding_window_pattern': 3, 'rope_local_base_freq': 1_000.0}
  if unknown := set(changes) - set(raw) - set(_ONLY) - {'rope_parameters', 'layer_types'}:
    raise ConfigError(f'tiny: {sorted(unknown)} are not keys of config.json; accepted: {sorted(raw)}')
  return ModelConfig.from_json(raw | changes)


def as_ids(value: Any) -> tuple[int, ...]:
  """Return the token ids of a field that is null, a number or a list of numbers. Raises ConfigError for anything else."""
  ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
  if not all(_is_int(i) and i >= 0 for i in ids):
    raise ConfigError(f'eos_token_id or pad_token_id = {value!r}; accepted: a number, 0 or more, or a list of them')
  return ids


def _family(raw: Mapping[str, Any]) -> Family:
  family = raw.get('model_type')
  if isinstance(family, str) and family in REFUSED:
    raise ConfigError(
      f'config.json: model_type = {family!r} is not supported: {REFUSED[family]}; accepted: {", ".join(ARCHITECTURES)}'
    )
  if not isinstance(family, str) or family not in ARCHITECTURES:
    raise ConfigError(f'config.json: model_type = {family!r} is not supported; accepted: {", ".join(ARCHITECTURES)}')
  architectures = raw.get('architectures') or [ARCHITECTURES[family]]
  if architectures != [ARCHITECTURES[family]]:
    raise ConfigError(f'config.json: architectures = {architectures} is not supported; accepted: [{ARCHITECTURES[family]!r}]')
  return family


def _is_int(value: Any) -> TypeGuard[int]:
  return isinstance(value, int) and not isinstance(value, bool)


def _id(raw: Mapping[str, Any], key: str) -> int | None:
  value = raw.get(key)
  if value is not None and not _is_int(value):
    raise ConfigError(f'config.json: {key} = {value!r}; accepted: a number, or null')
  return value


def _size(raw: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
  value = raw.get(key)
  value = default if value is None else value
  if not _is_int(value) or not 1 <= value <= most:
    raise ConfigError(f'config.json: {key} = {value!r}; accepted: a positive integer of at most {most}')
  return value


def _positive(name: str, value: Any) -> float:
  if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
    raise ConfigError(f'config.json: {name} = {value!r}; accepted: a number above 0')
  return float(value)


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
  value = raw.get(key, default)
  if not isinstance(value, bool):
    raise ConfigError(f'config.json: {key} = {value!r}; accepted: true or false')
  return value


def _experts(raw: Mapping[str, Any], family: Family) -> Experts | None:
  """Return the experts of a mixture-of-experts family: every `decoder_sparse_step`-th layer, except `mlp_only_layers`."""
  if not family.endswith('_moe'):
    return None
  names = [key for key in ('num_experts', 'num_local_experts') if raw.get(key) is not None]
  count, chosen = _size(raw, names[0] if names else 'num_experts', most=MOST_EXPERTS), _size(raw, 'num_experts_per_tok')
  if names and raw[names[-1]] != count:
    raise ConfigError(
      f'config.json: num_experts = {count} and num_local_experts = {raw[names[1]]}; accepted: one number for both'
    )
  if chosen > count:
    raise ConfigError(f'config.json: num_experts_per_tok = {chosen}; accepted: at most num_experts = {count}')
  layers = _size(raw, 'num_hidden_layers', most=MOST_LAYERS)
  step, plain = _size(raw, 'decoder_sparse_step', 1), raw.get('mlp_only_layers') or []
  if not isinstance(plain, list) or not all(_is_int(i) and 0 <= i < layers for i in plain):
    raise ConfigError(f'config.json: mlp_only_layers = {plain!r}; accepted: a list of layers, 0 to {layers - 1}')
  sparse = tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in plain)
  if not sparse:
    raise ConfigError(
      f'config.json: decoder_sparse_step = {step} and mlp_only_layers = {plain!r} give none of the {layers} layers experts; '
      f'accepted: values that give one layer experts, or model_type {family.removesuffix("_moe")!r}'
    )
  shared = _size(raw, 'shared_expert_intermediate_size') if family == 'qwen2_moe' else 0
  width = _size(raw, 'moe_intermediate_size')
  return Experts(count, chosen, width, _flag(raw, 'norm_topk_prob', False), sparse, shared)


def _query_scale(raw: Mapping[str, Any], head_dim: int) -> float:
  """Return the factor that turns 1 / sqrt(D) into 1 / sqrt(query_pre_attn_scalar)."""
  return math.sqrt(head_dim / _positive('query_pre_attn_scalar', raw.get('query_pre_attn_scalar', 256)))


def _sliding_windows(raw: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
  """Return each layer's sliding window, None for a layer that sees all tokens; () if no layer has a window.

  In Gemma 3, `layer_types` names the layers with a window, or every `sliding_window_pattern`-th layer has none. In Mistral all
  layers have the window, or none if `sliding_window` is null.
  """
  layers = _size(raw, 'num_hidden_layers', most=MOST_LAYERS)
  traits, kinds = FAMILIES[family], ('full_attention', 'sliding_attention')
  window = raw.get('sliding_window', traits.sliding_window)
  match traits.sliding_windows:
    case 'none':
      accepted, default = kinds[:1], kinds[:1] * layers
    case 'all':
      accepted = kinds[:1] if window is None else kinds[1:]
      default = accepted * layers
    case 'some':
      pattern = _size(raw, 'sliding_window_pattern', 6)
      accepted, default = kinds, [kinds[(i + 1) % pattern > 0] for i in range(layers)]
  types = raw.get('layer_types') or list(default)
  if not isinstance(types, list) or len(types) != layers or not all(kind in accepted for kind in types):
    raise ConfigError(
      f'config.json: layer_types = {types!r}; accepted: {" or ".join(map(repr, accepted))} for each of the {layers} layers'
    )
  if kinds[1] not in types:
    return ()
  _size({'sliding_window': window}, 'sliding_window')
  return tuple(window if kind == kinds[1] else None for kind in types)


def _ropes(raw: Mapping[str, Any], family: Family) -> tuple[Rope, Rope]:
  """Return the rotary settings of layers that see all tokens, and of layers with a window.

  Only Gemma 3's differ. `rope_parameters` has a section for each kind of layer, or `rope_local_base_freq` is the base of the
  layers with a window, whose positions are never scaled.
  """
  traits = FAMILIES[family]
  if traits.sliding_rope_theta is None:
    rope = _rope(raw, traits.rope_theta)
    return rope, rope
  of_kind = raw.get('rope_parameters') or {}
  if not isinstance(of_kind, Mapping) or not set(of_kind) <= {'full_attention', 'sliding_attention'}:
    raise ConfigError(f"config.json: rope_parameters = {of_kind!r}; accepted: sections 'full_attention' and 'sliding_attention'")

  def of(kind, scaling, theta, default):
    # As in transformers, a section of a kind of layer does not get the top-level original_max_position_embeddings.
    own = {'rope_parameters': of_kind.get(kind), 'rope_scaling': scaling, 'rope_theta': theta}
    return _rope({**raw, **own, 'original_max_position_embeddings': None}, default)

  return (
    of('full_attention', raw.get('rope_scaling'), raw.get('rope_theta'), traits.rope_theta),
    of('sliding_attention', None, raw.get('rope_local_base_freq'), traits.sliding_rope_theta),
  )


def _rope(raw: Mapping[str, Any], default_theta: float) -> Rope:
  """Return the rotary settings: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4.

  If a file has both, they must mean the same, because which of the two counts depends on the version of transformers.
  """
  sections = [name for name in ('rope_parameters', 'rope_scaling') if raw.get(name)]
  first, *others = [_rope_of(section, raw, default_theta) for section in sections or ['rope_scaling']]
  if others and others[0] != first:
    raise ConfigError(
      f'config.json: rope_parameters = {raw["rope_parameters"]!r} and rope_scaling = {raw["rope_scaling"]!r} describe different '
      'rotary embeddings; accepted: one of the two keys, or the same values in both'
    )
  return first


def _rope_of(section: str, raw: Mapping[str, Any], default_theta: float) -> Rope:
  """Return the rotary settings of one section, `rope_parameters` or `rope_scaling`, with the keys at the top of the file."""
  if not isinstance(raw.get(section) or {}, Mapping):
    raise ConfigError(f'config.json: {section} = {raw[section]!r}; accepted: an object, or null')
  given = dict(raw.get(section) or {})
  kind = given.pop('rope_type', None) or given.get('type') or 'default'
  given.pop('type', None)
  if kind not in tuple(_ROPE_REQUIRED):  # a list cannot be a key
    raise ConfigError(f'config.json: {section}.rope_type = {kind!r} is not supported; accepted: {", ".join(_ROPE_REQUIRED)}')
  thetas = given.pop('rope_theta', None), raw.get('rope_theta'), default_theta
  theta = _positive('rope_theta', next(value for value in thetas if value is not None))
  if given.pop('partial_rotary_factor', None) not in (None, 1.0):
    raise ConfigError(f'config.json: {section}.partial_rotary_factor is not supported; accepted: 1.0')
  if unknown := sorted(set(given) - set(_ROPE_KEYS)):
    raise ConfigError(f'config.json: {section}.{unknown[0]} is not supported; accepted: {", ".join(_ROPE_KEYS)}')

  if given.get('truncate') is not None:
    _flag(given, 'truncate', True)
  for key, value in given.items():
    if key != 'truncate' and value is not None and not (value == 0 and key.startswith('mscale')):
      _positive(f'{section}.{key}', value)

  if kind in ('llama3', 'yarn'):
    # The order of transformers: a top-level value first, then the section's own, then the model's length.
    length = raw.get('original_max_position_embeddings') or given.get('original_max_position_embeddings')
    given['original_max_position_embeddings'] = length or raw.get('max_position_embeddings')
    _size(given, 'original_max_position_embeddings')
  if kind == 'yarn' and 'factor' in given and given['factor'] is None:
    given['factor'] = _size(raw, 'max_position_embeddings') / _size(given, 'original_max_position_embeddings')
  for key in _ROPE_REQUIRED[kind]:
    if given.get(key) is None:
      raise ConfigError(f'config.json: {section}.{key} is missing; rope_type {kind!r} needs it')
  kinds = {f.name: f.type for f in dataclasses.fields(Rope)}
  named = {_ROPE_KEYS[key]: value for key, value in given.items() if value is not None}
  values: dict[str, Any] = {name: v if kinds[name] in (bool, int) else float(v) for name, v in named.items()}
  return Rope(kind, theta, **values)
