"""A run read back from its work directory: its policy with the weights of a checkpoint, and their export."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from sprl.cache.scales import Scales
from sprl.io.checkpoint import CheckpointError, Checkpoints
from sprl.io.huggingface import export_folder
from sprl.learner.state import TrainState
from sprl.models.transformer import Params
from sprl.policy import Policy, abstract_params
from sprl.sampler import calibrate
from sprl.settings import Run


def restore(policy: Policy, run: Run, workdir: Path, step: int | None = None) -> tuple[Params, int, Scales | None]:
  """A run's weights at a checkpoint (None: the newest intact one), that checkpoint's step, and the scales of the FP8 cache that
  belong to those weights, where they are kept.

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
  largest = tuple(np.array(found, np.float32) for found in restored.extra.get('largest', ()))
  kept = largest and run.quant.kv_scale != 'first_forward'
  return (
    restored.arrays.params,
    restored.step,
    calibrate.scales(largest, run.quant, policy.config.num_layers) if kept else None,
  )


def export(policy: Policy, params: Params, out: Path, dtype: str = 'bfloat16') -> Path:
  """Writes the weights as a Hugging Face folder at `out`, with the tokenizer of the model that was trained; returns `out`."""
  export_folder(out, params, policy.config, policy.folder, dtype=jnp.dtype(dtype))
  return out
