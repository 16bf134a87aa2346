"""Fuzz target: grader pools of processes and threads, with graders that behave well or as badly as foreign code can.

Every sample must get a Grade with a finite score in time. A call that returns a score must get exactly this score, whatever the
other calls do, unless one of them may have ended its process.
"""

import asyncio
import contextlib
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import behaviour

from sprl.config import Task
from sprl.tasks import graders
from sprl.tasks.grader_pool import Grade, Group, grader_pool
from sprl.tasks.rewards import Sample

SECONDS = 120.0
LIMIT = 4.0  # seconds that a grade may take
FORMS = {  # form of a grader -> text of its file, after HEAD
  'one': 'def grade(prompt, completion, answer):\n  return act(completion)',
  'async': 'async def grade(completion):\n  await asyncio.sleep(0)\n  return act(completion)',
  'group': 'def grade(completions):\n  return [act(each) for each in completions]',
  'whole': 'def grade(completions):\n  return act(completions[0])',
}
HEAD = f'import asyncio\nimport sys\nsys.path.append({str(Path(__file__).parent)!r})\nfrom behaviour import act\n\n\n'
NUMBERS = ('true', 'int', 'numpy', 'numpy int', 'numpy bool', 'fraction', 'minus', 'tiny')  # names of valid scores


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  """Write a grader file for each form."""
  for form, text in FORMS.items():
    (folder / f'{form}.py').write_text(f'{HEAD}{text}\n')
  yield SimpleNamespace(folder=folder)


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  form = rng.choice(('one', 'one', 'one', 'async', 'group', 'whole', 'function', 'async function'))
  most = 0.75 if 'function' in form else 1.0  # functions run in threads, which cannot be killed: no `returns`, no `ends`
  acts = []
  for _ in range(rng.randint(3, 12)):
    kind = most * rng.random()
    if kind < 0.4:
      acts.append(f'score {rng.randint(0, 10**6)}')
    elif kind < 0.6:
      acts.append(f'value {rng.choice(list(behaviour.VALUES))}')
    elif kind < 0.75:
      acts.append(f'raise {rng.choice(list(behaviour.ERRORS))}')
    elif kind < 0.9:
      acts.append(f'returns {rng.choice(list(behaviour.RETURNS))}')
    else:
      acts.append(f'ends {rng.choice(list(behaviour.MAY_END))}')
  return {'form': form, 'acts': acts, 'workers': rng.choice((1, 2))}


async def act_later(completion):
  await asyncio.sleep(0)
  return behaviour.act(completion)


def check(world: Any, case: dict[str, Any]) -> str:
  functions = {'function': lambda completion: behaviour.act(completion), 'async function': act_later}
  known = case['form'] in FORMS
  grader = f'{world.folder}/{case["form"]}.py:grade' if known else 'python:grade'
  rewards = graders.rewards(Task(grader=grader), {} if known else {'grade': functions[case['form']]})
  with grader_pool(rewards, case['workers'], LIMIT, memory_gb=0.3) as pool:
    return graded(pool, case)


def graded(pool: Any, case: dict[str, Any]) -> str:
  samples = [Sample('p', act, 'a') for act in case['acts']]
  calls = [Group(tuple(samples))] if case['form'] in ('group', 'whole') else samples
  tickets = [pool.submit(call) for call in calls]
  found: dict[int, Any] = {}
  until = time.monotonic() + 60
  while len(found) < len(tickets):
    assert time.monotonic() < until, 'some samples have no grade after 60 s'
    pool.wait(0.5)
    found |= pool.poll(tickets)
  grades = [found[ticket] for ticket in tickets]
  if case['form'] in ('group', 'whole'):
    (grades,) = grades
  else:  # the pool must still grade a sample after all others
    last = pool.submit(Sample('p', 'score 7', 'a'))
    while not (end := pool.poll([last])):
      assert time.monotonic() < until + 30, 'the pool did not grade a sample after all others'
      pool.wait(0.5)
    assert end[last] == Grade(7.0, 'ok') or any(act.startswith('ends') for act in case['acts']), end[last]
  assert len(grades) == len(samples)
  for act, grade in zip(case['acts'], grades, strict=True):
    assert isinstance(grade, Grade)
    assert math.isfinite(grade.score), act
    assert grade.status in ('ok', 'timeout', 'crash', 'error', 'invalid'), grade
    assert (grade.status == 'ok') == (not grade.reason), grade
    assert len(grade.reason) < 1000, act
    grade.reason.encode(errors='strict')
    assert grade.status == 'ok' or grade.score == 0, grade
    forged = any(act.startswith('ends write') for act in case['acts'])  # such code can write a reply in place of its process
    if act.startswith('score') and grade.status == 'ok' and case['form'] != 'whole' and not forged:
      assert grade.score == float(act.removeprefix('score ')), (act, grade)
  if case['form'] in ('one', 'function', 'async function') and not any(act.startswith('ends') for act in case['acts']):
    for act, grade in zip(case['acts'], grades, strict=True):
      expected(act, grade)
  return f'{case["form"]}: {", ".join(sorted({grade.status for grade in grades}))}'


def expected(act: str, grade: Grade) -> None:
  """Assert that `act`, which cannot end its process, has the same grade as in a pool without other calls."""
  what, _, which = act.partition(' ')
  if what == 'score':
    assert grade == Grade(float(which), 'ok'), (act, grade)
  elif what == 'returns':
    assert grade == Grade(1.0, 'ok'), (act, grade)
  elif what == 'value' and which in NUMBERS:
    assert grade == Grade(float(behaviour.VALUES[which]), 'ok'), (act, grade)
  else:
    assert grade.status in ('invalid', 'error', 'crash'), (act, grade)
    assert re.match(r'[a-zA-Z]', grade.reason), grade
