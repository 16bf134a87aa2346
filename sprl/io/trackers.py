"""Trackers show the metrics of a run elsewhere: TensorBoard, Weights & Biases, MLflow, or an object of the user.

metrics.jsonl stays the record of a run. `RunLog` passes to each tracker what it has written there. A tracker that raises is
logged once by name and is then only closed; the run continues.

    tensorboard    TensorBoard events, in WORKDIR/tensorboard
    wandb          Weights & Biases. WANDB_MODE=offline writes to WORKDIR/wandb only
    mlflow         MLflow, at MLFLOW_TRACKING_URI or in WORKDIR/mlruns

trackers.json in the work directory holds the ids of the run at Weights & Biases and MLflow. A resumed run continues them. Neither
can delete: of steps that a killed run had logged after its last checkpoint, Weights & Biases keeps the first values and MLflow
both.
"""

import importlib.util
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from sprl.config import Log, SettingsError
from sprl.io import files
from sprl.io.tables import Rows, samples_markdown, table_markdown

log = logging.getLogger(__name__)

_IDS = 'trackers.json'
_PROJECT = 'sprl'
_INSTALLED_BY = {'tensorboardX': 'make install', 'wandb': 'make install EXTRAS=wandb', 'mlflow': 'make install EXTRAS=mlflow'}
_PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb', 'mlflow': 'mlflow'}  # tracker -> the package that it needs
_COMPARED = ('reward/mean', 'eval/avg@k', 'completion/length_mean', 'policy/entropy', 'sparse/agreement_mean')  # by HPARAMS


@runtime_checkable
class Tracker(Protocol):
  """A writer of a run's metrics. Steps do not decrease; a resumed run repeats the steps after its checkpoint.

  A later call may give the same step other names: the ledger, the metrics and the evaluation of a step are separate calls.
  """

  def settings(self, values: Mapping[str, Any]) -> None:
    """Take the settings of the run, as `rollout.group` -> 8. Called once, before everything else."""

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Log numbers by name, such as `reward/mean`. A number may be infinite or NaN."""

  def histograms(self, step: int, values: Mapping[str, Shaped[np.ndarray, '...']]) -> None:
    """Log the distribution of the numbers of each name."""

  def table(self, step: int, name: str, rows: Rows) -> None:
    """Log a table: `samples` (completions), or `ledger` (the mismatch by cause). Values are text, numbers or None."""

  def close(self, failed: bool) -> None:
    """End the tracker. Called once. `failed`: the run ended with an error, or a guard stopped it."""


def check_installed(names: Sequence[str]) -> None:
  """Raise SettingsError if the package of a tracker is not installed."""
  for name in names:
    package = _PACKAGES[name]
    if importlib.util.find_spec(package) is None:
      raise SettingsError(
        f'config.log.trackers = {tuple(names)!r}: {name} needs the package {package}, which is not installed '
        f'({_INSTALLED_BY[package]})'
      )


def open_trackers(settings: Log, workdir: Path, resume_step: int | None) -> list[Tracker]:
  """Open the trackers that the settings name. A tracker that cannot be opened is logged and left out.

  Args:
    settings: their names, and the name of the project.
    workdir: the work directory, which exists.
    resume_step: the step of the checkpoint from which the run continues; None: the run starts.
  """
  openers: dict[str, Callable[[], Tracker]] = {
    'tensorboard': lambda: TensorBoard(workdir, resume_step),
    'wandb': lambda: WandB(workdir, settings.project or _PROJECT, resume_step),
    'mlflow': lambda: MLflow(workdir, settings.project or _PROJECT, resume_step),
  }
  opened = []
  for name in settings.trackers:
    try:
      opened.append(openers[name]())
    except Exception as error:  # such as no network, or no API key
      switched_off(name, error)
  return opened


def switched_off(name: str, error: Exception) -> None:
  """Log that a tracker failed. It is then only closed."""
  log.warning('tracker %s failed and is switched off (%s: %s); metrics.jsonl is complete', name, type(error).__name__, error)


def flat(settings: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Return nested settings with dotted names, such as `rollout.group`. Values other than numbers, text and None become text."""
  found: dict[str, Any] = {}
  for name, value in settings.items():
    if isinstance(value, Mapping) and value:
      found |= flat(value, f'{prefix}{name}.')
    else:
      found[f'{prefix}{name}'] = value if value is None or isinstance(value, str | int | float) else json.dumps(value)
  return found


class TensorBoard:
  """Events of scalars and histograms, tables as text, and the settings on the HPARAMS page with the latest metrics."""

  def __init__(self, workdir: Path, resume_step: int | None):
    from tensorboardX import SummaryWriter  # imported late, because it is slow and optional

    # File names contain the second. The suffix keeps a resume within the same second from overwriting earlier events.
    # TensorBoard ignores earlier events from `purge_step` on.
    first = 0 if resume_step is None else resume_step + 1
    self._events = SummaryWriter(str(workdir / 'tensorboard'), purge_step=first, flush_secs=1, filename_suffix=f'.from_{first}')
    self._end: Any = None  # the end of the session, for the HPARAMS page

  def settings(self, values: Mapping[str, Any]) -> None:  # noqa: D102
    from tensorboardX.summary import hparams

    # The page reads the latest value of each of these scalars. A tag cannot contain @.
    metrics = {re.sub(r'[^-/\w.]', '_', name): 0.0 for name in _COMPARED}
    experiment, start, self._end = hparams(dict(values), metrics)
    for summary in (experiment, start):
      self._add(summary)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:  # noqa: D102
    for name, value in values.items():
      self._events.add_scalar(name, value, step)

  def histograms(self, step: int, values: Mapping[str, Shaped[np.ndarray, '...']]) -> None:  # noqa: D102
    for name, x in values.items():
      self._events.add_histogram(name, x, step)

  def table(self, step: int, name: str, rows: Rows) -> None:  # noqa: D102
    self._events.add_text(name, _markdown(rows), step)

  def close(self, failed: bool) -> None:  # noqa: D102
    if self._end is not None:
      self._add(self._end)
    self._events.close()

  def _add(self, summary: Any) -> None:
    assert self._events.file_writer is not None  # there is one until `close`
    self._events.file_writer.add_summary(summary)


class WandB:
  """A run of Weights & Biases, named after the work directory. Tables are tables, and the settings are its config."""

  def __init__(self, workdir: Path, project: str, resume_step: int | None):
    import wandb

    self._wandb = wandb
    run_id = _read_id(workdir, 'wandb', resume_step)  # None: wandb makes one
    self._run = wandb.init(project=project, name=workdir.name, dir=str(workdir), id=run_id, resume='allow')
    _write_id(workdir, 'wandb', self._run.id)

  def settings(self, values: Mapping[str, Any]) -> None:  # noqa: D102
    self._run.config.update(dict(values), allow_val_change=True)  # a resumed run may change some

  def scalars(self, step: int, values: Mapping[str, float]) -> None:  # noqa: D102
    self._run.log(dict(values), step=step)

  def histograms(self, step: int, values: Mapping[str, Shaped[np.ndarray, '...']]) -> None:  # noqa: D102
    self._run.log({name: self._wandb.Histogram(np_histogram=np.histogram(x, 64)) for name, x in values.items()}, step=step)

  def table(self, step: int, name: str, rows: Rows) -> None:  # noqa: D102
    columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(key) for key in columns] for row in rows]
    self._run.log({name: self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)}, step=step)

  def close(self, failed: bool) -> None:  # noqa: D102
    self._run.finish(exit_code=int(failed))


class MLflow:
  """A run of MLflow, named after the work directory. Settings are its parameters; histograms and tables are artifacts."""

  def __init__(self, workdir: Path, project: str, resume_step: int | None):
    if 'MLFLOW_TRACKING_URI' not in os.environ:
      os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')  # MLflow asks for this before it writes to a folder
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    self._metric, self._param = Metric, Param
    self._client = MlflowClient(os.environ.get('MLFLOW_TRACKING_URI', (workdir.absolute() / 'mlruns').as_uri()))
    run_id = _read_id(workdir, 'mlflow', resume_step)
    if run_id is None:
      experiment = self._client.get_experiment_by_name(project)
      experiment_id = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
      run_id = self._client.create_run(experiment_id, run_name=workdir.name).info.run_id
      _write_id(workdir, 'mlflow', run_id)
    else:
      self._client.update_run(run_id, 'RUNNING')
    self._id = run_id

  def settings(self, values: Mapping[str, Any]) -> None:  # noqa: D102
    before = self._client.get_run(self._id).data.params
    for name, value in values.items():
      if name in before and before[name] != _param_text(value):  # a parameter cannot change: the new value is a tag
        self._client.set_tag(self._id, f'resumed.{name}', _param_text(value))
    params = [self._param(name, _param_text(value)) for name, value in values.items() if name not in before]
    for some in itertools.batched(params, 100):  # the most in one call
      self._client.log_batch(self._id, params=list(some))

  def scalars(self, step: int, values: Mapping[str, float]) -> None:  # noqa: D102
    now = int(time.time() * 1000)
    metrics = [self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
    for some in itertools.batched(metrics, 1000):  # the most in one call
      self._client.log_batch(self._id, metrics=list(some))

  def histograms(self, step: int, values: Mapping[str, Shaped[np.ndarray, '...']]) -> None:  # noqa: D102
    for name, x in values.items():
      counts, edges = np.histogram(x, bins=min(64, max(1, np.size(x))))
      text = json.dumps({'counts': counts.tolist(), 'edges': edges.tolist()})
      self._client.log_text(self._id, text, f'histograms/{_mlflow_name(name)}/{files.step_name(step)}.json')

  def table(self, step: int, name: str, rows: Rows) -> None:  # noqa: D102
    stem = f'{_mlflow_name(name)}/{files.step_name(step)}'
    self._client.log_text(self._id, _markdown(rows), f'{stem}.md')
    self._client.log_text(self._id, ''.join(json.dumps(dict(row)) + '\n' for row in rows), f'{stem}.jsonl')

  def close(self, failed: bool) -> None:  # noqa: D102
    self._client.set_terminated(self._id, 'FAILED' if failed else 'FINISHED')


def _markdown(rows: Rows) -> str:
  return samples_markdown(rows) if all('completion' in row for row in rows) else table_markdown(rows)


def _mlflow_name(name: str) -> str:
  """Return a name with the characters that MLflow accepts: `eval/avg@k` becomes `eval/avg_k`."""
  return re.sub(r'[^\w\-./]', '_', name)


def _param_text(value: Any) -> str:
  return str(value)[:6000]  # the longest that MLflow stores


def _read_id(workdir: Path, tracker: str, resume_step: int | None) -> str | None:
  """Return the id of the run at this tracker, or None if the run starts or had not this tracker."""
  path = workdir / _IDS
  if resume_step is None or not path.exists():
    return None
  return json.loads(path.read_text(encoding='utf-8')).get(tracker)


def _write_id(workdir: Path, tracker: str, run_id: str) -> None:
  path = workdir / _IDS
  ids = json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
  files.write_text(path, json.dumps(ids | {tracker: run_id}, indent=2, sort_keys=True) + '\n')
