"""A task with long answers whose tokens depend on few others: a small cache suffices, a very small one loses accuracy.

    python benchmarks/progressions.py --out FOLDER --train 5000 --test 200 --seed 0

    prompt     14+7*9=
    solution   1=14 2=21 3=28 4=35 5=42 6=49 7=56 8=63 9=70 #70
    answer     70

A term depends on the previous term, its index, and the step in the prompt. The number of terms is in the prompt too. The cache
can evict all other tokens. The solutions for supervised training contain errors: in a share `--slips` of them one term is off by
1 or 2, and later terms continue from it. A model trained on them answers well if it decodes greedily, and poorly if it samples.
Reinforcement learning can close this gap.

The command writes to FOLDER: train.jsonl and test.jsonl without common prompts, grader.py, and model/, a small byte-level model
with random weights. sprl.sft trains it on the solutions.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sprl.io.huggingface import export_folder
from sprl.io.tokenizer import write_tiny
from sprl.models import transformer
from sprl.models.config import ModelConfig, tiny

STARTS, STEPS, COUNTS = range(1, 100), range(2, 20), range(8, 17)
LONGEST_PROMPT, LONGEST_SOLUTION = 9, 112  # tokens; the solution includes its end token
SLIPS, OFF = 0.6, (-2, -1, 1, 2)

GRADER = '''"""The text after the last `#` must be the answer."""


def grade(prompt: str, completion: str, answer: str) -> float:
  _, mark, final = completion.rpartition('#')
  return float(bool(mark) and final == answer)
'''


def main():
  """Write problems, grader and model to the folder --out."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=Path, required=True)
  parser.add_argument('--train', type=int, default=5000, help='number of problems')
  parser.add_argument('--test', type=int, default=200, help='number of problems')
  parser.add_argument('--slips', type=float, default=SLIPS, help='share of solutions with a wrong term')
  parser.add_argument('--seed', type=int, default=0, help='seed of the problems and of the random weights')
  args = parser.parse_args()
  available = len(STARTS) * len(STEPS) * len(COUNTS)
  if args.train + args.test > available:
    parser.error(f'--train={args.train} and --test={args.test}: together at most {available}, the number of distinct problems')
  write_problems(args.out, args.train, args.test, args.seed, args.slips)
  write_model(args.out / 'model', args.seed)
  print(f'{args.out}: {args.train} and {args.test} problems, grader.py, model/')


def write_problems(folder: Path, train: int, test: int, seed: int, slips: float = 0.0, counts: range = COUNTS) -> None:
  """Write train.jsonl, test.jsonl and grader.py. All prompts are distinct. `counts`: possible numbers of terms."""
  rng = np.random.default_rng(seed)
  possible = list(itertools.product(STARTS, STEPS, counts))
  lines = []
  for i in rng.permutation(len(possible))[: train + test]:
    start, step, count = possible[i]
    slip = (int(rng.integers(1, count)), int(rng.choice(OFF))) if rng.random() < slips else (0, 0)
    lines.append(json.dumps(problem(start, step, count, slip)) + '\n')
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'train.jsonl').write_text(''.join(lines[:train]))
  (folder / 'test.jsonl').write_text(''.join(lines[train:]))
  (folder / 'grader.py').write_text(GRADER)


def problem(start: int, step: int, count: int, slip: tuple[int, int] = (0, 0)) -> dict[str, str]:
  """Return one line of the files. `slip` (i, by): the terms of the solution from index i on are off by `by`."""
  terms = [start + step * i for i in range(count)]
  written = [term + slip[1] * (i >= slip[0]) for i, term in enumerate(terms)]
  solution = ' '.join(f'{i}={term}' for i, term in enumerate(written, 1)) + f' #{written[-1]}'
  return {'prompt': f'{start}+{step}*{count}=', 'answer': str(terms[-1]), 'solution': solution}


def write_model(folder: Path, seed: int = 0, layers: int = 4, hidden: int = 128, heads: int = 4) -> None:
  """Write a Llama with random float32 weights, and a byte-level tokenizer."""
  sizes = {'num_hidden_layers': layers, 'hidden_size': hidden, 'intermediate_size': 3 * hidden}
  of_heads = {'num_attention_heads': heads, 'num_key_value_heads': heads // 2, 'head_dim': hidden // heads}
  write_random(folder, tiny('llama', **sizes, **of_heads), seed)


def write_random(folder: Path, config: ModelConfig, seed: int) -> None:
  """Write a model of this config with random float32 weights, and a byte-level tokenizer."""
  with tempfile.TemporaryDirectory() as name:
    write_tiny(Path(name))
    params = transformer.init_params(config, jax.random.key(seed), scale=0.05)
    export_folder(folder, params, config, Path(name), dtype=jnp.float32)


if __name__ == '__main__':
  main()
