"""The first weights of a run from a checkpoint of another run: `python -m sprl.main --from=RUN[:STEP|:best]`.

The network, or its adapters, come from the checkpoint, in the dtype and on the mesh of the new run. Everything else is new: the
optimiser, the step, the problems, the seed. The reference of a KL term stays the model of `config.model.path`.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal

import jax

from sprl.config import Run, SettingsError
from sprl.config_reader import resolve
from sprl.distributed.team import Team
from sprl.io.checkpoint import CheckpointError, best_step, committed, read_record
from sprl.io.config_file import read_config, read_located
from sprl.io.pretrained import PretrainedError, config_folder
from sprl.io.run_state import RunState
from sprl.io.starts import Origin, parse_source, recorded_origin
from sprl.learner.restore import check_base, no_checkpoint, restore_trained
from sprl.model import Model, abstract_params
from sprl.models.config import ModelConfig
from sprl.models.lora import Base
from sprl.models.transformer import Params

log = logging.getLogger(__name__)


def find_origin(source: str | None, run: Run, model: Model, workdir: Path) -> Origin | None:
  """Return the checkpoint that the run of `workdir` starts from; None: it starts from the model of its settings.

  `source` is RUN, RUN:STEP or RUN:best. A run keeps the origin of its first start, whether `source` is given again or not.
  Without a step the newest checkpoint of the first start counts. A run without a checkpoint may begin again from another origin.
  Reads no arrays and writes nothing.

  Raises SettingsError, CheckpointError or FileNotFoundError if `source` is not a run, has no such checkpoint, trains other
  weights than this run, or is not where the run of `workdir` comes from.
  """
  known = recorded_origin(workdir)
  if committed(workdir / 'checkpoints'):  # the run continues from its own weights
    if source is not None:
      _check_same(source, known, workdir)
    return known
  origin = known if source is None or _is(known, source) else _newest(*parse_source(source), workdir)
  if origin is not None:
    _check_fits(origin, run, model)
  return origin


def weights_of(origin: Origin, run: Run, model: Model, base: Base | None, team: Team) -> Params:
  """Return the trained weights of the origin on the devices of `model`. With several processes, all call this."""
  restored = restore_trained(model, origin.workdir, origin.step, team, cast=True)
  check_base(base, RunState.from_json(restored.step, restored.extra).base, run.model.path)
  log.info('the first weights are those of %s after step %d', origin.workdir, origin.step)
  return restored.arrays.params


def _newest(folder: Path, step: int | Literal['best'] | None, workdir: Path) -> Origin:
  read_config(folder, '--from')  # raises if there is no run
  if folder.resolve() == workdir.resolve():
    raise SettingsError(f'--from={folder}: is the new run itself; expected another run, or a new --workdir')
  checkpoints = folder / 'checkpoints'
  if step == 'best':
    return Origin(folder, best_step(checkpoints), best=True)
  if step is None and (step := max(committed(checkpoints), default=None)) is None:
    raise CheckpointError(f'--from={folder}: {no_checkpoint(checkpoints)}')
  return Origin(folder, read_record(checkpoints, step).step)


def _is(origin: Origin | None, source: str) -> bool:
  """Return whether `source` names this origin."""
  folder, step = parse_source(source)
  if origin is None or folder.resolve() != origin.workdir.resolve():
    return False
  return origin.best if step == 'best' else step in (None, origin.step)


def _check_same(source: str, origin: Origin | None, workdir: Path) -> None:
  if origin is None:
    raise SettingsError(
      f'--from={source}: the run of {workdir} did not start from another run; expected no --from, or a new --workdir'
    )
  if not _is(origin, source):
    raise SettingsError(f'--from={source}: the run of {workdir} started from {origin}; expected --from={origin}, or no --from')


def _check_fits(origin: Origin, run: Run, model: Model) -> None:
  """Raise SettingsError if the weights of the origin are not weights that this run trains."""
  old = resolve(read_located(origin.workdir))
  _check_adapters(origin, old, run)
  try:
    config = ModelConfig.read(config_folder(old.model.path))
  except PretrainedError as error:
    log.warning('--from=%s: its model is not here, so only the shapes of its weights are compared (%s)', origin, error)
  else:
    if changes := _differences(config, model.config):
      raise SettingsError(
        f'--from={origin}: its model is not that of config.model.path = {run.model.path!r}: {", ".join(changes)}; expected the '
        'same architecture'
      )
  saved = read_record(origin.workdir / 'checkpoints', origin.step).arrays
  expected = {f'.params{jax.tree_util.keystr(path)}': leaf.shape for path, leaf in _leaves(abstract_params(model))}
  shapes = {name: _shape(text) for name, text in saved.items() if name.startswith('.params')}
  for name in sorted(expected.keys() | shapes.keys()):
    if expected.get(name) != shapes.get(name):
      raise SettingsError(
        f'--from={origin}: {name.removeprefix(".params")} has shape {shapes.get(name, "(missing)")} there and '
        f'{expected.get(name, "(missing)")} in config.model.path = {run.model.path!r}; expected the same architecture'
      )


def _check_adapters(origin: Origin, old: Run, new: Run) -> None:
  """Raise SettingsError unless both runs train all weights, or adapters that mean the same."""
  if bool(old.lora.rank) != bool(new.lora.rank):
    raise SettingsError(
      f'--from={origin}: trains {_trained(old)}, but this run trains {_trained(new)} (config.lora.rank = {new.lora.rank}); '
      f'expected the same. Or set config.model.path=FOLDER, after python -m sprl.export --workdir={origin.workdir} --out=FOLDER'
    )
  if not new.lora.rank:
    return
  for name in (field.name for field in dataclasses.fields(new.lora)):
    there, here = getattr(old.lora, name), getattr(new.lora, name)
    if there != here:
      raise SettingsError(f'config.lora.{name} = {here!r}: expected {there!r}, that of --from={origin}')


def _trained(run: Run) -> str:
  return 'adapters' if run.lora.rank else 'all weights'


def _differences(old: ModelConfig, new: ModelConfig) -> list[str]:
  """Return the sizes and variants of a network that differ, each as `name old -> new`. Special tokens are not compared."""
  names = [f.name for f in dataclasses.fields(new) if f.compare and not f.name.endswith(('_token_id', '_token_ids'))]
  pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
  return [f'{name} {there} -> {here}' for name, there, here in pairs if there != here]


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_leaves_with_path(tree)


def _shape(description: str) -> tuple[int, ...]:
  """Return the shape of a description such as `float32[2,3]`."""
  inside = description[description.index('[') + 1 : -1]
  return tuple(int(size) for size in inside.split(',') if size)
