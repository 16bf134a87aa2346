"""python -m sprl.report --workdir=RUN[,RUN ...] [--out=FILE]

Writes the report of a run as one HTML file, by default report.html in the work directory: curves, evaluations, mismatch,
samples, timeline and warnings. Of several runs, writes their comparison, by default comparison.html in the current folder, and
prints the table of scores. Runs whose settings differ only in the seed form an arm. The differences from the first arm are
paired. A `*` stands for any text: `--workdir='runs/dense-*,runs/sparse-*'`.

The file needs no server and no network. Runs may be in progress. Exit status 2: a folder holds no run, or one that has logged
nothing yet.
"""

import os
from pathlib import Path

from absl import flags

from sprl import command_line
from sprl.foreign import expanded
from sprl.io.files import local_folder

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run, or the runs to compare, with commas between them.', required=True)
_OUT = flags.DEFINE_string('out', None, 'The file to write. Default: report.html in the work directory, or comparison.html here.')


def main() -> int:
  """Run the command and return its exit status."""
  given, out = _WORKDIR.value or '', _OUT.value
  out = expanded(out) if out else None
  if os.path.exists(os.path.expanduser(given)) or not set(given) & set(',*'):
    from sprl.io.html_report import write_report  # imported late: an error in the flags is reported before jax loads

    print(write_report(local_folder('--workdir', given), out))
    return 0
  from sprl.io.arm_scores import score_rows
  from sprl.io.arms import arms_of, matching, read_runs
  from sprl.io.comparison import score_text, write_comparison

  arms = arms_of(read_runs([path for name in given.split(',') for path in matching('--workdir', name)], '--workdir'))
  rows = score_rows(arms)
  print(score_text(rows))
  print(write_comparison(arms, rows, out or Path('comparison.html')))
  return 0


if __name__ == '__main__':
  command_line.start(main)
