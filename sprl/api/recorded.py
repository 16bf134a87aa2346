"""`open_run` opens a run from its work directory: its metrics, samples and evaluations, and its trained model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sprl.api.inputs import Data, Reward, inputs_of
from sprl.api.loaded import LoadedModel
from sprl.api.settings import Settings, merged
from sprl.api.training import Training, as_rows, with_held_out
from sprl.config import Run, to_dict
from sprl.config_checks import FILES
from sprl.config_reader import resolve
from sprl.distributed.process_group import require_single_process
from sprl.io.checkpoint import newest_record, read_record
from sprl.io.config_file import read_located
from sprl.io.files import local_folder
from sprl.io.run_state import RunState
from sprl.io.starts import began
from sprl.learner.restore import load_base, restore_trained
from sprl.model import open_here
from sprl.presets import sources
from sprl.tasks.environment_pool import Kind
from sprl.tasks.in_memory import Row


def open_run(
  workdir: str | Path,
  data: Data = None,
  reward: Reward = None,
  *,
  test: Iterable[Row] | None = None,
  environment: Kind | None = None,
  step: int | None = None,
) -> Training:
  """Open the run in a work directory, as `fit` returns it.

      run = sprl.open_run('runs/quickstart')
      run.plot()
      run.evaluate(samples=8, temperature=1.0)
      run.model.sampler(cache={'budget': 64}).generate(prompts)

  The run may be in progress: what was logged later is read again at each use, and the weights and evaluations are those of a
  checkpoint, which a run in progress may delete later. Nothing in the folder is changed. The weights are loaded when `model` is
  first used, on all devices of this machine if those of the run's settings are not here.

  Args:
    workdir: a folder that `sprl.fit` or `python -m sprl.main` has written.
    data: the problems that `fit` was given, for `evaluate` of a run whose problems were Python objects: a work directory does not
      hold these. None, here and in the next three: what the settings of the run name.
    reward: the reward that `fit` was given.
    test: the held-out problems that `fit` was given.
    environment: the environment that `fit` was given.
    step: the step of the checkpoint. None: that of the newest one when the run is opened.

  Raises FileNotFoundError if the folder has no run, SettingsError for an address of an object store and for settings of another
  version of sprl, and CheckpointError if there is no checkpoint of `step`.
  """
  require_single_process('sprl.open_run')
  folder = local_folder('workdir', workdir).absolute()
  saved = read_located(folder)
  kind = saved['task']['kind']
  of_inputs, inputs = inputs_of(data, reward, test=test, environment=environment, kind=kind if kind in FILES else None)
  run = resolve(merged(saved, of_inputs))
  checkpoints = folder / 'checkpoints'
  record = newest_record(checkpoints) if step is None else read_record(checkpoints, step)
  state = RunState() if record is None else RunState.from_json(record.step, record.extra)
  load = partial(_loaded, folder, run, None if record is None else record.step)
  completed = state.step == run.steps and bool(state.after)
  return Training(folder, run, with_held_out(inputs, run), load, state.step, completed, state.before, state.after)


def _loaded(folder: Path, run: Run, step: int | None) -> LoadedModel:
  """Load the trained weights of a run from a checkpoint."""
  here, model = open_here(run)
  model = model.at(began(folder))
  restored = restore_trained(model, folder, step)
  base = load_base(model, RunState.from_json(restored.step, restored.extra).base, run.model.path)
  return LoadedModel(as_rows(chosen(here), run.task.kind), model, restored.arrays.params, base, restored.step)


def chosen(run: Run) -> Settings:
  """Return the settings of a run that a user may have chosen: other than the defaults, and set by no arm or preset.

  A sampler of the model can then have another arm.
  """
  run = replace(run, packing=replace(run.packing, share_prefix=Run().packing.share_prefix))  # the arm or the task decides
  of_names = sources(run)
  return merged({key: value for key, value in _changed(to_dict(run), to_dict(Run())) if key not in of_names})


def _changed(settings: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = '') -> list[tuple[str, Any]]:
  """Return the settings that differ from their defaults, with dotted names."""
  found: list[tuple[str, Any]] = []
  for name, value in settings.items():
    default = defaults.get(name)
    if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
      found += _changed(value, default, f'{prefix}{name}.')
    elif value != default:
      found.append((f'{prefix}{name}', value))
  return found
