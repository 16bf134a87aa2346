"""Controls: arms that leave out, or replace, one part of sprl."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from claims.experiment import PLAIN_KEYS, RANDOM_VETO
from jaxtyping import Array, Bool, Float

from sprl import model
from sprl.cache.layout import CacheLayout, cache_layout
from sprl.objective import correction
from sprl.objective.correction import catastrophic


def at_random(log_rho: Float[Array, 'B T'], mask: Bool[Array, 'B T'], veto: float) -> Bool[Array, 'B T']:
  """Mark all tokens of sequences that are drawn at random, as many as `catastrophic` rejects.

  In place of `catastrophic` it makes the veto reject as many sequences, chosen independently of their log-probs.
  `catastrophic` gets no random key, so the bits of the sum of log_rho seed the draw.
  """
  count = jnp.sum(catastrophic(log_rho, mask, veto).any(axis=1))
  key = jax.random.key(jax.lax.bitcast_convert_type(jnp.sum(log_rho), jnp.uint32))
  place = jnp.where(mask.any(axis=1), jax.random.uniform(key, mask.shape[:1]), 2.0)  # rows without a token come last
  return mask & (jnp.argsort(jnp.argsort(place)) < count)[:, None]


def plain_keys(*args: Any, **more: Any) -> CacheLayout:
  """Return the layout of a cache that rounds keys to FP8 with their biases, as other engines do.

  It has neither the subtraction nor the second codes of docs/methods/fp8.md, eq. 9 and 10.
  """
  return replace(cache_layout(*args, **more), key_bias=False)


PATCHES = {RANDOM_VETO: (correction, 'catastrophic', at_random), PLAIN_KEYS: (model, 'cache_layout', plain_keys)}


def controlled(changes: Mapping[str, Any]) -> ExitStack:
  """Return a context that applies the controls which `changes` names."""
  with ExitStack() as stack:
    for name, patch in PATCHES.items():
      if changes.get(name):
        stack.enter_context(mock.patch.object(*patch))
    return stack.pop_all()
