"""Who has a say in which experts a token goes through, and who takes note of it (fp8_rollouts 6).

The network asks its memory for attention; a memory that is `Routed` is also told what the router thinks, and answers with the
experts to go through. Those are the router's own choice, or those of a record where there is one (router replay).
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from sprl.models.memory import Memory

MISSING = -1  # of a record: the token goes where the router sends it


class Balance(NamedTuple):
  """How tokens were spread over the experts: sums over tokens, for each of the M layers that have experts."""

  load: Float32[Array, 'M X']  # tokens that went through each
  probability: Float32[Array, 'M X']  # of each, by the router
  entropy: Float32[Array, ' M']  # of the router's distribution, in nats
  assigned: Float32[Array, ' M']  # experts that were to be gone through
  tokens: Float32[Array, ' M']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routed:
  """A memory with records of routes beside it: one that is followed, and the one that comes of it."""

  inner: Memory
  given: Int[Array, 'B T M k'] | None = None  # the experts to go through; MISSING where the router is to choose
  real: Bool[Array, 'B T'] | None = None  # tokens, not padding, which no balance counts; None: all are
  taken: tuple[Int[Array, 'B T k'], ...] = ()  # of the layers so far
  seen: tuple[Balance, ...] = ()  # of each, without its leading axis

  def attend(self, layer: int, q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']):
    """As the memory inside."""
    out, inner = self.inner.attend(layer, q, k, v)
    return out, dataclasses.replace(self, inner=inner)

  def route(self, probabilities: Float32[Array, 'B T X'], chosen: Int[Array, 'B T k']) -> tuple[Int[Array, 'B T k'], 'Routed']:
    """The record's experts where it has any, else the router's."""
    if self.given is not None:
      given = self.given[:, :, len(self.taken)].astype(chosen.dtype)
      chosen = jnp.where(jnp.all(given >= 0, axis=-1, keepdims=True), given, chosen)
    seen = _balance(probabilities, chosen, self.real)
    return chosen, dataclasses.replace(self, taken=(*self.taken, chosen), seen=(*self.seen, seen))

  @property
  def routes(self) -> Int[Array, 'B T M k']:
    """The experts that the tokens went through, in as few bytes as their number allows."""
    X = self.seen[0].load.shape[-1]
    return jnp.stack(self.taken, axis=2).astype(record_dtype(X))

  @property
  def balance(self) -> Balance | None:
    """How they were spread; None where no layer has experts."""
    return Balance(*map(jnp.stack, zip(*self.seen))) if self.seen else None


def record_dtype(experts: int):
  """What a record of experts is held in: their numbers, and MISSING."""
  return jnp.dtype(jnp.int8 if experts <= 128 else jnp.int16)


def balance_loss(balance: Balance) -> Float32[Array, '']:
  """X * sum over experts of (share of the assignments) * (mean probability), mean over layers: 1 where all get the same.

  Switch Transformer (arXiv 2101.03961) equations 4 to 6, with top-k assignments; of one layer transformers' is k times as much.
  A gradient comes through the probabilities alone.
  """
  mean = balance.probability / jnp.maximum(balance.tokens, 1)[:, None]
  return mean.shape[-1] * jnp.mean(jnp.sum(jax.lax.stop_gradient(_shares(balance)) * mean, axis=-1))


def balance_metrics(balance: Balance) -> dict[str, Float32[Array, '']]:
  """What a step's tokens say of the router; means over layers, entropies relative to that of all experts alike.

  moe/load_max         the busiest expert's load over the mean load; load_max_worst: of the worst layer
  moe/load_entropy     of the loads          moe/router_entropy  of the router's distributions, mean over tokens
  moe/unused           experts that no token went through
  moe/dropped          the share of assignments that no expert computed, which is 0: nothing has a capacity
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
    'moe/dropped': 1 - jnp.sum(balance.load) / jnp.maximum(jnp.sum(balance.assigned), 1),
    'moe/balance_loss': balance_loss(balance),
  }


def _shares(balance: Balance) -> Float32[Array, 'M X']:
  return balance.load / jnp.maximum(jnp.sum(balance.load, axis=-1, keepdims=True), 1)


def _entropy(p: Float32[Array, '*B X']) -> Float32[Array, '*B']:
  return -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-30)), axis=-1)


def _balance(probabilities, chosen, real) -> Balance:
  """Of one layer."""
  real = jnp.ones(chosen.shape[:2]) if real is None else real.astype(jnp.float32)
  weight = jnp.broadcast_to(real[..., None], chosen.shape)
  return Balance(
    load=jnp.zeros(probabilities.shape[-1]).at[chosen.reshape(-1)].add(weight.reshape(-1)),
    probability=jnp.einsum('btx,bt->x', probabilities, real),
    entropy=jnp.sum(_entropy(jax.lax.stop_gradient(probabilities)) * real),
    assigned=jnp.sum(weight),
    tokens=jnp.sum(real),
  )
