"""Hugging Face folders: every tensor arrives at its leaf, and bad files are refused before any device work."""

import errno
import json
import os
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from sprl.config import Lora
from sprl.io import huggingface
from sprl.io.config_file import write_config
from sprl.io.files import rename
from sprl.io.huggingface import WeightsError, check_weights, export_folder, load_params, tensors
from sprl.io.peft import export_adapters
from sprl.io.tokenizer import write_tiny
from sprl.models import transformer
from sprl.models.config import ModelConfig, tiny
from sprl.models.lora import init_adapters


def params_of(config, seed=0):
  return transformer.init_params(config, jax.random.key(seed))


def checkpoint(config, seed=0):
  """Return random tensors of a checkpoint by name, as numpy arrays."""
  rng = np.random.default_rng(seed)
  return {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in tensors(config).values()}


@pytest.fixture
def no_devices(monkeypatch):
  """Make any array on a device an error: refusals must come first."""

  def touched(*args, **kwargs):
    raise AssertionError('a device was touched')

  monkeypatch.setattr(jax, 'make_array_from_callback', touched)


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe', 'gemma3_text', 'olmo2'])
def test_the_table_covers_every_leaf_of_the_network(family):
  config = tiny(family)
  table = {}
  for keys, t in tensors(config).items():
    if 'experts' in keys:
      keys, t = keys[:-1], t._replace(shape=(6, *t.shape))
    table[keys] = t.shape
  leaves = jax.tree_util.tree_leaves_with_path(transformer.abstract_params(config))
  assert table == {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}


def test_every_leaf_gets_its_tensor(tmp_path):
  config = tiny('qwen2', tie_word_embeddings=False)
  stored = checkpoint(config)
  save_file(stored, tmp_path / 'model.safetensors')
  params = load_params(tmp_path, config)
  np.testing.assert_array_equal(params['embed'], stored['model.embed_tokens.weight'])
  np.testing.assert_array_equal(params['head']['kernel'], stored['lm_head.weight'])
  layer = params['layers'][1]
  np.testing.assert_array_equal(layer['attention']['k']['kernel'], stored['model.layers.1.self_attn.k_proj.weight'])
  np.testing.assert_array_equal(layer['attention']['k']['bias'], stored['model.layers.1.self_attn.k_proj.bias'])
  np.testing.assert_array_equal(layer['mlp_norm']['scale'], stored['model.layers.1.post_attention_layernorm.weight'])


def test_a_device_reads_its_part_of_the_stacked_experts(tmp_path, monkeypatch):
  config = tiny('qwen3_moe')
  stored = checkpoint(config)
  save_file(stored, tmp_path / 'model.safetensors')
  ups = np.stack([stored[f'model.layers.1.mlp.experts.{x}.up_proj.weight'] for x in range(6)])
  layer = load_params(tmp_path, config)['layers'][1]
  np.testing.assert_array_equal(layer['mlp']['experts']['up']['kernel'], ups)
  np.testing.assert_array_equal(layer['mlp']['router']['kernel'], stored['model.layers.1.mlp.gate.weight'])

  def held_in_part(shape, sharding, read):  # a device with two of the six experts and half of their rows
    return read((slice(2, 4), slice(0, shape[1] // 2), slice(None))) if len(shape) == 3 else np.zeros(shape)

  monkeypatch.setattr(jax, 'make_array_from_callback', held_in_part)
  part = load_params(tmp_path, config, dtype=jnp.bfloat16)['layers'][1]['mlp']['experts']['up']['kernel']
  np.testing.assert_array_equal(part, ups[2:4, :20].astype(jnp.bfloat16))


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_half_precision_files_are_converted_to_the_requested_dtype(tmp_path, dtype):
  config = tiny('llama')
  stored = {name: array.astype(dtype) for name, array in checkpoint(config).items()}
  save_file(stored, tmp_path / 'model.safetensors')
  embed = load_params(tmp_path, config, dtype=jnp.float32)['embed']
  assert embed.dtype == jnp.float32
  np.testing.assert_array_equal(embed, stored['model.embed_tokens.weight'].astype(np.float32))
  assert load_params(tmp_path, config, dtype=jnp.bfloat16)['norm']['scale'].dtype == jnp.bfloat16


FOUR_DEVICES = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from sprl.io.huggingface import load_params
from sprl.models import transformer
from sprl.models.config import tiny

config = tiny('llama')
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ('fsdp', 'tensor'))
shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), transformer.abstract_params(config))
shardings['layers'][1]['mlp']['down']['kernel'] = NamedSharding(mesh, PartitionSpec('tensor', 'fsdp'))
shardings['embed'] = NamedSharding(mesh, PartitionSpec(None, 'fsdp'))

read_shapes = {}
original = jax.make_array_from_callback
def spy(shape, sharding, read):
  def noted(index):
    part = read(index)
    read_shapes.setdefault(shape, set()).add(part.shape)
    return part
  return original(shape, sharding, noted)
jax.make_array_from_callback = spy

params = load_params(sys.argv[1], config, shardings)
stored = load_file(sys.argv[1] + '/model.safetensors')
down = params['layers'][1]['mlp']['down']['kernel']
np.testing.assert_array_equal(down, stored['model.layers.1.mlp.down_proj.weight'])
np.testing.assert_array_equal(params['embed'], stored['model.embed_tokens.weight'])
np.testing.assert_array_equal(params['head']['kernel'], stored['lm_head.weight'])
jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or 1 / 0, params, shardings)
assert [shard.data.shape for shard in down.addressable_shards] == [(32, 48)] * 4
assert read_shapes[(259, 64)] == {(259, 32), (259, 64)}, read_shapes  # the embedding's parts, the head whole
assert read_shapes[(64, 96)] == {(32, 48), (64, 96)}, read_shapes
print('loaded on', len(jax.devices()))
"""


@pytest.mark.slow
def test_four_devices_read_only_the_slices_they_hold(tmp_path):
  save_file(checkpoint(tiny('llama')), tmp_path / 'model.safetensors')
  env = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=4', 'JAX_PLATFORMS': 'cpu'}
  env['PYTHONPATH'] = os.pathsep.join(path for path in sys.path if path)
  done = subprocess.run([sys.executable, '-c', FOUR_DEVICES, str(tmp_path)], env=env, capture_output=True, text=True, check=False)
  assert 'loaded on 4' in done.stdout, done.stderr


def test_loading_holds_one_tensor_on_the_host(tmp_path):
  config = tiny('llama', num_hidden_layers=8, hidden_size=128, intermediate_size=512, head_dim=32)
  stored = checkpoint(config)
  save_file(stored, tmp_path / 'model.safetensors')
  total = sum(array.nbytes for array in stored.values())
  largest = max(array.nbytes for array in stored.values())
  consumed = []
  original = jax.make_array_from_callback

  def drop(shape, sharding, read):  # a device that holds nothing, so that only the host's memory is measured
    consumed.append(read(tuple(slice(None) for _ in shape)).nbytes)
    return original((1,), sharding, lambda index: np.zeros(1, np.float32))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'make_array_from_callback', drop)
    load_params(tmp_path, config)
    consumed.clear()
    tracemalloc.start()
    load_params(tmp_path, config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
  assert sum(consumed) == total
  assert peak < 3 * largest + 1_000_000 < total


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe', 'gemma3_text', 'olmo2'])
def test_export_then_load_gives_the_same_weights(tmp_path, family):
  config = tiny(family)
  params = params_of(config)
  export_folder(tmp_path / 'out', params, config, dtype=jnp.float32)
  assert ModelConfig.read(tmp_path / 'out') == config
  again = load_params(tmp_path / 'out', config)
  jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_large_export_is_split_into_shards_with_an_index(tmp_path):
  config = tiny('llama')
  params = params_of(config)
  write_tiny(tmp_path / 'tokenizer')
  export_folder(tmp_path / 'out', params, config, tmp_path / 'tokenizer', max_shard_bytes=40_000)
  shards = sorted((tmp_path / 'out').glob('*.safetensors'))
  assert len(shards) > 2
  assert shards[0].name == f'model-00001-of-{len(shards):05d}.safetensors'
  assert all(sum(a.nbytes for a in load_file(shard).values()) <= 40_000 for shard in shards)
  index = json.loads((tmp_path / 'out' / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == sum(2 * leaf.size for leaf in jax.tree.leaves(params))
  for shard in shards:
    with safe_open(shard, 'numpy') as file:
      assert file.metadata()['format'] == 'pt'  # without it transformers refuses the file
      assert {name for name, where in index['weight_map'].items() if where == shard.name} == set(file.keys())
  rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
  jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / 'out', config, dtype=jnp.bfloat16), rounded)


def test_an_export_contains_configs_and_tokenizer(tmp_path):
  config = tiny('qwen3', eos_token_id=[2, 5])
  write_tiny(tmp_path / 'tokenizer')
  (tmp_path / 'tokenizer' / 'chat_template.jinja').write_text('{{ messages }}')
  (tmp_path / 'tokenizer' / 'pytorch_model.bin').write_bytes(b'not carried')
  export_folder(tmp_path / 'out', params_of(config), config, tmp_path / 'tokenizer')
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written == dict(config.raw) | {'dtype': 'bfloat16'}
  assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == {
    'bos_token_id': 1,
    'eos_token_id': [2, 5],
    'pad_token_id': 0,
  }
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
    'chat_template.jinja',
    'config.json',
    'generation_config.json',
    'model.safetensors',
    'tokenizer.json',
    'tokenizer_config.json',
  ]
  older = ModelConfig.from_json(dict(config.raw) | {'torch_dtype': 'float16', 'architectures': None})
  export_folder(tmp_path / 'older', params_of(config), older, dtype=jnp.float32)
  written = json.loads((tmp_path / 'older' / 'config.json').read_text())
  assert (written['torch_dtype'], written['architectures'], 'dtype' in written) == ('float32', ['Qwen3ForCausalLM'], False)


def test_an_export_replaces_only_an_earlier_export(tmp_path):
  config = tiny('llama')
  params = params_of(config)
  export_folder(tmp_path / 'out', params_of(config, seed=1), config, max_shard_bytes=40_000)
  export_folder(tmp_path / 'out', params, config, dtype=jnp.float32)
  jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / 'out', config), params)
  assert [path.name for path in tmp_path.iterdir()] == ['out']
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.txt').write_text('precious')
  with pytest.raises(WeightsError, match='mine: '):
    export_folder(tmp_path / 'mine', params, config)
  assert (tmp_path / 'mine' / 'thesis.txt').read_text() == 'precious'


@pytest.mark.parametrize('name', ['notes.txt', '.git', 'other.safetensors', 'model-best-of-3.safetensors'])
def test_an_export_does_not_replace_a_folder_with_another_file(tmp_path, name):
  config = tiny('llama')
  params = params_of(config)
  export_folder(tmp_path / 'out', params, config, max_shard_bytes=40_000)
  (tmp_path / 'out' / name).write_bytes(b'precious')
  with pytest.raises(WeightsError, match=f'out: holds {name}, which no export by sprl writes; expected a new folder'):
    export_folder(tmp_path / 'out', params, config)
  assert (tmp_path / 'out' / name).read_bytes() == b'precious'


def test_an_export_that_was_killed_between_its_renames_is_found_again(tmp_path, monkeypatch):
  config = tiny('llama')
  first, second = params_of(config), params_of(config, seed=1)
  export_folder(tmp_path / 'out', first, config, dtype=jnp.float32)

  def killed(old, new):
    if new == tmp_path / 'out':
      raise KeyboardInterrupt
    rename(old, new)

  def full(*_):
    raise OSError(errno.ENOSPC, 'full')

  with monkeypatch.context() as context:
    context.setattr(huggingface, 'rename', killed)
    with pytest.raises(KeyboardInterrupt):
      export_folder(tmp_path / 'out', second, config, dtype=jnp.float32)
  assert not (tmp_path / 'out').exists()
  monkeypatch.setattr(huggingface, 'write_json', full)
  with pytest.raises(OSError, match='full'):
    export_folder(tmp_path / 'out', second, config, dtype=jnp.float32)
  jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / 'out', config), first)


def test_an_export_replaces_no_run_and_no_other_model(tmp_path):
  config = tiny('llama')
  run, other, own = (tmp_path / name for name in ('run', 'other', 'own'))
  write_config(run, {'steps': 3})  # its config.json describes no model
  other.mkdir()
  (other / 'config.json').write_text(json.dumps(config.raw))
  save_file(checkpoint(config), other / 'model.safetensors', metadata={'format': 'pt'})
  export_folder(own, params_of(config), config)
  for folder, source, said in [
    (run, own, 'run: exists'),
    (other, own, 'other: exists'),
    (own, own, 'own: is the model'),
  ]:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(WeightsError, match=said):
      export_folder(folder, params_of(config, seed=1), config, source)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_adapters_are_not_exported_over_their_base(tmp_path):
  config, lora = tiny('llama'), Lora(rank=2)
  export_folder(tmp_path / 'base', params_of(config), config, dtype=jnp.float32)
  adapters = init_adapters(config, lora, jax.random.key(0))
  with pytest.raises(WeightsError, match='base: is the model that this export is made from'):
    export_adapters(tmp_path / 'base', adapters, config, lora, str(tmp_path / 'base'))
  jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / 'base', config), params_of(config))


def test_a_failed_export_leaves_the_earlier_export(tmp_path):
  config = tiny('llama')
  params = params_of(config)
  export_folder(tmp_path / 'out', params, config, dtype=jnp.float32)
  broken = {**params, 'embed': params['embed'][:5]}
  with pytest.raises(WeightsError, match=r'embed_tokens.weight .*\(5, 64\).*\(259, 64\)'):
    export_folder(tmp_path / 'out', broken, config)
  assert [path.name for path in tmp_path.iterdir()] == ['out']  # no draft is left
  jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / 'out', config), params)


def test_an_export_to_a_link_replaces_the_folder_that_it_names(tmp_path):
  config = tiny('llama')
  (tmp_path / 'link').symlink_to('elsewhere')
  for seed in (1, 0):  # the first makes the folder
    export_folder(tmp_path / 'link', params_of(config, seed), config, dtype=jnp.float32)
  assert (tmp_path / 'link').readlink().name == 'elsewhere'
  jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / 'elsewhere', config), params_of(config))


# --- refused ---------------------------------------------------------------------------------------------------------


def refused(folder, config, named):
  with pytest.raises(WeightsError, match=named):
    load_params(folder, config)


def test_missing_and_extra_tensors_are_named(tmp_path, no_devices):
  config = tiny('llama')
  stored = checkpoint(config)
  without = {name: array for name, array in stored.items() if 'layers.1.mlp.up' not in name}
  save_file(without, tmp_path / 'model.safetensors')
  refused(tmp_path, config, r'model\.layers\.1\.mlp\.up_proj\.weight missing')
  save_file(stored | {'model.layers.0.self_attn.q_proj.bias': np.zeros(64, np.float32)}, tmp_path / 'model.safetensors')
  refused(tmp_path, config, r'model\.layers\.0\.self_attn\.q_proj\.bias')
  # One layer more than config.json has: nine tensors, of which five are named.
  save_file(stored, tmp_path / 'model.safetensors')
  refused(tmp_path, tiny('llama', num_hidden_layers=1), r'model\.layers\.1\..* and 4 more')


def test_a_wrong_shape_is_named_with_the_expected_one(tmp_path, no_devices):
  save_file(checkpoint(tiny('llama')), tmp_path / 'model.safetensors')
  wrong = tiny('llama', num_key_value_heads=1)
  refused(tmp_path, wrong, r'layers\.0\.self_attn\.k_proj\.weight .*\(32, 64\).*\(16, 64\)')


def test_a_repeated_head_and_old_rotary_tables_are_ignored(tmp_path):
  config = tiny('llama', tie_word_embeddings=True)
  stored = checkpoint(config)
  extra = {'lm_head.weight': stored['model.embed_tokens.weight'].copy()}
  extra['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(8, np.float32)
  save_file(stored | extra, tmp_path / 'model.safetensors')
  assert 'head' not in load_params(tmp_path, config)


def test_another_head_beside_tied_embeddings_is_refused(tmp_path, no_devices):
  config = tiny('llama', tie_word_embeddings=True, vocab_size=5000)
  stored = checkpoint(config)
  head = stored['model.embed_tokens.weight'].copy()
  head[4999, 63] += 1  # the last block of rows
  save_file(stored | {'lm_head.weight': head}, tmp_path / 'model.safetensors')
  refused(tmp_path, config, r'lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings')
  save_file(stored | {'lm_head.weight': head[:259]}, tmp_path / 'model.safetensors')
  refused(tmp_path, config, r'lm_head\.weight has shape \(259, 64\); expected \(5000, 64\)')


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path, no_devices):
  save_file(checkpoint(tiny('llama', tie_word_embeddings=True)), tmp_path / 'model.safetensors')
  refused(tmp_path, tiny('llama'), r'lm_head\.weight missing')


@pytest.mark.parametrize('keep', [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_named(tmp_path, keep, no_devices):
  config = tiny('llama')
  path = tmp_path / 'model.safetensors'
  save_file(checkpoint(config), path)
  data = path.read_bytes()
  path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
  refused(tmp_path, config, r'model\.safetensors: ')


def test_a_truncated_or_missing_shard_is_named(tmp_path, no_devices):
  config = tiny('llama')
  export_folder(tmp_path / 'out', params_of(config), config, max_shard_bytes=40_000)
  second = sorted((tmp_path / 'out').glob('*.safetensors'))[1]
  data = second.read_bytes()
  second.write_bytes(data[:-10])
  refused(tmp_path / 'out', config, second.name + ': ')
  second.unlink()
  refused(tmp_path / 'out', config, f"index.json: .*'{second.name}'")


@pytest.mark.parametrize(
  'index',
  [
    '{', '[]', '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../secrets.safetensors"}}',
    '{"weight_map": {"a": [1]}}', '[' * 100_000,
  ],
)  # fmt: skip
def test_a_bad_index_is_named(tmp_path, index, no_devices):
  (tmp_path / 'secrets.safetensors').write_bytes(b'')
  (tmp_path / 'model').mkdir()
  (tmp_path / 'model' / 'model.safetensors.index.json').write_text(index)
  refused(tmp_path / 'model', tiny('llama'), r'model\.safetensors\.index\.json: ')


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'consolidated.00.pth', 'model.pt'])
def test_pickle_files_are_refused_without_reading_them(tmp_path, name, no_devices):
  (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
  refused(tmp_path, tiny('llama'), f'pickle.*{name}.*safetensors')


def test_an_empty_folder_and_other_dtypes_are_refused(tmp_path, no_devices):
  config = tiny('llama')
  refused(tmp_path, config, r'model\.safetensors')
  stored = checkpoint(config)
  stored['model.norm.weight'] = stored['model.norm.weight'].astype(np.int32)
  save_file(stored, tmp_path / 'model.safetensors')
  refused(tmp_path, config, r'model\.norm\.weight .*I32.* F32, F16, BF16')


def test_check_weights_returns_the_file_of_each_tensor(tmp_path):
  config = tiny('qwen3')
  export_folder(tmp_path / 'out', params_of(config), config, max_shard_bytes=40_000)
  index = json.loads((tmp_path / 'out' / 'model.safetensors.index.json').read_text())['weight_map']
  assert {name: path.name for name, path in check_weights(tmp_path / 'out', config).items()} == index
  assert huggingface.get({'a': {0: 'leaf'}}, ('a', 0)) == 'leaf'


def test_shards_are_filled_in_the_order_of_the_tensors(tmp_path):
  """A shard ends only where the next tensor does not fit. One tensor may be larger than a shard."""
  config = tiny('llama')
  limit = 20_000
  export_folder(tmp_path / 'out', params_of(config), config, max_shard_bytes=limit)
  sizes = {t.name: 2 * int(np.prod(t.shape)) for t in tensors(config).values()}
  expected, room = [[]], limit
  for name, size in sizes.items():
    if expected[-1] and size > room:
      expected.append([])
      room = limit
    expected[-1].append(name)
    room -= size
  assert max(sizes.values()) > limit > 2 * min(sizes.values())
  shards = sorted((tmp_path / 'out').glob('*.safetensors'))
  assert [set(load_file(shard)) for shard in shards] == [set(names) for names in expected]
  assert sum(len(names) > 1 for names in expected) > 2
