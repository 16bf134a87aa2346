"""Checkpoints: a run's arrays (orbax) and its small host-side state, committed together or not at all.

    step_000020/arrays/       what orbax wrote
    step_000020/record.json   step, score, extra, every array's shape and dtype, every file's size and checksum, its own checksum
    tmp-*                     being written, or being deleted; ignored, and swept by the next save

A save takes four steps, of which the caller waits for the first only:

1. orbax takes hold of the arrays' values (a copy off the device; on CPU a reference that makes a later donation copy instead),
   so they may be donated as soon as `save` returns.
2. It writes them to `tmp-step_000020/arrays`.
3. The files are read back, made durable and described in `record.json`.
4. One rename makes the folder `step_000020`. Killed before it, the checkpoint does not exist; after it, it is complete, and
   only then are older ones deleted (renamed to `tmp-*` first, so that a half-deleted one is not mistaken for a damaged one).

A restore verifies every file before it trusts one. Only the process that saves changes the folder: reading a live run is safe.

Of a run over several processes each writes, and reads, what its devices hold; the folder must be the same to all. The rest of a
save, and the choice of what to restore, are process 0's. How many there were, and their mesh, may be others at a restore.
"""

import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sprl.io import files
from sprl.parallel.team import ALONE, Team
from sprl.settings import SettingsError

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
  """No checkpoint can be used, or it holds other arrays than were asked for; the message names folder and cause."""


@dataclass(frozen=True)
class Restored:
  """A checkpoint read back."""

  step: int
  arrays: Any  # the pytree asked for, on the shardings asked for
  extra: dict[str, Any]  # as given to `save`, through JSON
  score: float | None


class Checkpoints:
  """The checkpoints of one run, in one folder.

  Kept are the `keep_last` newest and the `keep_best` of highest score. Saving a step deletes checkpoints of later steps: they
  belong to a future that a restore has abandoned (damaged ones, or those after an explicit earlier step).

  Raises SettingsError for keep_last < 1 or keep_best < 0.
  """

  def __init__(self, folder: str | os.PathLike, keep_last: int, keep_best: int, team: Team = ALONE):
    if keep_last < 1:
      raise SettingsError(f'config.checkpoint.keep_last = {keep_last}: expected at least 1')
    if keep_best < 0:
      raise SettingsError(f'config.checkpoint.keep_best = {keep_best}: expected 0 or more')
    self.folder = Path(folder).absolute()
    self._keep_last, self._keep_best, self._team = keep_last, keep_best, team
    # Uncompressed: zstd takes 7 % off float32 weights, for ten times the CPU time that the run could use.
    self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    self._thread = ThreadPoolExecutor(1, 'checkpoint')
    self._pending: Future[None] | None = None
    self._current: int | None = None  # the step last committed or restored here

  def save(self, step: int, arrays: Any, extra: Mapping[str, Any], score: float | None = None) -> None:
    """Starts a checkpoint of `step` and returns once `arrays` (a pytree of jax arrays) may be donated.

    Waits for the save before it, and raises what went wrong in that one. `extra` is any dict that JSON can hold. The step just
    saved or restored is not written again: a run that is stopped there has nothing to add.
    """
    self.wait()
    if step == self._current:
      return
    flat = _flatten(arrays)
    record = {
      'step': step,
      'score': score if score is not None and math.isfinite(score) else None,
      'extra': json.loads(json.dumps(extra)),
      'arrays': {path: _describe(leaf) for path, leaf in flat.items()},
    }
    if self._team.leads:
      self.folder.mkdir(parents=True, exist_ok=True)
      for leftover in self.folder.glob('tmp-*'):
        shutil.rmtree(leftover)
    draft = self.folder / f'tmp-{files.step_name(step)}'
    self._orbax.save(draft / 'arrays', args=ocp.args.PyTreeSave(flat))
    self._pending = self._thread.submit(self._commit, draft, record)

  def wait(self) -> None:
    """Returns when the last save is committed, or raises what went wrong in it."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def close(self) -> None:
    """Waits, and ends the background threads."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._orbax.close()

  def steps(self) -> list[int]:
    """The committed steps, oldest first, intact or not."""
    return sorted(step for path in self.folder.glob('step_*') if (step := files.step_of(path)) is not None)

  def latest(self) -> int | None:
    """The newest committed step."""
    return max(self.steps(), default=None)

  def restore(self, abstract: Any, step: int | None = None, partial: bool = False) -> Restored | None:
    """The newest intact checkpoint (or that of `step`), or None where there is none at all.

    `abstract` is a pytree of ShapeDtypeStructs with the shardings wanted (without one: the first device). With `partial` it may
    leave out arrays that were saved, and these are not read. A damaged checkpoint is named in a warning and the one before it
    tried.

    Raises CheckpointError: every checkpoint is damaged (or the one of `step` is, or is missing); or arrays, shapes or dtypes
    differ from `abstract`, naming the first path that does.
    """
    self.wait()
    found = self._team.agree('checkpoint', lambda: self._intact(step))
    if found is None:
      return None
    restored = _restore(self._path(found), abstract, partial)
    self._current = found
    return restored

  def _intact(self, step: int | None) -> int | None:
    """The step of the checkpoint to restore."""
    if step is not None and step not in self.steps():
      raise CheckpointError(f'{self.folder} has no checkpoint of step {step}; it has {self.steps()}')
    damaged = []
    for candidate in reversed(self.steps()) if step is None else [step]:
      path = self._path(candidate)
      if (cause := _damage(path)) is None:
        return candidate
      _log.warning('damaged checkpoint %s not used: %s', path, cause)
      damaged.append(f'{path}: {cause}')
    if damaged:
      raise CheckpointError('no intact checkpoint; damaged are ' + '; '.join(damaged))
    return None

  def _path(self, step: int) -> Path:
    return self.folder / files.step_name(step)

  def _commit(self, draft: Path, record: dict[str, Any]) -> None:
    """Steps 2 to 4, on the background thread."""
    self._orbax.wait_until_finished()
    if self._team.leads:
      self._seal(draft, record)
    self._current = record['step']

  def _seal(self, draft: Path, record: dict[str, Any]) -> None:
    written = sorted(path for path in (draft / 'arrays').rglob('*') if path.is_file())
    record['files'] = {str(path.relative_to(draft)): _measure(path, durable=True) for path in written}
    files.write_text(draft / 'record.json', _sealed(record))
    final = self._path(record['step'])
    if final.exists():
      _delete(final)
    files.rename(draft, final)
    for step in self._superseded(record['step']):
      _delete(self._path(step))

  def _superseded(self, saved: int) -> list[int]:
    past = [step for step in self.steps() if step <= saved]
    scores = {step: _read_record(self._path(step)).get('score') for step in past}
    best = sorted((step for step in past if scores[step] is not None), key=lambda step: (scores[step], step), reverse=True)
    keep = {*past[-self._keep_last :], *best[: self._keep_best]}
    return [step for step in self.steps() if step not in keep]


# --- arrays ----------------------------------------------------------------------------------------------------------


def _flatten(tree: Any) -> dict[str, Any]:
  """Leaves by path. Orbax is given this, so that the tree's own containers (int keys, namedtuples, None) are jax's affair."""
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _describe(leaf) -> str:
  """`float32[2,3]`."""
  return f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'


def _restore(path: Path, abstract: Any, partial: bool) -> Restored:
  record = _read_record(path)
  wanted = _flatten(abstract)
  for difference in _differences(record['arrays'], {name: _describe(leaf) for name, leaf in wanted.items()}, partial):
    raise CheckpointError(f'{path} was written by another model or optimizer setting: {difference}')
  first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  item = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding or first) for k, v in wanted.items()}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    args = ocp.args.PyTreeRestore(item, ocp.checkpoint_utils.construct_restore_args(item), partial_restore=partial)
    flat = reader.restore(path / 'arrays', args=args)
  arrays = jax.tree.unflatten(jax.tree.structure(abstract), [flat[name] for name in wanted])
  return Restored(record['step'], arrays, record['extra'], record['score'])


def _differences(saved: dict[str, str], wanted: dict[str, str], partial: bool) -> Iterator[str]:
  for name, description in wanted.items():
    if saved.get(name) != description:
      yield f'{name} is {saved.get(name, "missing")}, expected {description}'
  for name, description in saved.items():
    if name not in wanted and not partial:
      yield f'{name} is {description}, expected nothing there'


# --- files -----------------------------------------------------------------------------------------------------------


def _sealed(record: dict[str, Any]) -> str:
  """The record's text, which holds its own checksum."""
  return json.dumps({'record': record, 'crc32': zlib.crc32(json.dumps(record).encode())}) + '\n'


def _read_record(folder: Path) -> dict[str, Any]:
  """The record, or {} unless it is as it was written."""
  try:
    text = (folder / 'record.json').read_text(encoding='utf-8')
    record = json.loads(text)['record']
    return record if _sealed(record) == text else {}
  except (OSError, ValueError, KeyError, TypeError):
    return {}


def _damage(folder: Path) -> str | None:
  """What is wrong with a committed checkpoint, naming the file; None if every byte is as it was written."""
  record = _read_record(folder)
  if not record:
    return 'record.json is missing or damaged'
  for name, measured in record['files'].items():
    path = folder / name
    if not path.is_file():
      return f'{name} is missing'
    if (size := path.stat().st_size) != measured[0]:
      return f'{name} has {size} bytes instead of {measured[0]}'
    if _measure(path) != measured:
      return f'{name} has changed since it was written'
  return None


def _measure(path: Path, durable: bool = False) -> list[int]:
  """Size and CRC-32 of a file; `durable` first waits until it is on disk."""
  size = checksum = 0
  with open(path, 'rb') as file:
    if durable:
      os.fsync(file.fileno())
    while chunk := file.read(1 << 20):
      size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
  return [size, checksum]


def _delete(folder: Path) -> None:
  doomed = folder.with_name(f'tmp-old-{folder.name}')
  files.rename(folder, doomed)
  shutil.rmtree(doomed)
