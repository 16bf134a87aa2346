"""Fuzz the environment pools (processes and threads) with environments that raise, hang, fork, exit or return invalid values,
next to correct ones.

Every call must end in time with (observation, info), an Outcome or a Failure, in the form that an episode can use. A correct
environment must return its own state, or a Failure if another environment may have ended its process.
"""

import contextlib
import math
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import behaviour

from sprl.config import SettingsError, Task
from sprl.tasks.environment_pool import Call, environment_pool, make_environment
from sprl.tasks.environments.protocol import Outcome, episode_metrics, turn_messages
from sprl.tasks.worker_pool import Failure

SECONDS = 120.0
LIMIT = 4.0  # seconds for a call
CODE = """
import sys
sys.path.append({folder!r})
from behaviour import VALUES, act


class FaultyEnvironment:
  '''Returns its seed and the number of its steps, unless an action or `fault` says otherwise.

  The action `PART NAME` puts the value NAME of behaviour.VALUES in one part of the result, or in place of the whole result.
  `raise NAME`, `ends NAME` and `returns NAME` run behaviour.act first. Any other action, such as `go`, changes nothing.

  `fault` is an action as well. With `fault_site` `init`, `reset` or `close` that method runs it with behaviour.act. With `return`
  it changes the result of reset.
  '''

  def __init__(self, fault_site='', fault='', **rest):
    self.fault_site, self.fault = fault_site, fault
    if fault_site == 'init':
      act(fault)

  def reset(self, seed):
    self.seed, self.count = seed, 0
    if self.fault_site == 'reset':
      act(self.fault)
    return self._answer([f'{{self.seed}}:0', {{}}], self.fault if self.fault_site == 'return' else 'none')

  def step(self, action):
    self.count += 1
    part, _, which = action.partition(' ')
    whole = [f'{{self.seed}}:{{self.count}}', float(self.count), False, False, {{}}]
    if part in ('observation', 'reward', 'terminated', 'truncated', 'info', 'whole', 'metrics', 'messages', 'suffix', 'mode'):
      return self._answer(whole, action)
    if part in ('value', 'raise', 'ends', 'returns'):
      act(action)
    return tuple(whole)

  def close(self):
    if self.fault_site == 'close':
      act(self.fault)

  def _answer(self, parts, action):
    part, _, which = action.partition(' ')
    value = VALUES.get(which)
    match part:
      case 'whole':
        return value
      case 'observation':
        parts[0] = value
      case 'reward' | 'terminated' | 'truncated' if len(parts) == 5:
        parts[1 + ('reward', 'terminated', 'truncated').index(part)] = value
      case 'info':
        parts[-1] = value
      case 'metrics' | 'messages' | 'suffix' | 'mode':
        key = 'metrics_agg_mode' if part == 'mode' else part
        parts[-1] = {{key: [{{'role': 'user', 'content': value, 'more': value}}] if part == 'messages' else
                     {{'a': value}} if part != 'suffix' else value}}
    return tuple(parts)
"""
PARTS = ('observation', 'reward', 'terminated', 'truncated', 'info', 'whole', 'metrics', 'messages', 'suffix', 'mode')


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  """Write the file of the environment."""
  file = folder / 'faulty.py'
  file.write_text(CODE.format(folder=str(Path(__file__).parent)))
  yield SimpleNamespace(file=file)


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  """Return the settings of a pool and the arguments of its environments, and the actions of 1 to 4 concurrent episodes.

  Threads cannot be killed, so their actions never begin with `ends` or `returns`.
  """
  threads = rng.random() < 0.4

  def random_action() -> str:
    kind = rng.random()
    if kind < 0.5:
      return f'{rng.choice(PARTS)} {rng.choice(list(behaviour.VALUES))}'
    if kind < 0.75 or threads:
      return f'raise {rng.choice(list(behaviour.ERRORS))}'
    which = rng.choice(('returns', 'returns', 'ends'))
    return f'{which} {rng.choice(list(behaviour.RETURNS if which == "returns" else behaviour.MAY_END))}'

  episodes = [
    [random_action() if rng.random() < 0.4 else 'go' for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))
  ]
  fault_site = rng.choice(('', '', '', 'init', 'reset', 'close', 'return'))
  return {'executor': 'threads' if threads else 'processes', 'workers': rng.choice((1, 2)), 'episodes': episodes,
          'args': {'fault_site': fault_site, 'fault': random_action()} if fault_site else {}}  # fmt: skip


def check(world: Any, case: dict[str, Any]) -> str:
  task = Task(kind='environment', name=f'{world.file}:FaultyEnvironment', args=case['args'])
  if case['args'].get('fault_site') == 'init' and case['args']['fault'].startswith('raise'):
    # A run makes one environment in its own process. There every error becomes a SettingsError, except KeyboardInterrupt: Ctrl-C.
    with contextlib.suppress(SettingsError, KeyboardInterrupt):
      make_environment(task, False)
  ends = 'ends' in str(case['episodes']) or 'ends' in str(case['args'])
  kinds = set()
  with environment_pool(partial(make_environment, task, False), case['workers'], LIMIT, case['executor']) as pool:
    keys = [(uid, 0) for uid in range(len(case['episodes']))]
    first = answers(pool, [Call(key, 'reset', key[0]) for key in keys])
    for key, answer in zip(keys, first, strict=True):
      kinds.add(kind_of(answer))
      if not isinstance(answer, Failure):
        observation, info = answer
        assert isinstance(observation, str)
        turn_messages(observation, info)[-1]['content'].encode()
      if not case['args']:
        assert answer == (f'{key[0]}:0', {}) or (ends and isinstance(answer, Failure)), answer
    for number in range(max(map(len, case['episodes']))):
      playing = [key for key in keys if number < len(case['episodes'][key[0]])]
      found = answers(pool, [Call(key, 'step', case['episodes'][key[0]][number]) for key in playing])
      for key, answer in zip(playing, found, strict=True):
        kinds.add(kind_of(answer))
        if isinstance(answer, Outcome):
          assert math.isfinite(answer.reward)
          turn_messages(answer.observation, answer.info)[-1]['content'].encode()
          assert all(math.isfinite(value) for value in episode_metrics([answer.info]).values())
        if case['episodes'][key[0]][number] == 'go' and not case['args'] and not ends:
          assert answer == Outcome(f'{key[0]}:{number + 1}', number + 1.0, False, False, {}), answer
    for key in keys:
      pool.release(Call(key, 'close'))
  return f'{case["executor"]}: {", ".join(sorted(kinds))}'


def kind_of(answer: Any) -> str:
  assert isinstance(answer, Failure | Outcome | tuple), answer
  if isinstance(answer, Failure):
    assert answer.kind in ('error', 'timeout', 'crash'), answer
    assert answer.reason, answer
    answer.reason.encode()
    return answer.kind
  return 'ok'


def answers(pool: Any, calls: list[Call]) -> list[Any]:
  tickets = [pool.submit(call) for call in calls]
  found: dict[int, Any] = {}
  until = time.monotonic() + 60
  while len(found) < len(tickets):
    assert time.monotonic() < until, 'no answers'
    pool.wait(0.5)
    found |= pool.poll(tickets)
  return [found[ticket] for ticket in tickets]
