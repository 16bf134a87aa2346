"""Weights as served: the learner's weights in the form that the sampler multiplies."""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from sprl.models.transformer import Params, head_weight


class Served(NamedTuple):
  """The network's weights in the sampler's dtype."""

  params: Params

  @property
  def head(self) -> Float[Array, 'V E']:
    """The output matrix."""
    return head_weight(self.params)


@partial(jax.jit, static_argnames='dtype')
def serve(params: Params, dtype) -> Served:
  """One jitted function, run after every update. Leaves already in `dtype` are shared, not copied."""
  return Served(jax.tree.map(lambda w: w.astype(dtype), params))
