"""python -m sprl.export --workdir=runs/quickstart --out=FOLDER [--step=N|best] [--dtype=bfloat16] [--adapter] [--push=OWNER/NAME]

Writes a checkpoint as a Hugging Face folder: weights, config, tokenizer, chat template, and a model card with the settings and
the results of the run. The run may be in progress. Adapters (config.lora) are merged into the weights; --adapter writes them
alone, in float32, as a folder that PEFT loads. --push also uploads the folder to the Hugging Face hub, with --private to a
private repository. The command may run over several processes, as sprl.main does. Exit status 2: the run, the checkpoint or the
repository cannot be used.
"""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from sprl import command_line
from sprl.config import Run, SettingsError, on_all_devices
from sprl.config_reader import resolve
from sprl.io import hub
from sprl.io.config_file import read_located
from sprl.io.files import local_folder

if TYPE_CHECKING:
  from sprl.distributed.team import Team

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run to export.', required=True)
_OUT = flags.DEFINE_string('out', None, 'The folder to write.', required=True)
_STEP = flags.DEFINE_string('step', None, 'The step of the checkpoint, or best. Default: the newest.')
_ADAPTER = flags.DEFINE_bool('adapter', False, 'Write the adapters alone, as a PEFT folder.')
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'The dtype of the exported weights.')
_PUSH = flags.DEFINE_string('push', None, 'OWNER/NAME: the repository of the Hugging Face hub to upload the folder to.')
_PRIVATE = flags.DEFINE_bool('private', False, 'Create the repository of --push as a private one.')


def main() -> int:
  """Run the command and return its exit status."""
  workdir, out = local_folder('--workdir', _WORKDIR.value), local_folder('--out', _OUT.value)
  run = on_all_devices(resolve(read_located(workdir)))
  if _ADAPTER.value and not run.lora.rank:
    raise SettingsError(f'--adapter: the run of {workdir} has config.lora.rank = None, so there are no adapters')
  if _ADAPTER.value and flags.FLAGS['dtype'].present and _DTYPE.value != 'float32':
    raise SettingsError(f'--dtype={_DTYPE.value}: expected float32 with --adapter, in which adapters are written')
  if _PUSH.value is not None:
    hub.check_name(_PUSH.value)
  elif _PRIVATE.value:
    raise SettingsError('--private: expected --push=OWNER/NAME with it')
  from sprl.distributed.process_group import join  # imported late: an error in the settings is reported before jax loads

  with join() as team:
    return team.leave(command_line.reported(partial(_export, run, workdir, out, team)))


def _export(run: Run, workdir: Path, out: Path, team: 'Team') -> int:
  from sprl.io.checkpoint import step_named
  from sprl.io.huggingface import check_apart, check_free
  from sprl.io.model_card import model_card
  from sprl.learner.restore import check_saved, export, export_adapter, restore, restore_trained
  from sprl.model import Model

  if not team.leads:
    logging.getLogger('sprl').setLevel(logging.ERROR)  # process 0 logs for all
  step = step_named(workdir / 'checkpoints', _STEP.value)
  if team.leads:  # before any device work: a folder in use, a missing checkpoint or a missing token is found here
    check_free(out)
    check_saved(workdir, step)
    if _PUSH.value:
      hub.create(_PUSH.value, _PRIVATE.value)
  model, name = Model.open(run), _PUSH.value or out.absolute().name
  check_apart(out, model.folder)
  if _ADAPTER.value:
    restored = restore_trained(model, workdir, step, team)
    step = restored.step
    card = model_card(workdir, step, model.folder, name, adapter=True)
    export_adapter(model, restored.arrays.params, out, run.model.path, card, team)
    what = f'the adapters after step {step}, of rank {run.lora.rank}, to {run.model.path}'
  else:
    params, step, _ = restore(model, run, workdir, step, 'float32', team)  # the precision in which adapters are merged
    export(model, params, out, _DTYPE.value, model_card(workdir, step, model.folder, name), team)
    what = f'the weights after step {step}, in {_DTYPE.value}'
  if team.leads:
    print(f'{out}: {what}')
    if _PUSH.value:
      print(hub.push(_PUSH.value, out, f'{what}, by sprl.export'))
  return 0


if __name__ == '__main__':
  command_line.start(main)
