"""Processes that find each other by three environment variables, as launch/local.sh sets them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.io.huggingface import export_folder
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.parallel.processes import Place, only_one, place
from sprl.parallel.watchman import LOST
from sprl.settings import SettingsError

ROOT = Path(__file__).parents[2]
WHOLE = {'SPRL_COORDINATOR': 'node7:8476', 'SPRL_PROCESSES': '4', 'SPRL_PROCESS': '3'}


def test_a_process_is_told_its_place():
  assert place(WHOLE) == Place('node7:8476', 4, 3)
  assert place({'HOME': '/root'}) is None
  assert place(dict.fromkeys(WHOLE, '')) is None


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'SPRL_PROCESS': ''}, 'SPRL_PROCESS is not set: .*; set are SPRL_COORDINATOR, SPRL_PROCESSES'),
    ({'SPRL_COORDINATOR': '', 'SPRL_PROCESSES': ''}, 'SPRL_COORDINATOR is not set: .*; set are SPRL_PROCESS$'),
    ({'SPRL_COORDINATOR': 'node7'}, "SPRL_COORDINATOR = 'node7': expected host:port"),
    ({'SPRL_COORDINATOR': 'node7:70000'}, 'expected host:port'),
    ({'SPRL_PROCESSES': '0'}, "SPRL_PROCESSES = '0': expected a number, 1 or more"),
    ({'SPRL_PROCESS': '4'}, "SPRL_PROCESS = '4': expected a number below SPRL_PROCESSES = 4"),
    ({'SPRL_PROCESS': '-1'}, "SPRL_PROCESS = '-1': expected a number below"),
  ],
)
def test_half_a_place_is_refused_by_name(changes, said):
  with pytest.raises(SettingsError, match=said):
    place(WHOLE | changes)


def test_a_command_of_one_process_is_refused_to_several():
  only_one('sprl.export', {})
  only_one('sprl.export', WHOLE | {'SPRL_PROCESSES': '1', 'SPRL_PROCESS': '0'})
  with pytest.raises(SettingsError, match=r'SPRL_PROCESSES = 4: expected 1, or nothing, for sprl\.export'):
    only_one('sprl.export', WHOLE)


def local(*command, **environment):
  """launch/local.sh with this command, under way; no GPUs are dealt out."""
  known = {'PATH': os.environ['PATH'], 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), **environment}
  return subprocess.Popen(
    ['bash', str(ROOT / 'launch' / 'local.sh'), *command], env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )


def test_two_processes_of_two_devices_add_up_what_they_hold():
  flags = '--xla_force_host_platform_device_count=2'
  process = local('2', sys.executable, str(ROOT / 'tests' / 'parallel' / 'processes_psum.py'), XLA_FLAGS=flags)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  told = sorted(line for line in out.splitlines() if '] process ' in line)  # between what gloo says
  assert told == ['[0] process 0 of 2: 22', '[1] process 1 of 2: 22']


@pytest.mark.parametrize(('devices', 'kept'), [(1, True), (2, False)])
@pytest.mark.parametrize('begin', ['initialize()', 'only_one("sprl.evaluate")'])
def test_several_cpus_take_no_program_from_the_compilation_cache(tmp_path, begin, devices, kept):
  """XLA would lose the order of what they send."""
  program = f'import jax; from sprl.parallel.processes import *; {begin}; print(jax.config.jax_enable_compilation_cache)'
  known = {
    'PATH': os.environ['PATH'], 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'JAX_COMPILATION_CACHE_DIR': str(tmp_path),
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
  }  # fmt: skip
  said = subprocess.run([sys.executable, '-c', program], env=known, capture_output=True, text=True, timeout=60)
  assert said.stdout.strip() == str(kept), said.stderr


def test_each_process_reads_and_holds_its_share(tmp_path):
  """Of weights, other arrays and problems; what is split over processes is gathered where the host wants it whole."""
  config, rng = tiny('qwen2'), np.random.default_rng(0)
  params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), transformer.abstract_params(config))
  export_folder(tmp_path / 'model', params, config, dtype=jnp.float32)
  asked = tmp_path / 'problems.jsonl'
  asked.write_text('\n'.join(json.dumps({'prompt': '?', 'answer': i}) for i in range(7)))
  flags = '--xla_force_host_platform_device_count=2'
  script = str(ROOT / 'tests' / 'parallel' / 'processes_share.py')
  process = local('2', sys.executable, script, str(tmp_path / 'model'), str(asked), XLA_FLAGS=flags)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  one, other = sorted(
    (json.loads(line[4:]) for line in out.splitlines() if '"process"' in line), key=lambda told: told['process']
  )
  assert one['devices'] == other['devices'] == [2, 4]
  for told in (one, other):
    assert told['whole'] / 2 <= told['read'] <= told['held'] < 0.52 * told['whole']  # norms are whole everywhere
    assert told['doubled']
    assert told['back']
    assert told['decided'] == 0
    assert told['parked'] == 8 * 3 * 4 / 2
  assert (one['rows'], other['rows']) == ([0, 2], [4, 6])
  assert (one['lines'], other['lines']) == ([0, 2, 4, 6], [1, 3, 5])
  assert one['problems'] == other['problems'] == [str(i) for i in range(7)]
  assert one['embed'] == other['embed'] != 0


def test_arrays_go_to_other_devices_of_each_process_without_the_host():
  """From every layout to every other; no device has more than half of what is brought over for the two of its process."""
  flags = '--xla_force_host_platform_device_count=4'
  process = local('2', sys.executable, str(ROOT / 'tests' / 'parallel' / 'processes_reshard.py'), XLA_FLAGS=flags)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  told = sorted((json.loads(line[4:]) for line in out.splitlines() if '"process"' in line), key=lambda told: told['process'])
  assert told == [{'process': process, 'pairs': 100, 'wrong': [], 'most': 0.5} for process in (0, 1)]


def test_one_that_sleeps_over_its_turn_is_named_and_ended():
  """And not the other, which waits for it; though it is some time until both have started, and compiled."""
  start = time.monotonic()
  process = local('2', sys.executable, str(ROOT / 'tests' / 'parallel' / 'processes_hang.py'))
  out, err = process.communicate(timeout=100)
  assert process.returncode == LOST
  assert time.monotonic() - start < 60
  assert {line for line in out.splitlines() if line.startswith('[0] 2')} == {'[0] 2 2.0'}
  named = rf'SPRL_PROCESS=1 \({re.escape(socket.gethostname())}\) \(at __main__:\d+\) has not moved for 4 s'
  assert re.search(rf'^\[0\] error: {named}, and so ends SPRL_PROCESS=0', err, re.MULTILINE)
  assert re.search(rf'^\[1\] error: {named}; the same command goes on', err, re.MULTILINE)


def test_the_first_to_fail_ends_the_others():
  """And gives its status, whatever theirs."""
  script = 'if [ "$SPRL_PROCESS" = 1 ]; then exit 7; fi; echo started; sleep 60'
  start = time.monotonic()
  process = local('3', 'bash', '-c', script)
  process.communicate(timeout=30)
  assert process.returncode == 7
  assert time.monotonic() - start < 20


def test_a_signal_reaches_every_process():
  script = 'trap "echo saved; exit 0" TERM; echo ready; while true; do sleep 0.05; done'
  process = local('2', 'bash', '-c', script)
  assert process.stdout is not None
  seen = {process.stdout.readline() for _ in range(2)}
  process.send_signal(signal.SIGTERM)
  out, _ = process.communicate(timeout=30)
  assert seen == {'[0] ready\n', '[1] ready\n'}
  assert sorted(out.splitlines()) == ['[0] saved', '[1] saved']
  assert process.returncode == 0


def test_gpus_are_dealt_out_evenly_or_not_at_all():
  script = 'echo $SPRL_PROCESS $SPRL_PROCESSES $CUDA_VISIBLE_DEVICES'
  out, _ = local('2', 'bash', '-c', script, CUDA_VISIBLE_DEVICES='4,5,6,7').communicate(timeout=30)
  assert sorted(out.splitlines()) == ['[0] 0 2 4,5', '[1] 1 2 6,7']
  process = local('3', 'bash', '-c', script, CUDA_VISIBLE_DEVICES='4,5,6,7')
  _, err = process.communicate(timeout=30)
  assert process.returncode == 2
  assert '4 GPUs (4 5 6 7) cannot be dealt out evenly to 3 processes' in err


@pytest.mark.parametrize('arguments', [(), ('2',), ('two', 'true'), ('0', 'true')])
def test_local_says_how_it_is_used(arguments):
  process = local(*arguments)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 2
  assert 'launch/local.sh PROCESSES COMMAND...' in err
