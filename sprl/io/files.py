"""Atomic file operations: a kill or a power cut during a write leaves the old file or the new one, never a part."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sprl.config import SettingsError
from sprl.foreign import expanded


def local_folder(name: str, path: str | os.PathLike) -> Path:
  """Return `path` as a Path, `~` as the home folder. Raises SettingsError, which begins with `name`, for an address `scheme://`.

  A run locks its work directory, appends to files and renames folders. Object stores have none of these operations.
  """
  if not isinstance(path, str | os.PathLike) or not os.fspath(path):
    raise SettingsError(f'{name}={path!r}: expected a folder')
  text = os.fspath(path)
  if found := re.match(r'([A-Za-z][A-Za-z0-9+.-]*):/', text):
    raise SettingsError(
      f'{name}={text}: expected a folder of this machine or of a mounted file system, not an address ({found[1]}://). Object '
      'stores have no locks and no renames; copy finished runs there, for example with gsutil, aws s3 or rclone'
    )
  folder = expanded(text)
  if folder.exists() and not folder.is_dir():
    raise SettingsError(f'{name}={text}: expected a folder, got a file')
  return folder


@contextmanager
def naming(path: Path) -> Iterator[None]:
  """Give an OSError of the block the name `path` if it has none. If a disk is full, the system names no file."""
  try:
    yield
  except OSError as error:
    if error.filename is None:
      error.filename = str(path)
    raise


def write_text(path: Path, text: str) -> None:
  """Replace the file `path` by one that holds `text` (UTF-8). The file is on disk when the function returns."""
  draft = path.with_name(path.name + '.tmp')
  try:
    with open(draft, 'w', encoding='utf-8', newline='\n') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    rename(draft, path)
  except OSError as error:
    with suppress(OSError):
      draft.unlink()
    raise OSError(error.errno, error.strerror, str(path)) from error


def rename(old: Path, new: Path) -> None:
  """Rename a file or folder within one file system, and wait until the directory entry is on disk."""
  os.replace(old, new)
  folder = os.open(new.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def step_name(step: int) -> str:
  """Return the name for files and folders of a step, `step_000012`. Names sort in the order of the steps."""
  return f'step_{step:06d}'


def step_of(path: Path) -> int | None:
  """Return the step of a path that `step_name` named, or of such a name with the suffix .md or .jsonl; None for other names."""
  found = re.fullmatch(r'step_(\d{6,})(\.md|\.jsonl)?', path.name)
  return int(found[1]) if found else None
