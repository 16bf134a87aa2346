"""Advantages: how much better a sequence is than the sequences it is compared with (docs/methods/losses.md, eq. 4 to 8).

R is the reward of a sequence, n the number of valid members of its group (the samples of one prompt).

  grpo                A = (R - mean_group) / (std_group + epsilon), ddof 1; epsilon = 1e-6
  dr_grpo             A = R - mean_group                                     arXiv 2503.20783
  rloo                A = n / (n - 1) * (R - mean_group)                     leave-one-out, arXiv 2402.14740
  reinforce_baseline  A = R - mean_batch
  reinforce           A = R

Statistics use the whole rollout batch, before any rejection: a sequence that is vetoed later still counts. Rewards are on the
host and packing needs the advantages there, so this file is numpy. It computes in float64: the square of a large reward overflows
float32.
"""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Bool, Float, Int

from sprl.config import Advantage, SettingsError
from sprl.foreign import own_function

EPSILON = 1e-6  # added to the standard deviation of a group
OVERLONG = 0.5  # largest penalty of a long answer. DAPO's is 1, for rewards of -1 and 1; here graders give 0 and 1


def overlong_penalty(length: Int[np.ndarray, ' B'], longest: int, share: float | None) -> Float[np.ndarray, ' B']:
  """Return the length penalty of each completion, to subtract from its reward (DAPO, arXiv 2503.14476, eq. 13, halved).

  It rises linearly from 0 to OVERLONG over the last `share` of the `longest` tokens. Without `share` it is 0.
  """
  if share is None:
    return np.zeros(len(length), np.float32)
  return (OVERLONG * np.clip(1 - (longest - length) / (share * longest), 0, 1)).astype(np.float32)


def advantages(
  reward: Float[np.ndarray, ' B'], group: Int[np.ndarray, ' B'], valid: Bool[np.ndarray, ' B'], settings: Advantage
) -> Float[np.ndarray, ' B']:
  """Return one advantage per sequence.

  `group` holds any integers: sequences with the same one are compared. A sequence that is not valid enters no statistic and
  gets 0. A group of equal rewards, or of one member, gets exactly 0 from `grpo`, `dr_grpo` and `rloo`.

  Raises SettingsError if the estimator has no function, or if that returns anything but a finite number for each sequence.
  """
  group = np.unique(group, return_inverse=True)[1]
  if not np.isfinite(reward[valid]).all():
    raise SettingsError('a reward is not finite in float32: expected smaller rewards, or fewer turns that add up (config.task)')
  found = np.asarray(estimator(settings)(np.where(valid, reward, 0).astype(np.float64), group, valid))
  returned = f'config.advantage.estimator = {settings.estimator!r}: its function returned'
  if found.shape != reward.shape:
    raise SettingsError(f'{returned} {found.dtype}{list(found.shape)}; expected [B] = {list(reward.shape)}')
  with np.errstate(over='ignore'):  # the check below reports an overflow
    result = np.where(valid, found, 0).astype(reward.dtype)
  if not np.isfinite(result).all():
    first = np.flatnonzero(~np.isfinite(result))[0]
    raise SettingsError(f'{returned} {found[first]} for a reward of {reward[first]}; expected finite numbers of {reward.dtype}')
  return result


def estimator(settings: Advantage) -> Callable:
  """Return the function of the estimator, or that of a user's file, `file.py:NAME`.

  Raises SettingsError for an unknown name, a file that does not define NAME, and a NAME that is no function.
  """
  if settings.estimator in ESTIMATORS:
    return ESTIMATORS[settings.estimator]
  return own_function('config.advantage.estimator', settings.estimator, ESTIMATORS)


def equal_rewards(rewards: Iterable[float]) -> bool:
  """Return whether a group's known rewards are equal in float32, in which `equal_groups` compares them; True if there are none.

  Sums of the parts of a reward may differ in the last bit of float64.
  """
  return len({*map(np.float32, rewards)}) < 2


def equal_groups(
  reward: Float[np.ndarray, ' B'], group: Int[np.ndarray, ' B'], valid: Bool[np.ndarray, ' B']
) -> Bool[np.ndarray, ' B']:
  """Return which valid sequences belong to a group whose valid members all have the same reward."""
  group = np.unique(group, return_inverse=True)[1]
  lowest, highest = _group_range(reward, group, valid)
  return valid & (lowest == highest)


# --- estimators: (reward, group, valid) -> advantage of each sequence; rewards are float64, and 0 where not valid -----------


def _grpo(reward, group, valid):
  centred, n = _centred(reward, group, valid)
  variance = _group_sum(centred**2, group, valid) / np.maximum(n - 1, 1)
  return centred / (np.sqrt(variance) + EPSILON)


def _dr_grpo(reward, group, valid):
  return _centred(reward, group, valid)[0]


def _rloo(reward, group, valid):
  centred, n = _centred(reward, group, valid)
  return centred * n / np.maximum(n - 1, 1)


def _reinforce_baseline(reward, group, valid):
  return reward - reward.sum() / max(int(valid.sum()), 1)


def _reinforce(reward, group, valid):
  return reward


ESTIMATORS: dict[str, Callable] = {
  'grpo': _grpo,
  'dr_grpo': _dr_grpo,
  'rloo': _rloo,
  'reinforce_baseline': _reinforce_baseline,
  'reinforce': _reinforce,
}


# --- statistics of groups ------------------------------------------------------------------------------------------------


def _centred(reward, group, valid):
  """Return each reward minus the mean of its group, and the size of the group."""
  # Measured from the lowest reward of the group, so that equal rewards give exact zeros. The rounded mean of eight times 0.1
  # would leave a difference that is then divided by a standard deviation of the same size.
  above = np.where(valid, reward - _group_range(reward, group, valid)[0], 0)
  n = _group_sum(np.ones_like(reward), group, valid)
  return above - _group_sum(above, group, valid) / np.maximum(n, 1), n


def _group_sum(x, group, valid):
  """Return, per sequence, the sum of x over the valid members of its group."""
  sums = np.zeros_like(x)
  np.add.at(sums, group, np.where(valid, x, 0))
  return sums[group]


def _group_range(reward, group, valid):
  """Return, per sequence, the lowest and the highest valid reward of its group."""
  lowest, highest = np.full_like(reward, np.inf), np.full_like(reward, -np.inf)
  np.minimum.at(lowest, group, np.where(valid, reward, np.inf))
  np.maximum.at(highest, group, np.where(valid, reward, -np.inf))
  return lowest[group], highest[group]
