"""python -m sprl.main --config=configs/quickstart.py [--workdir=...] [--config.key=value ...]

Trains, or resumes, the run of one work directory, and says at the end what was learned and where everything lies. The exit
status is 0 when the run is complete or a signal ended it with all of it saved; 3 when a sentinel stopped it, or no rollout
succeeds any more; 2 for settings or files that cannot be used, found before any device work; 4 when another process of the run
has gone, or one of them hangs.
"""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.settings import Run, resolve

if TYPE_CHECKING:
  from sprl.parallel.team import Team

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'The run: a Python file with get_config(), `file.py:argument` to pass it one.'
)
_WORKDIR = flags.DEFINE_string('workdir', None, "The run's folder. Default: runs/ and the name of the config file.")


def main() -> int:
  """Flags to a run."""
  run = resolve(_CONFIG.value)
  from sprl.parallel.team import joined  # after the settings: an error in them is told without waiting for jax to load

  with joined(patience=run.patience) as team:
    return team.leave(command_line.reported(partial(_train, run, team)))


def _train(run: Run, team: 'Team') -> int:
  from sprl.report import closing_report
  from sprl.trainer import StopRun, train

  if not team.leads:
    logging.getLogger('sprl').setLevel(logging.ERROR)  # what all find is said once
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
