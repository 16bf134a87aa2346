"""Environments of verifiers (PrimeIntellect-ai/verifiers, 0.1.14 to 0.3) by their id: those that `load_environment` gives.

They are not stepped: they run a whole rollout and ask a client for each answer of the model. So here the client is the other
way round: a rollout runs in an event loop of its own thread, and where it asks, it waits. `reset` starts it and gives what it
asks first, `step` hands it the model's text and gives what it asks next; at its end, the rubric's reward, all on the last step.

    caller    reset ----------> observation    step(action) -----------> observation ...   step -> reward
    rollout     run_rollout ... get_response (waits) ... env_response ... get_response (waits) ... score_rollout

Whatever asks its client works so: SingleTurnEnv, MultiTurnEnv, ToolEnv and their children. Tools are described in the first
message, and called by `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>`.

Limits. A conversation may only grow: one that rewrites its history raises, since tokens are trained on as they were sampled.
Rubrics that score a group at once are refused. A reward function that raises counts 0, as everywhere in verifiers. Its time
limits run while the model writes. Only text. The tasksets of its 0.4, which have no `load_environment`, cannot be stepped.
"""

import asyncio
import functools
import json
import queue
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sprl.settings import SettingsError
from sprl.tasks.environments.turns import Turns

_TOOL_CALL = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)
_CUT_SHORT = ('max_turns_reached', 'timeout_reached', 'max_total_completion_tokens_reached', 'prompt_too_long')
_NEEDED = "pip install 'sprl[verifiers]', for Python below 3.14"


@dataclass(frozen=True)
class _Asked:
  """A rollout that waits for the model."""

  messages: Sequence[Any]  # verifiers' messages: the whole conversation
  tools: Sequence[Any]  # verifiers' tool definitions
  reply: asyncio.Future


@dataclass(frozen=True)
class _Loaded:
  """An environment, its problems, and the event loop of all its rollouts."""

  env: Any
  rows: Any  # a Dataset
  loop: asyncio.AbstractEventLoop
  client: type  # of verifiers' Client; its instances ask a queue


class Verifiers:
  """One episode at a time of an environment of verifiers; the seed, modulo the number of problems, fixes the problem."""

  def __init__(self, name: str, loaded: _Loaded):
    self.name, self._loaded = name, loaded
    self._turns = Turns(10**6)  # its own limits end it
    self._rollout, self._events = None, queue.SimpleQueue()

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """The problem's conversation is in info['messages'], its last message the observation, `env_instruction` the tools."""
    self.close()
    self._events = queue.SimpleQueue()
    row = self._loaded.rows[seed % len(self._loaded.rows)]
    client = self._loaded.client(self._events)
    run = self._loaded.env.run_rollout(row, client, 'sprl', {})
    self._rollout = asyncio.run_coroutine_threadsafe(run, self._loaded.loop)
    self._rollout.add_done_callback(self._events.put)
    self._seen: list[dict[str, str]] = []
    asked = self._next()
    if not isinstance(asked, _Asked):
      raise RuntimeError(f'the rollout ended before it asked anything ({asked.get("error") or asked.get("stop_condition")})')
    self._turns.begin()
    info: dict[str, Any] = {'messages': self._grown(asked)}
    if asked.tools:
      info['env_instruction'] = _described(asked.tools)
    return info['messages'][-1]['content'], info

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Goes on with the model's text. Raises RuntimeError where the rollout fails."""
    self._turns.take()
    self._seen.append({'role': 'assistant', 'content': action})
    self._loaded.loop.call_soon_threadsafe(_reply, self._asked, action)
    got = self._next()
    if isinstance(got, _Asked):
      messages = self._grown(got)
      return _joined(messages), 0.0, False, self._turns.end(False), {'messages': messages}
    self._turns.end(True)
    if got.get('error'):
      raise RuntimeError(f'the rollout failed: {got["error"]}')
    stop = str(got.get('stop_condition') or '')
    # A single turn is over after its turn by the same condition that cuts others short.
    truncated = stop in _CUT_SHORT and not (stop == 'max_turns_reached' and getattr(self._loaded.env, 'max_turns', 0) == 1)
    metrics = {name: float(value) for name, value in (got.get('metrics') or {}).items()}
    info = {'metrics': metrics, 'metrics_agg_mode': dict.fromkeys(metrics, 'last'), 'stop_condition': stop}
    return '', float(got['reward']), not truncated, truncated, info

  def close(self) -> None:
    """Ends the rollout under way, if there is one."""
    if self._rollout is not None:
      self._rollout.cancel()
      self._rollout = None

  def _next(self) -> Any:
    """Waits until the rollout asks (an _Asked) or ends (its output)."""
    got = self._events.get()
    if isinstance(got, _Asked):
      self._asked = got
      return got
    return got.result()

  def _grown(self, asked: _Asked) -> list[dict[str, str]]:
    """The messages that are new to the conversation."""
    messages = [_plain(message) for message in asked.messages]
    known = len(self._seen)
    if messages[:known] != self._seen:
      raise RuntimeError('it rewrote the conversation so far; only one that grows can be trained on token by token')
    if not messages[known:]:
      raise RuntimeError('it asked again without a new message')
    self._seen = messages
    return messages[known:]


def verifiers(id: str, args: Mapping[str, Any] | None = None, split: Literal['train', 'test'] = 'train') -> Verifiers:
  """The environment that `verifiers.load_environment(id, **args)` gives; loaded once a process, however many are made.

  Raises SettingsError: no verifiers or one without `load_environment`, no such environment, arguments it refuses, a rubric
  that scores groups; RuntimeError where it is loaded outside the main thread, since it sets signal handlers.
  """
  return Verifiers(f'verifiers {id}', _load(id, json.dumps(dict(args or {}), sort_keys=True), split))


@functools.cache
def _load(id: str, args: str, split: str) -> _Loaded:
  where = f'config.environment.args.id = {id!r}'
  try:
    import verifiers as vf  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise SettingsError(f'{where}: the package verifiers is not installed ({error}): {_NEEDED}') from error
  if not hasattr(vf, 'load_environment'):
    raise SettingsError(f'{where}: verifiers {getattr(vf, "__version__", "")} has no load_environment: {_NEEDED}')
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError(f'{where}: environments of verifiers set signal handlers, so they are to be made in the main thread')
  handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    env = vf.load_environment(id, **json.loads(args))
  except Exception as error:
    raise SettingsError(f'{where}, args = {args}: verifiers cannot load it ({type(error).__name__}: {error})') from error
  finally:  # the handlers of this process are sprl's
    for number, handler in handlers.items():
      signal.signal(number, handler)
  if getattr(env, 'requires_group_rollouts', False):
    raise SettingsError(f'{where}: its rubric scores a group of rollouts at once, which cannot be done an episode at a time')
  rows = env.get_dataset() if split == 'train' else env.get_eval_dataset()
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name=f'verifiers {id}', daemon=True).start()
  return _Loaded(env, rows, loop, _client_class())


# --- between verifiers and text ----------------------------------------------------------------------------------------


def _client_class() -> type:
  from verifiers.clients import Client  # pyright: ignore[reportMissingImports]

  def __init__(self, events):
    self.events = events

  async def get_response(self, prompt, model, sampling_args, tools=None, **_):
    reply = asyncio.get_running_loop().create_future()
    self.events.put(_Asked(prompt, tools or [], reply))
    return await reply

  def unused(self, *_, **__):
    raise NotImplementedError

  # What Client asks of its children serves get_response, which is whole here.
  members = dict.fromkeys(Client.__abstractmethods__, unused)
  return type('AskedClient', (Client,), {**members, '__init__': __init__, 'get_response': get_response})


def _reply(asked: _Asked, action: str) -> None:
  """In the loop's thread: the model's text as verifiers' Response."""
  if not asked.reply.done():  # it may have been cancelled by a time limit
    asked.reply.set_result(_response(action, bool(asked.tools)))


def _response(action: str, with_tools: bool) -> Any:
  from verifiers.types import Response, ResponseMessage, ToolCall  # pyright: ignore[reportMissingImports]

  calls = _tool_calls(action) if with_tools else []
  message = ResponseMessage(
    content=action,
    tool_calls=[ToolCall(id=f'call_{i}', name=n, arguments=json.dumps(a)) for i, (n, a) in enumerate(calls)] or None,
    finish_reason='tool_calls' if calls else 'stop',
    is_truncated=False,
  )
  return Response(id='sprl', created=0, model='sprl', message=message)


def _tool_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
  """(name, arguments) of each well-formed call; what is malformed is text like any other."""
  found = []
  for call in _TOOL_CALL.findall(text):
    try:
      value = json.loads(call)
    except (ValueError, RecursionError):
      continue
    if isinstance(value, dict) and isinstance(value.get('name'), str) and isinstance(value.get('arguments', {}), dict):
      found.append((value['name'], value.get('arguments', {})))
  return found


def _described(tools: Sequence[Any]) -> str:
  lines = [json.dumps({'name': t.name, 'description': t.description, 'parameters': t.parameters}) for t in tools]
  return '\n'.join(
    [
      'You may call these tools, each described in JSON:',
      *lines,
      'Call one by <tool_call>{"name": "its name", "arguments": {"parameter": "value"}}</tool_call> and stop; the result is told '
      'to you in the next turn.',
    ]
  )


def _plain(message: Any) -> dict[str, str]:
  """{role, content} of a message of verifiers. Raises TypeError where its content is not only text."""
  content = message['content']
  if isinstance(content, list) and all(part['type'] == 'text' for part in content):
    content = '\n'.join(part['text'] for part in content)
  if not isinstance(content, str):
    raise TypeError(f'a message of role {message["role"]} has a content that is not text: {content!r:.100}')
  return {'role': message['role'], 'content': content}


def _joined(messages: Sequence[Mapping[str, str]]) -> str:
  return '\n\n'.join(message['content'] for message in messages)
