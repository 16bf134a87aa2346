"""Push an exported folder to the Hugging Face hub. The token comes from its usual places: HF_TOKEN, or `hf auth login`."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sprl.config import SettingsError
from sprl.io.huggingface import WRITTEN
from sprl.io.model_card import TAG
from sprl.io.pretrained import HUB_NAME

REPLACED = tuple(pattern for pattern in WRITTEN if pattern != 'README.md')  # a new repository may have a card


def check_name(name: str) -> None:
  """Raise SettingsError unless `name` is OWNER/NAME."""
  if not HUB_NAME.fullmatch(name):
    raise SettingsError(f'--push={name}: expected OWNER/NAME, a repository of models on the Hugging Face hub')


def create(name: str, private: bool, client: Any = None) -> None:
  """Create the repository `name` unless it exists. `client` is by default a huggingface_hub.HfApi.

  Raises SettingsError if the hub refuses it, for example without a token, if `private` is asked of a public repository, or if the
  repository holds a model that sprl has not pushed: the tag `sprl` of its card tells.
  """
  client = client or _client()
  try:
    client.create_repo(repo_id=name, private=private, exist_ok=True)
    found = client.repo_info(repo_id=name)
  except Exception as error:  # the hub's errors come from several libraries
    raise _refused(name, error) from error
  if private and not found.private:
    raise SettingsError(f'--push={name}: exists and is public; expected no --private, or another name')
  held = [file.rfilename for file in found.siblings or () if any(fnmatchcase(file.rfilename, pattern) for pattern in REPLACED)]
  if held and TAG not in (found.tags or ()):
    raise SettingsError(
      f'--push={name}: holds {held[0]}, and its card has no tag `{TAG}`, so it may be no export by sprl; expected a repository '
      'without a model, or an earlier export by sprl'
    )


def push(name: str, folder: Path, message: str, client: Any = None) -> str:
  """Upload `folder` to the repository as one commit, and return the address of the commit.

  Files of an earlier export that the folder does not have are deleted. Raises SettingsError if the hub refuses it.
  """
  client = client or _client()
  try:
    commit = client.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message, delete_patterns=list(WRITTEN))
  except Exception as error:
    raise _refused(name, error) from error
  return str(commit.commit_url)


def _refused(name: str, error: Exception) -> SettingsError:
  cause = ' '.join(f'{type(error).__name__}: {error}'.split())
  return SettingsError(
    f'--push={name}: the Hugging Face hub refused it ({cause}); expected a token that may write there, '
    'in HF_TOKEN or from `hf auth login`'
  )


def _client() -> Any:
  import huggingface_hub  # slow to import

  return huggingface_hub.HfApi()
