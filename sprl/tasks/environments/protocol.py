"""The protocol of an environment (that of GEM, axon-rl/gem), and checks of what one returns.

An environment is foreign code: it may raise, or return values of wrong types. So only `checked_reset` and `checked_step` call
`reset` and `step`. They turn every error into an EnvironmentFault that names the environment and the error. They have no time
limit; the caller must notice a hang.

`info` may hold these keys, which are checked:

    suffix             text at the end of a turn's message, such as the form of an answer
    env_instruction    text before the first observation
    messages           the turn as chat messages, {role, content} each, if it is more than one user message
    metrics            numbers of this step, by name
    metrics_agg_mode   how steps combine into an episode, by metric: mean (the default) or last
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sprl.foreign import LARGEST_REWARD, reason

Info = dict[str, Any]
Message = dict[str, str]  # {role, content}


@runtime_checkable
class Environment(Protocol):
  """An environment plays one episode at a time: `reset`, then `step` until it is terminated or truncated.

  Three methods are optional: `sample_random_action()` or `sample_random_action(rng)` returns an action for tests; `close()`
  releases resources; `len()` is the number of different episodes, of which an evaluation plays none twice.
  """

  def reset(self, seed: int) -> tuple[str, Info]:
    """Begin the episode that `seed` (0 or more) fixes. Returns (first observation, info)."""
    ...

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Answer the model's text. Returns (observation, reward, terminated, truncated, info)."""
    ...


class EnvironmentFault(RuntimeError):
  """An environment raised, or returned a wrong value; the message names the environment and the fault."""


@dataclass(frozen=True)
class Outcome:
  """The result of a step."""

  observation: str
  reward: float  # of this step, a finite number of float32
  terminated: bool  # the task has ended
  truncated: bool  # a limit of the environment cut it short
  info: Info

  @property
  def done(self) -> bool:
    """Whether the episode is over."""
    return self.terminated or self.truncated


def name_of(env: object) -> str:
  """Return the name for messages: the attribute `name` if there is one, else the class."""
  name = getattr(env, 'name', None)
  return name if isinstance(name, str) else type(env).__name__


# --- calls that are checked --------------------------------------------------------------------------------------------


def checked_reset(env: Any, seed: int) -> tuple[str, Info]:
  """Call `env.reset(seed)` and check the result. Raises EnvironmentFault."""
  where = f'environment {name_of(env)}: reset({seed})'
  observation, info = _parts(where, _call(where, env.reset, seed), ('observation', 'info'))
  _check(where, observation, info)
  return observation, info


def checked_step(env: Any, action: str) -> Outcome:
  """Call `env.step(action)` and check the result. Raises EnvironmentFault."""
  where = f'environment {name_of(env)}: step'
  returned = _call(where, env.step, action)
  observation, reward, *ends, info = _parts(where, returned, ('observation', 'reward', 'terminated', 'truncated', 'info'))
  _check(where, observation, info)
  if not _is_number(reward):
    raise EnvironmentFault(f'{where}: reward is a {type(reward).__name__}, {reward!r:.100}: expected a number')
  if not abs(reward) <= LARGEST_REWARD:  # NaN, too
    raise EnvironmentFault(f'{where}: reward is {reward}: expected a finite number of float32')
  for name, end in zip(('terminated', 'truncated'), ends, strict=True):
    if not isinstance(end, bool | np.bool_):
      raise EnvironmentFault(f'{where}: {name} is a {type(end).__name__}, {end!r:.100}: expected True or False')
  return Outcome(observation, float(reward), bool(ends[0]), bool(ends[1]), info)


def _call(where: str, method: Any, argument: Any) -> Any:
  try:
    return method(argument)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # foreign code may raise anything, and call sys.exit
    raise EnvironmentFault(f'{where} raised {reason(error)}') from error


def _parts(where: str, returned: Any, names: tuple[str, ...]) -> tuple:
  wanted = f'expected a tuple of {len(names)}: {", ".join(names)}'
  if not isinstance(returned, tuple):
    raise EnvironmentFault(f'{where} returned a {type(returned).__name__}: {wanted}')
  if len(returned) != len(names):
    raise EnvironmentFault(f'{where} returned a tuple of {len(returned)}: {wanted}')
  return returned


def _check(where: str, observation: Any, info: Any) -> None:
  if not _is_text(observation):
    raise EnvironmentFault(f'{where}: observation is a {type(observation).__name__}, {observation!r:.100}: expected {TEXT}')
  if not isinstance(info, dict):
    raise EnvironmentFault(f'{where}: info is a {type(info).__name__}, {info!r:.100}: expected a dict')
  for key, (accepted, expected) in _INFO.items():
    if key in info and not accepted(info[key]):
      raise EnvironmentFault(f'{where}: info[{key!r}] is {info[key]!r:.100}: expected {expected}')


TEXT = 'text that UTF-8 can encode'  # tokenizers need it; half a surrogate pair cannot be encoded


def _is_text(value: Any) -> bool:
  try:
    return isinstance(value, str) and value.encode() is not None
  except UnicodeEncodeError:
    return False


def _is_number(value: Any) -> bool:
  """Whether the value is a Python or numpy number. A bool is refused: as a reward it means a tuple in the wrong order."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _are_metrics(value: Any) -> bool:
  return isinstance(value, Mapping) and all(
    _is_text(name) and (isinstance(v, bool | np.bool_) or (_is_number(v) and math.isfinite(v))) for name, v in value.items()
  )


def _are_messages(value: Any) -> bool:
  return isinstance(value, list) and all(
    isinstance(m, Mapping) and _is_text(m.get('role')) and _is_text(m.get('content')) for m in value
  )


_INFO = {
  'suffix': (_is_text, TEXT),
  'env_instruction': (_is_text, TEXT),
  'messages': (_are_messages, f'a list of messages, each with a role and content in {TEXT}'),
  'metrics': (_are_metrics, 'a dict of finite numbers by name'),
  'metrics_agg_mode': (
    lambda v: isinstance(v, Mapping) and all(mode in ('mean', 'last') for mode in v.values()),
    "a dict of 'mean' or 'last' by the metric's name",
  ),
}
INFO_KEYS = tuple(_INFO)


# --- from what it returned to what the model reads -----------------------------------------------------------------------


def turn_messages(observation: str, info: Mapping[str, Any]) -> list[Message]:
  """Return the chat messages of a turn: one user message with the observation, or info['messages'].

  `env_instruction` precedes and `suffix` follows the text of the last message, each as a paragraph.
  """
  *before, last = info.get('messages') or [{'role': 'user', 'content': observation}]
  texts = (info.get('env_instruction', ''), last['content'], info.get('suffix', ''))
  return [*before, {'role': last['role'], 'content': '\n\n'.join(text for text in texts if text)}]


def episode_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Return the metrics of an episode from the infos of its steps: for each metric the mean over its steps, or the last value."""
  values: dict[str, list[float]] = {}
  modes: dict[str, str] = {}
  for info in infos:
    modes |= info.get('metrics_agg_mode', {})
    for name, value in info.get('metrics', {}).items():
      values.setdefault(name, []).append(float(value))
  return {name: found[-1] if modes.get(name) == 'last' else math.fsum(found) / len(found) for name, found in values.items()}
