"""Routes, the experts of each token: replay of recorded ones, and how evenly they spread tokens (docs/methods/fp8.md, eq. 11).

Each layer with experts asks `replayed` which experts its tokens use. `Routing` is the auxiliary result of a forward pass.

Letters: B rows, T tokens, X experts of a layer, M layers with experts, k experts of a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

MISSING = -1  # in recorded routes: the router chooses


class Balance(NamedTuple):
  """How tokens were spread over the experts: sums over tokens, for each of the M layers with experts."""

  load: Float32[Array, 'M X']  # tokens that used each expert
  probability: Float32[Array, 'M X']  # router's probability of each expert
  entropy: Float32[Array, ' M']  # entropy of the router's distribution, in nats
  tokens: Float32[Array, ' M']  # tokens


class LayerRouting(NamedTuple):
  """The routes of one layer and their balance. The arrays of `balance` have no leading axis."""

  chosen: Int[Array, 'B T k']
  balance: Balance


class Routing(NamedTuple):
  """The routes of a forward pass and their balance. Both are None if no layer has experts."""

  routes: Int[Array, 'B T M k'] | None = None  # dtype `route_dtype`
  balance: Balance | None = None

  @classmethod
  def of(cls, layers: Sequence[LayerRouting]) -> 'Routing':
    """Stack the routes and balances of the layers with experts."""
    if not layers:
      return cls()
    X = layers[0].balance.load.shape[-1]
    routes = jnp.stack([each.chosen for each in layers], axis=2).astype(route_dtype(X))
    return cls(routes, Balance(*map(jnp.stack, zip(*(each.balance for each in layers)))))


def replayed(chosen: Int[Array, 'B T k'], routes: Int[Array, 'B T k'] | None) -> Int[Array, 'B T k']:
  """Return the experts of recorded `routes` where they are not MISSING, else the experts that the router chose."""
  if routes is None:
    return chosen
  routes = routes.astype(chosen.dtype)
  return jnp.where(jnp.all(routes >= 0, axis=-1, keepdims=True), routes, chosen)


def balance_of(
  probabilities: Float32[Array, 'B T X'], chosen: Int[Array, 'B T k'], mask: Bool[Array, 'B T'] | None = None
) -> Balance:
  """Return the balance of one layer, without a leading axis, over the tokens of `mask` (None: all tokens)."""
  real = jnp.ones(chosen.shape[:2]) if mask is None else mask.astype(jnp.float32)
  weight = jnp.broadcast_to(real[..., None], chosen.shape)
  return Balance(
    load=jnp.zeros(probabilities.shape[-1]).at[chosen.reshape(-1)].add(weight.reshape(-1)),
    probability=jnp.einsum('btx,bt->x', probabilities, real),
    entropy=jnp.sum(_entropy(jax.lax.stop_gradient(probabilities)) * real),
    tokens=jnp.sum(real),
  )


def route_dtype(experts: int):
  """Return the smallest integer dtype that holds every expert's number and MISSING."""
  return jnp.dtype(jnp.int8 if experts <= 128 else jnp.int16)


def balance_loss(balance: Balance) -> Float32[Array, '']:
  """Return X * sum over experts of (share of the assignments) * (mean probability), averaged over layers.

  It is 1 if all experts get the same. Switch Transformer (arXiv 2101.03961) equations 4 to 6, with top-k assignments; for one
  layer the loss of transformers is k times as large. The gradient goes through the probabilities only.
  """
  mean = balance.probability / jnp.maximum(balance.tokens, 1)[:, None]
  return mean.shape[-1] * jnp.mean(jnp.sum(jax.lax.stop_gradient(_shares(balance)) * mean, axis=-1))


def balance_metrics(balance: Balance) -> dict[str, Float32[Array, '']]:
  """Return the router's metrics of a step's tokens. They are means over layers; entropies are relative to the uniform one.

  moe/load_max         the busiest expert's load over the mean load; load_max_worst: in the worst layer
  moe/load_entropy     entropy of the loads
  moe/router_entropy   entropy of the router's distributions, averaged over tokens
  moe/unused           experts that no token used
  moe/balance_loss     `balance_loss` of all tokens together
  """
  X, shares = balance.load.shape[-1], _shares(balance)
  largest = X * jnp.max(shares, axis=-1)
  return {
    'moe/load_max': jnp.mean(largest),
    'moe/load_max_worst': jnp.max(largest),
    'moe/load_entropy': jnp.mean(_entropy(shares)) / jnp.log(X),
    'moe/router_entropy': jnp.mean(balance.entropy / jnp.maximum(balance.tokens, 1)) / jnp.log(X),
    'moe/unused': jnp.mean(jnp.sum(balance.load == 0, axis=-1).astype(jnp.float32)),
    'moe/balance_loss': balance_loss(balance),
  }


def _shares(balance: Balance) -> Float32[Array, 'M X']:
  return balance.load / jnp.maximum(jnp.sum(balance.load, axis=-1, keepdims=True), 1)


def _entropy(p: Float32[Array, '*B X']) -> Float32[Array, '*B']:
  return -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)
