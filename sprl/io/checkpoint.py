"""Checkpoints: the arrays of a run (orbax) and its small host state, committed together or not at all.

    step_000020/arrays/       written by orbax
    step_000020/record.json   step, score, extra, shape and dtype of each array, size and checksum of each file, own checksum
    tmp-*                     being written or deleted; ignored by a restore, removed by the next save

A save has four steps. The caller waits only for the first:

1. Orbax captures the values of the arrays, so they may be donated when `save` returns. It copies them off the device. On CPU it
   takes a reference, which makes a later donation copy instead.
2. Orbax writes them to `tmp-step_000020/arrays`.
3. The files are read back, made durable and described in `record.json`.
4. One rename makes the folder `step_000020`. Before it, a kill leaves no checkpoint; after it, the checkpoint is complete. Only
   then are older checkpoints deleted. They are first renamed to `tmp-*`, so that a partly deleted one does not look damaged.

A restore verifies every file first. Only the process that saves changes the folder, so it is safe to read a run in progress.

In a run over several processes, each process writes and reads the parts that its devices hold. All processes must see the same
folder. Process 0 does the rest of a save and chooses the checkpoint to restore. The number of processes and the mesh may change
between a save and a restore.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sprl.config import SettingsError
from sprl.distributed.team import ALONE, Team
from sprl.io import files

_log = logging.getLogger(__name__)
_SAVE_SECONDS = 7 * 24 * 3600  # for orbax to write a checkpoint: the watchdog, not a clock, finds processes that hang
_DELETED = 'its run has deleted this checkpoint in the meantime, because it has saved newer ones'


class CheckpointError(RuntimeError):
  """A checkpoint cannot be saved, none is usable, or its arrays are not the expected ones.

  The message names the folder and the cause.
  """


@dataclass(frozen=True)
class Record:
  """What a checkpoint says of itself."""

  step: int
  arrays: dict[str, str]  # path in the saved pytree -> dtype and shape, such as `float32[2,3]`
  extra: dict[str, Any]  # the value given to `save`, after a round trip through JSON


@dataclass(frozen=True)
class Restored:
  """A checkpoint that was read."""

  step: int
  arrays: Any  # a pytree with the structure and shardings of `abstract`
  extra: dict[str, Any]  # the value given to `save`, after a round trip through JSON
  score: float | None


class Checkpoints:
  """The checkpoints of one run, in one folder.

  The `keep_last` newest checkpoints and, for each measure, the one with the highest score are kept. Saving a step deletes the
  checkpoints of later steps: they are damaged, or a restore named an earlier step, so the run no longer continues from them.
  """

  def __init__(self, folder: str | os.PathLike, keep_last: int, team: Team = ALONE):
    self.folder = Path(folder).absolute()
    self._keep_last, self._team = keep_last, team
    # Without compression: zstd saves 7 % of float32 weights, but needs ten times the CPU time.
    self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False), timeout_secs=_SAVE_SECONDS)
    self._thread = ThreadPoolExecutor(1, 'checkpoint')
    self._pending: Future[None] | None = None
    self._current: int | None = None  # the last step that this object committed or restored

  def save(self, step: int, arrays: Any, extra: Mapping[str, Any], score: float | None = None, measure: str = '') -> None:
    """Start a checkpoint of `step`. Returns as soon as `arrays`, a pytree of jax arrays, may be donated.

    Waits for the previous save. If that failed, its error is raised over several processes. In one process it is logged, and this
    save is waited for too: it raises its own error.
    `extra` must be valid JSON. If `step` was just saved or restored, there are no new arrays: only a score that the checkpoint
    lacks is added, with `extra`. `measure` names how it was measured.
    """
    failed = False
    try:
      self.wait()
    except CheckpointError as error:
      if self._team.processes > 1:  # perhaps only this process knows, and a save needs all
        raise
      failed = True
      _log.error('%s; step %d is saved now', error, step)
    score = score if score is not None and math.isfinite(score) else None
    if step == self._current:
      if score is not None and self._team.leads:
        self._add_score(step, extra, score, measure)
      return
    flat = _flatten(arrays)
    record = {
      'step': step,
      'score': score,
      'measure': measure,
      'extra': json.loads(json.dumps(extra)),
      'arrays': {path: _describe(leaf) for path, leaf in flat.items()},
    }
    if self._team.leads:
      self.folder.mkdir(parents=True, exist_ok=True)
      for leftover in self.folder.glob('tmp-*'):
        _remove(leftover)
    draft = self.folder / f'tmp-{files.step_name(step)}'
    with _named(draft):
      self._orbax.save(draft / 'arrays', args=ocp.args.PyTreeSave(flat))
    self._pending = self._thread.submit(self._commit, draft, record)
    if failed:
      self.wait()

  def wait(self) -> None:
    """Wait until the last save is committed. Raises its error if it failed."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def close(self) -> None:
    """Wait for the last save and end the background threads."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      with _named(self.folder):
        self._orbax.close()

  def steps(self) -> list[int]:
    """Return the committed steps, oldest first, intact or not."""
    return committed(self.folder)

  def restore(self, abstract: Any, step: int | None = None, partial: bool = False, cast: bool = False) -> Restored | None:
    """Read the newest intact checkpoint. Returns None if there is no checkpoint.

    Args:
      abstract: a pytree of ShapeDtypeStructs with the shardings of the result; without a sharding, the first device.
      step: the step to read instead of the newest.
      partial: whether `abstract` may lack saved arrays, which are then not read.
      cast: whether saved arrays of another dtype are converted to that of `abstract`.

    A damaged checkpoint is named in a warning, and the one before it is tried.

    Raises CheckpointError if every checkpoint is damaged, if the checkpoint of `step` is damaged or missing, or if arrays, shapes
    or dtypes differ from `abstract`; the message names the first path that differs.
    """
    self.wait()
    found = self._team.broadcast('checkpoint', lambda: self._intact(step))
    if found is None:
      return None
    try:
      restored = _restore(self._path(found), abstract, partial, cast)
    except (OSError, ValueError, KeyError) as error:
      if self._path(found).exists():
        raise
      raise CheckpointError(f'{self._path(found)}: {_DELETED}') from error
    self._current = found
    return restored

  def _intact(self, step: int | None) -> int | None:
    """Return the step of the checkpoint to restore."""
    if step is not None:
      _check_exists(self.folder, step)
    damaged = []
    for candidate in reversed(self.steps()) if step is None else [step]:
      path = self._path(candidate)
      if (cause := _damage(path)) is None:
        return candidate
      _log.warning('damaged checkpoint %s is not used: %s', path, cause)
      damaged.append(f'{path}: {cause}')
    if damaged:
      which = 'every checkpoint' if step is None else f'the checkpoint of step {step}'
      raise CheckpointError(f'{which} is damaged: {"; ".join(damaged)}')
    return None

  def _path(self, step: int) -> Path:
    return self.folder / files.step_name(step)

  def _commit(self, draft: Path, record: dict[str, Any]) -> None:
    """Do steps 2 to 4 of a save, on the background thread."""
    try:
      with _named(draft):
        self._orbax.wait_until_finished()
        if self._team.leads:
          self._seal(draft, record)
    except CheckpointError:
      if self._team.leads:
        _remove(draft)  # the disk may be full
      raise
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

  def _add_score(self, step: int, extra: Mapping[str, Any], score: float, measure: str) -> None:
    record = _read_record(self._path(step))
    if record and record['score'] is None:
      record |= {'score': score, 'measure': measure, 'extra': json.loads(json.dumps(extra))}
      files.write_text(self._path(step) / 'record.json', _sealed(record))

  def _superseded(self, saved: int) -> list[int]:
    past = [step for step in self.steps() if step <= saved]
    keep = {*past[-self._keep_last :], *_best(self.folder, past).values()}
    return [step for step in self.steps() if step not in keep]


# --- what a folder of checkpoints says, without their arrays -----------------------------------------------------------


def step_named(folder: Path, text: str | None) -> int | None:
  """Return the step that `--step` names, a number or `best`; None: the newest. Raises SettingsError for another text."""
  if text is None or text.isdecimal():
    return None if text is None else int(text)
  if text != 'best':
    raise SettingsError(f'--step = {text!r}: expected the step of a checkpoint, or best')
  return best_step(folder)


def best_step(folder: Path) -> int:
  """Return the step of the checkpoint with the highest score, of those that were measured as the newest score was.

  Raises CheckpointError if no checkpoint has a score.
  """
  best = _best(folder, committed(folder))
  if not best:
    raise CheckpointError(f'{folder}: no checkpoint has a score; config.eval.every says after which steps a run evaluates')
  return list(best.values())[-1]


def _best(folder: Path, steps: Sequence[int]) -> dict[str, int]:
  """Return the best step of each measure, in the order of the newest score of each. Of equal scores the newer one is best."""
  records = {step: _read_record(folder / files.step_name(step)) for step in steps}
  scored = {step: record for step, record in records.items() if record.get('score') is not None}
  newest = next((record['measure'] for record in reversed(scored.values()) if record.get('measure')), '')
  best: dict[str, tuple[float, int]] = {}
  for step, record in scored.items():
    measure = record.get('measure') or newest  # a record of an older version has none
    best[measure] = max(best.pop(measure, (-math.inf, -1)), (record['score'], step))
  return {measure: step for measure, (_, step) in best.items()}


def committed(folder: Path) -> list[int]:
  """Return the committed steps in a folder of checkpoints, oldest first, intact or not."""
  return sorted(step for path in folder.glob('step_*') if (step := files.step_of(path)) is not None)


def read_record(folder: Path, step: int) -> Record:
  """Return the record of a committed checkpoint in a folder of checkpoints. The files of its arrays are not verified.

  Raises CheckpointError if there is no checkpoint of `step`, which names those that exist, or if its record is damaged.
  """
  _check_exists(folder, step)
  path = folder / files.step_name(step)
  if not (record := _read_record(path)):
    raise CheckpointError(f'{path}: record.json is missing or damaged')
  return Record(step, record['arrays'], record['extra'])


def newest_record(folder: Path) -> Record | None:
  """Return the record of the newest checkpoint whose record is intact; None if there is none."""
  for step in reversed(committed(folder)):
    with contextlib.suppress(CheckpointError):  # damaged, or deleted meanwhile
      return read_record(folder, step)
  return None


def _check_exists(folder: Path, step: int) -> None:
  if step not in committed(folder):
    raise CheckpointError(f'{folder} has no checkpoint of step {step}; expected one of {committed(folder)}')


# --- arrays ----------------------------------------------------------------------------------------------------------


def _flatten(tree: Any) -> dict[str, Any]:
  """Map the path of each leaf to the leaf. Orbax gets this flat dict and need not know int keys, namedtuples or None."""
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _describe(leaf) -> str:
  """Return dtype and shape as text: `float32[2,3]`."""
  return f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'


def _restore(path: Path, abstract: Any, partial: bool, cast: bool) -> Restored:
  record = _read_record(path)
  wanted = _flatten(abstract)
  described = {name: _describe(leaf) for name, leaf in wanted.items()}
  saved = record['arrays']
  if cast:  # the shapes alone must agree
    saved, described = ({name: text[text.index('[') :] for name, text in each.items()} for each in (saved, described))
  for difference in _differences(saved, described, partial):
    raise CheckpointError(f'{path} belongs to another model or optimizer setting: {difference}')
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
      yield f'{name} is {description}, expected no such array'


# --- files -----------------------------------------------------------------------------------------------------------


def _sealed(record: dict[str, Any]) -> str:
  """Return the text of record.json, which includes its own checksum."""
  return json.dumps({'record': record, 'crc32': zlib.crc32(json.dumps(record).encode())}) + '\n'


def _read_record(folder: Path) -> dict[str, Any]:
  """Return the record of a checkpoint; {} if record.json is missing or damaged."""
  try:
    text = (folder / 'record.json').read_text(encoding='utf-8')
    record = json.loads(text)['record']
    return record if _sealed(record) == text else {}
  except (OSError, ValueError, KeyError, TypeError):
    return {}


def _damage(folder: Path) -> str | None:
  """Describe the damage of a committed checkpoint, with the name of the file. Returns None if it is intact."""
  record = _read_record(folder)
  if not folder.exists():
    return _DELETED
  if not record:
    return 'record.json is missing or damaged'
  for name, measured in record['files'].items():
    path = folder / name
    if not path.is_file():
      return f'{name} is missing'
    if (size := path.stat().st_size) != measured[0]:
      return f'{name} has {size} bytes, expected {measured[0]}'
    if _measure(path) != measured:
      return f'{name} has another checksum than when it was written'
  return None


def _measure(path: Path, durable: bool = False) -> list[int]:
  """Return the size and CRC-32 of a file. `durable` waits until the file is on disk."""
  size = checksum = 0
  with open(path, 'rb') as file:
    if durable:
      os.fsync(file.fileno())
    while chunk := file.read(1 << 20):
      size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
  return [size, checksum]


@contextmanager
def _named(draft: Path) -> Iterator[None]:
  """Raise an error of the file system, such as a full disk, as a CheckpointError. Tensorstore raises it as a ValueError."""
  try:
    yield
  except (OSError, ValueError) as error:
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if not isinstance(error, OSError) and code is None:
      raise
    cause = error if code is None else os.strerror(int(code[1]))
    raise CheckpointError(f'{draft}: cannot be written: {cause}; the checkpoints before it are as they were') from error


def _delete(folder: Path) -> None:
  doomed = folder.with_name(f'tmp-old-{folder.name}')
  files.rename(folder, doomed)
  _remove(doomed)


def _remove(folder: Path) -> None:
  """Delete a folder that no restore reads. On network disks a file that is open cannot be deleted: the next save tries again."""
  try:
    shutil.rmtree(folder)
  except OSError as error:
    _log.warning('%s: cannot be deleted now (%s); the next save tries again', folder, error)
