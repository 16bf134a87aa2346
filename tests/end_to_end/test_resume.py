"""A run that is killed, stopped by a signal, or left with a damaged checkpoint resumes bit for bit."""

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
from sprl.io.metrics_reference import undocumented
from sprl.io.run_folder import exclusive
from sprl.io.starts import read_starts

STEPS = 3
SMALL = (
  '--config.arm=dense',
  '--config.cache.budget=None',
  '--config.quant.sampler=kv8',
  '--config.ledger.every=None',
  '--config.eval.every=None',
  '--config.eval.memory=sampler',  # with the next four settings evaluations use the programs of the rollouts
  '--config.eval.temperature=1.0',
  '--config.eval.problems=4',
  '--config.eval.samples=4',
  '--config.eval.max_tokens=None',
  '--config.loss.kl_coef=0.0',
  '--config.optimizer.minibatches=1',
  f'--config.steps={STEPS}',
)


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


@pytest.fixture(scope='module')
def uninterrupted(inputs) -> Path:
  workdir = inputs / 'uninterrupted'
  status, out, err = train(inputs, workdir)
  assert status == 0, err
  assert 'What was learned in 6 steps, on 3 held-out problems (greedy)' in out
  assert undocumented(read_metrics(workdir)) == []
  return workdir


def test_a_killed_run_resumes_bit_for_bit(inputs):
  """A dense run with an FP8 cache is killed while it writes the second checkpoint, with one before it."""
  workdir = inputs / 'small-killed'
  kill_at_the_second_checkpoint(inputs, workdir, *SMALL)
  folders = workdir, inputs / 'small-uninterrupted'
  both = [tiny.start('main', *arguments(inputs, folder), *SMALL) for folder in folders]
  resumed, uninterrupted = map(tiny.finish, both)
  assert (resumed[0], uninterrupted[0]) == (0, 0), resumed[2] + uninterrupted[2]
  assert 'resuming after step 1' in resumed[2]
  assert_same(*folders, lines=STEPS + 2, tables=3)  # evaluations before and after; samples of each step


def arguments(inputs: Path, workdir: Path) -> list[str]:
  return [f'--config={inputs / "config.py"}', f'--workdir={workdir}']


def train(inputs: Path, workdir: Path, *changes: str) -> tuple[int, str, str]:
  return tiny.run('main', *arguments(inputs, workdir), *changes)


def interrupt(process, number: int, moment: Callable[[], bool]) -> tuple[int, str]:
  """Send a run a signal as soon as `moment()` is true. Return its exit status and standard error."""
  while not moment():
    assert process.poll() is None, process.communicate()
    time.sleep(0.001)
  process.send_signal(number)
  status, _, err = tiny.finish(process)
  assert 'Traceback' not in err
  return status, err


def kill_at_the_second_checkpoint(inputs: Path, workdir: Path, *changes: str) -> None:
  script = Path(__file__).with_name('killed_at_checkpoint.py')
  status, *_ = tiny.run(script, *arguments(inputs, workdir), *changes)
  draft = workdir / 'checkpoints' / 'tmp-step_000002'
  assert (status, draft.exists(), checkpoint(workdir, 2).exists()) == (-9, True, False)


def logged(workdir: Path, kind: str) -> int:
  """Return the number of lines of one kind in metrics.jsonl."""
  path = workdir / 'metrics.jsonl'
  return path.read_text().count(f'"kind": "{kind}"') if path.exists() else 0


def checkpoint(workdir: Path, step: int) -> Path:
  return workdir / 'checkpoints' / f'step_{step:06d}'


def assert_same(workdir: Path, expected: Path, lines: int, tables: int) -> None:
  """Assert equal metrics except times, equal sample tables, and an equal final state: weights, optimiser, prompts, evaluations.

  `lines` and `tables` are their numbers.
  """

  def metrics(folder):
    return [json.dumps({k: v for k, v in record.items() if k != 'time'}, sort_keys=True) for record in read_metrics(folder)]

  def samples(folder):
    return {path.name: path.read_bytes() for path in (folder / 'samples').iterdir()}

  def state(folder):
    last = max((folder / 'checkpoints').glob('step_*'))
    arrays = ocp.PyTreeCheckpointer().restore(last / 'arrays')
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}, json.loads((last / 'record.json').read_text())

  assert metrics(workdir) == metrics(expected)
  assert len(metrics(workdir)) == lines
  assert samples(workdir) == samples(expected)
  assert len(samples(workdir)) == 2 * tables  # .md and .jsonl
  (arrays, record), (expected_arrays, expected_record) = state(workdir), state(expected)
  assert arrays == expected_arrays
  assert record['record']['step'] == expected_record['record']['step']
  assert record['record']['extra'] == expected_record['record']['extra']


# Lines: six steps; evaluations before, in the middle and after; three ledgers.
SIX_STEPS = {'lines': 6 + 3 + 3, 'tables': 4}


@pytest.mark.slow
def test_every_interruption_leaves_the_same_run(inputs, uninterrupted):
  workdir = inputs / 'interrupted'

  def started():
    return tiny.start('main', *arguments(inputs, workdir))

  # A signal during the first evaluation, which is repeated.
  status, err = interrupt(started(), signal.SIGTERM, (workdir / 'metrics.jsonl').exists)
  assert (status, 'SIGTERM: ended before the first evaluation; nothing is saved' in err) == (0, True), err
  assert (logged(workdir, 'eval'), checkpoint(workdir, 0).exists()) == (0, False)

  kill_at_the_second_checkpoint(inputs, workdir)

  # A signal between steps. Meanwhile the checkpoints can be evaluated.
  status, err = interrupt(started(), signal.SIGTERM, lambda: logged(workdir, 'train') == 3)
  assert 'resuming after step 1' in err
  assert (status, 'SIGTERM: saved after step' in err) == (0, True), err
  assert not checkpoint(workdir, 6).exists()
  with exclusive(workdir):  # as during training
    check_evaluation(workdir)

  # The newest checkpoint is truncated. The run resumes from the checkpoint before it and repeats the later steps.
  newest = max((workdir / 'checkpoints').glob('step_*'))
  largest = max((path for path in newest.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:-1000])
  status, out, err = train(inputs, workdir)
  assert status == 0, err
  assert f'damaged checkpoint {newest}' in err
  steps = [start['step'] for start in read_starts(workdir)['starts']]
  assert steps[-1] < int(newest.name.removeprefix('step_')), steps
  assert_same(workdir, uninterrupted, **SIX_STEPS)

  # A complete run only reports again, and exports.
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


def steps_of_runs(inputs: Path, workdir: Path, mode: str, *last: int) -> list[dict]:
  """Train to each of the last steps, one run after the other. Return the metrics of all steps, without times."""
  for steps in last:
    flags = f'--config.steps={steps}', f'--config.quant.kv_scale={mode}', '--config.optimizer.schedule=constant'
    status, _, err = train(inputs, workdir, *flags)
    assert status == 0, err
  return [{k: v for k, v in record.items() if k != 'time'} for record in read_metrics(workdir) if record['kind'] == 'train']


@pytest.mark.slow
def test_a_run_with_more_steps_first_measures_missing_scales(inputs):
  """At the end of a run there are no next prompts, on which `first_forward` measures the scales of the cache."""
  extended = steps_of_runs(inputs, inputs / 'extended', 'first_forward', 1, 2)
  assert extended[1] == steps_of_runs(inputs, inputs / 'at-once', 'first_forward', 2)[1]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_scales_of_its_first_rollout(inputs):
  extended = steps_of_runs(inputs, inputs / 'extended-frozen', 'frozen', 1, 2)
  assert extended == steps_of_runs(inputs, inputs / 'at-once-frozen', 'frozen', 2)
  first, second = ({k: v for k, v in record.items() if k.startswith('fp8/scale_')} for record in extended)
  assert {name for name in first if first[name] != second[name]} == {
    'fp8/scale_k/0'
  }  # the bound of key biases follows the weights
  assert second['fp8/scale_k/0'] == pytest.approx(first['fp8/scale_k/0'], rel=1e-3)


def check_evaluation(workdir: Path) -> None:
  """Run `sprl.evaluate` with other settings on a run in progress."""
  changes = '--config.eval.samples=4', '--config.eval.temperature=1.0', '--config.eval.problems=5', '--step=2'
  changes += ('--config.task.time_limit=60',)  # None in the run
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
def test_kills_at_random_moments_change_nothing(inputs, uninterrupted):
  """Every start compiles again, so the result does not depend on programs in a cache."""
  workdir, rng = inputs / 'killed', random.Random(0)
  survived = 0
  for _ in range(3):
    process = tiny.start('main', *arguments(inputs, workdir))
    steps = logged(workdir, 'train') + rng.randrange(2)

    def moment(steps=steps):
      return logged(workdir, 'train') > steps or logged(workdir, 'train') == tiny.STEPS

    status, _ = interrupt(process, signal.SIGKILL, lambda: moment() and (time.sleep(rng.uniform(0, 0.5)) or True))
    survived += status == 0
  assert survived < 3
  status, _, err = tiny.run('main', *arguments(inputs, workdir))
  assert status == 0, err
  assert_same(workdir, uninterrupted, **SIX_STEPS)
