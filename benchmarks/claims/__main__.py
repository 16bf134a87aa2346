"""Makes `python benchmarks/claims` run command.py."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the other benchmarks import from

from claims.command import main  # noqa: E402  (the line above makes it importable)

if __name__ == '__main__':
  main()
