"""Checks before device work that KV caches fit into memory: those of rollouts, and those of an evaluation.

Each check assumes that nothing else uses the memory.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from sprl.cache.layout import CacheLayout
from sprl.config import Run, SettingsError
from sprl.model import Model
from sprl.planning.memory import kv_bytes
from sprl.rollout.evaluate import eval_engine
from sprl.rollout.setup import EvalSet

GIB = 2**30
GROUP_LIMITS = [Path('/sys/fs/cgroup/memory.max'), Path('/sys/fs/cgroup/memory/memory.limit_in_bytes')]  # of versions 2 and 1


def check_caches_fit(run: Run, layout: CacheLayout, engines: Sequence[Mesh]) -> None:
  """Raise SettingsError if the caches of all rows are larger than the memory of the devices that hold them.

  Only the caches count, each row once, so a run that passes may still be too large: sprl.plan estimates all of its memory.
  """
  rows = f'config.sampling.rows = {run.sampling.rows}'
  if run.sampling.rows is None:
    rows += f' and config.rollout.prompts, group: {run.rows} sequences side by side'
  for mesh in engines:
    _check(layout, run.engine_rows, mesh, rows, 'or set config.cache.budget')


def check_evaluation_fits(run: Run, model: Model, held_out: EvalSet) -> None:
  """Raise SettingsError if the caches of the rows of an evaluation are larger than the memory of its devices."""
  engine, _ = eval_engine(run, model, held_out)
  what = f'config.eval.memory = {run.eval.memory!r}: the evaluation has {engine.rows} sequences side by side'
  more = 'or set config.eval.max_tokens'
  if run.eval.memory == 'dense' and run.cache.budget is not None:
    more = "or set config.eval.memory = 'sampler', which evaluates with the cache of the rollouts"
  _check(engine.layout, engine.rows, model.mesh, what, more)


def _check(layout: CacheLayout, rows: int, mesh: Mesh, what: str, more: str) -> None:
  needed = kv_bytes(layout) * rows
  if (room := memory_of(list(mesh.devices.flat))) is not None and needed > room:
    raise SettingsError(
      f'{what}: expected a KV cache of at most {room / GIB:,.0f} GiB, the memory of its {mesh.size} devices; found '
      f'{needed / GIB:,.0f} GiB, for sequences of {layout.positions} tokens. Lower config.sampling.rows, max_prompt or '
      f'max_tokens, {more}'
    )


def memory_of(devices: Sequence[Any]) -> int | None:
  """Return the bytes of memory of devices; None where it is not known.

  CPU devices together have the memory of their host, or less where a control group limits this process.
  """
  if devices[0].platform == 'cpu':
    hosts = len({device.process_index for device in devices})
    known = {'SC_PHYS_PAGES', 'SC_PAGE_SIZE'} <= os.sysconf_names.keys()
    return hosts * min([os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'), *_group_limits()]) if known else None
  here = [device for device in devices if device.process_index == jax.process_index()]  # the others do not answer
  limits = [limit for device in here if (limit := (device.memory_stats() or {}).get('bytes_limit')) is not None]
  return len(devices) * max(limits) if limits else None


def _group_limits() -> list[int]:
  """Return the limits of memory that control groups set for this process, such as those of a container."""
  found = [file.read_text().strip() for file in GROUP_LIMITS if file.exists()]
  return [int(limit) for limit in found if limit.isdecimal()]  # `max`: no limit
