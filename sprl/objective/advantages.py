"""Advantages: how much better a sequence did than what it is compared with.

R is a sequence's reward, n the members of its group (the samples of one prompt).

  grpo                A = (R - mean_group) / (std_group + epsilon), std with ddof 1; or without the division
  dr_grpo             A = R - mean_group                            (Liu et al. 2025, with aggregate = seq-mean-token-sum-norm)
  rloo                A = R - mean of the group's other members     (leave-one-out: n/(n-1) times the centred reward)
  reinforce_baseline  A = R - mean of the batch
  reinforce           A = R

A sequence that is vetoed later still counts here: advantages are computed before any rejection (sparse_rollouts 3).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.settings import Advantage


def advantages(
  reward: Float[Array, ' B'], group: Int[Array, ' B'], valid: Bool[Array, ' B'], settings: Advantage
) -> Float[Array, ' B']:
  """One advantage a sequence.

  Group numbers lie in 0..B-1. A sequence that is not valid (padding, or filtered out) is in no statistic and gets 0.
  A group of equal rewards, or of one member, has exactly zero advantage relative to itself.
  """
  reward = jnp.where(valid, reward, 0)
  match settings.estimator:
    case 'grpo' | 'dr_grpo' | 'rloo':
      centred, n = _centred(reward, group, valid)
      if settings.estimator == 'rloo':
        result = centred * n / jnp.maximum(n - 1, 1)
      elif settings.estimator == 'grpo' and settings.normalise_std:
        variance = _over_group(centred**2, group, valid) / jnp.maximum(n - 1, 1)
        result = centred / (jnp.sqrt(variance) + settings.epsilon)
      else:
        result = centred
    case 'reinforce_baseline':
      result = reward - reward.sum() / jnp.maximum(valid.sum(), 1)
    case 'reinforce':
      result = reward
  if settings.clip > 0:
    result = jnp.clip(result, -settings.clip, settings.clip)
  return jnp.where(valid, result, 0)


def equal_groups(reward: Float[Array, ' B'], group: Int[Array, ' B'], valid: Bool[Array, ' B']) -> Bool[Array, ' B']:
  """The valid members of groups whose valid members all have the same reward: they teach nothing relative to each other."""
  lowest, highest = _extremes(reward, group, valid)
  return valid & (lowest == highest)


def _centred(reward, group, valid):
  """Reward minus its group's mean, and the group's size."""
  # Measured from the group's lowest reward: equal rewards then give exact zeros, where the rounding of a mean such as
  # that of eight times 0.1 would be divided by a standard deviation of the same rounding.
  above = jnp.where(valid, reward - _extremes(reward, group, valid)[0], 0)
  n = _over_group(jnp.ones_like(reward), group, valid)
  return above - _over_group(above, group, valid) / jnp.maximum(n, 1), n


def _over_group(x, group, valid):
  """Each sequence's sum of x over the valid members of its group."""
  return jax.ops.segment_sum(jnp.where(valid, x, 0), group, group.shape[0])[group]


def _extremes(reward, group, valid):
  """Each sequence's lowest and highest valid reward in its group."""
  lowest = jax.ops.segment_min(jnp.where(valid, reward, jnp.inf), group, group.shape[0])[group]
  highest = jax.ops.segment_max(jnp.where(valid, reward, -jnp.inf), group, group.shape[0])[group]
  return lowest, highest
