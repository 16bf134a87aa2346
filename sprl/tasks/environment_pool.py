"""Environments in a pool of workers. An environment stays in the worker that made it until its episode is over.

A worker holds many environments and makes one call at a time. If a call hangs or ends the worker's process, the other
environments there are lost too, and the next step of each fails.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

from sprl.config import Task
from sprl.foreign import attempt
from sprl.tasks.environments import registry, user_file
from sprl.tasks.environments.protocol import INFO_KEYS, Environment, Info, Outcome, checked_reset, checked_step
from sprl.tasks.worker_pool import Failure, WorkerPool, pause_before
from sprl.tasks.workers import starter


@dataclass(frozen=True)
class Call:
  """A call of one environment. `reset` makes the environment, `close` closes and removes it, `close all` all of a worker."""

  key: tuple[int, int]  # (uid, attempt) of the episode
  method: str  # reset, step, close or close all
  argument: Any = None  # reset: the seed; step: the model's text


class EnvironmentLost(RuntimeError):
  """Raised by a step of an environment whose worker died or was killed."""


def environment_pool(
  make: Callable[[], Environment],
  workers: int,
  time_limit: float,
  executor: str = 'threads',
  now: Callable[[], float] = time.monotonic,
) -> WorkerPool:
  """Return a pool of `workers` workers that steps environments. Its calls are of type Call.

  All calls with the same `key` go to the same worker, because the environment lives there (affinity). `reset` returns
  (observation, info), `step` an Outcome. A call that raises, hangs or ends its worker gives a Failure instead. The `reset` of an
  attempt after a failure waits up to 10 s first (PAUSES).

  Args:
    make: makes an environment. It is pickled for processes and Ray.
    workers: the number of workers.
    time_limit: seconds that a call may take.
    executor: 'threads', 'processes' or 'ray'. A thread cannot be killed: a call that hangs keeps its thread.
    now: the clock, in seconds.

  Raises:
    KeyError: for another executor.
    SettingsError: from the pool, on entering, if a worker cannot start; later, if workers fail repeatedly.
  """
  return WorkerPool(
    starter(executor, partial(_Stage, make)),
    workers,
    limit=time_limit,
    limit_setting='config.task.time_limit',
    blame=f'config.task.executor = {executor!r}',
    key=lambda call: call.key,
    farewell=Call((0, 0), 'close all'),
    pause=lambda call: pause_before(call.key[1]) if call.method == 'reset' else 0.0,
    read=_result,
    now=now,
  )


Kind = Callable[..., Environment]  # a class, or a function that makes an environment


def make_environment(task: Task, held_out: bool, kind: Kind | None = None) -> Environment:
  """Return a new environment of the task. If it takes `split`, the split is 'test' if `held_out`, else 'train'.

  `kind` is called with `task.args` in place of the environment that `task.name` names. Raises SettingsError if `task.name` is
  unknown or cannot be loaded, or if the environment refuses `task.args`.
  """
  assert task.name, 'checked with the settings'
  split = {'split': 'test' if held_out else 'train'} if takes_split(task, kind) else {}
  args = {**split, **task.args}
  if kind is None:
    return registry.make(task.name, args)
  return user_file.construct(kind, args, 'config.task.args', ('reset', 'step'))


def takes_split(task: Task, kind: Kind | None = None) -> bool:
  """Return whether the environment of the task, or `kind`, tells training from test problems by an argument `split`."""
  assert task.name, 'checked with the settings'
  return registry.takes(task.name, 'split') if kind is None else 'split' in inspect.signature(kind).parameters


class _Stage:
  """The service of a worker: its environments by key. Its answers are plain data, because processes answer in JSON."""

  def __init__(self, make: Callable[[], Environment]):
    self._make = make
    self._environments: dict[tuple[int, int], Environment] = {}

  def __call__(self, call: Call) -> Any:
    """(observation, info) of a reset; (observation, reward, terminated, truncated, info) of a step; None of a close."""
    match call.method:
      case 'reset':
        env = self._environments[call.key] = self._make()
        observation, info = checked_reset(env, call.argument)
        return observation, _plain(info)
      case 'step':
        if call.key not in self._environments:
          raise EnvironmentLost('another environment in its worker hung or ended the process')
        outcome = checked_step(self._environments[call.key], call.argument)
        return outcome.observation, outcome.reward, outcome.terminated, outcome.truncated, _plain(outcome.info)
      case 'close':
        close(self._environments.pop(call.key, None))
      case 'close all':
        self.close()

  def close(self) -> None:
    """Close the environments."""
    while self._environments:
      attempt(close, self._environments.popitem()[1])


def rows_of(env: Environment | None) -> int | None:
  """Return the number of an environment's rows, None if it does not tell."""
  return len(env) if isinstance(env, Sized) else None


def close(env: Environment | None) -> None:
  """Close an environment that has the method `close`."""
  if (method := getattr(env, 'close', None)) is not None:
    method()


def _plain(info: Info) -> Info:
  """Return the entries of `info` that the protocol knows, with metrics as floats."""
  plain = {key: info[key] for key in INFO_KEYS if key in info}
  if 'messages' in plain:
    plain['messages'] = [dict(message) for message in plain['messages']]
  for key, number in (('metrics', float), ('metrics_agg_mode', str)):
    if key in plain:
      plain[key] = {name: number(value) for name, value in plain[key].items()}
  return plain


def _result(answer: Any) -> Any:
  """Convert a worker's answer into what the episode receives: (observation, info), an Outcome or a Failure."""
  match answer:
    case (str() as observation, Mapping() as info):
      return observation, info
    case (str() as observation, int() | float() as reward, bool() as terminated, bool() as truncated, Mapping() as info):
      return Outcome(observation, reward, terminated, truncated, dict(info))
    case Failure():
      return answer
  return Failure('crash', 'malformed answer')
