"""An environment with slow steps: it dictates digits, and the answers are their running total, modulo 10.

    environment   a7      b9      c5      d6
    answers          =7      =6      =1      =7

The last total decides the reward. Each call of a training environment takes a log-normal time, and in a share of the episodes
ten times as long: their tail is heavy. This file needs no other of this folder, so that a run reads it from a task's folder.
"""

import itertools
import json
import os
import string
import time
from pathlib import Path

import numpy as np

TURNS, ANSWER = 16, 2  # answers of an episode, and tokens of an answer
MEDIAN, SIGMA = 0.02, 1.0  # seconds of a call: log-normal
SLOW, SLOWER = 0.02, 10.0  # a share of the episodes is as many times slower
NUMBERS = itertools.count()  # a number for each environment of a process


class Dictation:
  """Dictates `turns` digits. `split` = 'test' takes no time. Calls raise with probability `raising`, but never the last."""

  def __init__(self, split: str = 'train', turns: int = TURNS, raising: float = 0.0):
    self._slow, self._turns, self._raising, self._number = split == 'train', turns, raising, next(NUMBERS)

  def reset(self, seed: int):
    """Return the first digit. Equal seeds give equal digits."""
    self._digits = np.random.default_rng(seed).integers(10, size=self._turns).tolist()
    self._clock = np.random.default_rng([seed, os.getpid(), self._number])  # members of a group differ in their delays
    self._pace = MEDIAN * (SLOWER if self._clock.random() < SLOW else 1.0)
    self._turn = 0
    return self._observe(), {}

  def step(self, action: str):
    """Take the total of the digits so far, and return the next digit."""
    right = action.strip() == f'={sum(self._digits[: self._turn + 1]) % 10}'
    self._turn += 1
    done = self._turn == self._turns
    return '.' if done else self._observe(), float(right and done), done, False, {}

  def _observe(self) -> str:
    if self._slow:
      time.sleep(self._pace * self._clock.lognormal(0.0, SIGMA))
    if self._clock.random() < self._raising:
      raise RuntimeError('raised to test its callers')
    return f'{string.ascii_letters[self._turn]}{self._digits[self._turn]}'


def write(folder: Path, train: int, test: int, seed: int, slips: float) -> None:
  """Write this file, and train.jsonl and test.jsonl: whole conversations for supervised training."""
  rng = np.random.default_rng(seed)
  folder.mkdir(parents=True, exist_ok=True)
  for name, count in (('test', test), ('train', train)):
    lines = (json.dumps(conversation(rng, slips)) + '\n' for _ in range(count))
    (folder / f'{name}.jsonl').write_text(''.join(lines))
  (folder / 'grader.py').write_text('def grade(prompt, completion, answer):\n  return 0.0\n')
  (folder / 'dictation.py').write_text(Path(__file__).read_text())


def conversation(rng: np.random.Generator, slips: float = 0.0) -> dict[str, str]:
  """Return a conversation as it is encoded. In a share `slips` one total is wrong, and later ones continue from it."""
  digits = rng.integers(10, size=TURNS).tolist()
  wrong = int(rng.integers(1, TURNS)) if rng.random() < slips else None
  total, lines = 0, []
  for i, digit in enumerate(digits):
    total = (total + digit + (int(rng.integers(1, 10)) if i == wrong else 0)) % 10
    lines.append(f'{string.ascii_letters[i]}{digit}\n={total}')
  prompt, mark, rest = '\n'.join(lines).partition('\n')
  return {'prompt': prompt + mark, 'answer': str(total), 'solution': rest}
