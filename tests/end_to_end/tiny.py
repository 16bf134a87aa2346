"""A small run that tests can start many times: a random model of two layers, its problems, and a grader in a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compilation_cache
import jax.numpy as jnp
import numpy as np

from sprl.io.huggingface import export_folder, tensors
from sprl.io.tokenizer import write_tiny
from sprl.models.config import Family, tiny

ROOT = Path(__file__).parents[2]
STEPS = 6
LIMIT = 1200  # seconds: several processes that compile on a slow machine take five minutes

# Rewards differ within almost every group of random completions, so that every update has a gradient. A step takes a third of a
# second, so that a signal arrives before the run ends.
GRADER = """
import time


def grade(prompt, completion, answer):
  time.sleep(0.02)
  return (len(completion.encode()) * 7 + sum(completion.encode())) % 5 / 4
"""

CONFIG = """
from sprl.config import default_config


def get_config():
  config = default_config()
  config.steps = {steps}
  config.model.path = {folder!r} + '/model'
  config.task.kind, config.task.chat, config.task.workers = 'jsonl', False, 1
  config.task.path = {folder!r}
  config.task.grader = {folder!r} + '/grader.py:grade'
  config.rollout.prompts, config.rollout.group, config.rollout.stop_when_capped = 4, 4, False
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.chunk = 16, 12, 4
  config.sampling.prompt_buckets, config.sampling.stop = (16,), ('e',)
  config.optimizer.learning_rate, config.optimizer.minibatches = 1e-3, 2
  config.model.remat = 'layer'
  config.packing.row_tokens, config.packing.rows, config.packing.score_chunk = 64, 1, 16
  config.loss.kl_coef = 1e-3
  config.arm, config.cache.budget, config.cache.interval, config.cache.window = 'sparse_rl', 12, 3, 2
  config.quant.sampler, config.quant.kv_scale = 'w8a8_kv8', 'running_max'
  config.ledger.every = 2
  config.eval.every, config.eval.problems, config.eval.max_tokens = 3, 3, 4
  config.checkpoint.every, config.log.samples_every, config.log.trackers = 1, 2, ()
  return config
"""


def write_inputs(folder: Path, family: Family = 'qwen2', **changes: Any) -> Path:
  """Write model, problems, grader and config of the tiny run to `folder`. Return the config file."""
  config, rng = tiny(family, **changes), np.random.default_rng(0)
  params: dict = {}
  for path, tensor in tensors(config).items():
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = jnp.asarray(rng.normal(1.0 if 'scale' in path else 0.0, 0.1, tensor.shape), jnp.float32)
  write_tiny(folder / 'tokenizer')
  export_folder(folder / 'model', params, config, folder / 'tokenizer', dtype=jnp.float32)
  for name, count in (('train', 10), ('test', 5)):
    lines = [json.dumps({'prompt': f'{name} {i} + {i} = ', 'answer': str(2 * i)}) for i in range(count)]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines))
  (folder / 'grader.py').write_text(GRADER)
  (folder / 'config.py').write_text(CONFIG.format(folder=str(folder), steps=STEPS))
  return folder / 'config.py'


def start(command: str | Path, *arguments: object) -> subprocess.Popen:
  """Start `python -m sprl.COMMAND ARGUMENTS`, or a script, with the compilation cache of the tests (tests/conftest.py)."""
  program = [str(command)] if isinstance(command, Path) else ['-m', f'sprl.{command}']
  line = [sys.executable, *program, *map(str, arguments)]
  # With several CPU devices the command itself does without the cache (sprl/distributed/process_group.py).
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), **compilation_cache.variables()}
  return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
  """Wait for a process. Return (exit status, standard output, standard error)."""
  out, err = process.communicate(timeout=LIMIT)
  return process.returncode, out, err


def run(command: str | Path, *arguments: object) -> tuple[int, str, str]:
  """Run a command to its end. Return (exit status, standard output, standard error)."""
  return finish(start(command, *arguments))
