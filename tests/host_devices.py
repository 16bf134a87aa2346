"""Run a script on 8 host devices, in a separate process: JAX cannot change the devices of a running process."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
FAST = {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}  # halves the time of compilation


def on_devices(script, *arguments, **env):
  """Run tests/sharding/SCRIPT and return the last line of its output, read as JSON."""
  paths = (TESTS.parent, TESTS, TESTS.parent / 'benchmarks')
  env |= {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': os.pathsep.join(map(str, paths)),
  }
  line = [sys.executable, str(TESTS / 'sharding' / script), *arguments]
  result = subprocess.run(line, env=os.environ | env, capture_output=True, text=True, timeout=1800)
  assert result.returncode == 0, result.stderr[-3000:]
  return json.loads(result.stdout.splitlines()[-1])
