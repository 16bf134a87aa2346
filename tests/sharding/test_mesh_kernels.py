"""Kernels where several devices share an engine: each runs on a device's part, as it would on one device alone.

Numbers are the interpreter's, on 8 devices of the host; what the whole programs are is read off them as compiled for 8 H200s.
"""

import dataclasses
import logging
from collections import Counter

import jax
import pytest
from test_mesh import EIGHT, FAST, on_devices

from sprl.config import Cache, Mesh, ModelSettings, Quant, Run, Sampling, SettingsError
from sprl.kernels import platform
from sprl.kernels.platform import chosen
from sprl.models.config import tiny
from sprl.planning import aot, programs
from sprl.planning.memory import rollout_cache
from sprl.sharding.mesh import make_mesh

# CHECK:DATAxFSDPxTENSOR, of 4 heads and 2 kv heads: where tensor is 4, two devices have the same one
KERNELS = ('fp8:2x1x4', 'columns:2x1x4', 'rows:2x1x4')
MORE_KERNELS = [f'{check}:{mesh}' for mesh in ('8x1x1', '2x2x2') for check in ('bf16', 'fp8', 'columns', 'rows')]
MORE_KERNELS += ['bf16:2x1x4', 'within blocks:2x1x4']


@pytest.fixture(scope='module')
def ran():
  return on_devices('sharded_kernels.py', *KERNELS, **FAST)


@pytest.fixture(scope='module')
def more_ran():
  return on_devices('sharded_kernels.py', *MORE_KERNELS, **FAST)


def check_kernel(found):
  if 'kept' in found:
    assert found['moved']  # other slots than those in front were kept,
    assert found['kept']  # and the same ones
    assert found['off'] < 2.0**-7  # of outputs that are rounded to bfloat16 twice
  else:
    assert found['mosaic_gpu'] < 2.0**-7
    assert found['reference'] < 2.0**-7


@pytest.mark.parametrize('case', KERNELS)
def test_devices_compute_their_parts_as_one_would_all(ran, case):
  check_kernel(ran[case])


@pytest.mark.slow
@pytest.mark.parametrize('case', MORE_KERNELS)
def test_on_other_meshes_they_do_too(more_ran, case):
  check_kernel(more_ran[case])


def test_a_kernel_sees_a_device_s_part(ran):
  """2 of 4 rows of one kv head and its queries; a quarter of a weight's rows, and of its columns."""
  cache = ['compact of [2, 1, 16, 128]', 'decode_attention of [2, 2, 128]', 'similarity of [1, 1, 16, 128]']
  assert ran['fp8:2x1x4']['ran'] == cache
  assert ran['columns:2x1x4']['ran'] == ['block_matmul of [2, 256] and [128, 256]']
  assert ran['rows:2x1x4']['ran'] == ['block_matmul of [2, 128] and [64, 128]']


# --- the choice ------------------------------------------------------------------------------------------------------


def test_no_kernel_is_given_to_xla_to_split(monkeypatch, caplog):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(platform, 'hopper', lambda: True)
  platform._note.cache_clear()
  caplog.set_level(logging.INFO, logger='sprl')
  with jax.sharding.use_abstract_mesh(make_mesh(Mesh(), EIGHT).abstract_mesh):
    assert not chosen('sorting', 'auto', lambda: None)
    with pytest.raises(SettingsError, match="'mosaic_gpu': the kernel of sorting cannot run: it is not divided"):
      chosen('sorting', 'mosaic_gpu', lambda: None)
  assert chosen('sorting', 'auto', lambda: None)
  first, second = caplog.messages
  assert first == 'sorting: the reference runs, as it is not divided between the devices that share it'
  assert second == 'sorting: the Mosaic GPU kernel runs'


# --- compiled for H200s ----------------------------------------------------------------------------------------------

ROWS, L = 16, 2  # rows of a device, layers
H, K, D, E, F, V = 8, 4, 128, 512, 1024, 1024
ALL = {'decode_attention', 'block_matmul', 'compact', 'similarity'}
h200s = pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))


def decoding(sizes):
  """A sparse decode loop with linears and cache in FP8, compiled for eight H200s that share it, and its cache's plan."""
  heads = {'num_attention_heads': H, 'num_key_value_heads': K, 'head_dim': D}
  config = tiny('qwen2', **heads, hidden_size=E, intermediate_size=F, vocab_size=V, num_hidden_layers=L)
  cache, quant = Cache(budget=512, interval=128, method='rkv'), Quant(sampler='w8a8_kv8')
  run = Run(
    model=ModelSettings(path='none', kernels='mosaic_gpu', dtype='bfloat16'),
    sampling=Sampling(max_prompt=512, max_tokens=1536),
    cache=cache,
    quant=quant,
  )
  plan = dataclasses.replace(rollout_cache(config, run, cache, quant), key_bias=False)
  mesh = make_mesh(sizes, aot.h200s(8), (H, K))
  program = programs.decoding(config, run, plan, quant, ROWS * 8 // sizes.tensor, mesh)
  return aot.compile_for(program.jitted, *program.arguments, **program.static), plan


def check_in_place(compiled, plan, heads):
  """The cache of a device's rows and heads is written, and compacted, where it lies."""
  assert {kernel for kernel in ALL if f'hopper_{kernel}_mosaic_gpu' in compiled.text} == ALL
  assert all(kernel.spills == 0 for kernel in compiled.kernels)
  keys = f'u8[{ROWS},{heads},{plan.slots},{D}]'
  made = [line for line in compiled.text.splitlines() if f'= {keys}' in line]
  assert made
  assert not [line for line in made if ' copy(' in line or ' copy-start(' in line]


@h200s
def test_devices_with_rows_of_their_own_send_nothing():
  compiled, plan = decoding(Mesh(data=8, fsdp=1, tensor=1))
  check_in_place(compiled, plan, K)
  assert [(each.kind, each.bytes) for each in compiled.collectives] == [('all-reduce', 1)]  # whether all rows are done


@h200s
def test_devices_that_share_weights_send_what_is_planned():
  """data 2 x tensor 4: hidden states, what tokens are drawn from, and neither weights nor cache."""
  compiled, plan = decoding(Mesh(data=2, fsdp=1, tensor=4))
  check_in_place(compiled, plan, K // 4)
  rows = ROWS * 2 * E  # bfloat16
  planned = Counter({('all-reduce', rows, 4): 1 + 2 * L})  # the tokens' embeddings; o and down
  planned['all-to-all', 4 * ROWS * V // 4, 4] += 1  # logits: from a part of every row's to all of some rows'
  planned['all-gather', 4 * ROWS, 4] += 2  # tokens and their log-probs
  planned['all-reduce', 1, 2] += 1  # whether all rows are done
  assert Counter((each.kind, each.bytes, each.devices) for each in compiled.collectives) == planned
