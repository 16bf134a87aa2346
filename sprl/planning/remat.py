"""Choose what the backward pass recomputes (`model.remat = 'auto'`): as little as the planned memory of an update allows.

Without recomputation, an update has the fewest operations and takes the most memory. The choice is made once, before the update
is compiled, and is stored with the settings of the run. A resumed run keeps it, unless it sets another.
The plan of a run with adapters is that of training all weights, so it may recompute more than it must.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sprl.config import Kernels, Remat, RematSetting, Run
from sprl.kernels.platform import can_run
from sprl.learner.batch import Shape
from sprl.learner.learner import batch_shape
from sprl.model import Model
from sprl.models.config import ModelConfig
from sprl.planning.memory import caches_kept, update_memory
from sprl.planning.mesh_axes import MeshAxes
from sprl.planning.room import GIB, memory_of
from sprl.sharding.mesh import sizes

LEAST_FIRST: tuple[Remat, ...] = ('none', 'dots', 'layer')
USABLE = {'cpu': 0.8}  # fraction of the memory that an update may fill; other processes use the rest of a host
USABLE_OF_ACCELERATOR = 0.9  # as in sprl.plan
log = logging.getLogger(__name__)


def with_remat(run: Run, remat: RematSetting) -> Run:
  """Return the run with this value of `model.remat`."""
  return replace(run, model=replace(run.model, remat=remat))


def least_that_fits(config: ModelConfig, run: Run, shape: Shape, axes: MeshAxes, room: float) -> Remat:
  """Return the least recomputation with which an update takes at most `room` bytes of each device.

  If none fits, return 'layer'. A value of `model.remat` other than 'auto' is returned unchanged.
  """
  asked: RematSetting = run.model.remat
  if asked != 'auto':
    return asked
  for remat in LEAST_FIRST:
    if update_memory(config, with_remat(run, remat), shape, axes).total <= room:
      return remat
  return 'layer'


def decided(run: Run, model: Model, shape: Shape | None = None) -> Run:
  """Return the run with `model.remat` chosen for the learner's devices, and log the choice.

  `shape` is that of a minibatch, by default the run's. If the memory of the devices is unknown, each layer is recomputed.
  """
  if run.model.remat != 'auto':
    return run
  devices = list(model.mesh.devices.flat)
  memory, platform = memory_of(devices), devices[0].platform
  room = 0.0 if memory is None else memory * USABLE.get(platform, USABLE_OF_ACCELERATOR) / len(devices)
  kernels: Kernels = 'mosaic_gpu' if can_run(run.model.kernels) else 'reference'
  here = replace(run, model=replace(run.model, dtype=model.dtype.name, kernels=kernels))
  if model.shares_devices:
    engine, engines = MeshAxes(**sizes(model.engine_meshes[0])), len(model.engine_meshes)
    room -= caches_kept(model.config, here, replace(engine, data=engine.data * engines))
  remat = least_that_fits(model.config, here, shape or batch_shape(run, model), MeshAxes(**sizes(model.mesh)), room)
  found = 'the memory of the device is unknown' if memory is None else f'an update may fill {room / GIB:,.1f} GiB of each device'
  log.info('model.remat = %r: %s', remat, found)
  return with_remat(run, remat)


def as_stored(run: Run, stored: Mapping[str, Any]) -> Run:
  """Return the run, with settings that it leaves open taken from its work directory.

  `stored` are the settings of config.json. A run that started under another default keeps that value too.
  """
  remat, chunk = stored.get('model', {}).get('remat', 'auto'), stored.get('packing', {}).get('score_chunk')
  run = with_remat(run, remat) if run.model.remat == 'auto' else run
  return replace(run, packing=replace(run.packing, score_chunk=chunk)) if run.packing.score_chunk is None else run
