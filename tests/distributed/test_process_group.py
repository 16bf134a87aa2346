"""Processes of a run find each other through three environment variables, which launch/local.sh sets."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saving import SAVES

from sprl.config import SettingsError
from sprl.distributed import process_group
from sprl.distributed.process_group import Identity, identity, initialize, require_single_process
from sprl.distributed.signals import ECHO
from sprl.distributed.team import ALONE
from sprl.distributed.watchdog import LOST
from sprl.io.huggingface import export_folder
from sprl.models import transformer
from sprl.models.config import tiny

ROOT = Path(__file__).parents[2]
WHOLE = {'SPRL_COORDINATOR': 'node7:8476', 'SPRL_PROCESSES': '4', 'SPRL_PROCESS': '3'}


def test_the_variables_identify_a_process():
  assert identity(WHOLE) == Identity('node7:8476', 4, 3)
  assert identity({'HOME': '/root'}) is None
  assert identity(dict.fromkeys(WHOLE, '')) is None


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'SPRL_PROCESS': ''}, 'SPRL_PROCESS is not set: .*SPRL_COORDINATOR, SPRL_PROCESSES$'),
    ({'SPRL_COORDINATOR': '', 'SPRL_PROCESSES': ''}, 'SPRL_COORDINATOR is not set: .* SPRL_PROCESS$'),
    ({'SPRL_COORDINATOR': 'node7'}, "SPRL_COORDINATOR = 'node7'"),
    ({'SPRL_COORDINATOR': 'node7:70000'}, "SPRL_COORDINATOR = 'node7:70000'"),
    ({'SPRL_PROCESSES': '0'}, "SPRL_PROCESSES = '0'"),
    ({'SPRL_PROCESS': '4'}, "SPRL_PROCESS = '4': .* SPRL_PROCESSES = 4"),
    ({'SPRL_PROCESS': '-1'}, "SPRL_PROCESS = '-1'"),
  ],
)
def test_incomplete_and_invalid_variables_are_named(changes, said):
  with pytest.raises(SettingsError, match=said):
    identity(WHOLE | changes)


def test_a_command_for_one_process_refuses_several():
  require_single_process('sprl.export', {})
  require_single_process('sprl.export', WHOLE | {'SPRL_PROCESSES': '1', 'SPRL_PROCESS': '0'})
  with pytest.raises(SettingsError, match=r'SPRL_PROCESSES = 4: .* sprl\.export'):
    require_single_process('sprl.export', WHOLE)


def test_processes_find_each_other_and_broadcast(monkeypatch):
  """Threads stand for processes. A queue replaces the broadcast of JAX from process 0."""
  shared, results = queue.SimpleQueue(), {}

  def share(key, port):
    if port:
      shared.put((key, port))
      shared.put((key, port))
      return key, port
    return shared.get(timeout=10)

  def run(process):
    variables = {'SPRL_COORDINATOR': 'localhost:1', 'SPRL_PROCESSES': '3', 'SPRL_PROCESS': str(process)}
    with process_group.join(variables) as team:
      results[process] = team.gather('who', lambda: 10 * team.process), team.leads, team.leave(0)

  monkeypatch.setattr(process_group, 'initialize', lambda environment, patience: 3)
  monkeypatch.setattr(process_group, 'check_devices', lambda processes, process: None)  # JAX has one process
  monkeypatch.setattr(process_group, '_share', share)
  threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=20)
  assert results == {k: ([0, 10, 20], k == 0, 0) for k in range(3)}


def test_a_stranger_that_connects_and_says_nothing_does_not_stop_the_start(monkeypatch):
  """A port scanner, or the health check of a load balancer."""
  shared, accepted = queue.SimpleQueue(), {}
  monkeypatch.setattr(process_group, '_share', lambda key, port: shared.put((key, port)))
  monkeypatch.setattr(process_group, 'INTRODUCTION', 1)
  hub = threading.Thread(target=lambda: accepted.update(process_group._accept(1)), daemon=True)
  hub.start()
  key, port = shared.get(timeout=10)
  with socket.create_connection(('localhost', port)):
    time.sleep(0.2)  # the stranger is first in the queue
    mine = [process_group._connect_to(('localhost', port), key, 1, purpose)[0] for purpose in ('team', 'watchdog')]
    hub.join(timeout=20)
  assert set(accepted) == {(1, 'team'), (1, 'watchdog')}
  threading.Timer(1.5, lambda: mine[0].send('late')).start()
  assert accepted[1, 'team'][0].recv() == 'late'  # a member may be silent for longer


def test_devices_of_other_processes_are_refused(monkeypatch):
  monkeypatch.setattr(process_group.jax, 'process_count', lambda: 4)
  monkeypatch.setattr(process_group.jax, 'process_index', lambda: 2)
  said = 'SPRL_PROCESSES = 1, SPRL_PROCESS = 0: expected 4 and 2, because the devices'
  with pytest.raises(SettingsError, match=said), process_group.join({}):
    pass
  process_group.check_devices(4, 2)


def test_a_single_process_has_the_team_alone():
  with process_group.join({}) as team:
    assert team is ALONE


def heed_signals():
  """Reset what `nohup` and the background of a shell ignore. A shell cannot trap a signal that it was started to ignore."""
  for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


def local(*command, **environment):
  """Start launch/local.sh with this command, without GPUs."""
  known = {'PATH': os.environ['PATH'], 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), **environment}
  return subprocess.Popen(
    ['bash', str(ROOT / 'launch' / 'local.sh'), *command],
    env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_signals,
  )  # fmt: skip


def run_script(processes, devices, script, *arguments):
  """Run a script in several processes with `devices` devices each. Return the JSON of each, in the order of the processes."""
  flags = f'--xla_force_host_platform_device_count={devices}'
  run = local(str(processes), sys.executable, str(ROOT / 'tests' / 'distributed' / script), *map(str, arguments), XLA_FLAGS=flags)
  out, err = run.communicate(timeout=120)
  assert run.returncode == 0, err
  return sorted((json.loads(line[4:]) for line in out.splitlines() if '"process"' in line), key=lambda told: told['process'])


def test_each_process_reads_and_holds_its_share(tmp_path):
  """A process holds its share of weights, other arrays and problems. `fetch` gathers arrays that are split over processes."""
  config, rng = tiny('qwen2', num_hidden_layers=1), np.random.default_rng(0)
  params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), transformer.abstract_params(config))
  export_folder(tmp_path / 'model', params, config, dtype=jnp.float32)
  (tmp_path / 'train.jsonl').write_text('\n'.join(json.dumps({'prompt': '?', 'answer': i}) for i in range(7)))
  one, other = run_script(2, 2, 'processes_share.py', tmp_path / 'model', tmp_path)
  assert one['devices'] == other['devices'] == [2, 4]
  for told in (one, other):
    assert told['whole'] / 2 <= told['read'] <= told['held'] < 0.52 * told['whole']  # every process holds all norms
    assert told['doubled']
    assert told['back']
    assert told['decided'] == 0
    assert told['left_out'] == 5
    assert told['parked'] == 8 * 3 * 4 / 2
    assert told['moved'] == [True, True]
  assert (one['rows'], other['rows']) == ([0, 2], [4, 6])
  assert (one['lines'], other['lines']) == ([0, 2, 4, 6], [1, 3, 5])
  assert one['problems'] == other['problems'] == [str(i) for i in range(7)]
  assert one['embed'] == other['embed'] == pytest.approx(float(jnp.sum(params['embed'])), rel=1e-4)


@pytest.mark.slow
def test_arrays_move_to_other_devices_of_each_process():
  """Every layout moves to every other without the host. The parts that a device holds on the way are at most half of an array."""
  expected = [{'process': process, 'pairs': 100, 'wrong': [], 'most': 0.5} for process in (0, 1)]
  assert run_script(2, 4, 'processes_reshard.py') == expected


@pytest.mark.slow
def test_a_process_that_misses_its_turn_is_named():
  """The error does not name the process that waits for it. No process is named while both start and compile."""
  start = time.monotonic()
  process = local('2', sys.executable, str(ROOT / 'tests' / 'distributed' / 'processes_hang.py'))
  out, err = process.communicate(timeout=100)
  assert process.returncode == LOST
  assert time.monotonic() - start < 60
  assert {line for line in out.splitlines() if line.startswith('[0] 2')} == {'[0] 2 2.0'}
  named = rf'SPRL_PROCESS=1 \({re.escape(socket.gethostname())}\) at __main__:\d+ made no progress for 4 s'
  assert re.search(rf'^\[0\] error: {named}, so SPRL_PROCESS=0', err, re.MULTILINE)
  assert re.search(rf'^\[1\] error: {named}; ', err, re.MULTILINE)


def test_a_port_in_use_is_refused_by_the_name_of_its_variable():
  with socket.create_server(('', 0)) as taken:
    variables = {'SPRL_COORDINATOR': f'localhost:{taken.getsockname()[1]}', 'SPRL_PROCESSES': '2', 'SPRL_PROCESS': '0'}
    with pytest.raises(SettingsError, match=r"SPRL_COORDINATOR = 'localhost:\d+': expected a free port of this host \(.*in use"):
      initialize(variables)


@pytest.mark.parametrize(('devices', 'enabled'), [(1, True), (2, False)])
@pytest.mark.parametrize('begin', [initialize, partial(require_single_process, 'sprl.evaluate')])
def test_several_cpus_disable_the_compilation_cache(monkeypatch, tmp_path, begin, devices, enabled):
  """A program for several CPU devices loses the order of its collectives when XLA reads it from the cache."""
  monkeypatch.setattr(jax, 'device_count', lambda: devices)
  before = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  try:
    begin(environment={})
    assert jax.config.jax_enable_compilation_cache == enabled
  finally:
    jax.config.update('jax_enable_compilation_cache', before[0])
    jax.config.update('jax_compilation_cache_dir', before[1])


# --- launch/local.sh -------------------------------------------------------------------------------------------------


def test_the_first_failure_ends_the_others_and_gives_the_status():
  script = 'if [ "$SPRL_PROCESS" = 1 ]; then exit 7; fi; echo started; sleep 60'
  start = time.monotonic()
  process = local('3', 'bash', '-c', script)
  process.communicate(timeout=30)
  assert process.returncode == 7
  assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_process_that_ignores_sigterm_is_killed():
  """A process that SIGSTOP stops, or whose Python hangs, ignores SIGTERM too."""
  script = 'if [ "$SPRL_PROCESS" = 1 ]; then exit 7; fi; trap "" TERM; while true; do sleep 1; done'
  process = local('2', 'bash', '-c', script)
  process.communicate(timeout=30)
  assert process.returncode == 7


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


@pytest.mark.parametrize(('number', 'times'), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGHUP, 1), (signal.SIGINT, 2)])
def test_a_signal_to_the_group_saves_and_a_second_ends_the_processes(number, times):
  """Ctrl-C signals a group: the script, its `sleep`, and what it has started in the same group."""
  process = local('2', sys.executable, '-c', SAVES)
  assert process.stdout is not None
  seen = {process.stdout.readline() for _ in range(2)}
  for again in range(times):
    time.sleep(2 * ECHO * again)
    os.killpg(process.pid, number)
  out, _ = process.communicate(timeout=60)
  assert seen == {'[0] ready\n', '[1] ready\n'}
  assert (sorted(out.splitlines()), process.returncode) == ((['[0] saved', '[1] saved'], 0) if times == 1 else ([], 128 + 15))


def test_a_signal_that_arrives_twice_at_once_is_one_request():
  """`timeout` signals a command and then its group."""
  process = subprocess.Popen([sys.executable, '-c', SAVES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  assert process.stdout is not None
  process.stdout.readline()
  for _ in range(2):
    process.terminate()
    time.sleep(ECHO / 4)
  assert process.communicate(timeout=60)[0] == 'saved\n'
  assert process.returncode == 0


def test_gpus_are_divided_evenly_or_the_launch_fails():
  script = 'echo $SPRL_PROCESS $SPRL_PROCESSES $CUDA_VISIBLE_DEVICES'
  four = {'CUDA_VISIBLE_DEVICES': '4,5,6,7', 'JAX_PLATFORMS': 'cuda'}
  out, _ = local('2', 'bash', '-c', script, **four).communicate(timeout=30)
  assert sorted(out.splitlines()) == ['[0] 0 2 4,5', '[1] 1 2 6,7']
  process = local('3', 'bash', '-c', script, **four)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 2
  assert '4 GPUs (4 5 6 7)' in err
  assert '3 processes' in err


@pytest.mark.parametrize('environment', [{'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '-1'}])
def test_gpus_that_are_not_used_are_not_divided(environment):
  out, _ = local('2', 'bash', '-c', 'echo $SPRL_PROCESS $CUDA_VISIBLE_DEVICES', **environment).communicate(timeout=30)
  assert sorted(out.splitlines()) == [f'[{i}] {i} {environment["CUDA_VISIBLE_DEVICES"]}' for i in range(2)]


@pytest.mark.parametrize('arguments', [(), ('2',), ('two', 'true'), ('0', 'true')])
def test_wrong_arguments_print_the_usage(arguments):
  process = local(*arguments)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 2
  assert 'launch/local.sh PROCESSES COMMAND...' in err
