"""FP8 copies of the learner's linears (`quant.learner`): forward passes multiply the copies, updates change the master weights.

    copies = copies_of(params, quant, dtype)       # once an update, before the loop over microbatches
    params = with_copies(params, copies)           # for each microbatch; gradients go to `params`

The copies are of the linears that a sampler with the same settings has in FP8, with the same codes (docs/methods/fp8.md, FP8 in
the learner). They exist only while an update or a scoring pass runs. Checkpoints and optimiser states do not have them.
"""

from dataclasses import replace
from typing import Any

import jax

from sprl.config import Kernels, Quant
from sprl.models.transformer import Params
from sprl.quant.block import BlockScaled, Emulated, quantise
from sprl.quant.dot import LowRank, StraightThrough, plain
from sprl.sampler.weights import multiplies_codes, quantised_linears

Copies = dict[str, BlockScaled | Emulated]  # path of a linear -> its FP8 copy


def copies_of(params: Params, quant: Quant, dtype: Any, kernels: Kernels = 'auto') -> Copies:
  """Return the FP8 copies of the linears that `quant` names; {} if it quantises none. For use inside a jitted function.

  An adapter is merged into its frozen weight in float32 first, as in the sampler. `dtype` is that of emulated products.
  `kernels` selects the implementation of blockwise products.
  """
  named, codes = set(quantised_linears(params, quant)), multiplies_codes(quant, kernels)

  def copy(w) -> BlockScaled | Emulated:
    scaled = replace(quantise(plain(w), quant.format), kernels=kernels)
    return scaled if codes else scaled.emulated(dtype)

  leaves = jax.tree_util.tree_flatten_with_path(jax.lax.stop_gradient(params), is_leaf=_is_weight)[0]
  return {name: copy(w) for path, w in leaves if (name := jax.tree_util.keystr(path)) in named}


def with_copies(params: Params, copies: Copies) -> Params:
  """Return the weights with each linear that has a copy as a StraightThrough weight. Nothing is copied."""

  def leaf(path, w):
    copy = copies.get(jax.tree_util.keystr(path))
    return w if copy is None else StraightThrough(w, copy)

  return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=_is_weight) if copies else params


def _is_weight(w: Any) -> bool:
  return isinstance(w, LowRank)
