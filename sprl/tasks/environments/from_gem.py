"""Environments of GEM (the package gem-llm, axon-rl/gem) by their id, such as `game:GuessTheNumber-v0-easy`.

Their form is this package's own. What needs adapting is their chance: they draw from the global generators of `random` and
numpy, which `reset(seed)` seeds. Two episodes in two threads would draw from one another's. So each environment here has a
state of these generators of its own, which is put in place for its calls, one at a time in a process, and taken out again.
Other code that draws from them in another thread at that moment is not kept apart.
"""

import contextlib
import difflib
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sprl.settings import SettingsError

_ONE_AT_A_TIME = threading.RLock()


class Gem:
  """A GEM environment with its own chance.

  `exclusive = False` lets `step` run beside other steps: for environments whose steps are slow and draw nothing (tools, code).
  Otherwise one that hangs in a thread stops every other GEM environment of its process: such ones belong into processes.
  """

  def __init__(self, name: str, env: Any, exclusive: bool = True):
    self.name, self._env, self._exclusive = name, env, exclusive
    self._state = _state()

  def reset(self, seed: int) -> Any:
    """As GEM's; numpy takes seeds of 32 bits, so larger ones are folded."""
    with self._own_chance():
      return self._env.reset(seed=seed % 2**32)

  def step(self, action: str) -> Any:
    """As GEM's."""
    if not self._exclusive:
      return self._env.step(action)
    with self._own_chance():
      return self._env.step(action)

  def sample_random_action(self) -> Any:
    """As GEM's; drawing it changes the episode's chance."""
    with self._own_chance():
      return self._env.sample_random_action()

  def close(self) -> None:
    """Closes it where it can be closed."""
    if callable(release := getattr(self._env, 'close', None)):
      release()

  @contextlib.contextmanager
  def _own_chance(self) -> Iterator[None]:
    with _ONE_AT_A_TIME:
      outer = _state()
      _restore(self._state)
      try:
        yield
      finally:
        self._state = _state()
        _restore(outer)


def gem(id: str, args: Mapping[str, Any] | None = None, exclusive: bool = True) -> Gem:
  """The environment that `gem.make(id, **args)` makes. Raises SettingsError: no gem-llm, no such id, arguments it refuses."""
  where = 'config.environment.args'
  handlers, level = logging.root.handlers[:], logging.root.level
  try:
    import gem as package  # pyright: ignore[reportMissingImports]
    import gem.envs  # pyright: ignore[reportMissingImports]  # registers the ids
    from gem.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise SettingsError(
      f"config.environment.name = 'gem' needs the package gem-llm ({error}). Its metadata admits Python up to 3.12.0 only, its "
      'code runs on later ones: pip install --no-deps --ignore-requires-python gem-llm, and pip install nltk msgspec'
    ) from error
  finally:  # its import configures everybody's logging
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
  if id not in ENV_REGISTRY:
    close = difflib.get_close_matches(id, ENV_REGISTRY, n=5) or sorted(ENV_REGISTRY)
    raise SettingsError(f'{where}.id = {id!r}: gem has no such environment; expected {", ".join(close)}')
  with _ONE_AT_A_TIME:
    outer = _state()
    try:
      made = package.make(id, **(args or {}))  # some reset themselves, drawing
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
