"""The chat form of SkyRL-gym (NovaSky-AI/SkyRL): `init(prompt)`, then `step` to {observations, reward, done, metadata}.

In SkyRL-gym an environment object is one episode. It is constructed with `env_config` and the `extras` of a data row, and its
`init` turns the prompt of the row into the conversation that the model answers. Here rows come from a folder of train.jsonl and
test.jsonl,

    {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_spec": {"ground_truth": "5"}}

and the seed fixes the row. That form cannot report a truncation, so `truncated` is True only at `max_actions`. Its
`postprocessed_action`, which rewrites the model's text, is ignored: training uses the tokens that were sampled.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from sprl.config import SettingsError
from sprl.foreign import expanded, split_reference
from sprl.tasks import tables
from sprl.tasks.environments import user_file
from sprl.tasks.environments.turns import Turns

Build = Callable[[Mapping[str, Any]], Any]  # extras of a row -> environment of the episode


class Chat:
  """Builds one environment of the chat form for each episode, from `rows` of `prompt` and extras.

  `max_actions` truncates an episode that the environment does not end.
  """

  def __init__(self, name: str, build: Build, rows: Sequence[Mapping[str, Any]], max_actions: int = 100):
    self.name, self._build, self._rows = name, build, rows
    self._turns, self._env = Turns(max_actions), None

  def __len__(self) -> int:
    return len(self._rows)

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """Return the last message of the conversation that `init` gives; info['messages'] holds all of it."""
    self.close()
    row = copy.deepcopy(dict(self._rows[seed % len(self._rows)]))  # the environment may change it
    prompt = row.pop('prompt')
    self._env = self._build(row)
    conversation, metadata = self._env.init([{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt)
    if not conversation:
      raise TypeError('init returned no message: expected at least one')
    self._turns.begin()
    return _text(conversation[-1:]), {**(metadata or {}), 'messages': _messages(conversation)}

  def step(self, action: str) -> Any:
    """Return the observations as paragraphs, and in info['messages'].

    Raises TypeError if a key is missing.
    """
    self._turns.take()
    assert self._env is not None  # an episode is in progress
    returned = self._env.step(action)
    if not isinstance(returned, Mapping) or not {'observations', 'reward', 'done'} <= returned.keys():
      raise TypeError(f'step returned {returned!r:.100}: expected a dict of observations, reward, done, metadata')
    observations, done = returned['observations'] or [], returned['done']
    info = dict(returned.get('metadata') or {})
    if observations:
      info['messages'] = _messages(observations)
    return _text(observations), returned['reward'], done, self._turns.end(bool(done)), info

  def close(self) -> None:
    """Close the environment of the episode."""
    env, self._env = self._env, None
    if callable(release := getattr(env, 'close', None)):
      release()


def chat(
  environment: str,
  prompts: str,
  split: Literal['train', 'test'] = 'train',
  config: Mapping[str, Any] | None = None,
  max_actions: int = 100,
) -> Chat:
  """Return environments of the chat form.

  `environment` is `file.py:Class` or an id registered with skyrl_gym, `prompts` the folder of the rows, `config` the env_config.
  Raises SettingsError.
  """
  rows = _rows(prompts, split)
  where = 'config.task.args.environment'
  if split_reference(environment):
    make = user_file.load_class(environment, ('init', 'step'), where)
  else:
    make = _registered(environment, where)
  build = lambda extras: make(env_config=dict(config or {}), extras=dict(extras))  # noqa: E731
  return Chat(f'chat {environment}', build, rows, max_actions)


def _registered(identifier: str, where: str) -> Callable[..., Any]:
  try:
    import skyrl_gym  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise SettingsError(
      f'{where} = {identifier!r}: not `file.py:Class`, and ids are those of the package skyrl-gym, which is not installed '
      f'(pip install skyrl-gym)'
    ) from error
  if identifier not in skyrl_gym.registry:
    raise SettingsError(f'{where} = {identifier!r}: skyrl_gym has {", ".join(sorted(skyrl_gym.registry))}')
  return lambda **kwargs: skyrl_gym.make(identifier, **kwargs)


@functools.cache  # shared by all environments of a process
def _rows(prompts: str, split: str) -> Sequence[Mapping[str, Any]]:
  path = expanded(prompts) / f'{split}.jsonl'
  where = f'config.task.args.prompts = {prompts!r}'
  if not path.is_file():
    raise SettingsError(f'{where}: expected a folder of train.jsonl and test.jsonl; {path}: no such file')
  rows = [_row(f'{path}:{number}', line) for number, line in tables.lines(path)]
  if not rows:
    raise SettingsError(f'{where}: {path} has no rows')
  return rows


def _row(where: str, line: Mapping[str, Any]) -> Mapping[str, Any]:
  prompt = line.get('prompt')
  if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt))):
    raise SettingsError(f'{where}: prompt = {prompt!r:.100}: expected text or a list of messages')
  return line


def _messages(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  return [{'role': message['role'], 'content': message['content']} for message in conversation]


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
  return '\n\n'.join(message['content'] for message in messages)
