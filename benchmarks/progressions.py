"""A task with long answers that need little of what was written: where a small cache can do, and a tight one hurts.

    python benchmarks/progressions.py --out FOLDER --train 5000 --test 200 --seed 0

    prompt     14+7*9=
    solution   1=14 2=21 3=28 4=35 5=42 6=49 7=56 8=63 9=70 #70
    answer     70

To write a term, its number and the term before it must be found, and in the prompt the step; when to stop is in the prompt too.
Everything between may be forgotten. The solutions that the form is learnt from are those of a teacher who errs: in a share
`--slips` of them one term is a little off, and the rest go on from there. A model that has learnt them well answers well when it
is greedy, and seldom when it samples: that is what reinforcement learning finds to mend.

FOLDER gets train.jsonl and test.jsonl (no prompt is in both), grader.py, and in model/ a small byte-level model of random
weights, which sprl.sft teaches the form of a solution.
"""

import argparse
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sprl.io.huggingface import export_folder
from sprl.io.tokenizer import write_tiny
from sprl.models import transformer
from sprl.models.config import tiny

STARTS, STEPS, COUNTS = range(1, 100), range(2, 20), range(8, 17)
LONGEST_PROMPT, LONGEST_SOLUTION = 9, 112  # tokens; a solution's with the one that ends it
SLIPS, OFF = 0.6, (-2, -1, 1, 2)

GRADER = '''"""The text after the last `#` must be the answer."""


def grade(prompt: str, completion: str, answer: str) -> float:
  _, mark, final = completion.rpartition('#')
  return float(bool(mark) and final == answer)
'''


def main():
  """Arguments to a folder."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=Path, required=True)
  parser.add_argument('--train', type=int, default=5000, help='problems')
  parser.add_argument('--test', type=int, default=200, help='problems')
  parser.add_argument('--slips', type=float, default=SLIPS, help='share of the solutions with a term that is off')
  parser.add_argument('--seed', type=int, default=0, help='of the problems and of the random weights')
  args = parser.parse_args()
  all_there_are = len(STARTS) * len(STEPS) * len(COUNTS)
  if args.train + args.test > all_there_are:
    parser.error(f'--train and --test: there are {all_there_are} problems, fewer than {args.train} and {args.test} together')
  write_problems(args.out, args.train, args.test, args.seed, args.slips)
  write_model(args.out / 'model', args.seed)
  print(f'{args.out}: {args.train} and {args.test} problems, grader.py, model/')


def write_problems(folder: Path, train: int, test: int, seed: int, slips: float = 0.0, counts: range = COUNTS) -> None:
  """Writes train.jsonl, test.jsonl and grader.py; all prompts are distinct. `counts`: how many terms a solution may have."""
  rng = np.random.default_rng(seed)
  there_are = list(itertools.product(STARTS, STEPS, counts))
  lines = []
  for i in rng.permutation(len(there_are))[: train + test]:
    start, step, count = there_are[i]
    slip = (int(rng.integers(1, count)), int(rng.choice(OFF))) if rng.random() < slips else (0, 0)
    lines.append(json.dumps(problem(start, step, count, slip)) + '\n')
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'train.jsonl').write_text(''.join(lines[:train]))
  (folder / 'test.jsonl').write_text(''.join(lines[train:]))
  (folder / 'grader.py').write_text(GRADER)


def problem(start: int, step: int, count: int, slip: tuple[int, int] = (0, 0)) -> dict[str, str]:
  """One line of the files. `slip` (i, by): in the solution, the terms from the i-th on (0 the first) are off by `by`."""
  terms = [start + step * i for i in range(count)]
  written = [term + slip[1] * (i >= slip[0]) for i, term in enumerate(terms)]
  solution = ' '.join(f'{i}={term}' for i, term in enumerate(written, 1)) + f' #{written[-1]}'
  return {'prompt': f'{start}+{step}*{count}=', 'answer': str(terms[-1]), 'solution': solution}


def write_model(folder: Path, seed: int = 0, layers: int = 4, hidden: int = 128, heads: int = 4, scale: float = 0.05) -> None:
  """Writes a Llama of random float32 weights, whose tokens are bytes, with its tokenizer."""
  config = tiny(
    'llama',
    num_hidden_layers=layers,
    hidden_size=hidden,
    intermediate_size=3 * hidden,
    num_attention_heads=heads,
    num_key_value_heads=heads // 2,
    head_dim=hidden // heads,
  )
  tokenizer = folder.with_name(folder.name + '.tokenizer')
  write_tiny(tokenizer)
  export_folder(folder, transformer.init_params(config, jax.random.key(seed), scale=scale), config, tokenizer, dtype=jnp.float32)
  for path in tokenizer.iterdir():
    path.unlink()
  tokenizer.rmdir()


if __name__ == '__main__':
  main()
