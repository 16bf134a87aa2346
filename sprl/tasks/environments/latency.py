"""Delays and faults put on top of an environment, to test and to simulate what schedules them.

What happens in a turn is fixed by (salt, seed of the episode, turn) alone; `reset` is turn 0. Members of a group share the
seed: give each a `salt` of its own where they should not all be slow at once.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sprl.tasks.environments.protocol import Environment, name_of

Sleep = Callable[[float], object]  # seconds


class InjectedFault(RuntimeError):
  """What a faulty environment raises."""


def delay(mean: float, std: float, salt: int, seed: int, turn: int) -> float:
  """Seconds that a turn is delayed by: drawn from N(mean, std), 0 where that is negative."""
  return max(0.0, float(_draws(salt, seed, turn, 0).normal(mean, std)))


class Before:
  """`env`, before each call of which `act(seed, turn)` is called: the optional methods are there iff the environment has them."""

  def __init__(self, env: Environment, act: Callable[[int, int], object]):
    self._env, self._act = env, act
    self._seed = self._turn = 0

  @property
  def name(self) -> str:
    """That of the environment."""
    return name_of(self._env)

  def reset(self, seed: int) -> Any:
    """The environment's, after turn 0's act."""
    self._seed, self._turn = seed, 0
    self._act(seed, 0)
    return self._env.reset(seed)

  def step(self, action: str) -> Any:
    """The environment's, after the turn's act."""
    self._turn += 1
    self._act(self._seed, self._turn)
    return self._env.step(action)

  def __getattr__(self, name: str) -> Any:
    if name in ('sample_random_action', 'close'):
      return getattr(self._env, name)
    raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')


def delayed(env: Environment, mean: float, std: float = 0.0, salt: int = 0, sleep: Sleep = time.sleep) -> Before:
  """`env`, each call of which takes a delay longer. Raises ValueError where mean or std is negative."""
  if not (mean >= 0 and std >= 0):
    raise ValueError(f'mean = {mean}, std = {std}: expected seconds, 0 or more')
  return Before(env, lambda seed, turn: sleep(delay(mean, std, salt, seed, turn)))


def faulty(
  env: Environment,
  raising: float = 0.0,
  hanging: float = 0.0,
  hang_seconds: float = 3600.0,
  salt: int = 0,
  sleep: Sleep = time.sleep,
) -> Before:
  """`env`, which in a turn raises InjectedFault (probability `raising`) or sleeps `hang_seconds` (probability `hanging`).

  Raises ValueError where these are no probabilities.
  """
  if not (raising >= 0 and hanging >= 0 and raising + hanging <= 1):
    raise ValueError(f'raising = {raising}, hanging = {hanging}: expected probabilities, together at most 1')

  def strike(seed: int, turn: int) -> None:
    draw = _draws(salt, seed, turn, 1).random()
    if draw < raising:
      raise InjectedFault(f'injected in turn {turn} of seed {seed}')
    if draw < raising + hanging:
      sleep(hang_seconds)

  return Before(env, strike)


def _draws(salt: int, seed: int, turn: int, kind: int) -> np.random.Generator:
  return np.random.default_rng((salt, seed, turn, kind))
