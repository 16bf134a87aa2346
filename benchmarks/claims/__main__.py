"""The papers' claims, tested by training small models.

    python benchmarks/claims --list
    python benchmarks/claims NAME --minutes 60          # run, or go on with, an experiment
    python benchmarks/claims NAME --report              # verdicts and figure of the saved result
    python benchmarks/claims --page                     # docs/claims.md from all saved results

See command.py.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the other benchmarks import from

from claims.command import main  # noqa: E402  (the line above makes it importable)

if __name__ == '__main__':
  main()
