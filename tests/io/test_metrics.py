"""Logs of a run: exact lines, a resume that drops only later steps, and tables of samples."""

import contextlib
import json
import math
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from sprl.io import files
from sprl.io.metrics import LogError, RunLog, read_metrics, read_samples, sample_steps, samples_markdown, series

ROW = {'prompt': 'What is 2 + 3?', 'completion': '5', 'answer': '5', 'reward': 1.0, 'finish': 'stop'}


@pytest.fixture
def open_log():
  with contextlib.ExitStack() as stack:
    yield lambda *args: stack.enter_context(contextlib.closing(RunLog(*args)))


def log_steps(log: RunLog, first: int, last: int, pace: float) -> None:
  for step in range(first, last + 1):
    log.write(step, {'reward/mean': 1 / (step + 2), 'update/skipped': 0}, {'total': pace * step})
    if step % 2 == 0:
      log.evaluation(step, {'eval/pass@1': 0.1 * step, 'eval/low': 0.0, 'eval/high': 1.0})
      log.samples(step, [ROW])
  log.close()


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


def test_a_line_is_sorted_json_with_separate_times(open_log, tmp_path):
  log = open_log(tmp_path, None)
  log.write(3, {'reward/mean': 0.5, 'completion/truncated': 2}, {'update': 1.25, 'rollout': 2.0})
  log.evaluation(3, {'eval/pass@1': 0.75})
  assert (tmp_path / 'metrics.jsonl').read_text() == (
    '{"completion/truncated": 2, "kind": "train", "reward/mean": 0.5, "step": 3, "time": {"rollout": 2.0, "update": 1.25}}\n'
    '{"eval/pass@1": 0.75, "kind": "eval", "step": 3}\n'
  )


def test_natural_numbers_are_counted(open_log, tmp_path):
  log = open_log(tmp_path, None)
  log.write(1, {'reward/mean': 0.5}, {}, {'async/token_lag': np.array([0, 2, 2, 0, 5, 0])})
  (record,) = read_metrics(tmp_path)
  assert record['async/token_lag_counts'] == [3, 0, 2, 0, 0, 1]


def test_numbers_of_every_library_read_back_bit_for_bit(open_log, tmp_path):
  values = {
    'third': 1 / 3,
    'tiny': 5e-324,
    'np32': np.float32(0.1),
    'jax': jnp.float32(0.1),
    'bfloat16': jnp.bfloat16(0.1),
    'count': np.int64(7),
    'minus_zero': -0.0,
  }
  log = open_log(tmp_path, None)
  log.write(1, values, {})
  (record,) = read_metrics(tmp_path)
  for name, value in values.items():
    assert record[name] == float(value)
    assert math.copysign(1, record[name]) == math.copysign(1, float(value))


def test_values_that_are_not_finite_are_valid_json_and_read_back(open_log, tmp_path):
  log = open_log(tmp_path, None)
  log.write(1, {'a': math.nan, 'b': np.float32(math.inf), 'c': -math.inf}, {'total': math.nan})

  def refuse(token):
    raise AssertionError(f'{token} is no JSON')

  line = json.loads((tmp_path / 'metrics.jsonl').read_text(), parse_constant=refuse)
  assert [line[name] for name in 'abc'] == ['NaN', 'Infinity', '-Infinity']
  (record,) = read_metrics(tmp_path)
  assert math.isnan(record['a'])
  assert (record['b'], record['c']) == (math.inf, -math.inf)
  assert math.isnan(record['time']['total'])


def test_a_line_is_on_disk_when_write_returns(open_log, tmp_path):
  log = open_log(tmp_path, None)
  for step in (1, 2):
    log.write(step, {}, {})
    assert [r['step'] for r in read_metrics(tmp_path)] == list(range(1, step + 1))


def test_series_picks_the_steps_that_hold_a_name(open_log, tmp_path):
  log_steps(open_log(tmp_path, None), 1, 4, 0.5)
  records = read_metrics(tmp_path)
  assert [x.tolist() for x in series(records, 'eval/pass@1')] == [[2, 4], [0.2, 0.4]]
  assert [x.tolist() for x in series(records, 'time/total')] == [[1, 2, 3, 4], [0.5, 1.0, 1.5, 2.0]]
  assert [x.tolist() for x in series(records, 'absent')] == [[], []]


# --- resuming --------------------------------------------------------------------------------------------------------


def strip_times(path):
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  return [{name: value for name, value in line.items() if name != 'time'} for line in lines]


@pytest.mark.parametrize('torn', ['', '{"kind": "train", "rew', '\0\0\0\0'])
def test_a_resumed_log_equals_an_uninterrupted_one_except_times(open_log, tmp_path, torn):
  log_steps(open_log(tmp_path / 'whole', None), 1, 9, 1.0)
  killed = tmp_path / 'killed'
  log_steps(open_log(killed, None), 1, 7, 2.0)
  with open(killed / 'metrics.jsonl', 'a') as file:
    file.write(torn)
  kept = ''.join((killed / 'metrics.jsonl').read_text().splitlines(keepends=True)[:6])  # steps 1-4, evaluations of 2 and 4
  log = open_log(killed, 4)
  assert (killed / 'metrics.jsonl').read_text() == kept
  assert sample_steps(killed) == [2, 4]
  log_steps(log, 5, 9, 2.0)
  assert strip_times(killed / 'metrics.jsonl') == strip_times(tmp_path / 'whole' / 'metrics.jsonl')
  names = sorted(path.name for path in (tmp_path / 'whole' / 'samples').iterdir())
  assert names == sorted(path.name for path in (killed / 'samples').iterdir())
  for name in names:
    assert (killed / 'samples' / name).read_bytes() == (tmp_path / 'whole' / 'samples' / name).read_bytes()


def test_a_run_without_a_checkpoint_starts_its_log_again(open_log, tmp_path):
  log = open_log(tmp_path, None)
  log.evaluation(0, {'eval/pass@1': 0.0})
  log.samples(0, [ROW])
  open_log(tmp_path, None)
  assert read_metrics(tmp_path) == []
  assert list((tmp_path / 'samples').iterdir()) == []
  log.evaluation(0, {'eval/pass@1': 0.0})


def test_the_log_of_a_run_whose_checkpoints_are_gone_is_kept_under_another_name(open_log, tmp_path, caplog):
  log_steps(open_log(tmp_path, None), 1, 4, 0.5)
  before = (tmp_path / 'metrics.jsonl').read_bytes()
  open_log(tmp_path, None)
  assert read_metrics(tmp_path) == []
  assert (tmp_path / 'metrics_until_4.jsonl').read_bytes() == before
  assert 'there is no checkpoint of these steps' in caplog.text
  assert 'metrics_until_4.jsonl' in caplog.text


def test_a_second_log_without_a_checkpoint_does_not_replace_the_first_one(open_log, tmp_path):
  written = []
  for seconds in (0.5, 0.75):
    log_steps(open_log(tmp_path, None), 1, 4, seconds)
    written.append((tmp_path / 'metrics.jsonl').read_bytes())
  open_log(tmp_path, None)
  assert written[0] != written[1]
  assert [(tmp_path / name).read_bytes() for name in ('metrics_until_4.jsonl', 'metrics_until_4_2.jsonl')] == written


def test_resuming_at_step_zero_keeps_the_evaluation_before_training(open_log, tmp_path):
  open_log(tmp_path, None).evaluation(0, {'eval/pass@1': 0.25})
  open_log(tmp_path, 0)
  assert [record['eval/pass@1'] for record in read_metrics(tmp_path)] == [0.25]


@pytest.mark.parametrize('line', ['{"ste', '5', '[1]', 'null', '[' * 100_000])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
  (tmp_path / 'metrics.jsonl').write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
  for read in (read_metrics, lambda folder: RunLog(folder, 3)):
    with pytest.raises(LogError, match=r'metrics.jsonl, line 2: not a JSON object'):
      read(tmp_path)


@pytest.mark.parametrize(
  ('keep', 'missing'), [(None, 0), (-10, 1), (0, 3), ('deleted', 3)], ids=['whole', 'mid-line', 'empty', 'deleted']
)
def test_a_truncated_log_goes_on_and_the_missing_steps_are_counted(open_log, tmp_path, caplog, keep, missing):
  log_steps(open_log(tmp_path, None), 1, 3, 1.0)
  path = tmp_path / 'metrics.jsonl'
  if keep == 'deleted':
    path.unlink()
  elif keep is not None:
    path.write_bytes(path.read_bytes()[:keep] + b'\xe2\x82'[: abs(keep)])  # and a part of a character
  log_steps(open_log(tmp_path, 3), 4, 4, 1.0)
  assert [line['step'] for line in read_metrics(tmp_path) if line['kind'] == 'train'] == [*range(1, 4 - missing), 4]
  assert (f'metrics.jsonl: damaged; the lines of {missing} of 3 steps are missing' in caplog.text) == bool(missing)


def no_space(*_):
  raise OSError(28, 'No space left on device')


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'file'
  files.write_text(path, 'old')
  monkeypatch.setattr('os.fsync', no_space)
  with pytest.raises(OSError, match=r'No space left on device: .*file'):
    files.write_text(path, 'new')
  assert path.read_text() == 'old'
  assert [found.name for found in tmp_path.iterdir()] == ['file']


def test_a_write_that_fails_names_the_file_and_not_its_draft(tmp_path):
  with pytest.raises(OSError, match=r"'[^']*/missing/file'$"):
    files.write_text(tmp_path / 'missing' / 'file', 'new')
  (tmp_path / 'folder').mkdir()
  with pytest.raises(OSError, match=r"'[^']*/folder'$"):
    files.write_text(tmp_path / 'folder', 'new')
  assert [found.name for found in tmp_path.iterdir()] == ['folder']


@pytest.mark.parametrize('line', ['{"loss": 1}\n', '{"step": "x", "kind": "train"}\n'])
def test_the_log_of_another_program_is_not_replaced(open_log, tmp_path, line):
  (tmp_path / 'metrics.jsonl').write_text(line)
  with pytest.raises(LogError, match='not the log of a run'):
    open_log(tmp_path, None)
  assert (tmp_path / 'metrics.jsonl').read_text() == line


def test_a_line_that_does_not_fit_on_the_disk_names_the_log(open_log, tmp_path, monkeypatch):
  log = open_log(tmp_path, None)
  monkeypatch.setattr('os.fsync', no_space)
  with pytest.raises(OSError, match=r'No space left on device: .*metrics.jsonl'):
    log.evaluation(0, {})


def test_trackers_are_closed_though_the_disk_is_full(tmp_path, monkeypatch):
  tracker = Mock()
  log = RunLog(tmp_path, None, (tracker,))
  monkeypatch.setattr(log, '_file', open('/dev/full', 'w'))  # noqa: SIM115
  with pytest.raises(OSError, match='No space left'):
    log.evaluation(0, {})
  with pytest.raises(OSError, match='No space left'):
    log.close()
  tracker.close.assert_called_once()


# --- samples ---------------------------------------------------------------------------------------------------------


def test_samples_are_written_as_markdown_and_as_jsonl(open_log, tmp_path):
  open_log(tmp_path, None).samples(10, [ROW | {'reward': np.float32(0.5), 'completion': 'NaN'}])
  assert (tmp_path / 'samples' / 'step_000010.md').read_text() == (
    '# Samples of step 10\n\n'
    '### 1 · reward 0.5 · finish stop\n\n'
    'Prompt\n\n```text\nWhat is 2 + 3?\n```\n\n'
    'Completion\n\n```text\nNaN\n```\n\n'
    'Answer\n\n```text\n5\n```\n'
  )
  assert read_samples(tmp_path, 10) == [ROW | {'reward': 0.5, 'completion': 'NaN'}]
  assert sample_steps(tmp_path) == [10]


def test_a_completion_stays_within_its_code_block():
  text = samples_markdown([{'prompt': 'p', 'completion': 'a\n````\nb'}])
  assert '`````text\na\n````\nb\n`````' in text
