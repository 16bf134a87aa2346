"""Copies of the weights for matrix products: in FP8 (`quant.learner`), or in the compute dtype.

    copies = copies_of(params, quant, dtype)       # once an update, before the loop over microbatches
    params = with_copies(params, copies)           # for each microbatch; gradients go to `params`

Updates change the master weights. Copies exist only while an update or a scoring pass runs. Checkpoints and optimiser states do
not contain them. A sampler with the same settings has the same FP8 linears with the same codes (docs/methods/fp8.md, FP8 in the
learner). The other matrices are cast once, not once per microbatch and pass. The products do not change.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sprl.config import Kernels, Quant
from sprl.models.transformer import Params
from sprl.quant.block import BlockScaled, Emulated, quantise
from sprl.quant.dot import LowRank, StraightThrough, plain
from sprl.sampler.weights import multiplies_codes, quantised_linears

Copies = dict[str, BlockScaled | Emulated | Float[Array, '*X N M']]  # path of a weight -> its copy


def copies_of(params: Params, quant: Quant, dtype: Any, kernels: Kernels = 'auto', *, cast: bool = False) -> Copies:
  """Return the copies of a tree of weights, by path. Call it inside a jitted function.

  Each linear that `quant` names gets an FP8 copy. An adapter is first merged into its frozen weight in float32, as in the
  sampler. With `cast`, each other matrix that products would cast to `dtype` gets a copy in `dtype` (`cast_matrices`). Emulated
  products also have this dtype. `kernels` selects the implementation of blockwise products.
  """
  named, codes = set(quantised_linears(params, quant)), multiplies_codes(quant, kernels)
  matrices = cast_matrices(params, quant, dtype) if cast else set()

  def copy(w) -> BlockScaled | Emulated:
    scaled = replace(quantise(plain(w), quant.format), kernels=kernels)
    return scaled if codes else scaled.emulated(dtype)

  leaves = [(jax.tree_util.keystr(path), w) for path, w in _leaves(jax.lax.stop_gradient(params))]
  return {name: copy(w) for name, w in leaves if name in named} | {
    name: w.astype(dtype) for name, w in leaves if name in matrices
  }


def cast_matrices(params: Params, quant: Quant, dtype: Any) -> set[str]:
  """Return the paths of the weights that products would cast to `dtype`: kernels without an FP8 copy, and the head.

  Adapters and weights that already have `dtype` are excluded. `params` may be shapes.
  """
  named = set(quantised_linears(params, quant))
  head = "['head']['kernel']" if 'head' in params else "['embed']"
  return {
    name
    for path, w in _leaves(params)
    if not isinstance(w, LowRank) and w.dtype != jnp.dtype(dtype)
    if (name := jax.tree_util.keystr(path)) == head or name.endswith("['kernel']")
    if name not in named
  }


def with_copies(params: Params, copies: Copies) -> Params:
  """Return the weights with each weight that has a copy wrapped as a StraightThrough weight.

  No array is copied.
  """

  def leaf(path, w):
    copy = copies.get(jax.tree_util.keystr(path))
    return w if copy is None else StraightThrough(w, copy)

  return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=_is_weight) if copies else params


def _leaves(params: Params) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_weight)[0]


def _is_weight(w: Any) -> bool:
  return isinstance(w, LowRank)
