"""Weights as served: the learner's weights in the form that the sampler multiplies."""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from sprl.models.transformer import Params, head_weight


class Served(NamedTuple):
  """The network's weights in the sampler's dtype, and the head as [E, V], in which layout a few rows multiply fastest."""

  params: Params
  head: Float[Array, 'E V']


@partial(jax.jit, static_argnames='dtype')
def serve(params: Params, dtype) -> Served:
  """Cast and re-layout in one jitted function, run after every update. Leaves already in `dtype` are shared, not copied."""
  cast = jax.tree.map(lambda w: w.astype(dtype), params)
  return Served(cast, head_weight(cast).T)
