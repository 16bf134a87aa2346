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
  """What a Faulty environment raises."""


def delay(mean: float, std: float, salt: int, seed: int, turn: int) -> float:
  """Seconds that a turn is delayed by: drawn from N(mean, std), 0 where that is negative."""
  return max(0.0, float(_draws(salt, seed, turn, 0).normal(mean, std)))


class Delayed:
  """`env`, each call of which takes a delay longer. Raises ValueError where mean or std is negative."""

  def __init__(self, env: Environment, mean: float, std: float = 0.0, salt: int = 0, sleep: Sleep = time.sleep):
    if not (mean >= 0 and std >= 0):
      raise ValueError(f'mean = {mean}, std = {std}: expected seconds, 0 or more')
    self._env, self._mean, self._std, self._salt, self._sleep = env, mean, std, salt, sleep
    self._seed = self._turn = 0

  @property
  def name(self) -> str:
    """That of the environment."""
    return name_of(self._env)

  def reset(self, seed: int) -> Any:
    """The environment's, after the delay of turn 0."""
    self._seed, self._turn = seed, 0
    self._wait()
    return self._env.reset(seed)

  def step(self, action: str) -> Any:
    """The environment's, after the turn's delay."""
    self._turn += 1
    self._wait()
    return self._env.step(action)

  def _wait(self) -> None:
    self._sleep(delay(self._mean, self._std, self._salt, self._seed, self._turn))

  def __getattr__(self, name: str) -> Any:
    return _optional(self, name)


class Faulty:
  """`env`, which in a turn raises InjectedFault (probability `raising`) or sleeps `hang_seconds` (probability `hanging`).

  Raises ValueError where these are no probabilities.
  """

  def __init__(
    self,
    env: Environment,
    raising: float = 0.0,
    hanging: float = 0.0,
    hang_seconds: float = 3600.0,
    salt: int = 0,
    sleep: Sleep = time.sleep,
  ):
    if not (raising >= 0 and hanging >= 0 and raising + hanging <= 1):
      raise ValueError(f'raising = {raising}, hanging = {hanging}: expected probabilities, together at most 1')
    self._env, self._raising, self._hanging, self._hang_seconds = env, raising, hanging, hang_seconds
    self._salt, self._sleep = salt, sleep
    self._seed = self._turn = 0

  @property
  def name(self) -> str:
    """That of the environment."""
    return name_of(self._env)

  def reset(self, seed: int) -> Any:
    """The environment's, unless the fault of turn 0 strikes."""
    self._seed, self._turn = seed, 0
    self._strike()
    return self._env.reset(seed)

  def step(self, action: str) -> Any:
    """The environment's, unless the turn's fault strikes."""
    self._turn += 1
    self._strike()
    return self._env.step(action)

  def _strike(self) -> None:
    draw = _draws(self._salt, self._seed, self._turn, 1).random()
    if draw < self._raising:
      raise InjectedFault(f'injected in turn {self._turn} of seed {self._seed}')
    if draw < self._raising + self._hanging:
      self._sleep(self._hang_seconds)

  def __getattr__(self, name: str) -> Any:
    return _optional(self, name)


def _optional(wrapper: Any, name: str) -> Any:
  """The optional methods are there iff the environment has them."""
  if name in ('sample_random_action', 'close'):
    return getattr(wrapper._env, name)
  raise AttributeError(f'{type(wrapper).__name__} has no attribute {name!r}')


def _draws(salt: int, seed: int, turn: int, kind: int) -> np.random.Generator:
  return np.random.default_rng((salt, seed, turn, kind))
