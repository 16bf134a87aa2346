"""Commands: `python -m sprl.main` with random flags on top of the tiny run of the end-to-end tests, for one step.

A command ends in time with status 0, 2 (an error in one line, before any device work) or 3 (a broken run), without a traceback.
A third of the cases also changes where the run gets its model, its problems or its preset, or who gets its metrics. The commands
run without the Hugging Face hub and Weights & Biases, so that no case depends on the network.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz_settings
import tiny
import values

from sprl.config import SettingsError
from sprl.config_reader import resolve
from sprl.presets import RECIPES

SECONDS = 300.0
SHARE = 4  # a case takes seconds, one of another target milliseconds
# The largest numbers of settings that decide how long one step takes. Larger ones are not drawn: sprl accepts them, and the run
# takes hours or the memory of the machine.
MOST = {
  'steps': 2, 'sampling.max_tokens': 64, 'sampling.max_prompt': 128, 'sampling.prompt_buckets': 128, 'sampling.rows': 64,
  'rollout.prompts': 8, 'rollout.group': 8, 'rollout.extra_prompts': 8, 'rollout.extra_members': 8, 'rollout.async_ratio': 4,
  'optimizer.epochs': 3, 'task.workers': 3, 'task.turns': 4, 'task.turn_tokens': 16, 'task.branches': 4, 'eval.problems': 16,
  'eval.samples': 4, 'eval.max_tokens': 64, 'packing.row_tokens': 2048, 'packing.rows': 8, 'lora.rank': 16, 'devices.engines': 2,
}  # fmt: skip
OFFLINE = {'HF_HUB_OFFLINE': '1', 'WANDB_MODE': 'offline'}
# As config.py, on a machine where the packages of the trackers are not installed.
BARE = """
import sys

sys.modules.update(dict.fromkeys(('tensorboardX', 'wandb', 'mlflow')))
"""
SOURCES = ('model.path', 'task.path', 'preset', 'log.trackers')
TRACKERS = ('tensorboard', 'wandb', 'mlflow')


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  with fuzz_settings.prepare(folder) as world, mock.patch.dict(os.environ, OFFLINE | {'SPRL_CACHE': f'{folder}/cache'}):
    os.environ.pop('MLFLOW_TRACKING_URI', None)
    (folder / 'bare.py').write_text(BARE + world.config.read_text())
    (folder / 'empty').mkdir()
    shutil.copytree(folder / 'model', folder / 'no_weights', ignore=shutil.ignore_patterns('*.safetensors*'))
    shutil.copytree(folder / 'model', folder / 'no_tokenizer', ignore=shutil.ignore_patterns('tokenizer*'))
    shutil.copytree(folder / 'model', folder / 'no_json')
    (folder / 'no_json' / 'config.json').write_text('{')
    yield world


def source(rng: random.Random, key: str, folder: Path) -> dict[str, Any]:
  """Return a value of the setting `key`, one of SOURCES, and values of settings on which its meaning depends."""
  if key == 'log.trackers':
    names = tuple(rng.choice((*TRACKERS, values.text(rng))) if rng.random() < 0.3 else rng.choice(TRACKERS) for _ in range(2))
    return {key: rng.choice((names, names[:1], names[:1], names[0], values.value(rng, 1)))}
  if key == 'preset':
    preset = fuzz_settings.plausible(rng, key, str, folder)
    return {key: preset, 'arm': rng.choice((None, None, 'dense', 'sparse_rl'))} | RECIPES.get(preset, {})
  if rng.random() < 0.3:
    return {key: fuzz_settings.plausible(rng, key, str, folder)}
  names = ('model', 'tokenizer', 'empty', 'no_weights', 'no_tokenizer', 'no_json', 'none', 'train.jsonl', 'grader.py', '.')
  elsewhere = ('/dev/null', '/no/such/folder', '~', 'no/such', 'no/such:main', 'random:', 'wheel:', f'random:{folder}/empty')
  made = {key: rng.choice((*(f'{folder}/{name}' for name in names), *elsewhere))}
  if key == 'task.path' and rng.random() < 0.5:
    made['task.kind'] = rng.choice(('dataset', 'gsm8k', 'agent', 'jsonl'))
  return made


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  """Return the name of a config and flags. Most are accepted when the settings are read: the target `settings` has the others."""
  refused, key = rng.random() < 0.15, rng.choice(SOURCES) if rng.random() < 0.35 else None
  while True:
    changes = {'steps': 1, **dict(fuzz_settings.setting(rng, world.folder) for _ in range(rng.choice((1, 2, 3))))}
    if key is not None:
      changes |= source(rng, key, world.folder)
    if any(_large(value, MOST[name]) for name, value in changes.items() if name in MOST):
      continue
    given = world.tiny()
    try:
      given.update_from_flattened_dict(changes)
      resolve(given)
    except (SettingsError, TypeError, ValueError, KeyError, AttributeError):
      if not refused:
        continue
    config = 'bare.py' if 'log.trackers' in changes and rng.random() < 0.5 else 'config.py'
    return {'config': config, 'flags': [f'--config.{name}={value!s}'.replace('\0', '') for name, value in changes.items()]}


def _large(value: Any, most: float) -> bool:
  if isinstance(value, list | tuple):
    return any(_large(each, most) for each in value)
  return isinstance(value, int | float) and value > most


def check(world: Any, case: dict[str, Any]) -> str:
  workdir, flags = world.folder / 'run', case['flags']
  shutil.rmtree(workdir, ignore_errors=True)
  process = tiny.start('main', f'--config={world.folder / case["config"]}', f'--workdir={workdir}', *flags)
  try:
    out, err = process.communicate(timeout=SECONDS - 20)
  except subprocess.TimeoutExpired:
    raise AssertionError(f'no end: {flags}') from None
  finally:
    process.kill()
  last = err.strip().rpartition('\n')[2]
  assert process.returncode in (0, 2, 3), f'status {process.returncode}: {err[-1200:]}'
  assert 'Traceback' not in err, err[-1200:]
  if process.returncode == 0:
    steps = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    assert any(step['kind'] == 'train' for step in steps) or '--config.steps=0' in flags, out
    return 'status 0'
  if process.returncode == 2:
    assert any(line.startswith('error: ') for line in err.splitlines()), err[-1200:]
    return 'status 2'
  return f'status 3: {last[:60]}'
