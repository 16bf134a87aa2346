"""python tests/fuzz [TARGET ...] [--minutes 5] [--seed 0] [--case N] [--folder FOLDER]

Gives random inputs to the parts of sprl that read the input of others, and reports every case that ends in any other way than an
answer or a refusal. Without targets it runs all of them. Each target gets its share of the minutes, and at least one case.
`commands` gets four shares, because its cases take seconds. --case N runs one case here, with its traceback. Exit status: 0
without a failure, 1 with one.
"""

import argparse
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(TESTS.parent), *(str(TESTS / folder) for folder in ('.', 'agents', 'end_to_end', 'tasks'))]

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # as tests/conftest.py

import arguments  # noqa: E402  (the lines above make these importable, and say how jax starts)
import compilation_cache  # noqa: E402
from campaign import TARGETS, Campaign, case_of, opened, serve, shares  # noqa: E402


def main() -> int:
  parser = argparse.ArgumentParser(usage=__doc__)
  parser.add_argument('targets', nargs='*', metavar='TARGET', help=', '.join(TARGETS))
  parser.add_argument('--minutes', type=arguments.minutes, default=5.0, help='for all targets together')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--case', type=int, help='run this case only')
  parser.add_argument('--from', type=int, dest='first', default=0, help='the first case')
  parser.add_argument('--serve', type=int, metavar='FD', help='used by the command itself: run cases and write their outcomes')
  given = parser.parse_args()
  if unknown := [name for name in given.targets if name not in TARGETS]:
    parser.error(f'{unknown[0]!r}: expected targets among {", ".join(TARGETS)}')
  compilation_cache.use()
  targets = given.targets or list(TARGETS)
  if given.serve is not None:
    serve(targets[0], given.seed, given.first, given.serve)
  if given.case is not None:
    with opened(targets[0]) as (target, world):
      case = case_of(target, world, given.seed, given.case)
      print(case)
      print(target.check(world, case))
    return 0
  failed = 0
  for target, share in zip(targets, shares(targets), strict=True):
    failed += Campaign(target, given.seed, given.first).run(60 * given.minutes * share)
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
