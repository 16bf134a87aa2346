"""python -m sprl.main --config=configs/quickstart.py [--workdir=...] [--from=RUN[:STEP|:best]] [--config.key=value ...]

Trains the run of one work directory, or resumes it, and prints a report at the end. With --from, a new run starts from the
weights of another run: of its newest checkpoint, of that of STEP, or of the one with the best score. The same command resumes it.
Exit status:

    0  the run is complete, or a signal ended it and its state is saved
    2  a setting or file cannot be used, found before any device work; or a file cannot be written, for example on a full disk;
         or the grader grades no answer of the first evaluation
    3  a guard stopped the run, or every rollout fails
    4  another process of the run died or hangs
"""

import logging
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.config import Run
from sprl.config_reader import resolve
from sprl.io.files import local_folder, naming
from sprl.io.starts import Start

if TYPE_CHECKING:
  from sprl.distributed.team import Team

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'The config: a Python file with get_config(). `file.py:argument` passes it an argument.'
)
_WORKDIR = flags.DEFINE_string('workdir', None, "The run's folder. Default: runs/NAME, after the config file.")
_FROM = flags.DEFINE_string(
  'from',
  None,
  "RUN, RUN:STEP or RUN:best: the run whose weights a new run starts from. Default: the model's own weights.",
)


def main() -> int:
  """Run the command and return its exit status."""
  run = resolve(_CONFIG.value, command_line.settings_of_flags())
  from sprl.distributed.process_group import join  # imported late: an error in the settings is reported before jax loads

  with join(patience=run.patience) as team:
    return team.leave(command_line.reported(partial(_train, run, team)))


def _train(run: Run, team: 'Team') -> int:
  from sprl.hooks import StopRun
  from sprl.io.model_card import model_card
  from sprl.learner.restore import export, load_base
  from sprl.models.lora import network
  from sprl.summary import closing_report
  from sprl.train import train

  if not team.leads:
    logging.getLogger('sprl').setLevel(logging.ERROR)  # process 0 logs for all
  file, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
  name = '-'.join(filter(None, (Path(file).stem, variant)))
  workdir = local_folder('--workdir', _WORKDIR.value or Path('runs') / name).absolute()
  start = Start(_FROM.value, shlex.join(['python', '-m', 'sprl.main', *sys.argv[1:]]))
  try:
    finished = train(run, workdir, team, start)
  except StopRun as error:
    if team.leads:
      print(error, file=sys.stderr)
    team.barrier()  # process 0 ends later, and would be ended by the status of the others before it can print the report
    return 3
  if not finished.completed:
    return 0
  if team.leads:
    with naming(workdir):
      report = closing_report(run, workdir, finished)
    print(report, flush=True)
  if run.export:
    model = finished.model
    base = load_base(model, finished.base, run.model.path, 'float32')  # the precision in which adapters are merged
    card = model_card(workdir, finished.step, model.folder, f'{workdir.name}/export')
    export(model, network(finished.params, base), workdir / 'export', card=card, team=team)
  return 0


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  command_line.start(main)
