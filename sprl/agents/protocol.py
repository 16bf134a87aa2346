"""Requests and responses of OpenAI's chat completions as data: `read` checks a request, the other functions write JSON.

The engine draws all tokens from one distribution, so a request cannot choose its own: `read` refuses another temperature, filters
and stop strings, and says which setting to change. Fields that do not change the answer, such as `user`, are ignored.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sprl.agents.tool_calls import cut, tool_calls
from sprl.config import Sampling

IGNORED = (
  'metadata', 'model', 'prompt_cache_key', 'safety_identifier', 'service_tier', 'store', 'user',
)  # fmt: skip
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_OFF = {  # fields that are accepted with these values only, because the engine has no such feature
  'n': (1,),
  'frequency_penalty': (0,),
  'presence_penalty': (0,),
  'logit_bias': ({},),
  'top_logprobs': (0,),
  'response_format': ({'type': 'text'},),
  'modalities': (['text'],),
}

Message = dict[str, Any]


class Refused(Exception):
  """A request that is not answered. `status` is the HTTP status, `code` names the reason for programs."""

  def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
    super().__init__(message)
    self.status, self.param, self.code = status, param, code

  def body(self) -> dict[str, Any]:
    """Return the error in OpenAI's form."""
    kind = 'invalid_request_error' if self.status < 500 and self.status != 429 else 'server_error'
    return {'error': {'message': str(self), 'type': kind, 'param': self.param, 'code': self.code}}


@dataclass(frozen=True)
class Distribution:
  """How the engine draws the tokens of a request."""

  sampling: Sampling
  evaluation: bool = False  # whether `config.eval` sets temperature and top_p; evaluation has no other filter

  def setting(self, key: str) -> str:
    """Return the setting of a field of `sampling`."""
    if not self.evaluation:
      return f'config.sampling.{key}'
    return f'config.eval.{key}' if key in ('temperature', 'top_p') else 'evaluation sets none'


@dataclass(frozen=True)
class ChatRequest:
  """A request that the endpoint can answer."""

  messages: tuple[Message, ...]  # in the form of `canonical`
  tools: tuple[Mapping[str, Any], ...] = ()  # offered in the prompt
  calls: int | None = 0  # most tool calls that the message keeps; 0: the text is not parsed; None: all
  max_tokens: int | None = None
  template_args: Mapping[str, Any] = field(default_factory=dict)
  stream: bool = False
  usage: bool = False  # whether a stream ends with the numbers of tokens
  logprobs: bool = False
  token_ids: bool = False  # whether the response has the ids of prompt and answer
  stop: tuple[str, ...] = ()  # strings that end the answer: its tokens include the string, its text does not


@dataclass(frozen=True)
class Answer:
  """The model's answer to a request."""

  message: Message  # as it is sent
  finish: str  # stop, length or tool_calls
  prompt_ids: Sequence[int]
  ids: Sequence[int]
  logprobs: Sequence[float]  # of each id, under the distribution that it was drawn from
  pieces: Sequence[str]  # the text of each id


@dataclass(frozen=True)
class Partial:
  """The text of an answer that is not finished."""

  text: str


# --- requests --------------------------------------------------------------------------------------------------------------


def read(body: Any, distribution: Distribution) -> ChatRequest:
  """Return the request of a JSON body. Raises Refused (400) if a field is malformed, or if the engine cannot do what it asks."""
  if not isinstance(body, Mapping):
    raise Refused(400, 'expected a JSON object')
  given = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
  for key, accepted in _OFF.items():
    value = given.pop(key, accepted[0])
    if value not in accepted:
      raise Refused(400, f'{key} = {value!r:.200}: this endpoint accepts {accepted[0]!r} only', key)
  _check_distribution(given, distribution)
  messages, tools = given.pop('messages', None), given.pop('tools', [])
  if not isinstance(messages, list) or not messages:
    raise Refused(400, 'messages: expected a list of at least one message', 'messages')
  choice, options = given.pop('tool_choice', 'auto'), given.pop('stream_options', {})
  if choice not in ('none', 'auto'):
    raise Refused(400, f"tool_choice = {choice!r:.200}: expected 'none' or 'auto'", 'tool_choice')
  if not isinstance(tools, list) or not all(isinstance(t, Mapping) and isinstance(t.get('function'), Mapping) for t in tools):
    raise Refused(400, 'tools: expected a list of {"type": "function", "function": {...}}', 'tools')
  limits = {key: given.pop(key) for key in ('max_completion_tokens', 'max_tokens') if key in given}
  for key, limit in limits.items():
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
      raise Refused(400, f'{key} = {limit!r:.200}: expected a whole number above 0', key)
  template_args = given.pop('chat_template_kwargs', {})
  for key, value in (('chat_template_kwargs', template_args), ('stream_options', options)):
    if not isinstance(value, Mapping):
      raise Refused(400, f'{key} = {value!r:.200}: expected an object', key)
  most = None if _flag(given, 'parallel_tool_calls', default=True) else 1
  request = ChatRequest(
    messages=tuple(canonical(message, f'messages[{i}]') for i, message in enumerate(messages)),
    tools=tuple(tools),
    calls=most if tools and choice == 'auto' else 0,
    max_tokens=min(limits.values(), default=None),
    template_args=dict(template_args),
    stream=_flag(given, 'stream'),
    usage=_flag(dict(options), 'include_usage', 'stream_options.'),
    logprobs=_flag(given, 'logprobs'),
    token_ids=_flag(given, 'return_token_ids'),
    stop=distribution.sampling.stop,
  )
  if given:
    raise Refused(400, f'{", ".join(sorted(given))}: this endpoint has no such field', min(given))
  return request


def _flag(given: dict[str, Any], key: str, within: str = '', default: bool = False) -> bool:
  """Remove a flag from `given` and return it, or `default` if it has no value. `within` precedes the key in an error.

  Raises Refused if it is not a boolean.
  """
  value = given.pop(key, None)
  if not isinstance(value, bool | None):
    raise Refused(400, f'{within}{key} = {value!r:.200}: expected true or false', f'{within}{key}')
  return default if value is None else value


def _check_distribution(given: dict[str, Any], distribution: Distribution) -> None:
  """Remove the fields of the distribution from a request. Raises Refused if one differs from the engine's."""
  sampling = distribution.sampling
  engine = {'temperature': sampling.temperature, 'top_p': sampling.top_p, 'top_k': sampling.top_k or -1, 'min_p': sampling.min_p}
  for key, value in engine.items():
    asked = given.pop(key, value)
    if asked != value and not (key == 'top_k' and asked in (0, -1) and value == -1):
      which = 'of an evaluation ' if distribution.evaluation else ''
      one = f'all requests {which}draw from one distribution, whose {key} is {value!r}'
      why = f'{one} ({distribution.setting(key)}). Leave the field out'
      raise Refused(400, f'{key} = {asked!r:.200}: {why}', key, 'unsupported_value')
  stop = given.pop('stop', None) or []
  if stop and ([stop] if isinstance(stop, str) else stop) != list(sampling.stop):
    why = f'the stop strings are those of config.sampling.stop = {sampling.stop!r}. Leave the field out'
    raise Refused(400, f'stop = {stop!r:.200}: {why}', 'stop', 'unsupported_value')
  if 'seed' in given:
    raise Refused(400, 'seed: the random numbers are those of config.seed. Leave the field out', 'seed', 'unsupported_value')


def canonical(message: Any, where: str) -> Message:
  """Return a message with the fields that a chat template reads: equal conversations have equal canonical messages.

  Text parts are joined. An empty name, tool_call_id or reasoning_content is left out. The arguments of tool calls are decoded;
  those that are not JSON stay text. Raises Refused if a field has a wrong form.
  """
  if not isinstance(message, Mapping) or message.get('role') not in _ROLES:
    raise Refused(400, f'{where}: expected an object with a role of {", ".join(_ROLES)}', where)
  role, calls = message['role'], message.get('tool_calls') or []
  kept: Message = {'role': 'system' if role == 'developer' else role, 'content': _text(message.get('content'), where)}
  for key in ('name', 'tool_call_id', 'reasoning_content'):
    if message.get(key):
      kept[key] = str(message[key])
  if message.get('function_call'):
    raise Refused(400, f'{where}.function_call: expected the field that replaces it, tool_calls', where)
  if not isinstance(calls, list):
    raise Refused(400, f'{where}.tool_calls: expected a list of calls', where)
  if calls:
    kept['tool_calls'] = [_tool_call(call, f'{where}.tool_calls') for call in calls]
  return kept


def _text(content: Any, where: str) -> str:
  if content is None or isinstance(content, str):
    return content or ''
  match content:
    case [*parts] if all(isinstance(part, Mapping) and isinstance(part.get('text'), str) for part in parts):
      return ''.join(part['text'] for part in parts)
  raise Refused(400, f'{where}.content: expected text, or a list of parts with text; this model reads nothing else', where)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
  match call:
    case {'function': {'name': str() as name, **rest}}:
      arguments = rest.get('arguments') or {}
      if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template gets the text that a model wrote wrongly
          arguments = json.loads(arguments)
      return {'id': str(call.get('id') or ''), 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
  raise Refused(400, f'{where}: expected {{"id", "type": "function", "function": {{"name", "arguments"}}}}', where)


# --- answers ---------------------------------------------------------------------------------------------------------------


def message_of(text: str, calls: int | None, name: str, stop: Sequence[str] = ()) -> Message:
  """Return the message of a model's text with at most `calls` tool calls (None: all). `name` begins their ids.

  Calls are parsed before the text is cut at a stop string, because `</tool_call>` may be one.
  """
  content, found = (text, []) if calls == 0 else tool_calls(text)
  if not found:
    return {'role': 'assistant', 'content': cut(text, stop)}
  written = [
    {'id': f'call_{name}_{i}', 'type': 'function', 'function': {'name': call.name, 'arguments': json.dumps(call.arguments)}}
    for i, call in enumerate(found[:calls])
  ]
  return {'role': 'assistant', 'content': content or None, 'tool_calls': written}


def completion(request: ChatRequest, answer: Answer, model: str) -> dict[str, Any]:
  """Return the response to a request that does not stream."""
  choice = {'index': 0, 'message': {**answer.message, 'refusal': None}, **_end_of_choice(request, answer)}
  whole = {**_head('chat.completion', model), 'choices': [choice], 'usage': _usage(answer)}
  return {**whole, 'prompt_token_ids': list(answer.prompt_ids)} if request.token_ids else whole


class Chunks:
  """Writes the chunks of one stream: `delta` for each Partial, then `end` for the Answer."""

  def __init__(self, request: ChatRequest, model: str):
    self._request, self._head, self._sent = request, _head('chat.completion.chunk', model), 0

  def delta(self, content: str) -> list[dict[str, Any]]:
    """Return the chunks that extend what was sent to `content`."""
    if len(content) <= self._sent:
      return []
    delta: Message = {'role': 'assistant'} if self._sent == 0 else {}
    new, self._sent = content[self._sent :], len(content)
    return [self._chunk(delta | {'content': new}, {'finish_reason': None})]

  def end(self, answer: Answer) -> list[dict[str, Any]]:
    """Return the last chunks: the rest of the content, the tool calls, the reason, and the usage if it was asked for."""
    first: Message = {'role': 'assistant', 'content': ''} if self._sent == 0 and not answer.message['content'] else {}
    chunks = self.delta(answer.message['content'] or '')
    if calls := answer.message.get('tool_calls'):
      chunks.append(self._chunk({**first, 'tool_calls': [{'index': i, **call} for i, call in enumerate(calls)]}, {}))
      first = {}
    chunks.append(self._chunk(first, _end_of_choice(self._request, answer)))
    if self._request.token_ids:
      chunks[-1]['prompt_token_ids'] = list(answer.prompt_ids)
    if self._request.usage:
      chunks.append({**self._head, 'choices': [], 'usage': _usage(answer)})
    return chunks

  def _chunk(self, delta: Message, end: Mapping[str, Any]) -> dict[str, Any]:
    return {**self._head, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': None, **end}]}


def _head(kind: str, model: str) -> dict[str, Any]:
  return {'id': f'chatcmpl-{uuid.uuid4().hex}', 'object': kind, 'created': int(time.time()), 'model': model}


def _end_of_choice(request: ChatRequest, answer: Answer) -> dict[str, Any]:
  end: dict[str, Any] = {'finish_reason': answer.finish, 'logprobs': None}
  if request.logprobs:
    content = [
      {'token': piece, 'logprob': float(logprob), 'bytes': _bytes(piece), 'top_logprobs': []}
      for piece, logprob in zip(answer.pieces, answer.logprobs)
    ]
    end['logprobs'] = {'content': content, 'refusal': None}
  return {**end, 'token_ids': list(answer.ids)} if request.token_ids else end


def _bytes(piece: str) -> list[int] | None:
  """Return the bytes of a token's text; None for a part of a character, whose text does not have its bytes."""
  return None if '\ufffd' in piece else list(piece.encode(errors='replace'))


def _usage(answer: Answer) -> dict[str, int]:
  prompt, completion = len(answer.prompt_ids), len(answer.ids)
  return {'prompt_tokens': prompt, 'completion_tokens': completion, 'total_tokens': prompt + completion}
