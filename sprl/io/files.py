"""Files that are whole or absent: what a kill or a power cut leaves of a write is the old file or the new one."""

import os
import re
from pathlib import Path


def write_text(path: Path, text: str) -> None:
  """Replaces the file `path` by one holding `text` (UTF-8), on disk when this returns."""
  draft = path.with_name(path.name + '.tmp')
  with open(draft, 'w', encoding='utf-8', newline='\n') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  rename(draft, path)


def rename(old: Path, new: Path) -> None:
  """Renames within one file system, and waits until the folder's listing is on disk too."""
  os.replace(old, new)
  folder = os.open(new.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def step_name(step: int) -> str:
  """`step_000012`: how folders and files of one step are called, so that they list in order."""
  return f'step_{step:06d}'


def step_of(path: Path) -> int | None:
  """The step that `step_name` gave a file (whatever its suffix) or folder; None for any other name."""
  found = re.fullmatch(r'step_(\d{6,})(\.\w+)?', path.name)
  return int(found[1]) if found else None
