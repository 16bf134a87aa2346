"""benchmarks/gpu_check.py, rehearsed: it must run the first time that there is a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_check_runs_in_the_interpreter():
  command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py'), '--rehearse', '--limit=900']
  done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result['bad'] == []
  kernels = 'decode_attention', 'block_matmul', 'grouped_matmul', 'compact'
  for check in ('parity similarity', *kernels, 'append', 'decode step', 'update'):
    assert f'\n{check} ' in done.stdout


def test_without_a_gpu_it_says_so():
  command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check.py')]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert 'no GPU here; --rehearse runs the script without one' in done.stderr
