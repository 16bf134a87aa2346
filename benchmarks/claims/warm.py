"""Makes the models that the runs of experiments start from: benchmarks/claims/warm/, which is committed.

    cd benchmarks && python -m claims.warm                # 13 minutes on 2 cores

A model with random weights learns the task from right solutions, and then from solutions of which a share SLIPS is wrong.
"""

import tempfile
from pathlib import Path

import jax.numpy as jnp
from claims.tasks import SLIPS, TOTALS, TRAIN
from claims.totals import write_problems
from progressions import write_model

from sprl.config import default_config
from sprl.config_reader import resolve
from sprl.io.huggingface import export_folder, load_params
from sprl.models.config import ModelConfig
from sprl.sft import fine_tune

LAYERS, WIDTH = 4, 144
PARTS = ((1200, 16, 3e-3, 0.0), (150, 32, 5e-4, SLIPS))  # steps, batch, learning rate and slips of each part


def main() -> None:
  """Make the models that do not exist."""
  for seed, out in enumerate(TOTALS.warm):
    if out.exists():
      continue
    with tempfile.TemporaryDirectory() as name:
      folder = Path(name)
      write_model(folder / 'random', seed, layers=LAYERS, hidden=WIDTH)
      start = folder / 'random'
      for part, (steps, batch, rate, slips) in enumerate(PARTS):
        data, end = folder / f'data-{part}', folder / f'part-{part}'
        write_problems(data, TRAIN, 1, seed + 1, slips)
        config = default_config()
        config.update_from_flattened_dict(TOTALS.settings_in(data) | {'model.path': str(start), 'seed': seed})
        run = resolve(config)
        print(fine_tune(run, end, steps=steps, batch=batch, learning_rate=rate))
        start = end
      config = ModelConfig.read(start)
      export_folder(out, load_params(start, config, dtype=jnp.float32), config, start, dtype=jnp.bfloat16)  # half the bytes


if __name__ == '__main__':
  main()
