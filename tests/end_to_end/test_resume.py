"""A run that is killed, ended by a signal, or left with a damaged checkpoint ends in the same bits as one that was not."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from sprl.io.metrics import read_metrics
from sprl.process import exclusive


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder)
  return folder


@pytest.fixture(scope='module')
def uninterrupted(inputs) -> Path:
  workdir = inputs / 'uninterrupted'
  status, out, err = train(inputs, workdir)
  assert status == 0, err
  assert 'What was learned in 6 steps, on 3 held-out problems (greedy)' in out
  return workdir


def arguments(inputs: Path, workdir: Path) -> list[str]:
  return [f'--config={inputs / "config.py"}', f'--workdir={workdir}']


def train(inputs: Path, workdir: Path, *changes: str) -> tuple[int, str, str]:
  return tiny.run('main', *arguments(inputs, workdir), *changes, compiled=inputs / 'compiled')


def interrupt(process, number: int, moment: Callable[[], bool]) -> tuple[int, str]:
  """Sends a run a signal as soon as `moment` comes; its exit status and what it said on standard error."""
  while not moment():
    assert process.poll() is None, process.communicate()
    time.sleep(0.001)
  process.send_signal(number)
  status, _, err = tiny.finish(process)
  assert 'Traceback' not in err
  return status, err


def logged(workdir: Path, kind: str) -> int:
  """The lines of metrics.jsonl of one kind."""
  path = workdir / 'metrics.jsonl'
  return path.read_text().count(f'"kind": "{kind}"') if path.exists() else 0


def checkpoint(workdir: Path, step: int) -> Path:
  return workdir / 'checkpoints' / f'step_{step:06d}'


def assert_same(workdir: Path, expected: Path) -> None:
  """The same metrics but for times, the same sample tables, the same final state: weights, optimiser, prompt stream, report."""

  def lines(folder):
    return [json.dumps({k: v for k, v in record.items() if k != 'time'}, sort_keys=True) for record in read_metrics(folder)]

  def tables(folder):
    return {path.name: path.read_bytes() for path in (folder / 'samples').iterdir()}

  def state(folder):
    last = checkpoint(folder, tiny.STEPS)
    arrays = ocp.PyTreeCheckpointer().restore(last / 'arrays')
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}, json.loads((last / 'record.json').read_text())

  assert lines(workdir) == lines(expected)
  assert len(lines(workdir)) == 6 + 3 + 3  # a line a step, the evaluations before, in the middle and after, and three ledgers
  assert tables(workdir) == tables(expected)
  assert len(tables(workdir)) == 2 * 3
  (arrays, record), (expected_arrays, expected_record) = state(workdir), state(expected)
  assert arrays == expected_arrays
  assert record['record']['extra'] == expected_record['record']['extra']


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(inputs, uninterrupted):
  workdir = inputs / 'interrupted'

  def started():
    return tiny.start('main', *arguments(inputs, workdir), compiled=inputs / 'compiled')

  # A signal while the functions of the first evaluation are compiled: it will be made anew.
  status, err = interrupt(started(), signal.SIGTERM, (workdir / 'metrics.jsonl').exists)
  assert (status, 'SIGTERM: saved after step 0 of 6' in err) == (0, True), err
  assert logged(workdir, 'eval') == 0

  # Killed while a checkpoint is being written.
  draft = workdir / 'checkpoints' / 'tmp-step_000002'
  status, err = interrupt(started(), signal.SIGKILL, draft.exists)
  assert (status, draft.exists(), checkpoint(workdir, 2).exists()) == (-9, True, False)

  # A signal in the middle, with what other commands make of the run then.
  status, err = interrupt(started(), signal.SIGTERM, lambda: logged(workdir, 'train') == 3)
  assert 'resuming after step 1' in err
  assert (status, 'SIGTERM: saved after step' in err) == (0, True), err
  assert not checkpoint(workdir, 6).exists()
  with exclusive(workdir):  # as a process that is training holds it
    check_evaluation(workdir)

  # The newest checkpoint cut short: the one before it is used, and what came after is done again.
  newest = max((workdir / 'checkpoints').glob('step_*'))
  largest = max((path for path in newest.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:-1000])
  status, out, err = train(inputs, workdir)
  assert status == 0, err
  assert f'damaged checkpoint {newest} not used' in err
  assert_same(workdir, uninterrupted)

  # A run that is complete has nothing to do but to say so again.
  before = (workdir / 'metrics.jsonl').read_bytes()
  status, again, err = train(inputs, workdir, '--config.export=True')
  assert status == 0, err
  report = out[out.index('What was learned') : out.index('export')]
  assert report in again
  assert 'reward' in report
  assert (workdir / 'metrics.jsonl').read_bytes() == before
  assert (workdir / 'export' / 'model.safetensors').is_file()

  status, out, err = train(inputs, workdir, '--config.optimizer.learning_rate=1.0', '--config.seed=1')
  assert (status, out) == (2, '')
  assert 'optimizer.learning_rate: 0.001 -> 1.0' in err
  assert 'seed: 0 -> 1' in err
  assert 'Traceback' not in err


@pytest.mark.slow
def test_a_run_given_more_steps_finds_the_scales_of_its_last_weights_first(inputs):
  """Scales found on the next rollout's prompts are not looked for at the end of a run, where there is no next rollout."""

  def step_2(workdir, *steps):
    for last in steps:
      flags = f'--config.steps={last}', '--config.quant.kv_scale=first_forward', '--config.optimizer.schedule=constant'
      status, _, err = train(inputs, workdir, *flags)
      assert status == 0, err
    return next(
      {k: v for k, v in r.items() if k != 'time'} for r in read_metrics(workdir) if r['kind'] == 'train' and r['step'] == 2
    )

  assert step_2(inputs / 'extended', 1, 2) == step_2(inputs / 'at-once', 2)


def check_evaluation(workdir: Path) -> None:
  """`sprl.evaluate` with settings of its own on a run in progress."""
  changes = '--config.eval.samples=4', '--config.eval.temperature=1.0', '--config.eval.problems=5', '--step=2'
  status, out, err = tiny.run('evaluate', f'--workdir={workdir}', *changes)
  assert status == 0, err
  *_, last = out.splitlines()
  result = json.loads(last)
  assert (result['step'], result['eval/problems'], result['settings']['samples']) == (2, 5, 4)
  mean, low, high = result['intervals']['avg@4']
  assert low < mean == result['eval/avg@k'] < high
  assert result['intervals']['pass@4'][0] >= result['intervals']['pass@1'][0]
  assert f'avg@4     {mean:.3f}   {low:.3f} to {high:.3f}' in out
  assert out.count('Prompt\n    test ') == 3

  status, out, err = tiny.run('evaluate', f'--workdir={workdir}', '--config.seed=3', '--config.eval.problems=1')
  assert (status, out) == (2, '')
  assert 'config.seed: 0 -> 3' in err
  assert 'eval.problems' not in err


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(inputs, uninterrupted):
  """Every start compiles anew, so that no result hangs on an executable that another run has left."""
  workdir, rng = inputs / 'killed', random.Random(0)
  survived = 0
  for _ in range(5):
    process = tiny.start('main', *arguments(inputs, workdir))
    steps = logged(workdir, 'train') + rng.randrange(2)

    def moment(steps=steps):
      return logged(workdir, 'train') > steps or logged(workdir, 'train') == tiny.STEPS

    status, _ = interrupt(process, signal.SIGKILL, lambda: moment() and (time.sleep(rng.uniform(0, 0.5)) or True))
    survived += status == 0
  assert survived < 4
  status, _, err = tiny.run('main', *arguments(inputs, workdir))
  assert status == 0, err
  assert_same(workdir, uninterrupted)
