"""Kernels on a mesh run on each device's part of the arrays and give the numbers of one device.

Numbers come from the interpreter on 8 host devices. The structure of the programs comes from compilation for 8 H200s.
"""

import dataclasses
import logging
from collections import Counter

import jax
import pytest
from host_devices import FAST, on_devices
from test_mesh import EIGHT

from sprl.config import Cache, Mesh, ModelSettings, Quant, Run, Sampling, SettingsError
from sprl.kernels import platform
from sprl.kernels.platform import chosen
from sprl.models.config import tiny
from sprl.planning import aot, programs
from sprl.planning.memory import rollout_cache
from sprl.sharding.mesh import make_mesh

# CHECK:DATAxFSDPxTENSOR, with 4 heads and 2 kv heads: with tensor = 4, two devices share a kv head
KERNELS = ('fp8:2x1x4', 'columns:2x1x4')
MORE_KERNELS = [f'{check}:{mesh}' for mesh in ('8x1x1', '2x2x2') for check in ('bf16', 'fp8', 'columns', 'rows')]
MORE_KERNELS += ['bf16:2x1x4', 'rows:2x1x4', 'within blocks:2x1x4']


@pytest.fixture(scope='module')
def ran():
  return on_devices('sharded_kernels.py', *KERNELS, **FAST)


@pytest.fixture(scope='module')
def more_ran():
  return on_devices('sharded_kernels.py', *MORE_KERNELS, **FAST)


def check_kernel(found):
  if 'kept' in found:
    assert found['moved']  # not only the first slots were kept
    assert found['kept']
    assert found['off'] < 2.0**-7  # outputs are rounded to bfloat16 twice
  else:
    assert found['mosaic_gpu'] < 2.0**-7
    assert found['reference'] < 2.0**-7


@pytest.mark.parametrize('case', KERNELS)
def test_devices_compute_their_parts_as_one_would_all(ran, case):
  check_kernel(ran[case])


@pytest.mark.slow
@pytest.mark.parametrize('case', MORE_KERNELS)
def test_devices_of_more_meshes_compute_their_parts_as_one_would_all(more_ran, case):
  check_kernel(more_ran[case])
  if case == 'rows:2x1x4':
    assert more_ran[case]['ran'] == ['block_matmul of [2, 128] and [64, 128]']


def test_a_kernel_sees_the_part_of_its_device(ran):
  """The part is 2 of 4 rows with one kv head and its queries, and a quarter of a weight's columns."""
  cache = ['compact of [2, 1, 16, 128]', 'decode_attention of [2, 2, 128]', 'similarity of [1, 1, 16, 128]']
  assert ran['fp8:2x1x4']['ran'] == cache
  assert ran['columns:2x1x4']['ran'] == ['block_matmul of [2, 256] and [128, 256]']


# --- the choice ------------------------------------------------------------------------------------------------------


def test_xla_never_splits_a_kernel(monkeypatch, caplog):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(platform, 'hopper', lambda: True)
  platform._note.cache_clear()
  caplog.set_level(logging.INFO, logger='sprl')
  with jax.sharding.use_abstract_mesh(make_mesh(Mesh(), EIGHT).abstract_mesh):
    assert not chosen('sorting', 'auto', lambda: None)
    with pytest.raises(SettingsError, match=r"config\.model\.kernels = 'mosaic_gpu': .*sorting.* not split"):
      chosen('sorting', 'mosaic_gpu', lambda: None)
  assert chosen('sorting', 'auto', lambda: None)
  first, second = caplog.messages
  assert first == 'sorting: the reference runs, because it is not split between the devices that share it'
  assert second == 'sorting: the Mosaic GPU kernel runs'


# --- compiled for H200s ----------------------------------------------------------------------------------------------

ROWS, L = 16, 2  # rows of a device, layers
BLOCK = 8  # rows of a device that compress together: `decode.due_at_once`
H, K, D, E, F, V = 8, 4, 128, 512, 1024, 1024
ALL = {'decode_attention', 'block_matmul', 'compact', 'similarity'}
h200s = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))


def decoding(sizes):
  """Return a sparse decode loop with FP8 linears and cache, compiled for 8 H200s, and the layout of its cache."""
  heads = {'num_attention_heads': H, 'num_key_value_heads': K, 'head_dim': D}
  config = tiny('qwen2', **heads, hidden_size=E, intermediate_size=F, vocab_size=V, num_hidden_layers=L)
  cache, quant = Cache(budget=512, interval=128, method='rkv'), Quant(sampler='w8a8_kv8')
  run = Run(
    model=ModelSettings(path='none', kernels='mosaic_gpu', dtype='bfloat16'),
    sampling=Sampling(max_prompt=512, max_tokens=1536),
    cache=cache,
    quant=quant,
  )
  layout = dataclasses.replace(rollout_cache(config, run, cache, quant), key_bias=False)
  mesh = make_mesh(sizes, aot.devices('h200', 8), (H, K))
  program = programs.decoding(config, run, layout, quant, ROWS * 8 // sizes.tensor, mesh)
  return aot.compile_for(program.jitted, *program.arguments, **program.static), layout


def check_in_place(compiled, layout, heads):
  """Check that the program writes and compacts the cache of a device in place, without a copy."""
  assert {kernel for kernel in ALL if f'hopper_{kernel}_mosaic_gpu' in compiled.text} == ALL
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  keys = f'u8[{ROWS},{heads},{layout.slots},{D}]'
  made = [line for line in compiled.text.splitlines() if f'= {keys}' in line]
  assert made
  assert not [line for line in made if ' copy(' in line or ' copy-start(' in line]


def sent(compiled):
  return Counter((each.kind, each.bytes, each.devices) for each in compiled.collectives)


@h200s
def test_devices_that_share_no_row_send_one_bit_to_agree_whether_any_row_is_due():
  compiled, layout = decoding(Mesh(data=8, fsdp=1, tensor=1))
  check_in_place(compiled, layout, K)
  assert sent(compiled) == {('all-reduce', 1, 8): 1}


@h200s
def test_devices_that_share_weights_send_what_is_planned():
  """data 2 x tensor 4: they send hidden states and logits, and neither weights nor cache."""
  compiled, layout = decoding(Mesh(data=2, fsdp=1, tensor=4))
  check_in_place(compiled, layout, K // 4)

  def step(rows):
    planned = Counter({('all-reduce', rows * 2 * E, 4): 1 + 2 * L})  # bfloat16 embeddings of the tokens; o and down
    planned['all-to-all', 4 * rows * V // 4, 4] += 1  # logits: from parts of all rows to whole rows
    planned['all-gather', 4 * rows, 4] += 2  # drawn tokens and their log-probs
    return planned

  # Plain steps, a step for a block of rows that are due, and the question whether any row is, of the two parts of the rows.
  assert sent(compiled) == step(ROWS) + step(BLOCK) + Counter({('all-reduce', 1, 2): 1})
