"""A task with long worked answers: running totals of the digits in the prompt.

    prompt     a7b9c5d6=
    solution   a7=7 b9=6 c5=1 d6=7 #7
    answer     7

A letter names each digit of the prompt. The answer goes through the digits, and writes the total after each, modulo 10. A step
needs the previous total, and the digit with the next letter, which the model finds in the prompt. A cache that has evicted this
digit or its letter cannot give it back: eviction hurts more the longer the answer is, as in the papers' tasks.

The solutions for supervised training contain errors: in a share `slips` of them one total is off, and later totals continue from
it. A model trained on them answers well greedily, and poorly if it samples. Reinforcement learning can close this gap
(benchmarks/warm_starts.py measures it).
"""

import json
import string
from pathlib import Path

import numpy as np
from progressions import GRADER

COUNTS = range(20, 41)  # digits in a prompt
LONGEST_PROMPT = 2 * COUNTS[-1] + 1  # tokens: a byte is a token
LONGEST_SOLUTION = 5 * COUNTS[-1] + 2 + 1  # with the end token

# How common each digit is. Small ones are: a total then tells something of the next, without which a model learns the task late.
COMMON = 0.7 ** np.arange(10)


def write_problems(folder: Path, train: int, test: int, seed: int, slips: float) -> None:
  """Write train.jsonl, test.jsonl and grader.py. See `problem`."""
  rng = np.random.default_rng(seed)
  folder.mkdir(parents=True, exist_ok=True)
  for name, count in (('test', test), ('train', train)):
    lines = (json.dumps(problem(rng, slips)) + '\n' for _ in range(count))
    (folder / f'{name}.jsonl').write_text(''.join(lines))
  (folder / 'grader.py').write_text(GRADER)


def problem(rng: np.random.Generator, slips: float = 0.0) -> dict[str, str]:
  """Return a line of the files. A share `slips` of the solutions has one wrong total."""
  digits = rng.choice(10, size=rng.choice(COUNTS), p=COMMON / COMMON.sum()).tolist()
  wrong = int(rng.integers(1, len(digits))) if rng.random() < slips else None
  total, steps = 0, []
  named = list(zip(string.ascii_letters, digits))
  for i, (letter, digit) in enumerate(named):
    total = (total + digit + (int(rng.integers(1, 10)) if i == wrong else 0)) % 10
    steps.append(f'{letter}{digit}={total}')
  return {
    'prompt': ''.join(f'{letter}{digit}' for letter, digit in named) + '=',
    'answer': str(sum(digits) % 10),
    'solution': ' '.join(steps) + f' #{total}',
  }
