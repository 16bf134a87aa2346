"""python -m sprl.report --workdir=RUN[,RUN ...] [--out=FILE]

Writes the report of a run as one HTML file, by default report.html in the work directory: curves, evaluations, mismatch,
samples, timeline and warnings. Of several runs, writes their comparison, by default comparison.html in the current folder, and
prints the table of scores. Runs whose settings differ only in the seed form an arm. The differences from the first arm are
paired. A `*` stands for any text: `--workdir='runs/dense-*,runs/sparse-*'`.

The file needs no server and no network. Runs may be in progress. Exit status 2: a folder holds no run, or one that has logged
nothing yet.
"""

from glob import escape, glob
from pathlib import Path

from absl import flags

from sprl import command_line
from sprl.config import SettingsError
from sprl.io.files import local_folder

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run, or the runs to compare, with commas between them.', required=True)
_OUT = flags.DEFINE_string('out', None, 'The file to write. Default: report.html in the work directory, or comparison.html here.')


def main() -> int:
  """Run the command and return its exit status."""
  given, out = _WORKDIR.value or '', _OUT.value
  if Path(given).exists() or not set(given) & set(',*'):
    from sprl.io.html_report import write_report  # imported late: an error in the flags is reported before jax loads

    print(write_report(local_folder('--workdir', given), Path(out) if out else None))
    return 0
  from sprl.io.comparison import write_comparison

  path, rows = write_comparison([path for name in given.split(',') for path in matching(name)], Path(out or 'comparison.html'))
  widths = [max(map(len, column)) for column in zip(*rows)]
  for row in rows:
    print('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
  print(path)
  return 0


def matching(name: str) -> list[Path]:
  """Return the folder of this name, or those that a name with `*` matches and that hold a run.

  Raises SettingsError if it matches none.
  """
  if '*' not in name:
    return [local_folder('--workdir', name)]
  pattern = escape(name).replace('[*]', '*')  # only `*` has a meaning
  found = [Path(path) for path in sorted(glob(pattern)) if (Path(path) / 'config.json').exists()]
  if not found:
    raise SettingsError(f'--workdir = {name!r}: expected a name that matches the folder of a run; it matches none')
  return found


if __name__ == '__main__':
  command_line.start(main)
