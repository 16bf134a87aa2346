"""Models with random weights: `model.path=random:qwen2.5-1.5b`. They need no download, and show how fast a machine trains.

The folder of such a model has the config.json of the named architecture and a byte tokenizer, but no weights. The devices make
the weights (sprl/model.py). The vocabulary has the size of the architecture's. Ids without a byte decode to the empty string.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sprl.foreign import expanded
from sprl.io.tokenizer import write_tiny
from sprl.models.config import ARCHITECTURES, ConfigError, Family, ModelConfig, tiny

PREFIX = 'random:'
SPECIAL = {'bos_token_id': 1, 'eos_token_id': 2, 'pad_token_id': 0}  # of the byte tokenizer
VOCABULARY = 259  # tokens of the byte tokenizer


def _sizes(
  vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, tied: bool, **others: Any
) -> dict[str, Any]:
  return {
    'vocab_size': vocab, 'hidden_size': hidden, 'intermediate_size': ffn, 'num_hidden_layers': layers,
    'num_attention_heads': heads, 'num_key_value_heads': kv_heads, 'tie_word_embeddings': tied,
    'hidden_act': 'silu', 'rms_norm_eps': 1e-6, 'rope_theta': 1e6, 'max_position_embeddings': 32768, **others,
  }  # fmt: skip


_QWEN3 = {'head_dim': 128, 'max_position_embeddings': 40960}
_EXPERTS = {
  'num_experts': 128, 'num_experts_per_tok': 8, 'moe_intermediate_size': 768, 'norm_topk_prob': True,
  'decoder_sparse_step': 1, 'mlp_only_layers': [],
}  # fmt: skip
NAMED: dict[str, tuple[Family, dict[str, Any]]] = {  # name -> family, config.json
  'qwen2.5-0.5b': ('qwen2', _sizes(151936, 896, 4864, 24, 14, 2, True)),
  'qwen2.5-1.5b': ('qwen2', _sizes(151936, 1536, 8960, 28, 12, 2, True, max_position_embeddings=131072)),
  'qwen2.5-7b': ('qwen2', _sizes(152064, 3584, 18944, 28, 28, 4, False, max_position_embeddings=131072)),
  'qwen3-0.6b': ('qwen3', _sizes(151936, 1024, 3072, 28, 16, 8, True, **_QWEN3)),
  'qwen3-1.7b': ('qwen3', _sizes(151936, 2048, 6144, 28, 16, 8, True, **_QWEN3)),
  'qwen3-8b': ('qwen3', _sizes(151936, 4096, 12288, 36, 32, 8, False, **_QWEN3)),
  'qwen3-30b-a3b': ('qwen3_moe', _sizes(151936, 2048, 6144, 48, 32, 4, False, **_QWEN3, **_EXPERTS)),
  'smollm2-135m': (
    'llama',
    _sizes(49152, 576, 1536, 30, 9, 3, True, rms_norm_eps=1e-5, rope_theta=1e5, max_position_embeddings=8192),
  ),
  'tiny': ('qwen2', dict(tiny('qwen2').raw)),
}


def is_random(path: str | Path) -> bool:
  """Return whether `path` names a model with random weights."""
  return str(path).startswith(PREFIX)


def random_folder(name: str, cache: Path) -> Path:
  """Return the folder of an architecture. Creates it in `cache` if it does not exist.

  `name` is a key of NAMED, or a folder with a config.json. Raises ConfigError if it is neither, or if the vocabulary is smaller
  than that of the byte tokenizer.
  """
  text = json.dumps(_architecture(name), indent=2) + '\n'
  folder = cache / f'random-{Path(name).name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'
  if not folder.is_dir():
    draft = cache / f'{folder.name}.{os.getpid()}'
    write_tiny(draft)
    (draft / 'config.json').write_text(text, encoding='utf-8')
    try:
      draft.rename(folder)
    except OSError:  # another process was faster
      shutil.rmtree(draft)
  return folder


def _architecture(name: str) -> Mapping[str, Any]:
  """Return the config.json of an architecture, with the special tokens of the byte tokenizer."""
  if name in NAMED:
    family, sizes = NAMED[name]
    raw = {'architectures': [ARCHITECTURES[family]], 'model_type': family, **sizes}
  elif (expanded(name) / 'config.json').is_file():
    raw = dict(ModelConfig.read(expanded(name)).raw)
  else:
    raise ConfigError(f'config.model.path = {PREFIX}{name}: expected one of {", ".join(NAMED)}, or a folder with a config.json')
  if raw['vocab_size'] < VOCABULARY:
    raise ConfigError(f'config.model.path = {PREFIX}{name}: vocab_size = {raw["vocab_size"]}; expected at least {VOCABULARY}')
  return {**raw, **SPECIAL}
