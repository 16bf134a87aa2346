"""Programs of a cluster that exchange results through global memory, where the L2 cache holds them."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


def meet(barrier: Any) -> None:
  """Wait until the same warpgroup of every program in the cluster arrives at a ClusterBarrier.

  What these warpgroups wrote to global memory before is visible to the caller afterwards. In the interpreter this needs
  `inline_mgpu='ignore'`: it has no use for the fences.
  """
  # The barrier alone orders accesses to shared memory only; the fences order those to global memory.
  fence: Any = plgpu.inline_mgpu()(_fence)
  plgpu.commit_smem()  # all threads of the warpgroup have written
  fence()
  plgpu.barrier_arrive(barrier)
  plgpu.barrier_wait(barrier)
  fence()


def _fence(_):
  utils.inline_ptx('fence.acq_rel.gpu;', has_side_effects=True)
