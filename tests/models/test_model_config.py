"""config.json with the keys of transformers 4 and 5. Unsupported values raise errors that name the key."""

import json

import pytest

from sprl.config import Run, to_dict
from sprl.kernels.rope import Rope
from sprl.models.config import ConfigError, Experts, ModelConfig, tiny


def raw(family='llama', **changes):
  return dict(tiny(family).raw) | changes


def test_a_llama_config_of_transformers_4():
  config = ModelConfig.from_json(
    {
      'architectures': ['LlamaForCausalLM'],
      'attention_bias': False,
      'bos_token_id': 128000,
      'eos_token_id': [128001, 128008, 128009],
      'hidden_act': 'silu',
      'hidden_size': 2048,
      'intermediate_size': 8192,
      'max_position_embeddings': 131072,
      'mlp_bias': False,
      'model_type': 'llama',
      'num_attention_heads': 32,
      'num_hidden_layers': 16,
      'num_key_value_heads': 8,
      'rms_norm_eps': 1e-05,
      'rope_scaling': {
        'factor': 32.0,
        'high_freq_factor': 4.0,
        'low_freq_factor': 1.0,
        'original_max_position_embeddings': 8192,
        'rope_type': 'llama3',
      },
      'rope_theta': 500000.0,
      'tie_word_embeddings': True,
      'vocab_size': 128256,
    }
  )
  assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 32, 8, 64)
  assert (config.family, config.tie_embeddings, config.qkv_bias, config.qk_norm) == ('llama', True, False, None)
  assert config.eos_token_ids == (128001, 128008, 128009)
  assert config.pad_token_id is None
  assert config.rope == Rope('llama3', 500_000.0, factor=32.0, original_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_families_differ_in_biases_norms_and_head_width():
  qwen2, qwen3 = tiny('qwen2'), tiny('qwen3')
  assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tie_embeddings) == (True, None, True)
  assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, 'head')
  assert qwen3.head_dim * qwen3.num_heads != qwen3.hidden_size
  assert tiny('qwen3', head_dim=None).head_dim == 128  # transformers' default for the family
  assert tiny('llama', head_dim=None).head_dim == 16  # E/H
  assert tiny('llama', num_key_value_heads=None).num_kv_heads == 4


def test_a_gemma_config_of_transformers_4():
  """The sizes of Gemma 3 1B. Its config.json has no key for tied embeddings."""
  config = ModelConfig.from_json(
    {
      'architectures': ['Gemma3ForCausalLM'],
      'attention_bias': False,
      'attn_logit_softcapping': None,
      'bos_token_id': 2,
      'eos_token_id': [1, 106],
      'final_logit_softcapping': None,
      'head_dim': 256,
      'hidden_activation': 'gelu_pytorch_tanh',
      'hidden_size': 1152,
      'intermediate_size': 6912,
      'max_position_embeddings': 32768,
      'model_type': 'gemma3_text',
      'num_attention_heads': 4,
      'num_hidden_layers': 26,
      'num_key_value_heads': 1,
      'pad_token_id': 0,
      'query_pre_attn_scalar': 256,
      'rms_norm_eps': 1e-06,
      'rope_local_base_freq': 10000,
      'rope_scaling': None,
      'rope_theta': 1000000,
      'sliding_window': 512,
      'sliding_window_pattern': 6,
      'vocab_size': 262144,
    }
  )
  assert (config.norms, config.norm_offset, config.qk_norm, config.activation) == ('both', 1.0, 'head', 'gelu_tanh')
  assert (config.tie_embeddings, config.query_scale, config.embed_scale) == (True, 1.0, 1152**0.5)
  assert [layer for layer in range(26) if config.sliding_window(layer) is None] == [5, 11, 17, 23]
  assert config.sliding_windows[0] == 512
  assert (config.rope, config.sliding_rope) == (Rope(theta=1e6), Rope(theta=1e4))


def test_gemma_configs_of_transformers_4_and_5_are_equal():
  linear = {'rope_type': 'linear', 'factor': 8.0}
  four = raw('gemma3_text', rope_theta=1e6, rope_scaling=linear)
  new = {'rope_parameters': {'full_attention': linear | {'rope_theta': 1e6}, 'sliding_attention': {'rope_theta': 1e3}}}
  new |= {'layer_types': ['sliding_attention', 'sliding_attention', 'full_attention']}
  old = ('rope_theta', 'rope_scaling', 'rope_local_base_freq', 'sliding_window_pattern')
  config = ModelConfig.from_json({key: value for key, value in four.items() if key not in old} | new)
  assert config == ModelConfig.from_json(four)
  assert (config.rope, config.sliding_rope) == (Rope('linear', 1e6, factor=8.0), Rope(theta=1e3))


def test_a_mistral_has_its_window_on_all_layers_or_none():
  assert tiny('mistral').sliding_windows == (6, 6)
  assert tiny('mistral', sliding_window=None).sliding_windows == ()
  missing = {key: value for key, value in tiny('mistral').raw.items() if key != 'sliding_window'}
  assert ModelConfig.from_json(missing).sliding_windows == (4096, 4096)  # transformers' default for the family
  assert tiny('mistral').sliding_rope == tiny('mistral').rope


def test_rope_parameters_of_transformers_5_equal_rope_scaling():
  yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 128}
  old = tiny('qwen2', rope_theta=1e6, rope_scaling=yarn)
  new = tiny('qwen2', rope_theta=None, rope_scaling=None, rope_parameters=yarn | {'rope_theta': 1e6})
  assert old.rope == new.rope == Rope('yarn', 1e6, factor=4.0, original_positions=128)
  assert tiny('llama', rope_parameters={'rope_theta': 5e5, 'rope_type': 'default'}).rope == Rope(theta=5e5)


def test_rope_parameters_and_rope_scaling_must_describe_the_same_embeddings():
  yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 128}
  linear = {'rope_type': 'linear', 'factor': 8.0}
  plain = {'rope_type': 'default', 'rope_theta': 1e4}
  assert (
    tiny('qwen2', rope_parameters=yarn | {'rope_theta': 1e4}, rope_scaling=yarn).rope == tiny('qwen2', rope_scaling=yarn).rope
  )
  gemma = tiny('gemma3_text', rope_parameters={'full_attention': linear}, rope_scaling=linear)
  assert gemma.rope == Rope('linear', 1e4, factor=8.0)
  for family, parameters in (('qwen2', plain), ('gemma3_text', {'full_attention': plain, 'sliding_attention': plain})):
    with pytest.raises(ConfigError, match=r'rope_parameters = .* and rope_scaling = .*yarn.*different.*accepted: one of the two'):
      tiny(family, rope_parameters=parameters, rope_scaling=yarn)


def test_a_section_of_gemma_has_its_own_original_length():
  yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 128}
  file = raw('gemma3_text', rope_parameters={'full_attention': yarn}, original_max_position_embeddings=256)
  assert ModelConfig.from_json(file).rope.original_positions == 128
  assert (
    ModelConfig.from_json(raw('llama', rope_scaling=yarn, original_max_position_embeddings=256)).rope.original_positions == 256
  )


def test_old_name_of_rope_type_and_default_original_length():
  assert tiny('llama', rope_scaling={'type': 'linear', 'factor': 2}).rope == Rope('linear', factor=2.0)
  assert tiny('llama', rope_scaling={'type': 'yarn', 'factor': 2.0}).rope.original_positions == 512
  yarn = {'rope_type': 'yarn', 'factor': None, 'original_max_position_embeddings': 128}
  assert tiny('llama', rope_scaling=yarn).rope.factor == 4.0


@pytest.mark.parametrize(
  ('family', 'changes', 'named'),
  [
    ('llama', {'model_type': 'phi'}, "model_type = 'phi' is not supported; accepted: llama, mistral, qwen2, qwen3"),
    ('llama', {'model_type': 'gpt_oss'}, "'gpt_oss' is not supported: attention sinks.* missing; accepted: llama, mistral"),
    ('llama', {'model_type': 'gemma2'}, "'gemma2' is not supported: soft caps .* missing; accepted: .*gemma3_text"),
    ('llama', {'model_type': 'gemma3'}, "'gemma3' is not supported: images .* gemma3_text"),
    ('llama', {'model_type': 'olmo3'}, "'olmo3' is not supported: .* missing"),
    ('llama', {'model_type': 'deepseek_v3'}, "'deepseek_v3' is not supported: latent attention is missing"),
    (
      'gemma3_text',
      {'hidden_activation': 'silu'},
      'hidden_activation = \'silu\' is not supported; accepted: "gelu_pytorch_tanh"',
    ),
    ('gemma3_text', {'final_logit_softcapping': 30.0}, 'final_logit_softcapping = 30.0 is not supported; accepted: null'),
    ('gemma3_text', {'use_bidirectional_attention': True}, 'use_bidirectional_attention = True'),
    ('gemma3_text', {'query_pre_attn_scalar': 0}, 'query_pre_attn_scalar = 0; accepted: a number above 0'),
    ('gemma3_text', {'sliding_window': None}, 'sliding_window = None; accepted: a positive integer'),
    ('gemma3_text', {'sliding_window_pattern': 0}, 'sliding_window_pattern = 0; accepted: a positive integer'),
    (
      'gemma3_text',
      {'layer_types': ['full_attention']},
      r"layer_types = \['full_attention'\]; accepted: .* each of the 3 layers",
    ),
    ('gemma3_text', {'rope_parameters': {'rope_type': 'default'}}, "rope_parameters.*'full_attention' and 'sliding_attention'"),
    ('mistral', {'sliding_window': 0}, 'sliding_window = 0; accepted: a positive integer'),
    (
      'mistral',
      {'layer_types': ['sliding_attention', 'full_attention']},
      "accepted: 'sliding_attention' for each of the 2 layers",
    ),
    ('olmo2', {'attention_bias': True}, 'attention_bias'),
    ('llama', {'model_type': None}, 'model_type'),
    ('llama', {'architectures': ['LlamaForSequenceClassification']}, 'architectures.*LlamaForCausalLM'),
    ('llama', {'hidden_act': 'gelu'}, 'hidden_act.*silu'),
    ('llama', {'attention_bias': True}, 'attention_bias'),
    ('llama', {'mlp_bias': True}, 'mlp_bias'),
    ('llama', {'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config'),
    ('llama', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    ('qwen2', {'use_sliding_window': True}, 'use_sliding_window'),
    ('qwen3', {'layer_types': ['full_attention', 'sliding_attention']}, 'layer_types.*sliding_attention'),
    ('llama', {'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}}, "rope_scaling.rope_type = 'dynamic'.*llama3"),
    ('llama', {'rope_scaling': {'type': 'longrope'}}, 'longrope'),
    ('llama', {'rope_parameters': {'rope_type': 'proportional'}}, 'rope_parameters.rope_type'),
    ('llama', {'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.25}}, 'partial_rotary_factor'),
    ('llama', {'rope_parameters': {'rope_type': 'default', 'mrope_section': [1, 1]}}, 'mrope_section'),
    ('llama', {'rope_scaling': {'rope_type': 'linear'}}, 'rope_scaling.factor is missing'),
    ('llama', {'rope_scaling': {'rope_type': 'linear', 'factor': 0}}, 'rope_scaling.factor = 0; accepted: a number above 0'),
    ('llama', {'rope_scaling': {'rope_type': 'linear', 'factor': '4'}}, "rope_scaling.factor = '4'"),
    ('llama', {'rope_parameters': {'rope_type': 'yarn', 'factor': None, 'original_max_position_embeddings': 'x'}}, "= 'x'"),
    ('llama', {'rope_scaling': [1]}, r'rope_scaling = \[1\]; accepted: an object, or null'),
    ('llama', {'rope_theta': -5.0}, 'rope_theta = -5.0; accepted: a number above 0'),
    ('llama', {'rope_theta': '10000'}, "rope_theta = '10000'"),
    ('llama', {'rms_norm_eps': None}, 'rms_norm_eps = None'),
    ('llama', {'rms_norm_eps': 'small'}, "rms_norm_eps = 'small'"),
    ('llama', {'tie_word_embeddings': 'no'}, "tie_word_embeddings = 'no'; accepted: true or false"),
    ('llama', {'eos_token_id': '2'}, "eos_token_id or pad_token_id = '2'; accepted: a number"),
    ('llama', {'eos_token_id': [2, None]}, 'eos_token_id'),
    ('llama', {'model_type': ['llama']}, 'model_type'),
    ('llama', {'eos_token_id': True}, 'eos_token_id'),
    ('llama', {'bos_token_id': {'a': 1}}, "bos_token_id = {'a': 1}; accepted: a number, or null"),
    ('llama', {'pad_token_id': [0]}, r'pad_token_id = \[0\]; accepted: a number, or null'),
    ('llama', {'num_hidden_layers': 10**12}, 'num_hidden_layers = 1000000000000; accepted: a positive integer of at most 1000'),
    ('qwen3_moe', {'num_experts': 10**9}, 'num_experts = 1000000000; accepted: a positive integer of at most 1024'),
    ('qwen3_moe', {'mlp_only_layers': [[0]]}, r'mlp_only_layers = \[\[0\]\]; accepted: a list of layers'),
    ('gemma3_text', {'layer_types': [{}, {}, {}]}, 'layer_types = .*; accepted: '),
    ('llama', {'rope_theta': 10**400}, 'rope_theta = 10+; accepted: a number above 0'),
    ('llama', {'rope_scaling': {'rope_type': ['linear']}}, r"rope_type = \['linear'\] is not supported"),
    ('llama', {'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0, 'truncate': []}}, 'truncate = .*; accepted: true or false'),
    ('llama', {'hidden_size': 0}, 'hidden_size = 0.*positive integer'),
    ('llama', {'vocab_size': None}, 'vocab_size = None'),
    ('llama', {'num_key_value_heads': 3}, 'num_key_value_heads = 3.*divisor'),
    ('llama', {'head_dim': 15}, 'head_dim = 15.*even'),
    ('llama', {'head_dim': None, 'num_attention_heads': 5, 'num_key_value_heads': 5}, 'num_attention_heads = 5'),
  ],
)
def test_an_unsupported_value_is_named(family, changes, named):
  with pytest.raises(ConfigError, match=named):
    ModelConfig.from_json(raw(family, **changes))


def test_read_names_a_missing_or_broken_file(tmp_path):
  with pytest.raises(ConfigError, match=r'config\.json: no such file'):
    ModelConfig.read(tmp_path)
  for text in ('{"model_type":', '[' * 100_000):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ConfigError, match=r'config\.json: not JSON'):
      ModelConfig.read(tmp_path)
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(ConfigError, match=r'config\.json: not a JSON object'):
    ModelConfig.read(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(to_dict(Run())))
  with pytest.raises(ConfigError, match=r'config\.model\.path = .*: the work directory of a run;.* sprl\.export .* --from='):
    ModelConfig.read(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(raw('qwen3')))
  assert ModelConfig.read(tmp_path) == tiny('qwen3')


def test_configs_are_hashable_and_keep_the_raw_file():
  config = tiny('llama', num_hidden_layers=3)
  assert hash(config) == hash(tiny('llama', num_hidden_layers=3))
  assert config != tiny('llama')
  assert config.raw['num_hidden_layers'] == 3


def test_tiny_names_unknown_keys():
  with pytest.raises(ConfigError, match='num_layers'):
    tiny('llama', num_layers=3)


def test_experts_with_the_keys_of_transformers_4_and_5():
  four = tiny('qwen3_moe', num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False)
  assert four.experts == Experts(count=6, per_token=2, width=40, normalised=False, layers=(1, 5))
  five = {key: value for key, value in four.raw.items() if key != 'num_experts'} | {'num_local_experts': 6}
  assert ModelConfig.from_json(five) == four
  assert tiny('qwen2_moe').experts == Experts(6, 2, 40, False, (0, 1), shared_width=48)
  assert (tiny('qwen2_moe').qkv_bias, tiny('qwen2_moe', qkv_bias=False).qkv_bias) == (True, False)
  assert tiny('qwen3').experts is None
  assert tiny('qwen3_moe', head_dim=None).head_dim == 16  # E/H; the default of dense qwen3 is 128


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'num_experts_per_tok': 7}, 'num_experts_per_tok = 7; accepted: at most num_experts = 6'),
    ({'num_experts': None}, 'num_experts = None'),
    ({'num_local_experts': 8}, 'num_experts = 6 and num_local_experts = 8'),
    ({'mlp_only_layers': [0, 1]}, 'mlp_only_layers = [0, 1]'),
    ({'mlp_only_layers': [2]}, 'mlp_only_layers = [2]; accepted: a list of layers, 0 to 1'),
    ({'decoder_sparse_step': 0}, 'decoder_sparse_step = 0; accepted: a positive integer'),
    ({'moe_intermediate_size': 0}, 'moe_intermediate_size = 0; accepted: a positive integer'),
    ({'architectures': ['Qwen3ForCausalLM']}, "accepted: ['Qwen3MoeForCausalLM']"),
  ],
)
def test_impossible_experts_are_named(changes, said):
  with pytest.raises(ConfigError) as error:
    ModelConfig.from_json(raw('qwen3_moe', **changes))
  assert said in str(error.value)
