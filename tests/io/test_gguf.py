"""Conversion of a small GGUF file, written with the gguf package, to a Hugging Face folder."""

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from sprl.io import gguf
from sprl.io.huggingface import WeightsError, load_params
from sprl.io.tokenizer import Tokenizer
from sprl.kernels.rope import Rope
from sprl.models.config import ModelConfig

library = pytest.importorskip('gguf')

SPECIALS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
MERGES = ['Ġ Ġ', 'h e', 'Ġ t', 'l l', 'he ll']


def pairs_side_by_side(kernel, heads):
  """Reorder q or k into GGUF's order, row by row."""
  width = kernel.shape[0] // heads
  rows = [h * width + half * (width // 2) + i for h in range(heads) for i in range(width // 2) for half in (0, 1)]
  return kernel[rows]


def write(path, changes=None, drop=(), extra=None, quantise=None, architecture='llama'):
  """Write a small GGUF file like SmolLM2's. Return its tensors under their Hugging Face names."""
  rng = np.random.default_rng(0)
  writer = library.GGUFWriter(path, architecture)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = SPECIALS + alphabet + [merge.replace(' ', '') for merge in MERGES]
  meta = {
    'llama.block_count': 2,
    'llama.context_length': 512,
    'llama.embedding_length': 64,
    'llama.feed_forward_length': 96,
    'llama.attention.head_count': 4,
    'llama.attention.head_count_kv': 2,
    'llama.rope.dimension_count': 16,
    'llama.rope.freq_base': 100000.0,
    'llama.attention.layer_norm_rms_epsilon': 1e-5,
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': [3] * 3 + [1] * (len(tokens) - 3),
    'tokenizer.ggml.merges': MERGES,
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.unknown_token_id': 0,
    'tokenizer.ggml.padding_token_id': 2,
    'tokenizer.chat_template': "{{ messages[0]['content'] }}<|im_end|>",
  } | (changes or {})
  for key, value in meta.items():
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[type(value)]
    add(key, value)

  def matrix(*shape):
    return (rng.standard_normal(shape) * 0.1).astype(np.float32)

  theirs, names = {}, {}
  theirs['model.embed_tokens.weight'], names['model.embed_tokens.weight'] = matrix(264, 64), 'token_embd'
  theirs['model.norm.weight'], names['model.norm.weight'] = matrix(64), 'output_norm'
  parts = [
    ('input_layernorm', 'attn_norm', (64,)),
    ('self_attn.q_proj', 'attn_q', (64, 64)),
    ('self_attn.k_proj', 'attn_k', (32, 64)),
    ('self_attn.v_proj', 'attn_v', (32, 64)),
    ('self_attn.o_proj', 'attn_output', (64, 64)),
    ('post_attention_layernorm', 'ffn_norm', (64,)),
    ('mlp.gate_proj', 'ffn_gate', (96, 64)),
    ('mlp.up_proj', 'ffn_up', (96, 64)),
    ('mlp.down_proj', 'ffn_down', (64, 96)),
  ]
  for i in range(2):
    for name, ggml, shape in parts:
      theirs[f'model.layers.{i}.{name}.weight'], names[f'model.layers.{i}.{name}.weight'] = matrix(*shape), f'blk.{i}.{ggml}'
  for name, array in theirs.items():
    stored = array
    if 'attn_q' in names[name] or 'attn_k' in names[name]:
      stored = pairs_side_by_side(array, 4 if 'attn_q' in names[name] else 2)
    if names[name] in drop:
      continue
    if quantise and array.ndim == 2:
      kind = quantise
      packed = library.quants.quantize(stored, kind)
      writer.add_tensor(f'{names[name]}.weight', packed, raw_dtype=kind)
    else:
      writer.add_tensor(f'{names[name]}.weight', stored)
  for name, array in (extra or {}).items():
    writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return theirs


def test_weights_config_and_tokenizer_are_converted(tmp_path):
  theirs = write(tmp_path / 'm.gguf')
  gguf.convert(tmp_path / 'm.gguf', tmp_path / 'out')
  config = ModelConfig.read(tmp_path / 'out')
  assert (config.num_heads, config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 2, 16, True)
  assert (config.rope, config.rms_norm_eps, config.max_positions) == (Rope(theta=1e5), 1e-5, 512)
  params = load_params(tmp_path / 'out', config)
  np.testing.assert_array_equal(params['embed'], theirs['model.embed_tokens.weight'])
  for i in range(2):
    layer, name = params['layers'][i], f'model.layers.{i}'
    for part in 'qkvo':
      np.testing.assert_array_equal(layer['attention'][part]['kernel'], theirs[f'{name}.self_attn.{part}_proj.weight'])
    for part in ('gate', 'up', 'down'):
      np.testing.assert_array_equal(layer['mlp'][part]['kernel'], theirs[f'{name}.mlp.{part}_proj.weight'])
    np.testing.assert_array_equal(layer['attention_norm']['scale'], theirs[f'{name}.input_layernorm.weight'])
    np.testing.assert_array_equal(layer['mlp_norm']['scale'], theirs[f'{name}.post_attention_layernorm.weight'])

  tokenizer = Tokenizer.load(tmp_path / 'out')
  assert tokenizer.within(config) is tokenizer
  assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((2,), 2, 264)
  assert tokenizer.render([{'role': 'user', 'content': 'hi'}]) == 'hi<|im_end|>'

  def pieces(text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]

  # The tokenizer splits digits off first, without the space before them. The rule of GPT-2 gives 'Ġ', 'Ġ', '1'.
  assert pieces('hello  12') == ['hell', 'o', 'ĠĠ', '1', '2']
  assert pieces('the t<|im_end|>') == ['t', 'he', 'Ġt', '<|im_end|>']
  assert tokenizer.decode(tokenizer.encode('hello  12 é<|im_end|>')) == 'hello  12 é<|im_end|>'


def test_rotary_rows_are_reordered():
  rows = np.arange(12.0)[:, None] * np.ones((1, 2))
  expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
  np.testing.assert_array_equal(gguf.split_halves(rows, heads=2)[:, 0], expected)


def test_quantised_weights_are_dequantised(tmp_path):
  # Q4_1: a block of 32 weights has 16 evenly spaced levels from its smallest to its largest weight.
  theirs = write(tmp_path / 'm.gguf', quantise=library.GGMLQuantizationType.Q4_1)
  gguf.convert(tmp_path / 'm.gguf', tmp_path / 'out')
  kernel = load_params(tmp_path / 'out', ModelConfig.read(tmp_path / 'out'))['layers'][1]['mlp']['down']['kernel']
  exact = theirs['model.layers.1.mlp.down_proj.weight'].reshape(64, 3, 32)
  step = (exact.max(-1) - exact.min(-1)) / 15
  error = np.abs(np.asarray(kernel).reshape(64, 3, 32) - exact)
  assert (error <= 0.55 * step[..., None] + 1e-4).all()
  assert error.max() > 1e-3


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    ({'architecture': 'gemma2'}, "general.architecture = 'gemma2'.*llama"),
    ({'changes': {'tokenizer.ggml.pre': 'tekken'}}, "'gpt2', 'tekken'"),
    ({'changes': {'tokenizer.ggml.model': 'llama'}}, "'llama', 'smollm'"),
    ({'changes': {'llama.rope.scaling.type': 'yarn'}}, "llama.rope.scaling.type = 'yarn'"),
    ({'changes': {'llama.rope.dimension_count': 8}}, 'llama.rope.dimension_count = 8'),
    ({'changes': {'llama.expert_count': 8}}, 'llama.expert_count = 8'),
    ({'drop': ['blk.1.ffn_up']}, r'tensor model\.layers\.1\.mlp\.up_proj\.weight is missing'),
    ({'extra': {'rope_freqs.weight': np.ones(8, np.float32)}}, 'rope_freqs.weight'),
    ({'extra': {'blk.0.attn_q.bias': np.ones(64, np.float32)}}, r'self_attn\.q_proj\.bias'),
  ],
)
def test_an_unsupported_file_is_refused_with_the_difference(tmp_path, arguments, named):
  write(tmp_path / 'm.gguf', **arguments)
  with pytest.raises(WeightsError, match=named):
    gguf.convert(tmp_path / 'm.gguf', tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_a_truncated_file_and_another_format_are_named(tmp_path):
  (tmp_path / 'm.gguf').write_bytes(b'PK\x03\x04' + b'\0' * 100)
  with pytest.raises(WeightsError, match=r'm\.gguf: '):
    gguf.convert(tmp_path / 'm.gguf', tmp_path / 'out')
  write(tmp_path / 'm.gguf')
  data = (tmp_path / 'm.gguf').read_bytes()
  (tmp_path / 'm.gguf').write_bytes(data[: len(data) // 2])
  with pytest.raises(WeightsError, match=r'm\.gguf: '):
    gguf.convert(tmp_path / 'm.gguf', tmp_path / 'out')
