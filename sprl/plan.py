"""python -m sprl.plan --config=FILE --mesh=fsdp=8 [--device=h200] [--json=FILE] [--png=FILE] [--config.key=value ...]

Predicts what a run needs before any device is rented: for each device the memory of the update and of dense, FP8, sparse and
sparse FP8 rollouts, the number of sequences that fit, operations, bytes, and a lower bound on the time. It reads the settings and
the model's config.json, and uses no device. With --compile (h200 or v5e) XLA's compilers, if they are installed, compile the
programs, and it prints their memory beside the plan's. Measured ceilings, such as --bandwidth=4.2e12, replace the vendor's.

The exit status is 0, or 2 for settings, files or meshes that cannot be used.
"""

import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.config_reader import resolve

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'The run: a Python file with get_config(); `file.py:argument` passes it an argument.'
)
_MESH = flags.DEFINE_string(
  'mesh', None, "The learner's mesh, such as data=2,fsdp=8,tensor=1; axes not named are 1. Default: config.mesh, if it is set."
)
_ROLLOUT_MESH = flags.DEFINE_string(
  'rollout_mesh', None, 'The mesh of all engines together. Default: config.mesh, if it is set, else --mesh with its fsdp as data.'
)
_DEVICE = flags.DEFINE_string('device', 'h200', 'h100, h200, a100, v5e or v5p.')
_USABLE = flags.DEFINE_float('usable', 0.9, "The fraction of a device's memory that a run may fill.")
_CEILINGS = {
  'memory': 'Bytes of a device', 'bandwidth': 'Bytes/s of its memory',
  'bfloat16': 'FLOP/s of its matrix products', 'float32': 'FLOP/s of its matrix products in float32',
  'link': 'Bytes/s that it sends to the other devices of its node', 'network': 'Bytes/s that it sends beyond its node',
}  # fmt: skip
_MEASURED = {
  name: flags.DEFINE_float(name, None, f"{unit}, in place of the vendor's figure.") for name, unit in _CEILINGS.items()
}
_COMPILE = flags.DEFINE_bool('compile', False, 'Also compile the update and the decode steps.')
_JSON = flags.DEFINE_string('json', None, 'File to write the plan to, as JSON.')
_PNG = flags.DEFINE_string('png', None, 'File to draw the plan in.')


def main() -> int:
  """Print the plan that the flags ask for, and return the exit status."""
  run = resolve(_CONFIG.value, command_line.settings_of_flags())
  # Imported late: an error in the settings is reported before jax loads.
  from sprl.io.pretrained import config_folder
  from sprl.models.config import ModelConfig
  from sprl.planning import compile_check, show
  from sprl.planning.devices import device
  from sprl.planning.estimate import plan
  from sprl.planning.mesh_axes import run_axes

  learner, rollout = run_axes(run, _MESH.value, _ROLLOUT_MESH.value)
  ceilings = device(_DEVICE.value, **{name: flag.value for name, flag in _MEASURED.items()})
  if _COMPILE.value:
    compile_check.check_compilable(run, _DEVICE.value, learner.devices)
  config = ModelConfig.read(config_folder(run.model.path))
  planned = plan(config, run, learner, rollout, ceilings, _USABLE.value)
  entries = show.as_json(planned)
  write(entries)  # now: an error is reported before minutes of compiling
  if _PNG.value:
    show.as_figure(planned).savefig(_PNG.value, dpi=150, format='png')
  print(show.as_text(planned), flush=True)
  if _COMPILE.value:
    checks = compile_check.checks(config, run, planned)
    print(f'\n{compile_check.as_text(checks)}')
    write(entries | {'compiled': show.as_json(checks)})
  return 0


def write(entries: dict[str, Any]) -> None:
  """Write the plan as JSON, if --json is given."""
  if _JSON.value:
    Path(_JSON.value).write_text(json.dumps(entries, indent=2) + '\n', encoding='utf-8')


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  command_line.start(main)
