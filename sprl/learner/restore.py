"""Read trained weights back from a run's checkpoints, and export them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sprl.cache.scales import Scales
from sprl.config import Run, SettingsError
from sprl.distributed.team import ALONE, Team
from sprl.io.checkpoint import CheckpointError, Checkpoints, Restored, committed, read_record
from sprl.io.huggingface import export_folder
from sprl.io.peft import export_adapters
from sprl.io.pretrained import transformers_path
from sprl.io.run_state import RunState
from sprl.learner.state import TrainState
from sprl.model import Model, abstract_params
from sprl.models.lora import FORM, Base, network
from sprl.models.transformer import Params
from sprl.sampler import calibrate


def restore(
  model: Model, run: Run, workdir: Path, step: int | None = None, dtype=None, team: Team = ALONE
) -> tuple[Params, int, Scales | None]:
  """Restore the network's weights from a checkpoint; `step=None` takes the newest intact one.

  Returns the weights, the step of the checkpoint, and the FP8 cache scales that belong to the weights (None where the checkpoint
  has none). Frozen weights under adapters are loaded in `dtype`, by default the compute dtype. With several processes, all call
  this.

  Raises CheckpointError as `restore_trained` does, and SettingsError if the adapters were trained with other frozen weights.
  """
  restored = restore_trained(model, workdir, step, team)
  state = RunState.from_json(restored.step, restored.extra)
  base = load_base(model, state.base, run.model.path, dtype)
  largest = tuple(np.array(found, np.float32) for found in state.amax)
  params, scales = network(restored.arrays.params, base), None
  if largest and calibrate.RULES[run.quant.kv_scale].measured_on != 'next prompts':
    scales = calibrate.scales(largest, run.quant, model.cache_layout(run.sampling, run.cache, run.quant), params)
  return params, state.step, scales


def restore_trained(model: Model, workdir: Path, step: int | None = None, team: Team = ALONE, cast: bool = False) -> Restored:
  """Restore only the trained weights of a checkpoint: the network, or its adapters. With several processes, all call this.

  The folder is not modified, so the run may be in progress. `cast` converts weights of another dtype than `model` trains in.
  Raises CheckpointError if the checkpoint does not exist or holds arrays of other shapes.
  """
  checkpoints = Checkpoints(workdir / 'checkpoints', keep_last=1, team=team)  # keeps nothing: it only reads
  absent: Any = None
  try:
    restored = checkpoints.restore(TrainState(abstract_params(model), *[absent] * 4), step, partial=True, cast=cast)
  finally:
    checkpoints.close()
  if restored is None:
    raise CheckpointError(no_checkpoint(checkpoints.folder))
  return restored


def check_saved(workdir: Path, step: int | None) -> None:
  """Raise CheckpointError if a run has no checkpoint of `step`, or none at all. Reads no arrays."""
  folder = workdir / 'checkpoints'
  if step is not None:
    read_record(folder, step)
  elif not committed(folder):
    raise CheckpointError(no_checkpoint(folder))


def no_checkpoint(folder: Path) -> str:
  """Return the error for a run that has not saved a checkpoint."""
  return f'{folder}: no checkpoint yet. A run saves one every config.checkpoint.every steps, at its end, and on SIGTERM'


def load_base(model: Model, fingerprint: str | None, path: str, dtype=None) -> Base | None:
  """Load the frozen weights under adapters, as `Model.base` does. Raises SettingsError as `check_base` does."""
  base = model.base(dtype)
  check_base(base, fingerprint, path)
  return base


def check_base(base: Base | None, fingerprint: str | None, path: str) -> None:
  """Raise SettingsError unless the frozen weights, of the model at `path`, are those that adapters were trained with."""
  if base is not None and not (fingerprint or '').startswith(FORM):
    raise SettingsError(
      f'config.lora: the fingerprint of the frozen weights in the checkpoint, {fingerprint}, is that of an older version of sprl '
      'and cannot be compared; expected a new run, or that version'
    )
  if base is not None and base.fingerprint != fingerprint:
    raise SettingsError(
      f'config.model.path = {path!r}: expected the weights that the adapters were trained with (fingerprint {fingerprint}), '
      f'found others ({base.fingerprint})'
    )


def export(model: Model, params: Params, out: Path, dtype: str = 'bfloat16', card: str | None = None, team: Team = ALONE) -> Path:
  """Write the weights as a Hugging Face folder at `out`, with the tokenizer of the base model. Returns `out`.

  `card` is the text of its README.md. With several processes, all call this, and process 0 writes.
  """
  export_folder(out, params, model.config, model.folder, dtype=jnp.dtype(dtype), card=card, leads=team.leads)
  return out


def export_adapter(model: Model, adapters: Params, out: Path, path: str, card: str | None = None, team: Team = ALONE) -> Path:
  """Write the adapters as a PEFT folder at `out`, which names the model at `path` as their base. Returns `out`.

  `card` and `team` are those of `export`.
  """
  export_adapters(out, adapters, model.config, model.lora, transformers_path(path, model.folder), card, team.leads)
  return out
