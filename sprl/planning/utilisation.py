"""How much of the devices a run uses: model FLOPs of its updates over the devices' peak, and memory.

Model FLOPs are those of a forward and a backward pass over the tokens in the packed rows: 2 operations for each weight and token
forward, twice that backward, and the products of attention. Shared prompts count once. The recomputation of a backward pass
(`config.model.remat`), the scoring passes and the optimiser do not count.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sprl.config import Lora
from sprl.learner.batch import Tokens
from sprl.models.config import ModelConfig
from sprl.models.lora import abstract_adapters
from sprl.planning.devices import of_kind
from sprl.planning.memory import size
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.work import linear_weights


def update_flops(config: ModelConfig, lora: Lora, tokens: Tokens) -> int:
  """Return the model FLOPs of one epoch of updates on these tokens, on all devices together.

  Frozen weights under adapters have no gradient: their products count twice, not three times.
  """
  linears = 2 * _weights_per_token(config) * tokens.read
  head = 2 * config.vocab_size * config.hidden_size * tokens.trained
  attention = 4 * config.num_layers * config.num_heads * config.head_dim * tokens.pairs
  if not lora.rank:
    return 3 * (linears + head + attention)
  return 2 * (linears + head) + 3 * (attention + 2 * size(abstract_adapters(config, lora)) * tokens.read)


@cache
def _weights_per_token(config: ModelConfig) -> int:
  return linear_weights(config, MeshAxes())


def peak(device: Any, dtype: Any) -> float | None:
  """Return the peak FLOP/s of a device's matrix products in `dtype`, by its vendor; None for a device without an entry.

  FP8 products are counted against the peak of `dtype` too.
  """
  known = of_kind(device.device_kind)
  return None if known is None else known.bfloat16 if jnp.dtype(dtype).itemsize == 2 else known.float32


def memory(devices: Sequence[Any]) -> dict[str, float]:
  """Return bytes of memory: of this process on its host, and the most that one of these devices uses and has used.

  A fact that the system or the device does not report, such as memory of a CPU device, is absent.
  """
  stats = [found for device in devices if (found := device.memory_stats())]
  found = {}
  for name, key in (('device_memory', 'bytes_in_use'), ('device_memory_peak', 'peak_bytes_in_use')):
    if known := [each[key] for each in stats if key in each]:
      found[name] = float(max(known))
  if (statm := Path('/proc/self/statm')).exists():  # Linux
    found['host_memory'] = float(int(statm.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE'))
  return found


def local_devices(meshes: Sequence[jax.sharding.Mesh]) -> list[Any]:
  """Return the devices of these meshes that belong to this process, each once."""
  found = {device.id: device for mesh in meshes for device in mesh.devices.flat if device.process_index == jax.process_index()}
  return list(found.values())
