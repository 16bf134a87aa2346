"""python -m sprl.report --workdir=runs/quickstart [--out=FILE]

Writes the report of a run as one HTML file, by default report.html in the work directory: curves, evaluations, mismatch,
samples, timeline and warnings. The file needs no server and no network. The run may be in progress. Exit status 2: the folder
holds no run, or one that has logged nothing yet.
"""

from pathlib import Path

from absl import flags

from sprl import command_line

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run.', required=True)
_OUT = flags.DEFINE_string('out', None, 'The file to write. Default: report.html in the work directory.')


def main() -> int:
  """Run the command and return its exit status."""
  from sprl.io.html_report import write_report  # imported late: an error in the flags is reported before jax loads

  print(write_report(Path(_WORKDIR.value), Path(_OUT.value) if _OUT.value else None))
  return 0


if __name__ == '__main__':
  command_line.start(main)
