"""Trackers get what metrics.jsonl holds, continue a resumed run, and never stop a run."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from sprl.config import Log, SettingsError
from sprl.io import trackers
from sprl.io.metrics import RunLog, read_metrics
from sprl.io.tables import table_markdown
from sprl.io.trackers import check_installed, flat, open_trackers

ROW = {'prompt': '2 + 3 = ', 'completion': '5 | <b>', 'answer': '5', 'reward': 1.0, 'finish': 'stop', 'tokens': 1}
LEDGER = {'ledger/gap_mean': -0.1, 'ledger/gap_abs': 0.25, 'ledger/gap_p99': 1.5, 'ledger/kv_mean': 0.0, 'ledger/kv_abs': 0.125}
COUNTS = {'edges': [0.0], 'histograms': {'gap': [1, 1], 'kv': [1, 1]}}
VALUES = {'gap': np.array([-0.5, 0.25]), 'kv': np.array([-0.125, 0.125])}
SETTINGS = {'steps': 7, 'rollout': {'group': 8}, 'sampling': {'stop': ('\n',)}, 'task': {'args': {}}, 'arm': None, 'export': True}


class Recorder:
  """A user's tracker: keeps the calls."""

  def __init__(self):
    self.calls = []

  def settings(self, values):
    self.calls.append(('settings', dict(values)))

  def scalars(self, step, values):
    self.calls.append(('scalars', step, dict(values)))

  def histograms(self, step, values):
    self.calls.append(('histograms', step, {name: np.asarray(x).tolist() for name, x in values.items()}))

  def table(self, step, name, rows):
    self.calls.append(('table', step, name, [dict(row) for row in rows]))

  def close(self, failed):
    self.calls.append(('close', failed))


def log_run(workdir, opened, first=1, last=3, resume_step=None, settings=SETTINGS):
  """Log steps with every kind of record, as a run does."""
  log = RunLog(workdir, resume_step, opened)
  log.settings(settings)
  for step in range(first, last + 1):
    log.ledger(step, LEDGER, COUNTS, VALUES)
    log.write(step, {'reward/mean': np.float32(step / 4)}, {'learn': 0.5}, {'async/token_lag': np.array([0, 0, 1])})
    log.samples(step, [ROW])
    log.evaluation(step, {'eval/avg@k': step / 8})
  log.close()


def trackers_of(workdir, resume_step, *names, project=None):
  workdir.mkdir(exist_ok=True)
  return open_trackers(Log(trackers=names, project=project), workdir, resume_step)


# --- what a tracker gets ----------------------------------------------------------------------------------------------


def test_a_tracker_gets_every_record_in_order(tmp_path):
  recorder = Recorder()
  log_run(tmp_path, [recorder], last=1)
  rows = [{'entry': 'gap', 'mean': -0.1, 'abs': 0.25, 'p99': 1.5}, {'entry': 'kv', 'mean': 0.0, 'abs': 0.125}]
  assert recorder.calls == [
    ('settings', {'steps': 7, 'rollout.group': 8, 'sampling.stop': '["\\n"]', 'task.args': '{}', 'arm': None, 'export': True}),
    ('scalars', 1, LEDGER),
    ('histograms', 1, {'ledger/gap': [-0.5, 0.25], 'ledger/kv': [-0.125, 0.125]}),
    ('table', 1, 'ledger', rows),
    ('scalars', 1, {'reward/mean': 0.25, 'time/learn': 0.5}),
    ('histograms', 1, {'async/token_lag': [0, 0, 1]}),
    ('table', 1, 'samples', [ROW]),
    ('scalars', 1, {'eval/avg@k': 0.125}),
    ('close', False),
  ]


@pytest.mark.parametrize('method', ['settings', 'scalars', 'histograms', 'table', 'close'])
def test_a_tracker_that_raises_is_logged_once_and_the_log_is_complete(tmp_path, method, caplog):
  class Failing(Recorder):
    pass

  calls = []

  def fail(self, *args):
    calls.append(args)
    raise ConnectionError('no route')

  setattr(Failing, method, fail)
  failing, recorder = Failing(), Recorder()
  with caplog.at_level(logging.WARNING):
    log_run(tmp_path / 'run', [failing, recorder])
  assert len(calls) == 1
  assert [r.getMessage() for r in caplog.records] == [
    'tracker Failing failed and is switched off (ConnectionError: no route); metrics.jsonl is complete'
  ]
  assert len(recorder.calls) == 2 + 7 * 3
  assert method == 'close' or failing.calls.count(('close', False)) == 1
  assert method == 'close' or failing.calls[-1] == ('close', False)
  assert [r['kind'] for r in read_metrics(tmp_path / 'run')] == ['ledger', 'train', 'eval'] * 3


def test_a_tracker_that_cannot_be_opened_is_logged_and_left_out(tmp_path, monkeypatch, caplog):
  def refuse(*_):
    raise RuntimeError('no API key')

  monkeypatch.setattr(trackers, 'WandB', refuse)
  opened = trackers_of(tmp_path, None, 'wandb', 'tensorboard')
  assert [type(tracker).__name__ for tracker in opened] == ['TensorBoard']
  assert 'tracker wandb failed' in caplog.text
  opened[0].close(failed=False)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch):
  check_installed(('tensorboard',))
  monkeypatch.setattr(trackers.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(SettingsError, match=r"config.log.trackers = \('wandb',\): .* wandb, .*EXTRAS=wandb"):
    check_installed(('wandb',))


def test_settings_become_flat():
  assert flat({'a': {'b': {'c': 1}, 'd': None}, 'e': (1, 'x'), 'f': {}}) == {
    'a.b.c': 1, 'a.d': None, 'e': '[1, "x"]', 'f': '{}'
  }  # fmt: skip


def test_a_table_has_a_column_for_each_key_of_any_row():
  text = table_markdown([{'entry': 'gap', 'mean': 1 / 3}, {'entry': 'a|b\nc', 'p99': 2}])
  assert text == '| entry | mean | p99 |\n| --- | --- | --- |\n| gap | 0.3333 |  |\n| a\\|b c |  | 2 |\n'


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def read_events(workdir):
  """Return every (step, value) of the event files, in order. The value 'restart' marks the drop of later steps."""
  from tensorboardX.proto.event_pb2 import Event, SessionLog

  found = []
  for path in sorted((workdir / 'tensorboard').iterdir(), key=lambda path: path.stat().st_mtime_ns):
    data, at = path.read_bytes(), 0
    while at < len(data):  # a record: size (8 bytes), checksum (4), event, checksum (4)
      size = int.from_bytes(data[at : at + 8], 'little')
      event = Event.FromString(data[at + 12 : at + 12 + size])
      found += [(event.step, value) for value in event.summary.value]
      if event.session_log.status == SessionLog.START:
        found.append((event.step, 'restart'))
      at += 12 + size + 4
  return found


def scalars_of(events):
  return [
    (step, v if v == 'restart' else (v.tag, v.simple_value)) for step, v in events if v == 'restart' or v.HasField('simple_value')
  ]


def test_tensorboard_has_scalars_histograms_text_and_settings(tmp_path):
  log_run(tmp_path, trackers_of(tmp_path, None, 'tensorboard'), last=1)
  events = read_events(tmp_path)
  scalars = {**LEDGER, 'reward/mean': 0.25, 'time/learn': 0.5, 'eval/avg_k': 0.125}  # a tag cannot contain @
  found = dict(value for _, value in scalars_of(events)[1:])
  assert found == pytest.approx(scalars)
  others = {v.tag: v for _, v in events if v != 'restart' and not v.HasField('simple_value')}
  assert others['async/token_lag'].histo.num == 3
  assert others['ledger/gap'].histo.min == -0.5
  (samples,) = others['samples/text_summary'].tensor.string_val
  assert '```text\n5 | <b>\n```' in samples.decode()
  (ledger,) = others['ledger/text_summary'].tensor.string_val
  assert '| gap | -0.1 | 0.25 | 1.5 |' in ledger.decode()


def test_the_hparams_page_has_the_settings_and_names_the_metrics(tmp_path):
  from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

  log_run(tmp_path, trackers_of(tmp_path, None, 'tensorboard'), last=1)
  pages = [
    HParamsPluginData.FromString(v.metadata.plugin_data.content)
    for _, v in read_events(tmp_path)
    if v != 'restart' and v.metadata.plugin_data.plugin_name == 'hparams'
  ]
  experiment, start, end = pages
  assert [info.name.tag for info in experiment.experiment.metric_infos][:2] == ['reward/mean', 'eval/avg_k']
  found = {name: value.WhichOneof('kind') for name, value in start.session_start_info.hparams.items()}
  assert found == {
    'steps': 'number_value', 'rollout.group': 'number_value', 'sampling.stop': 'string_value', 'task.args': 'string_value',
    'export': 'bool_value',
  }  # fmt: skip
  assert end.HasField('session_end_info')


def test_a_resumed_run_drops_later_events(tmp_path):
  log = RunLog(tmp_path, None, trackers_of(tmp_path, None, 'tensorboard'))
  log.write(5, {'reward/mean': 0.5}, {'total': 2.0})
  log.close()
  written = [(0, 'restart'), (5, ('reward/mean', 0.5)), (5, ('time/total', 2.0))]
  assert scalars_of(read_events(tmp_path)) == written
  RunLog(tmp_path, 3, trackers_of(tmp_path, 3, 'tensorboard')).close()
  assert scalars_of(read_events(tmp_path)) == [*written, (4, 'restart')]


# --- Weights & Biases, offline ----------------------------------------------------------------------------------------


def wandb_records(workdir):
  """Return (file, record) for each record of the offline runs, oldest first.

  A file has a header of 7 bytes, then blocks of 32 KiB in LevelDB's log format: checksum (4 bytes), length (2), kind (1), data.
  Kind 1 is a whole record; 2, 3 and 4 are the beginning, the middle and the end of one.
  """
  from wandb.proto.wandb_internal_pb2 import Record

  found = []
  for path in sorted((workdir / 'wandb').glob('offline-run-*/run-*.wandb'), key=lambda path: path.stat().st_mtime_ns):
    data, at, whole = path.read_bytes(), 7, b''
    while at + 7 <= len(data):
      if 32768 - at % 32768 < 7:  # no room for a header before the end of the block
        at += 32768 - at % 32768
        continue
      size, kind = int.from_bytes(data[at + 4 : at + 6], 'little'), data[at + 6]
      whole += data[at + 7 : at + 7 + size]
      at += 7 + size
      if kind in (1, 4):
        found.append((path, Record.FromString(whole)))
        whole = b''
  return found


def history(records):
  """Return {step: {name: value}} of the history records; the parts of a value are named `samples _type` and so on."""
  rows = {}
  for record in records:
    if record.WhichOneof('record_type') == 'history':
      items = {' '.join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
      rows[record.history.step.num] = items
  return rows


def test_wandb_has_the_metrics_the_settings_and_the_tables_and_continues_a_resumed_run(tmp_path, monkeypatch):
  wandb = pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  workdir = tmp_path / 'run-3'
  log_run(workdir, trackers_of(workdir, None, 'wandb', project='sums'))
  log_run(workdir, trackers_of(workdir, 2, 'wandb', project='sums'), 3, 4, resume_step=2, settings={**SETTINGS, 'steps': 9})
  wandb.teardown()  # ends wandb's process, which writes the files
  records = wandb_records(workdir)
  runs = {path: record.run for path, record in records if record.WhichOneof('record_type') == 'run'}
  first, second = dict.fromkeys(path for path, _ in records)
  assert runs[first].run_id == runs[second].run_id == json.loads((workdir / 'trackers.json').read_text())['wandb']
  assert (runs[first].project, runs[first].display_name) == ('sums', 'run-3')
  before = history(record for path, record in records if path == first)
  after = history(record for path, record in records if path == second)
  assert {step: (row['reward/mean'], row['eval/avg@k']) for step, row in before.items() if 'reward/mean' in row} == {
    1: (0.25, 0.125), 2: (0.5, 0.25), 3: (0.75, 0.375)
  }  # fmt: skip
  assert sorted(step for step, row in after.items() if 'reward/mean' in row) == [3, 4]
  assert before[1]['ledger/gap _type'] == 'histogram'
  assert (before[1]['samples _type'], before[1]['ledger nrows']) == ('table-file', 2)
  (table,) = first.parent.rglob('samples_1_*.table.json')
  assert json.loads(table.read_text())['data'] == [list(ROW.values())]
  updates = [u for _, record in records for u in record.config.update]
  config = {u.key: json.loads(u.value_json) for u in updates}
  assert config['rollout.group'] == 8
  assert config['steps'] == 9


def test_a_run_that_starts_again_has_a_new_id(tmp_path, monkeypatch):
  monkeypatch.setattr(trackers, '_IDS', 'ids.json')
  trackers._write_id(tmp_path, 'wandb', 'a')
  trackers._write_id(tmp_path, 'mlflow', 'b')
  assert (trackers._read_id(tmp_path, 'wandb', 3), trackers._read_id(tmp_path, 'mlflow', 0)) == ('a', 'b')
  assert trackers._read_id(tmp_path, 'wandb', None) is None


# --- MLflow -----------------------------------------------------------------------------------------------------------


def test_mlflow_has_the_metrics_the_settings_and_the_tables_and_continues_a_resumed_run(tmp_path, monkeypatch):
  pytest.importorskip('mlflow')
  from mlflow.tracking import MlflowClient

  monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  workdir = tmp_path / 'run-3'
  log_run(workdir, trackers_of(workdir, None, 'mlflow', project='sums'))
  log_run(workdir, trackers_of(workdir, 3, 'mlflow', project='sums'), 4, 5, resume_step=3, settings={**SETTINGS, 'steps': 9})
  client = MlflowClient((workdir / 'mlruns').as_uri())
  experiment = client.get_experiment_by_name('sums')
  (run,) = client.search_runs([experiment.experiment_id])
  assert (run.info.run_name, run.info.status) == ('run-3', 'FINISHED')
  assert run.data.params['rollout.group'] == '8'
  assert (run.data.params['steps'], run.data.tags['resumed.steps']) == ('7', '9')
  points = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, 'reward/mean')]
  assert points == [(step, step / 4) for step in range(1, 6)]
  assert run.data.metrics['eval/avg_k'] == 5 / 8
  folder = Path(client.download_artifacts(run.info.run_id, '', str(tmp_path)))
  assert json.loads((folder / 'samples/step_000002.jsonl').read_text()) == ROW
  assert '| gap | -0.1 | 0.25 | 1.5 |' in (folder / 'ledger/step_000005.md').read_text()
  assert sum(json.loads((folder / 'histograms/ledger/gap/step_000001.json').read_text())['counts']) == 2


def test_a_run_that_ended_with_an_error_has_failed_in_mlflow(tmp_path, monkeypatch):
  pytest.importorskip('mlflow')
  from mlflow.tracking import MlflowClient

  monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  [tracker] = trackers_of(tmp_path, None, 'mlflow', project='sums')
  tracker.close(failed=True)
  client = MlflowClient((tmp_path / 'mlruns').as_uri())
  [run] = client.search_runs([client.get_experiment_by_name('sums').experiment_id])
  assert run.info.status == 'FAILED'


@pytest.mark.parametrize('name', ['tensorboard', 'wandb', 'mlflow'])
def test_numbers_that_are_not_finite_do_not_switch_a_tracker_off(tmp_path, monkeypatch, caplog, name):
  pytest.importorskip({'tensorboard': 'tensorboardX'}.get(name, name))
  for variable, value in (('WANDB_MODE', 'offline'), ('WANDB_SILENT', 'true'), ('MLFLOW_ALLOW_FILE_STORE', 'true')):
    monkeypatch.setenv(variable, value)
  log = RunLog(tmp_path, None, trackers_of(tmp_path, None, name))
  log.write(1, {'a': math.nan, 'b': np.float32(math.inf), 'c': -math.inf}, {})
  log.close()
  assert 'switched off' not in caplog.text
