"""benchmarks/gpu_check.py in rehearsal. tests/kernels/test_compiled_gpu_check.py compiles its real sizes."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import compilation_cache
import gpu_check
import gpu_check_decode
import gpu_check_kernels
import gpu_check_parity
import gpu_check_record
import jax
import jax.numpy as jnp
import pytest
from bare import IMAGE, OnlyTheImage, with_dependencies
from device_timing import Ceilings
from gpu_check_bench import Bench, Case, config_of, judged, torch_time

from sprl.cache.kv_cache import KVCache
from sprl.cache.layout import cache_layout
from sprl.config import DENSE, Cache, Quant
from sprl.kernels import ptxas
from sprl.kernels.cost import Cost
from sprl.models.config import tiny
from sprl.quant.block import BlockScaled, quantise_groups
from sprl.quant.joined import Joined, Within

ROOT = Path(__file__).parents[1]
BARE = [sys.executable, str(ROOT / 'tests' / 'bare.py')]  # Python with the packages of a bare JAX image
SCRIPT = str(ROOT / 'benchmarks' / 'gpu_check.py')
BENCH = Bench(rehearse=True, ceilings=Ceilings(copy=1e12, bf16=1e14, fp8=None))
REAL = Bench(rehearse=False, ceilings=BENCH.ceilings)


def rehearsed(folder, parts):
  """Rehearse these parts with the packages of a bare image; return what is printed."""
  command = [*BARE, SCRIPT, '--rehearse', f'--only={parts}', '--limit=1500', '--save', str(folder)]
  environment = {**os.environ, **compilation_cache.variables()}
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert (result['bad'], result['not run']) == ([], [])
  [saved] = folder.glob('gpu_check_*.json')
  assert json.loads(saved.read_text())['result'] == result
  return done.stdout


@pytest.mark.slow
def test_the_checks_of_kernels_run_in_the_interpreter_with_the_packages_of_a_bare_image(tmp_path):
  printed = rehearsed(tmp_path, 'parity,attention,matmul,quantise,rows,eviction,append')
  kernels = (
    'decode_attention',
    'block_matmul',
    'grouped_matmul',
    'grouped_matmul bf16',
    'compact',
    'quantise',
    'norm',
    'rows',
    'append',
  )
  parity = 'similarity', 'norm', 'rows', 'append', 'quantise alone', 'quantise norm', 'quantise gated activation'
  for check in (*kernels, *(f'parity {name}' for name in parity)):
    assert f'\n{check} ' in printed


@pytest.mark.slow
def test_the_checks_of_programs_run_in_the_interpreter_with_the_packages_of_a_bare_image(tmp_path):
  """CI leaves it out (.ci/run): its programs take ten minutes to compile for the interpreter."""
  printed = rehearsed(tmp_path, 'decode,launches,update,decode_whole')
  for check in ('decode', 'decode step', 'update'):
    assert f'\n{check} ' in printed


@pytest.mark.slow
def test_a_part_runs_in_an_environment_with_the_packages_of_a_bare_image(tmp_path):
  """`bare.py` refuses imports in this environment. Here a fresh one has the packages, and sprl is not installed."""
  python = tmp_path / 'venv' / 'bin' / 'python'
  venv.create(tmp_path / 'venv', with_pip=True)
  versions = [f'{name}=={metadata.version(name)}' for name in ('jax', 'jaxlib')]
  installed = subprocess.run(
    [str(python), '-m', 'pip', 'install', '--quiet', '--only-binary=:all:', *versions, *IMAGE[1:]], capture_output=True, text=True
  )
  if installed.returncode:
    pytest.skip(f'pip could not install the packages: {installed.stderr.strip().splitlines()[-1][:100]}')
  environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'} | {'JAX_PLATFORMS': 'cpu'}
  command = [str(python), SCRIPT, '--rehearse', '--only=append', '--save', str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert (result['bad'], result['not run']) == ([], [])


@pytest.mark.slow
def test_a_part_runs_with_the_packages_of_a_bare_image_and_saves_its_rows(tmp_path):
  command = [*BARE, SCRIPT, '--rehearse', '--only=append', '--save', str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  saved = json.loads((tmp_path / 'gpu_check_cpu_append.json').read_text())
  assert [(row['check'], row['status']) for row in saved['rows']] == [('append', 'ok')] * 2
  assert saved['result'] == json.loads(done.stdout.splitlines()[-1])


def test_the_packages_of_a_bare_image_lack_those_of_training():
  kept = with_dependencies(IMAGE)
  assert {'jax', 'jaxlib', 'optax', 'orbax-checkpoint', 'flax', 'numpy', 'jaxtyping', 'absl-py'} <= kept
  assert not kept & {'ml-collections', 'grain', 'safetensors', 'tokenizers', 'tensorboardx', 'jinja2', 'pyarrow', 'gguf'}
  assert {'ml_collections', 'grain', 'safetensors', 'tensorboardX'} <= OnlyTheImage().refused


def test_the_error_without_a_gpu_names_rehearse():
  command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py')]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert 'no GPU here; --rehearse runs the script without one' in done.stderr


def test_rows_and_the_summary_compare_figures_with_targets():
  row = judged({'check': 'a', 'us': 3.0, 'times bf16': 1.69}, {'us': 3.0, 'times bf16': 1.7, 'times best peer': 1.0})
  assert row['asked'] == 'us >= 3: 3, met; times bf16 >= 1.7: 1.69, MISSED; times best peer >= 1: not measured'
  others = [{'check': 'c', 'case': 'd', 'status': status} for status in ('not run', 'FAILED: ValueError')]
  told = gpu_check_record.summary([{'case': 'b', 'status': 'ok', **row}, *others], device='x')
  assert told['missed'] == ['a b: times bf16 >= 1.7: 1.69, MISSED']
  assert (told['asked'], told['met'], told['bad'], told['not run'], told['device']) == (3, 1, ['c d'], ['c d'], 'x')


def test_the_gain_over_dense_decoding_is_judged_only_at_equal_rows():
  asked = {'share of bytes': 0.7, 'times dense bf16': 3.0}
  row = {'B': 256, 'us': 500.0, 'share of bytes': 0.75}

  def beside(dense):
    return gpu_check_decode.beside_dense(row, dense, 'us', asked)

  assert beside({'B': 256, 'us': 2000.0})['asked'] == 'share of bytes >= 0.7: 0.75, met; times dense bf16 >= 3: 4, met'
  fewer = beside({'B': 128, 'us': 2000.0})
  assert (fewer['times dense bf16'], fewer['note']) == (8.0, 'dense bf16 has B 128')  # twice the rows in a quarter of the time
  assert fewer['asked'] == 'share of bytes >= 0.7: 0.75, met'
  assert beside(None)['asked'] == 'share of bytes >= 0.7: 0.75, met; times dense bf16 >= 3: not measured'


def test_the_time_of_a_layer_is_the_slope_between_two_models(monkeypatch):
  """4 layers take 1,000 us and 8 take 1,400: 100 a layer, so 28 take 3,400. A layer reads 0.08 GB, at 1e12 bytes/s 80 us."""
  measured = {
    4: {'B': 256, 'us': 1000.0, 'plain us': 1000.0, 'GB': 0.5},
    8: {'B': 256, 'us': 1400.0, 'plain us': 1400.0, 'GB': 0.82},
  }
  monkeypatch.setattr(gpu_check_decode, 'steps_of', lambda bench, name, mode, tokens, layers: measured[layers] | {'B': 256})
  name, rows = 'Qwen2.5-7B', {}
  for layers in (4, 8):
    rows['decode', gpu_check_decode.layers_case(name, 'bf16', 4096, layers)] = row = gpu_check_decode.few_layers(
      REAL, name, 'bf16', 4096, layers, rows
    )
  assert (row['us a layer'], row['us all layers']) == (100.0, 3400.0)
  assert row['share of bytes'] == pytest.approx(0.8)
  measured[4], measured[8] = (each | {'us': each['us'] / 4} for each in measured.values())
  for layers in (4, 8):
    rows['decode', gpu_check_decode.layers_case(name, 'sparse', 4096, layers)] = row = gpu_check_decode.few_layers(
      REAL, name, 'sparse', 4096, layers, rows
    )
  assert row['times dense bf16'] == pytest.approx(4.0)


def test_rows_are_due_only_at_the_last_step_of_a_chunk():
  since = gpu_check_decode.staggered(256, interval=128, chunk=16)
  steps_to_compression = [127 - int(each) for each in since]
  assert {step % 16 for step in steps_to_compression} == {15}
  assert sorted(set(steps_to_compression)) == [15, 31, 47, 63, 79, 95, 111, 127]  # equally often at the end of each chunk


@pytest.mark.parametrize('quant', ['none', 'kv8'])
def test_caches_are_filled_with_different_numbers_and_no_clamped_code(quant):
  layout = cache_layout(
    tiny('llama'), Cache(budget=12, interval=4, window=4, method='rkv'), Quant(sampler=quant), 8, 24, jnp.bfloat16
  )
  layer = gpu_check_decode.filled(KVCache.empty(layout, 3).layers[0], 0)
  keys = jnp.abs(layer.keys.astype(jnp.float32))
  assert len(set(keys[0, 0].ravel().tolist())) > 30
  assert not jnp.array_equal(layer.k, layer.v)
  assert float(keys.max()) < 448
  assert layer.position[1, 1].tolist() == list(range(layout.slots))


@pytest.mark.parametrize('cache', [DENSE, Cache(budget=12, interval=4, window=4, method='rkv')])
def test_the_lengths_of_a_timed_cache_have_the_types_of_decode_so_that_nothing_compiles_in_the_timed_chunks(cache):
  layout = cache_layout(tiny('llama'), cache, Quant(), 8, 24, jnp.bfloat16)
  state = gpu_check_decode.at_lengths(KVCache.empty(layout, 2), 16, gpu_check_decode.staggered(2, 4, 2))
  assert not any(jax.typeof(x).weak_type for x in (state.seen, state.length, state.decoded))
  assert state.length.tolist() == ([12, 14] if cache.budget else [16, 16])
  assert state.seen.tolist() == [16, 16]


@pytest.mark.parametrize('mode', gpu_check_decode.modes(BENCH))
def test_every_mode_decodes_with_the_joined_weights_of_the_engine(mode):
  params, (cache, quant) = gpu_check_decode.random_params('toy', 1), gpu_check_decode.modes(BENCH)[mode]
  layout = cache_layout(config_of('toy', 1), cache, quant, 8, 24, jnp.bfloat16)
  weights = gpu_check_decode.engine_weights(params, quant, layout)
  [layer] = weights.params['layers'].values()
  assert [type(layer['attention'][name]['kernel']) for name in 'qkv'] == [Joined, Within, Within]
  assert [type(layer['mlp'][name]['kernel']) for name in ('gate', 'up')] == [Joined, Within]
  assert (weights.scales is not None) == ('kv8' in quant.sampler)
  assert isinstance(layer['attention']['q']['kernel'].weight, BlockScaled) == ('w8a8' in quant.sampler)
  bytes_of = sum(x.nbytes for x in jax.tree.leaves((params, weights)))
  assert gpu_check_decode.held(params, weights) == bytes_of  # no buffer is shared, so both copies count


def test_memory_counts_each_array_once():
  x, y = jnp.ones((4, 8)), jnp.ones(16, jnp.bfloat16)
  assert gpu_check_decode.held({'x': x, 'y': y}, [x]) == 4 * 4 * 8 + 2 * 16
  assert gpu_check_decode.held(x, jnp.copy(x)) == 2 * 4 * 4 * 8


def test_a_timed_row_has_the_share_of_the_ceiling_and_the_ratio_to_the_best_peer():
  def unlike(x):
    raise NotImplementedError

  row = BENCH.timed(
    'sum', 'toy', jnp.sum, lambda key: (jax.random.normal(key, (64,)),), Cost(10**6, 10**3), {'b': jnp.max, 'c': unlike}
  )
  assert row['share of ceiling'] == pytest.approx(1e6 / 1e12 / (row['us'] / 1e6))  # bytes take longer than operations
  assert row['times best peer'] == pytest.approx(row['b us'] / row['us'])
  assert row['note'] == 'c: NotImplementedError'


def test_a_peer_can_have_its_own_arguments():
  shapes = []

  def peer(x):
    shapes.append(x.shape)
    return x

  def of(size):
    return lambda key: (jax.random.normal(key, (size,)),)

  BENCH.timed('sum', 'toy', jnp.sum, of(64), Cost(1, 1), {'b': peer, 'c': peer}, {'c': of(32)})
  assert set(shapes) == {(64,), (32,)}


class FakeTimings(Bench):
  """A bench whose peers are as fast as the kernel, except `bf16` (cuBLAS), which takes 1.5 times as long."""

  def timed(self, name, case, kernel, make, least, peers=None, makes=None, moving=0, fp8=False):
    return {'case': case, 'us': 10.0, **{f'{peer} us': 15.0 if peer == 'bf16' else 10.0 for peer in peers or {}}}


@pytest.mark.parametrize('module', [None, SimpleNamespace(block_matmul=None)])
def test_triton_is_a_peer_if_it_can_be_imported_and_the_target_is_over_bfloat16(monkeypatch, module):
  monkeypatch.setitem(sys.modules, 'peers.triton_block_matmul', module)
  bench = FakeTimings(rehearse=False, ceilings=BENCH.ceilings)
  cases = {case.case: case for case in gpu_check_kernels.check_matmul(bench)}
  first = cases['Qwen2.5-7B gate M 16'].measure({})
  assert first['asked'] == 'times bf16 >= 1.6: 1.5, MISSED'
  compared = {each.check for each in gpu_check_parity.matmul_comparisons(bench)}
  assert ('triton us' in first, 'parity triton' in compared) == (module is not None,) * 2


def test_pytorch_is_a_peer_only_if_it_was_measured():
  row = {'us': 10.0, 'times best peer': 3.0}
  bench = Bench(True, BENCH.ceilings, {'decode': {'[2, 4, 2, 64, 8]': 20.0}})
  assert torch_time(bench, row, 'decode', 2, 4, 2, 64, 8) == {'us': 10.0, 'times best peer': 2.0, 'torch us': 20.0}
  assert torch_time(bench, row, 'rows', 2, 4, 2, 64, 8) == row


def test_a_missing_reference_interpreter_is_named(monkeypatch):
  monkeypatch.setenv('SPRL_REFERENCE_PYTHON', '/nowhere/python')  # it takes precedence over a torch of this environment
  assert gpu_check.by_torch(rehearse=False) == {
    'missing': 'no reference interpreter at /nowhere/python: run `make reference`, or set SPRL_REFERENCE_PYTHON'
  }


def test_a_peer_script_beyond_its_time_limit_is_stopped(tmp_path, monkeypatch):
  python = tmp_path / 'python'
  python.write_text('#!/bin/sh\nexec sleep 60\n')
  python.chmod(0o755)
  monkeypatch.setenv('SPRL_REFERENCE_PYTHON', str(python))
  monkeypatch.setattr(gpu_check, 'TORCH', 0.1)
  assert gpu_check.by_torch(rehearse=False) == {'missing': 'torch_gpu.py took more than 0.1 s'}


def case_of(name, seconds=0.0, clock=None, error=None):
  """A case that takes `seconds` of a fake clock and then raises `error`, if given."""

  def measure(before):
    if clock is not None:
      clock[0] += seconds
    if error is not None:
      raise error
    return {'us': 1.0, 'earlier': len([row for row in before.values() if row['status'] == 'ok'])}

  return Case('check', name, measure)


def test_a_failed_case_is_a_row_and_the_others_run(monkeypatch):
  cases = [case_of('a'), case_of('b', error=ValueError('a tile of another shape')), case_of('c')]
  rows = gpu_check_record.planned(cases)
  assert [row['status'] for row in rows.values()] == ['not run'] * 3
  for row in gpu_check_record.run('part', cases, rows, float('inf')):
    rows[gpu_check_record.key(row)] = row
  assert [row['status'] for row in rows.values()] == ['ok', 'FAILED: ValueError', 'ok']
  assert rows['check', 'b']['note'] == 'a tile of another shape'
  assert rows['check', 'c']['earlier'] == 1  # a case sees the rows that were measured before it


def test_a_part_that_is_cut_says_what_did_not_run(monkeypatch, capsys):
  clock = [0.0]
  monkeypatch.setattr(gpu_check_record.time, 'monotonic', lambda: clock[0])
  cases = [case_of(name, 20, clock) for name in 'abcd']
  rows = gpu_check_record.planned(cases)
  assert [row['case'] for row in gpu_check_record.run('part', cases, rows, 30)] == ['a', 'b']
  assert 'part: 40 s; out of time, not run: check c; check d' in capsys.readouterr().out


def test_a_resumed_run_measures_only_what_is_missing_or_failed():
  earlier = [{'check': 'check', 'case': name, 'status': status, 'us': 7.0} for name, status in (
    ('a', 'ok'), ('b', 'FAILED: ValueError'), ('c', 'not run'), ('gone', 'ok')
  )]  # fmt: skip
  cases = [case_of(name) for name in 'abc']
  rows = gpu_check_record.planned(cases, earlier)
  assert [row['case'] for row in gpu_check_record.run('part', cases, rows, float('inf'))] == ['b', 'c']
  assert rows['check', 'a']['us'] == 7.0
  assert ('check', 'gone') not in rows


def test_a_result_of_another_device_cannot_be_resumed(tmp_path):
  file = tmp_path / 'a.json'
  file.write_text(json.dumps({'result': {'device': 'NVIDIA_H100'}, 'rows': [], 'commit': 'c'}))
  with pytest.raises(SystemExit, match='measured on NVIDIA_H100; expected a result of NVIDIA_H200'):
    gpu_check.read_earlier(file, 'NVIDIA_H200')
  assert gpu_check.read_earlier(tmp_path / 'none.json', 'NVIDIA_H200') == ([], {})


def test_every_case_has_its_own_name():
  """The names select what a resumed run measures."""
  for bench in (BENCH, REAL):
    names = [(each.check, each.case) for check in gpu_check.CHECKS.values() for each in check(bench)]
    assert len(names) == len(set(names))


def test_the_first_comparisons_are_one_of_each_kernel():
  cases = [each.check for each in gpu_check_parity.check_parity(REAL)]
  kernels = set(cases)
  assert set(cases[: len(kernels)]) == kernels


def test_a_part_gets_the_seconds_that_earlier_parts_left_and_later_parts_keep_theirs():
  deadline, parts = gpu_check_record.deadline, gpu_check.SECONDS
  assert deadline(start=0, until=100, part=30, later=50) == 50  # the later parts leave 20 seconds
  assert deadline(start=40, until=100, part=30, later=50) == 70  # the parts before took more than theirs
  assert deadline(start=90, until=100, part=30, later=0) == 100
  assert set(parts) == set(gpu_check.CHECKS)
  assert sum(parts.values()) <= gpu_check.LIMIT <= 600


def test_an_fp8_product_below_one_and_a_half_bfloat16_products_is_an_upcast():
  slow, fast = Ceilings(4.3e12, 7.9e14, 7.5e14), Ceilings(4.3e12, 7.9e14, 1.5e15)
  assert (slow.upcast, fast.upcast, Ceilings(1.0, 1.0, None).upcast) == (True, False, False)
  assert (slow.fp8_rate, fast.fp8_rate) == (2 * 7.9e14, 1.5e15)
  assert 'it converts e4m3 to bfloat16' in gpu_check.ceilings_note(slow)
  assert gpu_check.ceilings_note(fast) is None


def test_a_rehearsal_interprets_every_kernel():
  """A kernel has an optional argument `interpret`. If it were missing in KERNELS, a rehearsal would compile it for a GPU."""
  modules = [importlib.import_module(f'sprl.kernels.{path.stem}') for path in (ROOT / 'sprl' / 'kernels').glob('hopper_*.py')]
  kernels = {
    (module.__name__, name)
    for module in modules
    for name, function in inspect.getmembers(module, callable)
    if getattr(function, '__module__', '') == module.__name__ and not name.startswith('_')
    if 'interpret' in inspect.signature(function).parameters
  }
  kernels -= {('sprl.kernels.hopper_block_matmul', 'run')}  # called by the two products of its module
  assert kernels == {(module.__name__, name) for module, name in gpu_check.KERNELS}


def test_codes_of_values_that_were_not_rounded_to_bfloat16_first_are_beyond_the_bound():
  """So the comparison would find a kernel that quantises a norm in float32, as XLA may."""
  comparisons = [each for each in gpu_check_parity.quantise_comparisons(BENCH) if each.check == 'parity quantise norm']

  def unrounded(x, added, scale):
    total = x + added
    wide = total.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + 1e-6) * scale.astype(jnp.float32)
    codes, scales = quantise_groups(normed, 'float32')
    return {'values': codes.astype(jnp.float32) * jnp.repeat(scales, 128, axis=1), 'scale': scales, 'sum': total}

  for each in comparisons:
    assert gpu_check_parity.compared(each._replace(kernel=each.reference), {})['status'] == 'ok'
    found = gpu_check_parity.compared(each._replace(kernel=unrounded), {})
    assert found['status'].startswith('WRONG')
    assert found['output'] == 'values'


def test_a_comparison_reports_the_output_with_the_largest_error():
  def comparison(kernel):
    return gpu_check_parity.Comparison('toy', 'toy', lambda key: (jnp.ones(4),), kernel, lambda x: {'y': x, 'z': 2 * x}, 1e-3)

  def status(kernel):
    row = gpu_check_parity.compared(comparison(kernel), {})
    return row['output'], row['status']

  assert status(lambda x: {'y': x, 'z': 2 * x})[1] == 'ok'
  assert status(lambda x: {'y': 1.01 * x, 'z': 2.001 * x}) == ('y', 'WRONG: beyond 0.001')
  assert status(lambda x: {'y': 1.01 * x, 'z': x * jnp.nan}) == ('z', 'WRONG: beyond 0.001')


def test_ptxas_is_that_of_cuda_root_or_the_first_that_is_found(monkeypatch, tmp_path):
  for name in ('wheel', 'toolkit'):
    (tmp_path / name / 'bin').mkdir(parents=True)
  (tmp_path / 'toolkit' / 'bin' / 'ptxas').touch()
  monkeypatch.delenv('CUDA_ROOT', raising=False)
  monkeypatch.setattr(ptxas, '_folders', lambda: iter([tmp_path / 'wheel', tmp_path / 'toolkit']))
  assert ptxas.environment() == {'CUDA_ROOT': str(tmp_path / 'toolkit')}  # the wheel lacks ptxas
  monkeypatch.setenv('CUDA_ROOT', str(tmp_path / 'toolkit'))
  assert (ptxas.find(), ptxas.environment()) == (tmp_path / 'toolkit' / 'bin' / 'ptxas', {})
  monkeypatch.setenv('CUDA_ROOT', str(tmp_path / 'wheel'))
  assert (ptxas.find(), ptxas.environment()) == (None, {})  # a setting of the user is not replaced
  assert ptxas.described().startswith(f'no ptxas in CUDA_ROOT = {tmp_path / "wheel"}: kernels cannot be compiled; set CUDA_ROOT')
