"""Environments of verifiers (PrimeIntellect-ai/verifiers, 0.1.14 to 0.3) by id, as `load_environment` returns them.

They have no `step`: they run a whole rollout and ask a client for each answer of the model. Here the client waits instead. A
rollout runs in an event loop in its own thread. `reset` starts it and returns its first request; `step` gives it the model's
text and returns its next request. The reward of the rubric comes with the last step.

    caller    reset ----------> observation    step(action) -----------> observation ...   step -> reward
    rollout     run_rollout ... get_response (waits) ... env_response ... get_response (waits) ... score_rollout

This works for SingleTurnEnv, MultiTurnEnv, ToolEnv and their subclasses. Tools are described in the first message, and called by
`<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>`.

Limits. A conversation may only grow: one that rewrites its history raises, because training uses the sampled tokens. Rubrics that
score a group at once are refused. A reward function that raises counts 0, as in verifiers. Its time limits include the time in
which the model writes. Only text is supported. verifiers 0.4 has no `load_environment` and is not supported.
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

from sprl.config import SettingsError
from sprl.tasks.environments.turns import Turns

_TOOL_CALL = re.compile(r'<tool_call>(.*?)</tool_call>', re.DOTALL)
_CUT_SHORT = ('max_turns_reached', 'timeout_reached', 'max_total_completion_tokens_reached', 'prompt_too_long')
_NEEDED = 'make install EXTRAS=verifiers, for Python below 3.14'


@dataclass(frozen=True)
class _Asked:
  """A request of a rollout that waits for the model."""

  messages: Sequence[Any]  # the whole conversation, as messages of verifiers
  tools: Sequence[Any]  # tool definitions of verifiers
  reply: asyncio.Future


@dataclass(frozen=True)
class _Loaded:
  """An environment, its problems, and the event loop of its rollouts."""

  env: Any
  rows: Any  # a Dataset
  loop: asyncio.AbstractEventLoop
  client: type  # a subclass of verifiers' Client that puts requests into a queue


class Verifiers:
  """Plays one episode of an environment of verifiers at a time. The problem is number `seed` modulo their count."""

  def __init__(self, name: str, loaded: _Loaded):
    self.name, self._loaded = name, loaded
    self._turns = Turns(10**6)  # the environment has its own limits
    self._rollout, self._events = None, queue.SimpleQueue()

  def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
    """Start the rollout. info['messages'] is the conversation, its last message the observation, `env_instruction` the tools."""
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
    """Continue with the model's text. Raises RuntimeError if the rollout fails."""
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
    # A single-turn environment ends by the condition that truncates others.
    truncated = stop in _CUT_SHORT and not (stop == 'max_turns_reached' and getattr(self._loaded.env, 'max_turns', 0) == 1)
    metrics = {name: float(value) for name, value in (got.get('metrics') or {}).items()}
    info = {'metrics': metrics, 'metrics_agg_mode': dict.fromkeys(metrics, 'last'), 'stop_condition': stop}
    return '', float(got['reward']), not truncated, truncated, info

  def close(self) -> None:
    """Cancel the rollout in progress, if any."""
    if self._rollout is not None:
      self._rollout.cancel()
      self._rollout = None

  def _next(self) -> Any:
    """Wait until the rollout asks (an _Asked) or ends (its output)."""
    got = self._events.get()
    if isinstance(got, _Asked):
      self._asked = got
      return got
    return got.result()

  def _grown(self, asked: _Asked) -> list[dict[str, str]]:
    """Return the new messages of the conversation."""
    messages = [_plain(message) for message in asked.messages]
    known = len(self._seen)
    if messages[:known] != self._seen:
      raise RuntimeError('the rollout rewrote the conversation: expected one that only grows')
    if not messages[known:]:
      raise RuntimeError('the rollout asked again without a new message')
    self._seen = messages
    return messages[known:]


def verifiers(id: str, args: Mapping[str, Any] | None = None, split: Literal['train', 'test'] = 'train') -> Verifiers:
  """Return `verifiers.load_environment(id, **args)`, loaded once per process.

  Raises SettingsError if verifiers or its `load_environment` is missing, the environment or its arguments are refused, or its
  rubric scores groups. Raises RuntimeError outside the main thread, because verifiers sets signal handlers.
  """
  return Verifiers(f'verifiers {id}', _load(id, json.dumps(dict(args or {}), sort_keys=True), split))


@functools.cache
def _load(id: str, args: str, split: str) -> _Loaded:
  where = f'config.task.args.id = {id!r}'
  try:
    import verifiers as vf  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise SettingsError(f'{where}: the package verifiers is not installed ({error}): {_NEEDED}') from error
  if not hasattr(vf, 'load_environment'):
    raise SettingsError(f'{where}: verifiers {getattr(vf, "__version__", "")} has no load_environment: {_NEEDED}')
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError(f'{where}: expected to be made in the main thread: verifiers sets signal handlers')
  handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    env = vf.load_environment(id, **json.loads(args))
  except Exception as error:
    raise SettingsError(f'{where}, args = {args}: verifiers cannot load it ({type(error).__name__}: {error})') from error
  finally:  # restores sprl's handlers
    for number, handler in handlers.items():
      signal.signal(number, handler)
  if getattr(env, 'requires_group_rollouts', False):
    raise SettingsError(f'{where}: its rubric scores a group of rollouts at once, expected one that scores each rollout')
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

  # The abstract methods of Client only serve its get_response, which is replaced here.
  members = dict.fromkeys(Client.__abstractmethods__, unused)
  return type('AskedClient', (Client,), {**members, '__init__': __init__, 'get_response': get_response})


def _reply(asked: _Asked, action: str) -> None:
  """Give the model's text to the waiting rollout. Runs in the thread of the event loop."""
  if not asked.reply.done():  # a time limit may have cancelled it
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
  """Return (name, arguments) of each well-formed call; malformed calls count as text."""
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
  """Return {role, content} of a message of verifiers. Raises TypeError if its content is not text."""
  content = message['content']
  if isinstance(content, list) and all(part['type'] == 'text' for part in content):
    content = '\n'.join(part['text'] for part in content)
  if not isinstance(content, str):
    raise TypeError(f'a message of role {message["role"]} has a content that is not text: {content!r:.100}')
  return {'role': message['role'], 'content': content}


def _joined(messages: Sequence[Mapping[str, str]]) -> str:
  return '\n\n'.join(message['content'] for message in messages)
