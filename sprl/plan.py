"""python -m sprl.plan --config=FILE --mesh=fsdp=8 [--device=h200] [--json=FILE] [--png=FILE] [--config.key=value ...]

What a run will need, before anything is rented: per device the memory of its update and of dense, FP8, sparse and sparse FP8
rollouts, the sequences that fit, operations, bytes, and the least time they take. Of the model only config.json is read, and no
device is touched. With --compile (an h200, or a v5e) XLA's compilers, where they are installed, tell what they make of it.
Measured ceilings (--bandwidth=4.2e12 ...) may take the place of the vendor's.

The exit status is 0, or 2 for settings, files or meshes that cannot be used.
"""

import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.settings import resolve

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'The run: a Python file with get_config(), `file.py:argument` to pass it one.'
)
_MESH = flags.DEFINE_string(
  'mesh',
  None,
  "The learner's mesh, such as data=2,fsdp=8,tensor=1; axes not named are 1. Default: config.mesh where that is set.",
)
_ROLLOUT_MESH = flags.DEFINE_string(
  'rollout_mesh', None, "The rollouts', on all engines. Default: config.mesh where that is set, else as --mesh, its fsdp as data."
)
_DEVICE = flags.DEFINE_string('device', 'h200', 'h100, h200, a100, v5e or v5p.')
_USABLE = flags.DEFINE_float('usable', 0.9, "The part of a device's memory that a run may fill.")
_MEASURED = {
  name: flags.DEFINE_float(name, None, f'{unit}, in place of what the vendor states.')
  for name, unit in {
    'memory': 'Bytes of a device',
    'bandwidth': 'Bytes/s of its memory',
    'bfloat16': 'FLOP/s of its matrix products',
    'float32': 'FLOP/s of its matrix products in float32',
    'link': 'Bytes/s that it sends to its neighbours',
    'network': 'Bytes/s that it sends beyond its node',
  }.items()
}
_COMPILE = flags.DEFINE_bool('compile', False, 'Also compile the update and the decode step.')
_JSON = flags.DEFINE_string('json', None, 'Where to write the plan as JSON.')
_PNG = flags.DEFINE_string('png', None, 'Where to draw it.')


def main() -> int:
  """Flags to a plan."""
  run = resolve(_CONFIG.value)
  from sprl import compiled  # after the settings: an error in them is told without waiting for jax to load
  from sprl.io.pretrained import config_folder
  from sprl.models.config import ModelConfig
  from sprl.planning.devices import device
  from sprl.planning.layout import laid_out
  from sprl.planning.plan import plan
  from sprl.planning.show import page, picture

  learner, rollout = laid_out(run, _MESH.value, _ROLLOUT_MESH.value)
  ceilings = device(_DEVICE.value, **{name: flag.value for name, flag in _MEASURED.items()})
  if _COMPILE.value:  # whatever it lacks is told before anything else
    compiled.check_compilable(run, _DEVICE.value, learner.devices)
  config = ModelConfig.read(config_folder(run.model.path))
  planned = plan(config, run, learner, rollout, ceilings, _USABLE.value)
  told = planned.json()
  write(told)  # what cannot be written is told before minutes of compiling
  if _PNG.value:
    picture(planned).savefig(_PNG.value, dpi=150, format='png')
  print(page(planned), flush=True)
  if _COMPILE.value:
    checks = compiled.checks(config, run, planned)
    print(f'\n{compiled.page(checks)}')
    write(told | {'compiled': [check.json() for check in checks]})
  return 0


def write(told: dict[str, Any]) -> None:
  """The plan as JSON, where that is asked for."""
  if _JSON.value:
    Path(_JSON.value).write_text(json.dumps(told, indent=2) + '\n', encoding='utf-8')


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  command_line.start(main)
