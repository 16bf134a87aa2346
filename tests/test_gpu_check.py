"""benchmarks/gpu_check.py in rehearsal. tests/kernels/test_compiled_gpu_check.py compiles its real sizes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import gpu_check_kernels
import gpu_check_parity
import gpu_check_programs
import jax
import jax.numpy as jnp
import pytest
from device_timing import Ceilings
from gpu_check_bench import Bench, judged, torch_time

from sprl.kernels.cost import Cost

ROOT = Path(__file__).parents[1]
BENCH = Bench(rehearse=True, ceilings=Ceilings(copy=1e12, bf16=1e14, fp8=None))
REAL = Bench(rehearse=False, ceilings=BENCH.ceilings)


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


def test_the_error_without_a_gpu_names_rehearse():
  command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py')]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert 'no GPU here; --rehearse runs the script without one' in done.stderr


def test_rows_and_the_summary_compare_figures_with_targets():
  row = judged({'check': 'a', 'us': 3.0, 'times bf16': 1.69}, {'us': 3.0, 'times bf16': 1.7, 'times best peer': 1.0})
  assert row['asked'] == 'us >= 3: 3, met; times bf16 >= 1.7: 1.69, MISSED; times best peer >= 1: not measured'
  told = gpu_check.summary(
    [{'case': 'b', 'status': 'ok', **row}, {'check': 'c', 'case': '', 'status': 'out of time'}], device='x'
  )
  assert told['missed'] == ['a b: times bf16 >= 1.7: 1.69, MISSED']
  assert (told['asked'], told['met'], told['bad'], told['device']) == (3, 1, ['c'], 'x')


def test_the_gain_over_dense_decoding_is_judged_only_at_equal_rows():
  asked = {'share of bytes': 0.7, 'times dense bf16': 3.0}
  row = {'rows': 256, 'tokens/s': 400.0, 'share of bytes': 0.75}
  same = gpu_check_programs.beside_dense(row, {'rows': 256, 'tokens/s': 100.0}, asked)
  assert same['asked'] == 'share of bytes >= 0.7: 0.75, met; times dense bf16 >= 3: 4, met'
  fewer = gpu_check_programs.beside_dense(row, {'rows': 128, 'tokens/s': 100.0}, asked)
  assert (fewer['times dense bf16'], fewer['note']) == (4.0, 'dense bf16 has B 128')
  assert fewer['asked'] == 'share of bytes >= 0.7: 0.75, met'
  missing = gpu_check_programs.beside_dense(row, None, asked)
  assert missing['asked'] == 'share of bytes >= 0.7: 0.75, met; times dense bf16 >= 3: not measured'


def test_memory_counts_each_array_once():
  x, y = jnp.ones((4, 8)), jnp.ones(16, jnp.bfloat16)
  assert gpu_check_programs.held({'x': x, 'y': y}, [x]) == 4 * 4 * 8 + 2 * 16
  assert gpu_check_programs.held(x, jnp.copy(x)) == 2 * 4 * 4 * 8


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
  first = next(iter(gpu_check_kernels.check_matmul(bench)))
  assert first['asked'] == 'times bf16 >= 1.6: 1.5, MISSED'
  compared = {each.check for each in gpu_check_parity.matmul_comparisons(bench)}
  assert ('triton us' in first, 'parity triton' in compared) == (module is not None,) * 2


def test_pytorch_is_a_peer_only_if_it_was_measured():
  row = {'us': 10.0, 'times best peer': 3.0}
  bench = Bench(True, BENCH.ceilings, {'decode': {'[2, 4, 2, 64, 8]': 20.0}})
  assert torch_time(bench, row, 'decode', 2, 4, 2, 64, 8) == {'us': 10.0, 'times best peer': 2.0, 'torch us': 20.0}
  assert torch_time(bench, row, 'rows', 2, 4, 2, 64, 8) == row


def test_a_missing_reference_interpreter_is_named(monkeypatch):
  monkeypatch.setenv('SPRL_REFERENCE_PYTHON', '/nowhere/python')
  assert gpu_check.by_torch(rehearse=False) == {
    'missing': 'no reference interpreter at /nowhere/python: run `make reference`, or set SPRL_REFERENCE_PYTHON'
  }


def test_a_peer_script_beyond_its_time_limit_is_stopped(monkeypatch):
  monkeypatch.setenv('SPRL_REFERENCE_PYTHON', sys.executable)
  monkeypatch.setattr(gpu_check, 'TORCH', 0.01)
  assert gpu_check.by_torch(rehearse=False) == {'missing': 'torch_gpu.py took more than 0.01 s'}


def test_a_failed_or_late_check_keeps_its_rows_and_adds_one_with_the_reason(monkeypatch):
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
  clock[0] = 0.0  # a check may use the time that the later checks leave, and all of it if it is the last
  assert [row['status'] for row in gpu_check.run(REAL, 'slow', 1000, ('last',))] == ['ok'] * 3 + ['out of time']
  clock[0] = 0.0
  assert [row['status'] for row in gpu_check.run(REAL, 'slow', 1000)] == ['ok'] * 3
  assert [row['status'] for row in gpu_check.run(REAL, 'broken', 1000)] == ['ok', 'FAILED: RuntimeError']
  assert [row['status'] for row in gpu_check.run(REAL, 'broken', 10)] == ['not begun: out of time']


def test_a_check_gets_the_seconds_that_earlier_checks_left_and_later_checks_keep_theirs(monkeypatch):
  """The first check ends at once and the others never end: the second gets the first one's time too."""
  second_of_row, (first, second, *_) = 0.25, gpu_check.CHECKS

  def endless(bench):
    while True:
      clock[0] += second_of_row
      yield {'check': 'endless', 'case': ''}

  clock = [float(gpu_check.TORCH + gpu_check.CEILINGS)]  # both are measured before the checks
  monkeypatch.setattr(gpu_check.time, 'monotonic', lambda: clock[0])
  monkeypatch.setattr(gpu_check, 'CHECKS', dict.fromkeys(gpu_check.CHECKS, endless) | {first: lambda bench: iter(())})
  names, took = tuple(gpu_check.CHECKS), {}
  for i, name in enumerate(names):
    start = clock[0]
    list(gpu_check.run(REAL, name, gpu_check.LIMIT, names[i + 1 :]))
    took[name] = clock[0] - start
  expected = gpu_check.SECONDS | {first: 0, second: gpu_check.SECONDS[first] + gpu_check.SECONDS[second]}
  assert took == pytest.approx(expected, abs=len(names) * second_of_row)  # each check ends within a row of its limit
  assert clock[0] < 8 * 60


def test_packed_attention_and_its_gradients_agree_with_the_reference():
  [rows] = gpu_check_parity.row_comparisons(BENCH)
  errors = {row['case'].split()[0]: row for row in gpu_check_parity.compared(rows)}
  assert set(errors) == {'out', 'dq', 'dk', 'dv'}
  assert all(0 < row['error'] < 0.01 and row['status'] == 'ok' for row in errors.values())


def test_a_failed_comparison_is_a_row_and_the_other_comparisons_run(monkeypatch):
  def comparison(name, kernel):
    return gpu_check_parity.Comparison(name, 'toy', lambda key: (jnp.ones(4),), kernel, lambda x: {'y': x, 'z': 2 * x}, 1e-3)

  def unlike(x):
    raise ValueError('a tile of another shape')

  kernels = {
    'fails': unlike,
    'agrees': lambda x: {'y': x, 'z': 2 * x},
    'is off': lambda x: {'y': 1.01 * x, 'z': x * jnp.nan},
  }
  monkeypatch.setattr(gpu_check_parity, 'comparisons', lambda bench: [comparison(*each) for each in kernels.items()])
  rows = [(row['check'], row['case'], row['status']) for row in gpu_check_parity.check_parity(BENCH)]
  assert rows == [
    ('fails', 'toy', 'FAILED: ValueError'),
    ('agrees', 'y toy', 'ok'),
    ('agrees', 'z toy', 'ok'),
    ('is off', 'y toy', 'WRONG: beyond 0.001'),
    ('is off', 'z toy', 'WRONG: beyond 0.001'),
  ]
