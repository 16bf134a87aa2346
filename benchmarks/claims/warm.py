"""Makes the models that the runs of experiments start from: benchmarks/claims/warm/, which is committed.

    cd benchmarks && python -m claims.warm TASK           # 13 minutes on 2 cores for `totals`

A model with random weights learns the task from right solutions, and then from solutions of which a share SLIPS is wrong.
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from claims.experiment import Task
from claims.tasks import KEY_BIASES, MODELS, SLIPS, TASKS
from progressions import write_random
from safetensors.numpy import load_file, save_file

from sprl.config import default_config
from sprl.config_reader import resolve
from sprl.io.huggingface import export_folder, load_params
from sprl.models.config import ModelConfig
from sprl.sft import fine_tune

SOLUTIONS = {'task.kind': 'jsonl', 'task.path': '{}', 'task.grader': '{}/grader.py:grade'}  # {}: the folder of the solutions
# Task -> steps on right solutions, and steps on solutions with slips.
STEPS = {
  'totals': (1200, 150),
  'totals_larger': (900, 150),
  'totals_biased': (1200, 150),
  'totals_more_biased': (900, 150),
  'totals_mixture': (500, 150),
  'dictation': (400, 120),
}


def main() -> None:
  """Make the models of a task that do not exist."""
  tasks = {task.name: task for task in TASKS}
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('task', choices=tasks)
  task = tasks[parser.parse_args().task]
  for seed, out in enumerate(map(Path, task.warm)):
    if not out.exists():
      make(task, seed, out)


def add_key_biases(folder: Path, config: ModelConfig, size: float, rotations: int) -> None:
  """Set the key biases of the slowest `rotations` of each head to `size`, in the model in this folder."""
  path = folder / 'model.safetensors'
  weights = load_file(path)
  bias = np.zeros((config.num_kv_heads, 2, config.head_dim // 2), np.float32)  # a rotation turns channel i with i + D / 2
  bias[:, 0, -rotations:] = size
  for layer in range(config.num_layers):
    weights[f'model.layers.{layer}.self_attn.k_proj.bias'] = bias.reshape(-1)
  save_file(weights, path, metadata={'format': 'pt'})


def make(task: Task, seed: int, out: Path) -> None:
  """Train a model on the task's solutions, and write it to the folder `out`."""
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_random(folder / 'random', MODELS[task.name], seed)
    if task.name in KEY_BIASES:
      add_key_biases(folder / 'random', MODELS[task.name], *KEY_BIASES[task.name])
    start = folder / 'random'
    right, slipping = STEPS[task.name]
    for part, (steps, batch, rate, slips) in enumerate(((right, 16, 3e-3, 0.0), (slipping, 32, 5e-4, SLIPS))):
      data, end = folder / f'data-{part}', folder / f'part-{part}'
      task.write(data, seed=seed + 1, slips=slips)
      config = default_config()
      settings = {key: value for key, value in task.settings.items() if not key.startswith('task.')}
      solutions = {key: str(value).format(data) for key, value in SOLUTIONS.items()}
      config.update_from_flattened_dict(settings | solutions | {'task.chat': False, 'model.path': str(start), 'seed': seed})
      print(fine_tune(resolve(config), end, steps=steps, batch=batch, learning_rate=rate), flush=True)
      start = end
    config = ModelConfig.read(start)
    export_folder(out, load_params(start, config, dtype=jnp.float32), config, start, dtype=jnp.bfloat16)  # half the bytes


if __name__ == '__main__':
  main()
