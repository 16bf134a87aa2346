"""python -m sprl.export --workdir=runs/quickstart --out=FOLDER [--step=N] [--dtype=bfloat16] [--adapter]

Writes a checkpoint as a Hugging Face folder: weights, config, tokenizer, chat template. The run may be in progress.
Adapters (config.lora) are merged into the weights; --adapter writes them alone, in float32, as a folder that PEFT loads.
Exit status 2: the run or the checkpoint does not exist.
"""

from pathlib import Path

from absl import flags

from sprl import command_line
from sprl.config import SettingsError
from sprl.config_reader import resolve
from sprl.io.config_file import read_config

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run to export.', required=True)
_OUT = flags.DEFINE_string('out', None, 'The folder to write.', required=True)
_STEP = flags.DEFINE_integer('step', None, 'The step of the checkpoint. Default: the newest.')
_ADAPTER = flags.DEFINE_bool('adapter', False, 'Write the adapters alone, as a PEFT folder.')
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'The dtype of the exported weights.')


def main() -> int:
  """Run the command and return its exit status."""
  workdir = Path(_WORKDIR.value)
  run = resolve(read_config(workdir))
  # Imported late: an error in the settings is reported before jax loads.
  from sprl.distributed.process_group import require_single_process
  from sprl.learner.restore import export, export_adapter, restore, restore_trained
  from sprl.model import Model

  if _ADAPTER.value and not run.lora.rank:
    raise SettingsError(f'--adapter: the run of {workdir} has config.lora.rank = None, so there are no adapters')
  require_single_process('sprl.export')
  model = Model.open(run)
  if _ADAPTER.value:
    restored = restore_trained(model, workdir, _STEP.value)
    out = export_adapter(model, restored.arrays.params, Path(_OUT.value), run.model.path)
    print(f'{out}: the adapters after step {restored.step}, of rank {run.lora.rank}, to {run.model.path}')
    return 0
  params, step, _ = restore(model, run, workdir, _STEP.value, 'float32')  # the precision in which adapters are merged
  out = export(model, params, Path(_OUT.value), _DTYPE.value)
  print(f'{out}: the weights after step {step}, in {_DTYPE.value}')
  return 0


if __name__ == '__main__':
  command_line.start(main)
