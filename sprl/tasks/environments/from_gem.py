"""Environments of GEM (the package gem-llm, axon-rl/gem) by id, such as `game:GuessTheNumber-v0-easy`.

sprl uses the protocol of GEM. Only the random numbers need adapting: GEM's environments draw from the global generators of
`random` and numpy, which `reset(seed)` seeds, so episodes in two threads would mix their numbers. Here each environment has its
own state of these generators. It is installed during a call, for one call at a time in a process. Other code that draws from
these generators in another thread during a call is not isolated.
"""

import contextlib
import difflib
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sprl.config import SettingsError

_ONE_AT_A_TIME = threading.RLock()


class Gem:
  """A GEM environment with its own random state.

  `exclusive = False` lets `step` run beside other steps, for environments whose steps are slow and draw no numbers (tools, code).
  Otherwise an environment that hangs in a thread blocks every other GEM environment of its process; run such ones in processes.
  """

  def __init__(self, name: str, env: Any, exclusive: bool = True):
    self.name, self._env, self._exclusive = name, env, exclusive
    self._state = _state()

  def reset(self, seed: int) -> Any:
    """Reset the environment. numpy takes seeds of 32 bits; larger ones are taken modulo 2^32."""
    with self._own_random_state():
      return self._env.reset(seed=seed % 2**32)

  def step(self, action: str) -> Any:
    """Step the environment."""
    if not self._exclusive:
      return self._env.step(action)
    with self._own_random_state():
      return self._env.step(action)

  def sample_random_action(self) -> Any:
    """Return a random action. This advances the random state of the episode."""
    with self._own_random_state():
      return self._env.sample_random_action()

  def close(self) -> None:
    """Close the environment if it can be closed."""
    if callable(release := getattr(self._env, 'close', None)):
      release()

  @contextlib.contextmanager
  def _own_random_state(self) -> Iterator[None]:
    with _ONE_AT_A_TIME:
      outer = _state()
      _restore(self._state)
      try:
        yield
      finally:
        self._state = _state()
        _restore(outer)


def gem(id: str, args: Mapping[str, Any] | None = None, exclusive: bool = True) -> Gem:
  """Return `gem.make(id, **args)`. Raises SettingsError if gem-llm is missing, or the id or the arguments are refused."""
  where = 'config.task.args'
  handlers, level = logging.root.handlers[:], logging.root.level
  try:
    import gem as package  # pyright: ignore[reportMissingImports]
    import gem.envs  # pyright: ignore[reportMissingImports]  # registers the ids
    from gem.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise SettingsError(
      f"config.task.name = 'gem' needs the package gem-llm ({error}). Its metadata admits Python up to 3.12.0 only, its "
      'code runs on later ones: pip install --no-deps --ignore-requires-python gem-llm, and pip install nltk msgspec'
    ) from error
  finally:  # importing gem configures the root logger
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
  if id not in ENV_REGISTRY:
    close = difflib.get_close_matches(id, ENV_REGISTRY, n=5) or sorted(ENV_REGISTRY)
    raise SettingsError(f'{where}.id = {id!r}: gem has no such environment; expected {", ".join(close)}')
  with _ONE_AT_A_TIME:
    outer = _state()
    try:
      made = package.make(id, **(args or {}))  # some draw numbers when made
    except Exception as error:
      raise SettingsError(f'{where}.args = {dict(args or {})!r}: refused by {id} ({type(error).__name__}: {error})') from error
    finally:
      _restore(outer)
  return Gem(f'gem {id}', made, exclusive)


def _state() -> tuple[Any, Any]:
  return random.getstate(), np.random.get_state()


def _restore(state: tuple[Any, Any]) -> None:
  random.setstate(state[0])
  np.random.set_state(state[1])
