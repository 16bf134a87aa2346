"""python -m sprl.main --config=configs/quickstart.py [--workdir=...] [--config.key=value ...]

Trains the run of one work directory, or resumes it, and prints a report at the end. Exit status:

    0  the run is complete, or a signal ended it and its state is saved
    2  a setting or file cannot be used; found before any device work
    3  a guard stopped the run, or every rollout fails
    4  another process of the run died or hangs
"""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.config import Run
from sprl.config_reader import resolve

if TYPE_CHECKING:
  from sprl.distributed.team import Team

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'The config: a Python file with get_config(). `file.py:argument` passes it an argument.'
)
_WORKDIR = flags.DEFINE_string('workdir', None, "The run's folder. Default: runs/NAME, after the config file.")


def main() -> int:
  """Run the command and return its exit status."""
  run = resolve(_CONFIG.value)
  from sprl.distributed.process_group import join  # imported late: an error in the settings is reported before jax loads

  with join(patience=run.patience) as team:
    return team.leave(command_line.reported(partial(_train, run, team)))


def _train(run: Run, team: 'Team') -> int:
  from sprl.hooks import StopRun
  from sprl.summary import closing_report
  from sprl.train import train

  if not team.leads:
    logging.getLogger('sprl').setLevel(logging.ERROR)  # process 0 logs for all
  file, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
  name = '-'.join(filter(None, (Path(file).stem, variant)))
  workdir = Path(_WORKDIR.value or Path('runs') / name).absolute()
  try:
    finished = train(run, workdir, team)
  except StopRun as error:
    if team.leads:
      print(error, file=sys.stderr)
    return 3
  if finished.completed and team.leads:
    print(closing_report(run, workdir, finished))
  return 0


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  command_line.start(main)
