"""A run whose machine misbehaves ends with an error that names the cause, or goes on. The last good checkpoint is never lost.

A full disk, a read-only folder, a clock that jumps, stopped processes, damaged files. tests/soak kills runs at random moments;
tests/io has faster tests of the files.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import test_over_processes
import tiny
from test_resume import SMALL, STEPS, arguments, assert_same, checkpoint

from sprl.distributed.watchdog import LOST
from sprl.io.checkpoint import CheckpointError, Checkpoints, committed
from sprl.io.metrics import read_metrics

pytestmark = pytest.mark.slow
SAME = {'lines': STEPS + 2, 'tables': 3}  # an evaluation before and after; samples of each step


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


@pytest.fixture(scope='module')
def finished(inputs) -> Path:
  """A complete run with checkpoints of its last two steps."""
  assert train(inputs, inputs / 'finished')[0] == 0
  return inputs / 'finished'


@pytest.fixture
def copy(finished, tmp_path) -> Path:
  return shutil.copytree(finished, tmp_path / 'run')


def train(inputs: Path, workdir: Path, *changes: str) -> tuple[int, str, str]:
  return tiny.run('main', *arguments(inputs, workdir), *SMALL, *changes)


def refused(result: tuple[int, str, str], *named: object) -> None:
  """Assert that a run ended with status 2 and one line that names these."""
  status, _, err = result
  assert status == 2, err  # orbax may print the ends of threads and tasks that it leaves behind
  (line,) = [line for line in err.splitlines() if line.startswith('error: ')]
  assert all(str(name) in line for name in named), line


def until(moment: Callable[[], object], process: subprocess.Popen) -> None:
  while not moment():
    assert process.poll() is None, process.communicate()
    time.sleep(0.005)


# --- the disk --------------------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, size: str):
  """Mount a file system in memory at `folder`. Skip the test where that is not permitted."""
  folder.mkdir()
  done = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'none', str(folder)], capture_output=True, text=True)
  if done.returncode:
    pytest.skip(f'file systems cannot be mounted here: {done.stderr.strip()}')
  try:
    yield folder
  finally:
    subprocess.run(['umount', str(folder)], check=True)


@pytest.mark.parametrize('left', [0, 20_000, 100_000, 400_000], ids=lambda left: f'{left}-bytes-left')
def test_a_full_disk_is_named_and_the_run_resumes_when_there_is_space(inputs, finished, tmp_path, left):
  """A checkpoint takes 660 kB: the disk is full at a line of metrics, at the first array, or in the middle of the arrays."""
  with mounted(tmp_path / 'disk', '16m') as disk:
    workdir, filler = disk / 'run', disk / 'filler'
    process = tiny.start('main', *arguments(inputs, workdir), *SMALL)
    until(checkpoint(workdir, 1).exists, process)
    space = os.statvfs(disk)
    filler.write_bytes(bytes(max(0, space.f_bavail * space.f_bsize - left)))
    saved = committed(workdir / 'checkpoints')
    refused(tiny.finish(process), 'No space left on device', workdir)
    assert saved[-1] in committed(workdir / 'checkpoints')
    assert STEPS not in committed(workdir / 'checkpoints')
    filler.unlink()
    status, _, err = train(inputs, workdir)
    assert status == 0, err
    assert 'resuming after step' in err
    assert_same(workdir, finished, **SAME)


def test_a_read_only_run_is_refused_by_name_but_can_be_read(inputs, finished, tmp_path):
  with mounted(tmp_path / 'disk', '16m') as disk:
    workdir = shutil.copytree(finished, disk / 'run')
    subprocess.run(['mount', '-o', 'remount,ro', str(disk)], check=True)
    refused(train(inputs, workdir), 'Read-only file system', workdir)
    refused(train(inputs, disk / 'new'), 'Read-only file system', disk / 'new')
    status, _, err = tiny.run('export', f'--workdir={workdir}', f'--out={tmp_path / "out"}')
    assert status == 0, err


# --- damaged files ---------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int) -> None:
  data = bytearray(path.read_bytes())
  data[at] ^= 1 << bit
  path.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
  return [path for path in sorted(folder.rglob('*')) if path.is_file() and path.stat().st_size]


def test_one_flipped_bit_in_any_file_of_a_checkpoint_is_found_and_the_file_named(copy):
  """The first byte, the last and ten more of each file."""
  checkpoints, rng = Checkpoints(copy / 'checkpoints', 2), random.Random(0)
  found = files_of(checkpoint(copy, STEPS))
  assert len(found) > 10
  for path in found:
    size = path.stat().st_size
    for at in (0, size - 1, *(rng.randrange(size) for _ in range(10))):
      bit = rng.randrange(8)
      flip(path, at, bit)
      with pytest.raises(CheckpointError, match=re.escape(path.name)):
        checkpoints.restore({}, STEPS)  # refused before arrays are read
      flip(path, at, bit)
  checkpoints.close()


@pytest.mark.parametrize('which', ['record.json', 'largest'])
def test_a_run_with_a_flipped_bit_repeats_the_steps_after_the_checkpoint_before(inputs, finished, copy, which):
  newest = checkpoint(copy, STEPS)
  damaged = newest / which if which == 'record.json' else max(files_of(newest), key=lambda path: path.stat().st_size)
  flip(damaged, damaged.stat().st_size // 3, 0)
  status, _, err = train(inputs, copy)
  assert status == 0, err
  assert f'damaged checkpoint {newest} is not used: {damaged.relative_to(newest)}' in err
  assert f'resuming after step {STEPS - 1}' in err
  assert_same(copy, finished, **SAME)


def test_a_run_of_which_every_checkpoint_is_damaged_is_refused_and_left_as_it_is(inputs, copy):
  saved = committed(copy / 'checkpoints')
  for step in saved:
    flip(checkpoint(copy, step) / 'record.json', 100, 3)
  refused(train(inputs, copy), *(f'step_{step:06d}: record.json is missing or damaged' for step in saved))
  assert committed(copy / 'checkpoints') == saved


@pytest.mark.parametrize('keep', ['half', 'nothing', 'deleted'])
def test_a_run_with_a_truncated_log_goes_on_with_the_same_weights(inputs, finished, copy, tmp_path, keep):
  """The lines that are left and those of later steps are equal to those of a run with a whole log."""
  whole = shutil.copytree(finished, tmp_path / 'whole')
  log = copy / 'metrics.jsonl'
  log.write_bytes(log.read_bytes()[: log.stat().st_size // 2 if keep == 'half' else 0])
  if keep == 'deleted':
    log.unlink()
  longer = f'--config.steps={STEPS + 1}'
  for workdir, said in (copy, True), (whole, False):
    status, _, err = train(inputs, workdir, longer)
    assert status == 0, err
    assert ('metrics.jsonl: damaged; the lines of' in err) == said
  left, expected = ([line for line in read_metrics(folder) if line['kind'] == 'train'] for folder in (copy, whole))
  assert [line['step'] for line in expected] == [1, 2, 3, 4]
  assert [line['step'] for line in left] == ([1, 4] if keep == 'half' else [4])
  shutil.copy(whole / 'metrics.jsonl', log)  # all else is equal
  assert_same(copy, whole, lines=STEPS + 4, tables=4)


# --- time ------------------------------------------------------------------------------------------------------------


def jump(inputs: Path, workdir: Path, unit: int) -> tuple[int, str, str]:
  """Train with a wall clock that jumps by several `unit` seconds, back and forth."""
  return tiny.run(Path(__file__).with_name('clock_jumps.py'), unit, *arguments(inputs, workdir), *SMALL)


def test_a_wall_clock_that_jumps_by_minutes_changes_nothing(inputs, finished, tmp_path):
  status, _, err = jump(inputs, tmp_path / 'run', 30)
  assert status == 0, err
  assert_same(tmp_path / 'run', finished, **SAME)


def test_a_save_that_a_jump_by_days_cuts_off_is_named_and_the_run_resumes(inputs, finished, tmp_path):
  """Orbax measures its time limits, 5 and 20 minutes, with the wall clock. Whether a jump meets it is chance."""
  workdir = tmp_path / 'run'
  ended = jump(inputs, workdir, 86_400)
  if ended[0]:
    refused(ended, workdir / 'checkpoints', 'imed out')
  status, _, err = train(inputs, workdir)
  assert status == 0, err
  assert_same(workdir, finished, **SAME)


def stopped(pid: int, seconds: float) -> None:
  os.kill(pid, signal.SIGSTOP)
  time.sleep(seconds)
  os.kill(pid, signal.SIGCONT)


def worker_of(process: subprocess.Popen) -> int:
  """Return the grading worker of a run."""
  found = subprocess.run(['ps', '-o', 'pid=,args=', '--ppid', str(process.pid)], capture_output=True, text=True).stdout
  (pid,) = [int(line.split()[0]) for line in found.splitlines() if 'sprl.tasks.worker_process' in line]
  return pid


@pytest.mark.parametrize('part', ['run', 'worker', 'worker that is continued'])
def test_a_run_with_a_stopped_process_or_worker_goes_on(inputs, tmp_path, part):
  """It costs at most the grade of the call under way. A worker that stays stopped beyond the time limit is replaced."""
  workdir = tmp_path / 'run'
  process = tiny.start('main', *arguments(inputs, workdir), *SMALL, '--config.task.time_limit=2')
  until(checkpoint(workdir, 1).exists, process)
  if part == 'run':
    stopped(process.pid, 120.0)
  elif part == 'worker that is continued':
    stopped(worker_of(process), 1.0)
  else:
    os.kill(worker_of(process), signal.SIGSTOP)
  status, _, err = tiny.finish(process)
  assert status == 0, err
  lines = [line for line in read_metrics(workdir) if line['kind'] == 'train']
  assert [line['step'] for line in lines] == [1, 2, 3]
  assert all(line['grading/ok'] + line['grading/timeout'] == 16 for line in lines)
  assert sum(line['grading/timeout'] for line in lines) <= 1


def test_a_stopped_process_ends_the_others_and_the_run_resumes(inputs, tmp_path):
  dense, workdir = test_over_processes.DENSE, tmp_path / 'run'
  processes = test_over_processes.start(inputs, workdir, 2, 1, *dense, '--config.patience=40')
  test_over_processes.until_step(2, workdir, processes)
  processes[1].send_signal(signal.SIGSTOP)
  try:
    status, _, err = tiny.finish(processes[0])
    assert status == LOST
    assert re.search(r'error: SPRL_PROCESS=1 .* for 40 s', err), err
  finally:
    processes[1].send_signal(signal.SIGCONT)
  assert tiny.finish(processes[1])[0] != 0
  test_over_processes.train(inputs, workdir, 2, 1, *dense)
  assert [line['step'] for line in read_metrics(workdir) if line['kind'] == 'train'] == [1, 2, 3, 4]


def test_a_run_whose_process_is_stopped_for_two_minutes_goes_on_or_names_it(inputs, tmp_path):
  """By default the JAX of the others would abort after 100 s. That of the stopped process may find its connection lost."""
  dense, workdir = test_over_processes.DENSE, tmp_path / 'run'
  processes = test_over_processes.start(inputs, workdir, 2, 1, *dense)
  test_over_processes.until_step(2, workdir, processes)
  stopped(processes[1].pid, 120.0)
  status, _, err = tiny.finish(processes[0])
  if (status, tiny.finish(processes[1])[0]) != (0, 0):
    assert status == LOST, err
    assert 'error: SPRL_PROCESS=1 ' in err
    test_over_processes.train(inputs, workdir, 2, 1, *dense)
  assert [line['step'] for line in read_metrics(workdir) if line['kind'] == 'train'] == [1, 2, 3, 4]
