"""A run over several processes equals a run of one process. After a kill the others end, and the same command resumes.

All tests here are slow. tests/distributed and tests/rollout/test_broadcast.py have faster tests of the parts, and test_resume.py
has a faster test of a kill.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from sprl.distributed.watchdog import LOST
from sprl.io.metrics import read_metrics

SOON = 20.0  # seconds within which the others end; usually less than one, more on a busy machine
DENSE = (
  '--config.arm=dense',
  '--config.cache.budget=None',
  '--config.quant.sampler=none',
  '--config.ledger.every=None',
  '--config.eval.every=None',
  '--config.loss.kl_coef=0.0',
  '--config.optimizer.minibatches=1',
  '--config.steps=4',
)


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


# A config that makes process 0, which alone writes logs, close them slowly.
SLOW_LOGS = """
import runpy
import time

from sprl.io.metrics import RunLog

get_config, close = runpy.run_path({config!r})['get_config'], RunLog.close


def slowly(self, *args, **more):
  time.sleep({seconds})
  close(self, *args, **more)


RunLog.close = slowly
"""


def start(inputs: Path, workdir: Path, processes: int, devices: int, *changes: str, **variables: str) -> list[subprocess.Popen]:
  """Start a run of several processes with `devices` devices each."""
  with socket.socket() as free:
    free.bind(('', 0))
    port = free.getsockname()[1]
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    'SPRL_COORDINATOR': f'localhost:{port}',
    'SPRL_PROCESSES': str(processes),
    **variables,
  }
  command = [sys.executable, '-m', 'sprl.main', f'--config={inputs / "config.py"}', f'--workdir={workdir}', *changes]
  return [
    subprocess.Popen(
      command,
      cwd=tiny.ROOT,
      env={**environment, 'SPRL_PROCESS': str(k)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for k in range(processes)
  ]


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
  """Return exit status, standard output and standard error of each process."""
  return [tiny.finish(process) for process in processes]


def train(inputs: Path, workdir: Path, processes: int, devices: int, *changes: str) -> str:
  """Run several processes to the end. Return the standard output of process 0."""
  results = finish(start(inputs, workdir, processes, devices, *changes))
  for status, _, err in results:
    assert status == 0, err
  assert [out for _, out, _ in results[1:] if 'reward' in out] == []  # only process 0 reports
  return results[0][1]


def logged(workdir: Path) -> list[dict]:
  """Return the metrics without times."""
  return [{name: value for name, value in record.items() if name != 'time'} for record in read_metrics(workdir)]


def until_step(step: int, workdir: Path, processes: list[subprocess.Popen]) -> None:
  path = workdir / 'metrics.jsonl'
  while not (path.exists() and any(json.loads(line)['step'] >= step for line in path.read_text().splitlines(True)[:-1])):
    assert all(process.poll() is None for process in processes), finish(processes)
    time.sleep(0.02)


def check_killed(inputs: Path, workdir: Path, gone: int, processes: int, *changes: str) -> None:
  """Kill process `gone` after step 2. The others end soon and name it."""
  running = start(inputs, workdir, processes, 2 // processes or 1, *changes)
  until_step(2, workdir, running)
  running[gone].kill()
  start_of_end = time.monotonic()
  results = finish(running)
  assert time.monotonic() - start_of_end < SOON
  for k, (status, _, err) in enumerate(results):
    if k == gone:
      assert status == -signal.SIGKILL
    else:
      assert status == LOST
      assert f'error: SPRL_PROCESS={gone} ({socket.gethostname()}) died' in err


@pytest.fixture(scope='module')
def killed(inputs) -> Path:
  """A run of two processes with one device each. Process 1 is killed, and one process with two devices resumes the run."""
  check_killed(inputs, inputs / 'killed', 1, 2, *DENSE)
  assert 'What was learned in 4 steps' in train(inputs, inputs / 'killed', 1, 2, *DENSE)
  return inputs / 'killed'


@pytest.mark.slow
def test_a_killed_process_is_named_and_another_number_resumes(killed):
  assert [record['step'] for record in logged(killed)] == [0, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(inputs, killed):
  [(status, _, err)] = finish(start(inputs, inputs / 'alone', 1, 2, *DENSE, JAX_LOG_COMPILES='1'))
  assert status == 0, err
  assert logged(killed) == logged(inputs / 'alone')
  assert err.count('Compiling jit(update)') == 1  # the same program for the first state and for later ones


@pytest.mark.slow
def test_a_mesh_without_devices_of_every_process_is_refused(inputs, tmp_path):
  results = finish(start(inputs, tmp_path / 'run', 2, 1, '--config.devices.learner=0', '--config.devices.rollout=1'))
  for status, _, err in results:
    assert status == 2
    assert "error: config.devices.learner = '0': " in err
    assert 'SPRL_PROCESS=1' in err
    assert 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_every_part_of_a_step_is_the_same_over_processes(inputs):
  """Sparse FP8 rollouts, scales, ledger, minibatches and a reference, over 2 processes and in one with 4 devices."""
  mesh = '--config.mesh.learner.data=2', '--config.mesh.learner.fsdp=2', '--config.steps=3'
  train(inputs, inputs / 'two', 2, 2, *mesh)
  train(inputs, inputs / 'one', 1, 4, *mesh)
  assert logged(inputs / 'two') == logged(inputs / 'one')
  assert {record['kind'] for record in logged(inputs / 'one')} == {'train', 'eval', 'ledger'}


@pytest.mark.slow
def test_two_processes_resume_a_run_of_four_on_another_mesh(inputs):
  """Process 0 is killed."""
  check_killed(inputs, inputs / 'fewer', 0, 4, *DENSE, '--config.mesh.learner.data=2', '--config.mesh.learner.fsdp=2')
  out = train(inputs, inputs / 'fewer', 2, 1, *DENSE, '--config.mesh.learner.data=1', '--config.mesh.rollout.tensor=2')
  assert 'What was learned in 4 steps' in out


@pytest.mark.slow
def test_a_signal_to_one_process_saves_in_all_processes(inputs):
  running = start(inputs, inputs / 'signal', 2, 1, *DENSE)
  until_step(1, inputs / 'signal', running)
  running[1].send_signal(signal.SIGTERM)
  results = finish(running)
  assert [status for status, _, _ in results] == [0, 0], results
  assert 'SIGTERM: saved after step' in results[0][2]
  train(inputs, inputs / 'signal', 2, 1, *DENSE)
  assert [record['step'] for record in logged(inputs / 'signal')] == [0, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_rollouts_may_run_ahead_over_processes(inputs):
  """The clock of process 0 decides which weights sample each token."""
  ahead = '--config.rollout.async_ratio=1', '--config.sampling.rows=8', '--config.steps=4'
  train(inputs, inputs / 'ahead', 2, 1, *DENSE[:-1], *ahead)
  steps = [record for record in logged(inputs / 'ahead') if record['kind'] == 'train']
  assert len(steps) == 4
  assert all(record['async/age_max'] <= 1 for record in steps)


# --- separate devices for rollouts -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_separate_devices_change_nothing_over_processes(inputs, tmp_path):
  """A synchronous run is equal bit for bit; weights go to the rollouts' devices in FP8."""
  apart = '--config.devices.learner=0,2', '--config.devices.rollout=1,3', '--config.steps=3'
  train(inputs, tmp_path / 'two', 2, 2, *apart)
  train(inputs, tmp_path / 'one', 1, 4, *apart)
  assert logged(tmp_path / 'two') == logged(tmp_path / 'one')


@pytest.mark.slow
def test_rollouts_on_separate_devices_resume_over_processes(inputs, tmp_path):
  """No group is lost or repeated. The weights are in four parts, two in each process."""
  ahead = (
    '--config.devices.learner=0-1,3-4', '--config.devices.rollout=2,5',
    '--config.rollout.async_ratio=1', '--config.steps=6',
    '--config.checkpoint.every=1',
  )  # fmt: skip
  running = start(inputs, tmp_path / 'run', 2, 3, *DENSE[:-1], *ahead)
  until_step(3, tmp_path / 'run', running)
  running[1].kill()
  assert all(status for status, _, _ in finish(running))
  train(inputs, tmp_path / 'run', 2, 3, *DENSE[:-1], *ahead)
  steps = [record for record in logged(tmp_path / 'run') if record['kind'] == 'train']
  assert [record['step'] for record in steps] == [1, 2, 3, 4, 5, 6]
  assert max(record['async/age_max'] for record in steps) == 1
  record = json.loads((tmp_path / 'run' / 'checkpoints' / 'step_000006' / 'record.json').read_text())['record']
  state = record['extra']['scheduler']
  assert (state['consumed'], state['next'], state['live']) == (24, 24, [])
  events = json.loads((tmp_path / 'run' / 'trace.json').read_text())['traceEvents']
  tracks = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
  spans = [(tracks[e['tid']], e['ts'], e['ts'] + e['dur']) for e in events if e['ph'] == 'X']
  learner, engine = ([(a, b) for name, a, b in spans if name == track] for track in ('learner', 'engine 0'))
  assert any(max(a, c) < min(b, d) for a, b in learner for c, d in engine)  # the engine decodes during updates


# --- adapters, conversations, experts --------------------------------------------------------------------------------

GAME = """
class Game:
  def reset(self, seed):
    self.left = 2
    return f'{seed % 10} is? ', {}

  def step(self, action):
    self.left -= 1
    return 'no. ', (len(action) * 7 + sum(action.encode())) % 5 / 4, self.left == 0, False, {}
"""
CONVERSATIONS = (
  '--config.task.kind=environment', '--config.task.path=None', '--config.task.workers=None', '--config.task.grader=auto',
  '--config.task.turns=2', '--config.task.turn_tokens=6', '--config.sampling.max_prompt=64',
  '--config.sampling.prompt_buckets=()', '--config.sampling.max_tokens=64', '--config.packing.row_tokens=128',
  '--config.eval.max_tokens=None',
)  # fmt: skip
EXPERTS = '--config.model.router_replay=R3', '--config.mesh.learner.expert=2', '--config.mesh.rollout.expert=2'
ADAPTERS = '--config.lora.rank=2', '--config.loss.kl_coef=1e-3'


def check_alike(inputs: Path, workdir: Path, *changes: str) -> list[dict]:
  """Train over 2 processes and in one with 2 devices. Assert equal metrics. Return the metrics of the steps."""
  two, one = train_both(inputs, workdir, *changes)
  assert two == one
  return [record for record in two if record['kind'] == 'train']


def train_both(inputs: Path, workdir: Path, *changes: str) -> tuple[list[dict], list[dict]]:
  """Train over 2 processes and in one with 2 devices. Return the metrics of both."""
  train(inputs, workdir / 'two', 2, 1, *DENSE, '--config.steps=2', *changes)
  train(inputs, workdir / 'one', 1, 2, *DENSE, '--config.steps=2', *changes)
  return logged(workdir / 'two'), logged(workdir / 'one')


@pytest.mark.slow
def test_adapters_are_trained_over_processes(inputs, tmp_path):
  first, second = check_alike(inputs, tmp_path, *ADAPTERS)
  # New adapters change no log-probability but by rounding, which is about 1e-15 on some processors.
  assert abs(first['policy/kl_ref']) < 1e-12
  assert second['policy/kl_ref'] > 1e-5


@pytest.mark.slow
def test_process_0_reports_the_guard_that_stops_a_run(inputs, tmp_path):
  """All processes stop at the same step. Process 0, whose logs take long to close here, is not ended before it reports."""
  (tmp_path / 'config.py').write_text(SLOW_LOGS.format(config=str(inputs / 'config.py'), seconds=8))
  running = start(tmp_path, tmp_path / 'run', 2, 1, *DENSE, '--config.optimizer.learning_rate=1e30')
  [(status, _, err), (other, _, said)] = finish(running)
  assert (status, other) == (3, 3), err + said
  assert 'stopped at step' in err
  assert 'ended with status' not in err + said


@pytest.mark.slow
def test_a_run_over_processes_starts_from_another_and_exports_at_its_end(inputs, tmp_path):
  """The weights come from a run of one process. The export equals that of one process, bit for bit."""
  train(inputs, tmp_path / 'first', 1, 1, *DENSE, '--config.steps=2')
  train(inputs, tmp_path / 'second', 2, 1, *DENSE, '--config.steps=0', f'--from={tmp_path / "first"}', '--config.export=True')
  status, _, err = tiny.run('export', f'--workdir={tmp_path / "first"}', f'--out={tmp_path / "one"}')
  assert status == 0, err
  one, two = ((folder / 'model.safetensors').read_bytes() for folder in (tmp_path / 'one', tmp_path / 'second' / 'export'))
  assert one == two
  assert 'after step 2' in (tmp_path / 'second' / 'export' / 'README.md').read_text()


@pytest.mark.slow
def test_conversations_agree_over_processes(inputs, tmp_path):
  """Metrics are equal to rounding: the row of a conversation in the batch depends on the order in which environments answer."""
  (tmp_path / 'game.py').write_text(GAME)
  pair = train_both(inputs, tmp_path, *CONVERSATIONS, f'--config.task.name={tmp_path / "game.py"}:Game')
  two, one = ([record for record in records if record['kind'] == 'train'] for records in pair)
  assert [record['completion/turns'] for record in two] == [2, 2]
  for found, expected in zip(two, one, strict=True):
    of_learning = {name for name in expected if name.startswith(('reward/', 'completion/', 'policy/', 'update/', 'env/'))}
    assert {'reward/mean', 'update/grad_norm'} <= of_learning
    for name in of_learning:
      assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_experts_are_sharded_and_replayed_over_processes(tmp_path):
  tiny.write_inputs(tmp_path, 'qwen3_moe', num_hidden_layers=1)
  check_alike(tmp_path, tmp_path, *EXPERTS)
