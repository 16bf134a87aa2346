"""A run read back from its work directory: its policy with the weights of a checkpoint, and their export."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sprl.cache.scales import Scales
from sprl.io.checkpoint import CheckpointError, Checkpoints, Restored
from sprl.io.huggingface import export_folder
from sprl.io.peft import export_adapters
from sprl.learner.state import TrainState
from sprl.models.lora import Base, network
from sprl.models.transformer import Params
from sprl.policy import Policy, abstract_params
from sprl.sampler import calibrate
from sprl.settings import Run, SettingsError


def restore(policy: Policy, run: Run, workdir: Path, step: int | None = None, dtype=None) -> tuple[Params, int, Scales | None]:
  """The network's weights at a checkpoint (None: the newest intact one), that checkpoint's step, and the scales of the FP8 cache
  that belong to those weights, where they are kept. What is frozen under adapters is in `dtype`, else the compute dtype.

  Raises CheckpointError as `restore_trained`, SettingsError where a checkpoint's adapters are of other frozen weights.
  """
  restored, base = restore_trained(policy, run, workdir, step), policy.base(dtype)
  check_base(base, restored.extra, run.model.path)
  largest = tuple(np.array(found, np.float32) for found in restored.extra.get('largest', ()))
  kept = largest and run.quant.kv_scale != 'first_forward'
  return (
    network(restored.arrays.params, base),
    restored.step,
    calibrate.scales(largest, run.quant, policy.config.num_layers) if kept else None,
  )


def restore_trained(policy: Policy, run: Run, workdir: Path, step: int | None = None) -> Restored:
  """A checkpoint's train state with its trained weights alone: the network's, or its adapters'.

  Nothing in the folder is changed, so the run may be in progress. Raises CheckpointError where there is no such checkpoint,
  or it holds other arrays.
  """
  checkpoints = Checkpoints(workdir / 'checkpoints', run.checkpoint.keep_last, run.checkpoint.keep_best)
  absent: Any = None
  try:
    restored = checkpoints.restore(TrainState(abstract_params(policy), *[absent] * 4), step, partial=True)
  finally:
    checkpoints.close()
  if restored is None:
    raise CheckpointError(
      f'{checkpoints.folder}: no checkpoint yet; the run saves one every config.checkpoint.every = {run.checkpoint.every} steps, '
      'at its end, and when SIGTERM ends it'
    )
  return restored


def check_base(base: Base | None, extra: Mapping[str, Any], path: str) -> None:
  """Raises SettingsError where a checkpoint's adapters were trained beside other weights; `extra` is its record."""
  if base is not None and base.fingerprint != extra['base']:
    raise SettingsError(
      f'config.model.path = {path!r}: expected the weights beside which the adapters were trained (fingerprint {extra["base"]}), '
      f'found others ({base.fingerprint})'
    )


def export(policy: Policy, params: Params, out: Path, dtype: str = 'bfloat16') -> Path:
  """Writes the weights as a Hugging Face folder at `out`, with the tokenizer of the model that was trained; returns `out`."""
  export_folder(out, params, policy.config, policy.folder, dtype=jnp.dtype(dtype))
  return out


def export_adapter(policy: Policy, adapters: Params, out: Path, path: str) -> Path:
  """Writes adapters alone as a PEFT folder at `out`, which names the model of `path` as their base; returns `out`."""
  on_hub = not path.startswith('wheel:') and not Path(path).expanduser().is_dir()
  export_adapters(out, adapters, policy.config, policy.lora, path if on_hub else str(policy.folder.absolute()))
  return out
