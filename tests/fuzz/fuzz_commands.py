"""Commands: `python -m sprl.main` with random flags on top of the tiny run of the end-to-end tests, for one step.

A command ends in time with status 0, 2 (an error in one line, before any device work) or 3 (a broken run), without a traceback.
Sizes are kept small, so that a run that is accepted ends in time.
"""

import contextlib
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_settings
import tiny

from sprl.config import SettingsError
from sprl.config_reader import resolve

SECONDS = 300.0
MOST = {  # of settings that decide how long one step takes
  'steps': 2, 'sampling.max_tokens': 64, 'sampling.max_prompt': 128, 'sampling.prompt_buckets': 128, 'sampling.rows': 64,
  'rollout.prompts': 8, 'rollout.group': 8, 'rollout.extra_prompts': 8, 'rollout.extra_members': 8, 'rollout.async_ratio': 4,
  'optimizer.epochs': 3, 'task.workers': 3, 'task.turns': 4, 'task.turn_tokens': 16, 'task.branches': 4, 'eval.problems': 16,
  'eval.samples': 4, 'eval.max_tokens': 64, 'packing.row_tokens': 2048, 'packing.rows': 8, 'lora.rank': 16, 'devices.engines': 2,
}  # fmt: skip
HUBS = ('task.path', 'model.path', 'preset')  # texts that a run would look for on the network, or that change most settings


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  with fuzz_settings.prepare(folder) as world:
    yield world


def case(rng: random.Random, world: Any) -> list[str]:
  """Return flags. Most are accepted when the settings are read: the other targets have enough of those that are not."""
  refused = rng.random() < 0.15
  while True:
    changes = {'steps': 1, **dict(fuzz_settings.setting(rng, world.folder) for _ in range(rng.choice((1, 2, 3))))}
    if any(_large(value, MOST[key]) for key, value in changes.items() if key in MOST):
      continue
    if 'log.trackers' in changes or '/no/' in str(changes) or any(key in HUBS for key in changes):
      continue
    given = world.tiny()
    try:
      given.update_from_flattened_dict(changes)
      resolve(given)
    except (SettingsError, TypeError, ValueError, KeyError, AttributeError):
      if not refused:
        continue
    return [f'--config.{key}={value!s}'.replace('\0', '') for key, value in changes.items()]


def _large(value: Any, most: float) -> bool:
  if isinstance(value, list | tuple):
    return any(_large(each, most) for each in value)
  return isinstance(value, int | float) and value > most


def check(world: Any, flags: list[str]) -> str:
  workdir = world.folder / 'run'
  shutil.rmtree(workdir, ignore_errors=True)
  process = tiny.start('main', f'--config={world.config}', f'--workdir={workdir}', *flags)
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
