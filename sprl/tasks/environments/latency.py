"""Delays and faults injected into an environment, to test and simulate schedulers.

(salt, seed of the episode, turn) fixes what happens in a turn; `reset` is turn 0. Members of a group share the seed: give each
its own `salt` if they should not all be slow at once.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sprl.tasks.environments.protocol import Environment, name_of

Sleep = Callable[[float], object]  # seconds


class InjectedFault(RuntimeError):
  """The error that a faulty environment raises."""


def delay(mean: float, std: float, salt: int, seed: int, turn: int) -> float:
  """Return the delay of a turn in seconds: drawn from N(mean, std), or 0 if that is negative."""
  return max(0.0, float(_draws(salt, seed, turn, 0).normal(mean, std)))


class Before:
  """Wraps `env` and calls `act(seed, turn)` before each call. It has the optional methods that the environment has."""

  def __init__(self, env: Environment, act: Callable[[int, int], object]):
    self._env, self._act = env, act
    self._seed = self._turn = 0

  @property
  def name(self) -> str:
    """The name of the environment."""
    return name_of(self._env)

  def reset(self, seed: int) -> Any:
    """Act for turn 0, then reset the environment."""
    self._seed, self._turn = seed, 0
    self._act(seed, 0)
    return self._env.reset(seed)

  def step(self, action: str) -> Any:
    """Act for this turn, then step the environment."""
    self._turn += 1
    self._act(self._seed, self._turn)
    return self._env.step(action)

  def __getattr__(self, name: str) -> Any:
    if name in ('sample_random_action', 'close'):
      return getattr(self._env, name)
    raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')


def delayed(env: Environment, mean: float, std: float = 0.0, salt: int = 0, sleep: Sleep = time.sleep) -> Before:
  """Delay each call of `env`. Raises ValueError if mean or std is negative."""
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
  """Make `env` raise InjectedFault in a turn (probability `raising`) or sleep `hang_seconds` (probability `hanging`).

  Raises ValueError if these are not probabilities.
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
