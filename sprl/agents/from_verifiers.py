"""Environments of verifiers 0.4 (PrimeIntellect-ai/verifiers) as an agent: config.task.kind = 'agent', task.name = 'verifiers'.

The host of the agents imports this file, in the interpreter that has verifiers. verifiers runs its own harness and tools, and
sends the requests of its agents to the episode's URL. Arguments (config.task.args):

    taskset    the id of a taskset, or its config: {"id": ..., ...}
    env        further settings of the environment, such as {"agent": {"harness": {"id": "null"}, "max_turns": 5}}
    path       a folder with packages of tasksets and harnesses
    held_out   tasks that evaluation alone uses, the first of the taskset; 0: training and evaluation share all tasks

Programs of the role `agent` run as subprocesses on this machine unless `env` names another runtime. The reward of an episode is
the mean over its trainable agents. An episode that verifiers reports as failed raises, and is tried again.
"""

import itertools
import random
import sys
from collections.abc import Mapping
from typing import Any

_LOADED: dict[str, Any] = {}  # environment and tasks, loaded once, before the processes of the episodes are forked


def prepare_agents(
  taskset: str | Mapping[str, Any], env: Mapping[str, Any] | None = None, path: str | None = None, held_out: int = 0, **_: Any
):
  """Load the environment, and its tasks if there is an end of them."""
  if path is not None:
    sys.path.insert(0, path)
  from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    env_config_type,
    load_environment,
    resolve_env_config,
  )

  tasks = {'id': taskset} if isinstance(taskset, str) else dict(taskset)
  settings = {**(env or {}), 'taskset': tasks}
  if 'agent' in env_config_type(tasks['id'], settings.get('id', '')).model_fields:
    settings['agent'] = {'runtime': {'type': 'subprocess'}, **settings.get('agent', {})}
  loaded = load_environment(resolve_env_config(settings))
  _LOADED['env'] = loaded
  _LOADED['tasks'] = tasks_of(loaded.taskset, held_out)


async def agent(base_url: str, row: Mapping[str, Any], held_out: int = 0, order: int = 0, **_: Any) -> dict[str, Any]:
  """Run one episode. Returns reward and metrics. Raises RuntimeError if verifiers reports an error.

  `order` is the seed of the order of the training tasks.
  """
  from verifiers.v1 import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
  from verifiers.v1.env import RunSlot  # pyright: ignore[reportMissingImports]

  env = _LOADED['env']
  client = EvalClientConfig(base_url=base_url, api_key_var='SPRL_HAS_NO_KEY')
  async with env.serving():
    episode = await env.run_slot(RunSlot(_task(row, held_out, order)), ModelContext(model='policy', client=client))
  errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
  if not episode.ok:
    raise RuntimeError(errors[-1].message if errors else 'the episode is not ok')
  trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
  metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None}
  rewards = {name: reward.score for trace in trained for name, reward in trace.rewards.items() if reward is not None}
  return {'reward': sum(trace.reward for trace in trained) / len(trained), 'metrics': {**metrics, **rewards}}


def tasks_of(taskset: Any, held_out: int) -> list[Any] | None:
  """Return the tasks of a taskset; None if there is no end of them. Raises ValueError if none is left for training."""
  found = list(taskset) if taskset.bounded else None
  most = sys.maxsize if found is None else len(found) - 1
  if type(held_out) is not int or not 0 <= held_out <= most:
    tasks = '' if found is None else f' to {most}: the taskset has {len(found)} tasks'
    raise ValueError(f"config.task.args['held_out'] = {held_out!r}: expected a whole number from 0{tasks}")
  return found


def place(row: Mapping[str, Any], held_out: int, count: int | None, order: int) -> int:
  """Return the place of a row's task among `count`; None: there is no end of them.

  Each epoch of training has another order, which `order` seeds. Evaluation, and training without end, keep the taskset's order.
  Training has even seeds and evaluation odd ones, so half a seed counts the groups.
  """
  number, left = row['seed'] // 2, None if count is None else count - held_out
  if row['split'] == 'test':
    share = held_out or count
    return number if share is None else number % share
  if left is None:
    return held_out + number
  epoch, at = divmod(number, left)
  shuffled = list(range(held_out, held_out + left))
  random.Random(f'{order}/{epoch}').shuffle(shuffled)
  return shuffled[at]


def _task(row: Mapping[str, Any], held_out: int, order: int) -> Any:
  tasks = _LOADED['tasks']
  if tasks is None:
    return next(itertools.islice(_LOADED['env'].taskset, place(row, held_out, None, order), None))
  return tasks[place(row, held_out, len(tasks), order)]
