"""python -m sprl.main --config=configs/quickstart.py [--workdir=...] [--config.key=value ...]

Trains, or resumes, the run of one work directory, and says at the end what was learned and where everything lies. The exit
status is 0 when the run is complete or a signal ended it with all of it saved; 3 when a sentinel stopped it, or no rollout
succeeds any more; 2 for settings or files that cannot be used, found before any device work.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.settings import SettingsError, resolve

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'The run: a Python file with get_config(), `file.py:argument` to pass it one.'
)
_WORKDIR = flags.DEFINE_string('workdir', None, "The run's folder. Default: runs/ and the name of the config file.")


def main() -> int:
  """Flags to a run."""
  run = resolve(_CONFIG.value)
  from sprl.parallel.processes import initialize  # after the settings: an error in them is told without waiting for jax to load
  from sprl.report import closing_report
  from sprl.trainer import StopRun, train

  if (processes := initialize()) > 1:
    raise SettingsError(f'SPRL_PROCESSES = {processes}: expected 1; a run over several processes is not supported yet')
  file, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
  name = '-'.join(filter(None, (Path(file).stem, variant)))
  workdir = Path(_WORKDIR.value or Path('runs') / name).absolute()
  try:
    finished = train(run, workdir)
  except StopRun as error:
    print(error, file=sys.stderr)
    return 3
  if finished.completed:
    print(closing_report(run, workdir, finished))
  return 0


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  command_line.start(main)
