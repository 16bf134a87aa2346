"""python -m sprl.export --workdir=runs/quickstart --out=FOLDER [--step=N] [--dtype=bfloat16] [--adapter]

Writes a checkpoint of a run, which may be in progress, as a Hugging Face folder: weights, config, tokenizer, chat template.
Adapters (config.lora) are merged into the weights, or with --adapter written alone, in float32, as a folder that PEFT loads.
The exit status is 2, with a line that says why, where there is no such run or checkpoint.
"""

from pathlib import Path

from absl import flags

from sprl import command_line
from sprl.io.config_file import read_config
from sprl.settings import SettingsError, resolve

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run to export.', required=True)
_OUT = flags.DEFINE_string('out', None, 'The folder to write.', required=True)
_STEP = flags.DEFINE_integer('step', None, 'The checkpoint; default: the newest.')
_ADAPTER = flags.DEFINE_bool('adapter', False, 'Write the adapters alone, as a PEFT folder.')
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of the exported weights.')


def main() -> int:
  """Flags to an export."""
  workdir = Path(_WORKDIR.value)
  run = resolve(read_config(workdir))
  from sprl.parallel.processes import only_one  # after the settings: an error in them is told without waiting for jax to load
  from sprl.policy import Policy
  from sprl.saved import export, export_adapter, restore, restore_trained

  if _ADAPTER.value and not run.lora.rank:
    raise SettingsError(f'--adapter: the run of {workdir} has config.lora.rank = 0, so all of its weights were trained')
  only_one('sprl.export')
  policy = Policy.open(run)
  if _ADAPTER.value:
    restored = restore_trained(policy, run, workdir, _STEP.value)
    out = export_adapter(policy, restored.arrays.params, Path(_OUT.value), run.model.path)
    print(f'{out}: the adapters after step {restored.step}, of rank {run.lora.rank}, to {run.model.path}')
    return 0
  params, step, _ = restore(policy, run, workdir, _STEP.value, 'float32')  # as adapters are merged elsewhere, too
  out = export(policy, params, Path(_OUT.value), _DTYPE.value)
  print(f'{out}: the weights after step {step}, in {_DTYPE.value}')
  return 0


if __name__ == '__main__':
  command_line.start(main)
