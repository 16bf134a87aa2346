"""benchmarks/gpu_check.py, rehearsed. That its real sizes compile: tests/kernels/test_compiled_gpu_check.py."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / 'benchmarks'))
import gpu_check
from device_timing import Ceilings

ROOT = Path(__file__).parents[1]
BENCH = gpu_check.Bench(rehearse=True, ceilings=Ceilings(copy=1e12, bf16=1e14, fp8=None))
REAL = gpu_check.Bench(rehearse=False, ceilings=BENCH.ceilings)


@pytest.mark.slow
def test_every_check_runs_in_the_interpreter(tmp_path):
  command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py'), '--rehearse', '--limit=900', '--save', str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result['bad'] == []
  kernels = 'decode_attention', 'block_matmul', 'grouped_matmul', 'grouped_matmul bf16', 'compact'
  for check in ('parity similarity', 'parity rows', *kernels, 'rows', 'append', 'decode step', 'update'):
    assert f'\n{check} ' in done.stdout
  [saved] = tmp_path.glob('gpu_check_*.json')
  assert json.loads(saved.read_text())['result'] == result


def test_without_a_gpu_it_says_so():
  command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py')]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert 'no GPU here; --rehearse runs the script without one' in done.stderr


def test_what_is_asked_stands_beside_the_figure():
  row = gpu_check.judged({'check': 'a', 'us': 3.0, 'times bf16': 1.69}, {'us': 3.0, 'times bf16': 1.7, 'times best peer': 1.0})
  assert row['asked'] == 'us >= 3: 3, met; times bf16 >= 1.7: 1.69, MISSED; times best peer >= 1: not measured'
  told = gpu_check.summary(
    [{'case': 'b', 'status': 'ok', **row}, {'check': 'c', 'case': '', 'status': 'out of time'}], device='x'
  )
  assert told['missed'] == ['a b: times bf16 >= 1.7: 1.69, MISSED']
  assert (told['asked'], told['met'], told['bad'], told['device']) == (3, 1, ['c'], 'x')


def test_a_gain_over_dense_decoding_is_judged_where_both_have_as_many_rows():
  asked = {'share of bytes': 0.7, 'times dense bf16': 3.0}
  row = {'rows': 256, 'tokens/s': 400.0, 'share of bytes': 0.75}
  same = gpu_check.beside_dense(row, {'rows': 256, 'tokens/s': 100.0}, asked)
  assert same['asked'] == 'share of bytes >= 0.7: 0.75, met; times dense bf16 >= 3: 4, met'
  fewer = gpu_check.beside_dense(row, {'rows': 128, 'tokens/s': 100.0}, asked)
  assert (fewer['times dense bf16'], fewer['note']) == (4.0, 'dense bf16 has B 128')
  assert fewer['asked'] == 'share of bytes >= 0.7: 0.75, met'
  missing = gpu_check.beside_dense(row, None, asked)
  assert missing['asked'] == 'share of bytes >= 0.7: 0.75, met; times dense bf16 >= 3: not measured'


def test_an_array_that_is_held_twice_takes_memory_once():
  x, y = jnp.ones((4, 8)), jnp.ones(16, jnp.bfloat16)
  assert gpu_check.held({'x': x, 'y': y}, [x]) == 4 * 4 * 8 + 2 * 16
  assert gpu_check.held(x, jnp.copy(x)) == 2 * 4 * 4 * 8


def test_a_kernel_is_timed_against_the_time_that_its_bytes_take_and_against_its_peers():
  def unlike(x):
    raise NotImplementedError

  row = BENCH.timed(
    'sum', 'toy', jnp.sum, lambda key: (jax.random.normal(key, (64,)),), gpu_check.Cost(10**6, 10**3), {'b': jnp.max, 'c': unlike}
  )
  assert row['share of ceiling'] == pytest.approx(1e6 / 1e12 / (row['us'] / 1e6))  # bytes take longer than operations
  assert row['times best peer'] == pytest.approx(row['b us'] / row['us'])
  assert row['note'] == 'c: NotImplementedError'


def test_a_peer_may_have_arrays_of_its_own():
  shapes = []

  def peer(x):
    shapes.append(x.shape)
    return x

  def of(size):
    return lambda key: (jax.random.normal(key, (size,)),)

  BENCH.timed('sum', 'toy', jnp.sum, of(64), gpu_check.Cost(1, 1), {'b': peer, 'c': peer}, {'c': of(32)})
  assert set(shapes) == {(64,), (32,)}


class Noted(gpu_check.Bench):
  """Notes the peers, and takes all of them to be as fast as the kernel but cuBLAS."""

  def timed(self, name, case, kernel, make, least, peers=None, makes=None, moving=0, fp8=False):
    return {'case': case, 'us': 10.0, **{f'{peer} us': 15.0 if peer == 'bf16' else 10.0 for peer in peers or {}}}


@pytest.mark.parametrize('module', [None, SimpleNamespace(block_matmul=None)])
def test_the_product_in_triton_is_timed_where_it_can_be_imported_and_the_gain_asked_for_is_over_bfloat16(monkeypatch, module):
  monkeypatch.setitem(sys.modules, 'peers.triton_block_matmul', module)
  bench = Noted(rehearse=False, ceilings=BENCH.ceilings)
  first = next(iter(gpu_check.check_matmul(bench)))
  assert first['asked'] == 'times bf16 >= 1.6: 1.5, MISSED'
  compared = {each.check for each in gpu_check.matmul_comparisons(bench)}
  assert ('triton us' in first, 'parity triton' in compared) == (module is not None,) * 2


def test_pytorch_is_a_peer_where_it_was_measured():
  row = {'us': 10.0, 'times best peer': 3.0}
  bench = gpu_check.Bench(True, BENCH.ceilings, {'decode': {'[2, 4, 2, 64, 8]': 20.0}})
  assert gpu_check.torch_time(bench, row, 'decode', 2, 4, 2, 64, 8) == {'us': 10.0, 'times best peer': 2.0, 'torch us': 20.0}
  assert gpu_check.torch_time(bench, row, 'rows', 2, 4, 2, 64, 8) == row


def test_without_pytorch_on_a_gpu_what_is_missing_is_named(monkeypatch):
  monkeypatch.setenv('SPRL_REFERENCE_PYTHON', '/nowhere/python')
  assert gpu_check.by_torch(rehearse=False) == {
    'missing': 'no reference interpreter at /nowhere/python: run `make reference`, or set SPRL_REFERENCE_PYTHON'
  }


def test_a_peer_that_takes_too_long_is_ended(monkeypatch):
  monkeypatch.setenv('SPRL_REFERENCE_PYTHON', sys.executable)
  monkeypatch.setattr(gpu_check, 'TORCH', 0.01)
  assert gpu_check.by_torch(rehearse=False) == {'missing': 'torch_gpu.py took more than 0.01 s'}


def test_a_check_that_fails_or_has_no_time_left_is_a_line_and_keeps_what_it_found(monkeypatch):
  def slow(bench):
    for i in range(3):
      clock[0] += 20
      yield {'check': 'slow', 'case': str(i)}

  def broken(bench):
    yield {'check': 'broken', 'case': 'first'}
    raise RuntimeError

  clock = [0.0]
  monkeypatch.setattr(gpu_check.time, 'monotonic', lambda: clock[0])
  monkeypatch.setattr(gpu_check, 'CHECKS', {'slow': slow, 'broken': broken})
  monkeypatch.setattr(gpu_check, 'SECONDS', {'slow': 30, 'broken': 30, 'last': 945})
  cut = [('0', 'ok'), ('1', 'ok'), ('the rest of it', 'out of time')]
  assert [(row['case'], row['status']) for row in gpu_check.run(REAL, 'slow', 1000, ('broken', 'last'))] == cut
  clock[0] = 0.0  # what is left over is the check's, and all that there is where no other comes later
  assert [row['status'] for row in gpu_check.run(REAL, 'slow', 1000, ('last',))] == ['ok'] * 3 + ['out of time']
  clock[0] = 0.0
  assert [row['status'] for row in gpu_check.run(REAL, 'slow', 1000)] == ['ok'] * 3
  assert [row['status'] for row in gpu_check.run(REAL, 'broken', 1000)] == ['ok', 'FAILED: RuntimeError']
  assert [row['status'] for row in gpu_check.run(REAL, 'broken', 10)] == ['not begun: out of time']


def test_all_checks_together_keep_within_eight_minutes():
  assert set(gpu_check.SECONDS) == set(gpu_check.CHECKS)
  assert gpu_check.TORCH + gpu_check.CEILINGS + sum(gpu_check.SECONDS.values()) <= gpu_check.LIMIT < 8 * 60


def test_the_attention_of_packed_rows_agrees_with_its_reference_both_ways():
  [rows] = gpu_check.row_comparisons(BENCH)
  errors = {row['case'].split()[0]: row for row in gpu_check.compared(rows)}
  assert set(errors) == {'out', 'dq', 'dk', 'dv'}
  assert all(0 < row['error'] < 0.01 and row['status'] == 'ok' for row in errors.values())


def test_a_comparison_that_fails_is_a_line_and_the_others_go_on(monkeypatch):
  def comparison(name, kernel):
    return gpu_check.Comparison(name, 'toy', lambda key: (jnp.ones(4),), kernel, lambda x: {'y': x, 'z': 2 * x}, 1e-3)

  def unlike(x):
    raise ValueError('a tile of another shape')

  kernels = {
    'fails': unlike,
    'agrees': lambda x: {'y': x, 'z': 2 * x},
    'is off': lambda x: {'y': 1.01 * x, 'z': x * jnp.nan},
  }
  monkeypatch.setattr(gpu_check, 'comparisons', lambda bench: [comparison(*each) for each in kernels.items()])
  rows = [(row['check'], row['case'], row['status']) for row in gpu_check.check_parity(BENCH)]
  assert rows == [
    ('fails', 'toy', 'FAILED: ValueError'),
    ('agrees', 'y toy', 'ok'),
    ('agrees', 'z toy', 'ok'),
    ('is off', 'y toy', 'WRONG: beyond 0.001'),
    ('is off', 'z toy', 'WRONG: beyond 0.001'),
  ]
