"""A run over several processes is that of one; when one of them is killed the others end soon, and the same command goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from sprl.io.metrics import read_metrics
from sprl.parallel.watchman import LOST

SOON = 20.0  # seconds within which the others end; a busy machine's, for it takes about two
DENSE = (
  '--config.arm=dense',
  '--config.cache.budget=0',
  '--config.quant.sampler=bf16',
  '--config.ledger.every=0',
  '--config.eval.every=0',
  '--config.loss.kl_coef=0.0',
  '--config.optimizer.minibatches=1',
  '--config.steps=4',
)


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


def start(inputs: Path, workdir: Path, processes: int, devices: int, *changes: str, **variables: str) -> list[subprocess.Popen]:
  """The processes of a run with so many devices each, under way."""
  with socket.socket() as free:
    free.bind(('', 0))
    port = free.getsockname()[1]
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'JAX_COMPILATION_CACHE_DIR': str(inputs / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
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
  """Exit status, standard output and error of each."""
  return [tiny.finish(process) for process in processes]


def train(inputs: Path, workdir: Path, processes: int, devices: int, *changes: str) -> str:
  """A run from start to end; what its first process said on standard output."""
  results = finish(start(inputs, workdir, processes, devices, *changes))
  for status, _, err in results:
    assert status == 0, err
  assert [out for _, out, _ in results[1:] if 'reward' in out] == []  # the first speaks for all
  return results[0][1]


def logged(workdir: Path) -> list[dict]:
  """What was measured, without what a clock says."""
  return [{name: value for name, value in record.items() if name != 'time'} for record in read_metrics(workdir)]


def until_step(step: int, workdir: Path, processes: list[subprocess.Popen]) -> None:
  path = workdir / 'metrics.jsonl'
  while not (path.exists() and any(json.loads(line)['step'] >= step for line in path.read_text().splitlines(True)[:-1])):
    assert all(process.poll() is None for process in processes), finish(processes)
    time.sleep(0.02)


def check_killed(inputs: Path, workdir: Path, gone: int, processes: int, *changes: str) -> None:
  """Kills one of the processes; the others end soon and name it."""
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
      assert status == LOST or gone == 0  # jax aborts those that have lost process 0 at once
      assert status != 0
      assert f'error: SPRL_PROCESS={gone} ({socket.gethostname()}) died' in err


@pytest.fixture(scope='module')
def killed(inputs) -> Path:
  """A run of two processes of one device, of which one is killed; it goes on as one of two."""
  check_killed(inputs, inputs / 'killed', 1, 2, *DENSE)
  assert 'What was learned in 4 steps' in train(inputs, inputs / 'killed', 1, 2, *DENSE)
  return inputs / 'killed'


def test_a_killed_process_is_named_and_the_run_goes_on_with_another_number(killed):
  assert [record['step'] for record in logged(killed)] == [0, 1, 2, 3, 4, 4]


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_the_run_goes_on(inputs, killed):
  """Stopped, it holds its connections open, and its watchman lives. The patience is more than compiling takes."""
  workdir = inputs / 'hangs'
  running = start(inputs, workdir, 2, 1, *DENSE, '--config.patience=30')
  until_step(2, workdir, running)
  running[1].send_signal(signal.SIGSTOP)
  results = finish(running)
  assert [status for status, _, _ in results] == [LOST, -signal.SIGKILL]
  assert re.search(r'error: SPRL_PROCESS=1 \(.*\) \(at .*\) has not moved for 30 s, and so ends SPRL_PROCESS=0', results[0][2])
  train(inputs, workdir, 2, 1, *DENSE)
  assert logged(workdir) == logged(killed)


@pytest.mark.slow
def test_what_was_killed_is_what_would_have_been(inputs, killed):
  [(status, _, err)] = finish(start(inputs, inputs / 'alone', 1, 2, *DENSE, JAX_LOG_COMPILES='1'))
  assert status == 0, err
  assert logged(killed) == logged(inputs / 'alone')
  assert err.count('Compiling jit(_update)') == 1  # for the state that it is given first and for those that it returns


@pytest.mark.slow
def test_what_processes_cannot_share_is_refused_by_each(inputs, tmp_path):
  results = finish(start(inputs, tmp_path / 'run', 2, 1, '--config.devices.learner=0', '--config.devices.rollout=1'))
  for status, _, err in results:
    assert status == 2
    assert "error: config.devices.learner = '0': expected some devices of every process; SPRL_PROCESS=1 has none" in err
    assert 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_every_part_of_a_step_is_the_same_over_processes(inputs):
  """Sparse FP8 rollouts, scales, ledger, minibatches, a reference: over 4 processes, and in one of 4 devices."""
  mesh = '--config.mesh.learner.data=2', '--config.mesh.learner.fsdp=2', '--config.steps=3'
  train(inputs, inputs / 'four', 4, 1, *mesh)
  train(inputs, inputs / 'one', 1, 4, *mesh)
  assert logged(inputs / 'four') == logged(inputs / 'one')
  assert {record['kind'] for record in logged(inputs / 'one')} == {'train', 'eval', 'ledger'}


@pytest.mark.slow
def test_the_first_process_may_be_the_one_that_is_killed(inputs):
  check_killed(inputs, inputs / 'first', 0, 2, *DENSE)
  assert 'What was learned in 4 steps' in train(inputs, inputs / 'first', 2, 1, *DENSE)


@pytest.mark.slow
def test_four_processes_go_on_as_two_on_another_mesh(inputs):
  check_killed(inputs, inputs / 'fewer', 2, 4, *DENSE, '--config.mesh.learner.data=2', '--config.mesh.learner.fsdp=2')
  said = train(inputs, inputs / 'fewer', 2, 1, *DENSE, '--config.mesh.learner.data=1', '--config.mesh.rollout.tensor=2')
  assert 'What was learned in 4 steps' in said


@pytest.mark.slow
def test_a_signal_to_one_process_saves_in_all(inputs):
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
  """What is sampled under which weights is the clock's choice, and process 0's clock alone; no group is lost or comes twice."""
  ahead = '--config.rollout.async_ratio=1', '--config.loss.variant=decoupled_ppo', '--config.sampling.rows=8', '--config.steps=4'
  train(inputs, inputs / 'ahead', 2, 1, *DENSE[:-1], *ahead)
  steps = [record for record in logged(inputs / 'ahead') if record['kind'] == 'train']
  assert len(steps) == 4
  assert all(record['async/age_max'] <= 1 for record in steps)


# --- devices of their own for rollouts -------------------------------------------------------------------------------


@pytest.mark.slow
def test_devices_of_their_own_change_nothing_over_processes(inputs, tmp_path):
  """Of a synchronous run, bit for bit: weights go to the rollouts' devices in FP8, and what is sampled there and learned."""
  apart = '--config.devices.learner=0,2', '--config.devices.rollout=1,3', '--config.steps=3'
  train(inputs, tmp_path / 'two', 2, 2, *apart)
  train(inputs, tmp_path / 'one', 1, 4, *apart)
  assert logged(tmp_path / 'two') == logged(tmp_path / 'one')


@pytest.mark.slow
def test_rollouts_beside_the_learner_go_on_over_processes_after_a_kill(inputs, tmp_path):
  """Of the groups none is lost and none comes twice; weights are cut into four parts, of which each process has two."""
  ahead = (
    '--config.devices.learner=0-1,3-4', '--config.devices.rollout=2,5',
    '--config.rollout.async_ratio=1', '--config.loss.variant=decoupled_ppo', '--config.steps=6',
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
  assert any(max(a, c) < min(b, d) for a, b in learner for c, d in engine)  # chunks were decoded meanwhile


# --- what a run may have besides -------------------------------------------------------------------------------------

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
  '--config.task.kind=environment', '--config.task.path=', '--config.task.eval_path=', '--config.task.grader=auto',
  '--config.environment.turns=2', '--config.environment.turn_tokens=6', '--config.sampling.max_prompt=64',
  '--config.sampling.prompt_buckets=()', '--config.sampling.max_tokens=64', '--config.packing.row_tokens=128',
  '--config.eval.max_tokens=0',
)  # fmt: skip
EXPERTS = '--config.model.router_replay=R3', '--config.mesh.learner.expert=2', '--config.mesh.rollout.expert=2'
ADAPTERS = '--config.lora.rank=2', '--config.loss.kl_coef=1e-3'


def check_alike(inputs: Path, workdir: Path, *changes: str) -> list[dict]:
  """Trains over 2 processes and in one of 2 devices, which measure the same; what they measure at each step."""
  two, one = in_both(inputs, workdir, *changes)
  assert two == one
  return [record for record in two if record['kind'] == 'train']


def in_both(inputs: Path, workdir: Path, *changes: str) -> tuple[list[dict], list[dict]]:
  """What is measured over 2 processes, and in one of 2 devices."""
  train(inputs, workdir / 'two', 2, 1, *DENSE, '--config.steps=2', *changes)
  train(inputs, workdir / 'one', 1, 2, *DENSE, '--config.steps=2', *changes)
  return logged(workdir / 'two'), logged(workdir / 'one')


@pytest.mark.slow
def test_adapters_are_trained_over_processes(inputs, tmp_path):
  first, second = check_alike(inputs, tmp_path, *ADAPTERS)
  assert 0 == first['policy/kl_ref'] < second['policy/kl_ref']


@pytest.mark.slow
def test_conversations_are_held_over_processes(inputs, tmp_path):
  """To rounding: which environment answers first decides who decodes in which row, and beside whom."""
  (tmp_path / 'game.py').write_text(GAME)
  pair = in_both(inputs, tmp_path, *CONVERSATIONS, f'--config.environment.name={tmp_path / "game.py"}:Game')
  two, one = ([record for record in records if record['kind'] == 'train'] for records in pair)
  assert [record['completion/turns'] for record in two] == [2, 2]
  for found, expected in zip(two, one, strict=True):
    of_learning = {name for name in expected if name.startswith(('reward/', 'completion/', 'policy/', 'update/', 'env/'))}
    assert {'reward/mean', 'update/grad_norm'} <= of_learning
    for name in of_learning:
      assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_experts_are_split_and_replayed_over_processes(tmp_path):
  tiny.write_inputs(tmp_path, 'qwen3_moe', num_hidden_layers=1)
  check_alike(tmp_path, tmp_path, *EXPERTS)
