"""The endpoint's HTTP input: bodies that are nearly requests, other paths and methods, and bytes that are no HTTP.

Every request is answered: with a completion, or with an error of the client in OpenAI's form. No input gives status 500, and the
server answers a good request after it. A fifth of the cases goes to an endpoint with a token, as sprl.serve makes it: without the
token a request gets status 401, except at /health.
"""

import asyncio
import contextlib
import errno
import json
import random
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hermes
import values

from sprl.agents import protocol
from sprl.agents.endpoint import application
from sprl.agents.engine_thread import encoded, split
from sprl.agents.protocol import Answer, Partial
from sprl.agents.server import ServerThread
from sprl.config import Sampling
from sprl.io.tokenizer import Tokenizer

SECONDS = 30.0
SAMPLING = Sampling(max_prompt=128, max_tokens=64, temperature=0.7, stop=('END',))
CALL = {'id': 'call_1', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1, "b": [2]}'}}
REQUEST = {
  'model': 'tiny', 'messages': [
    {'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': [{'type': 'text', 'text': '1 + 2?'}]},
    {'role': 'assistant', 'content': None, 'tool_calls': [CALL], 'reasoning_content': 'Hm.'},
    {'role': 'tool', 'tool_call_id': 'call_1', 'name': 'add', 'content': '3'},
  ],
  'tools': [hermes.ADD], 'tool_choice': 'auto', 'max_tokens': 16, 'max_completion_tokens': 8, 'temperature': 0.7, 'top_p': 1.0,
  'top_k': -1, 'n': 1, 'stop': ['END'], 'stream': False, 'stream_options': {'include_usage': True}, 'logprobs': True,
  'chat_template_kwargs': {'enable_thinking': False}, 'return_token_ids': True, 'user': 'u', 'metadata': {'a': 'b'},
  'response_format': {'type': 'text'}, 'logit_bias': {}, 'seed': None,
}  # fmt: skip
WRITTEN = (
  'Three.',
  '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
  '<tool_call>[',
  '',
  'é🙂\ufffd',
  'x <tool_call>',
)
WRITTEN += (
  '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
  '<tool_call>' + '[' * 20_000 + '</tool_call>',
)
HEADERS = (
  b'Content-Length: 5',
  b'Content-Length: -1',
  b'Content-Length: 99999999999999999999',
  b'Transfer-Encoding: chunked',
  b'Expect: 100-continue',
)
HEADERS += (
  b'Host:',
  b'\xff\xfe: x',
  b'X: ' + b'y' * 70_000,
  b'Connection: upgrade\r\nUpgrade: websocket',
  b'Content-Encoding: gzip',
  b': x',
)
TOKEN = 'sk-1~!"\\{x}='  # visible ASCII characters, which sprl.serve accepts
RIGHT = f'Bearer {TOKEN}'.encode()
WRONG = (
  b'',
  b'Bearer',
  b'Bearer ',
  b'Bearer x',
  RIGHT[:-1],
  RIGHT + b'x',
  RIGHT.lower(),
  RIGHT.replace(b' ', b'  '),
  RIGHT.replace(b'Bearer', b'Basic'),
)
WRONG += (
  TOKEN.encode(),
  RIGHT + b', ' + RIGHT,
  RIGHT + b'\xe9',
  b'Bearer \xff\xfe',
  'Bearer é🙂'.encode(),
  b'Bearer ' + b'x' * 70_000,
  RIGHT * 1000,
)
WAIT, LIMIT = 0.1, 10.0  # seconds for an answer to random bytes before the end of the input is sent; for an answer to anything
GOOD = json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}).encode()


class Backend:
  """A backend that reads requests as that of an engine does, and writes a text that the case chooses."""

  model = 'tiny'

  def __init__(self, tokenizer: Tokenizer):
    self.tokenizer, self.text = tokenizer, 'x'

  def distribution(self, episode):
    return protocol.Distribution(SAMPLING)

  async def answer(self, episode, request):
    ids = encoded(self.tokenizer, request)
    *_, room = split(ids, SAMPLING)
    for n in range(3, len(self.text), max(3, len(self.text) // 5)):
      yield Partial(self.text[:n])
    message = protocol.message_of(self.text, request.calls, '0', request.stop)
    finish = 'tool_calls' if 'tool_calls' in message else 'stop'
    yield Answer(message, finish, ids, list(range(min(room, request.max_tokens or room))), [-1.0], ['x'])


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  hermes.write_tokenizer(folder)
  backend = Backend(Tokenizer.load(folder))
  public, guarded = application(backend, '/{episode}'), application(backend, token=TOKEN)
  with ServerThread(public) as one, ServerThread(guarded) as other:
    yield SimpleNamespace(backend=backend, public=(public, one.port), guarded=(guarded, other.port))


def authorization(rng: random.Random) -> list[bytes]:
  """Return the values of the Authorization headers of a request: none, the right one, a wrong one, or several."""
  wrong = lambda: rng.choice((*WRONG, rng.randbytes(rng.randint(0, 40)), values.changed_bytes(rng, RIGHT)))  # noqa: E731
  match rng.randrange(5):
    case 0:
      return []
    case 1 | 2:
      return [RIGHT]
    case 3:
      return [wrong()]
  return [rng.choice((RIGHT, wrong())) for _ in range(rng.choice((2, 2, 3, 50)))]


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  given = authorization(rng) if rng.random() < 0.2 else None
  body: Any = {key: REQUEST[key] for key in REQUEST if key == 'messages' or rng.random() < 0.3}
  if rng.random() < 0.8:
    body = values.changed_json(rng, body)
  if isinstance(body, dict) and rng.random() < 0.1:
    names = (
      'messages',
      'tools',
      'self',
      'add_generation_prompt',
      'template_args',
      'documents',
      'x',
      'bos_token',
      'enable_thinking',
    )
    body['chat_template_kwargs'] = {rng.choice(names): values.value(rng, 2, lone=True)}
  if isinstance(body, dict) and rng.random() < 0.1:
    body[rng.choice((*REQUEST, values.text(rng, lone=True)))] = values.value(rng, 2, lone=True)
  data = values.as_json(body)
  if rng.random() < 0.15:
    data = values.changed_bytes(rng, data)
  if rng.random() < 0.03:
    data = rng.choice(
      (b'', b'null', b'\xff\xfe{\x00}\x00', b'[' * 10**6, b'x' * ((1 << 25) + 1), b'{"messages": 1' + b'1' * 5000 + b'}')
    )
  path = '/3/v1/chat/completions' if given is None else '/v1/chat/completions'
  made = {'method': 'POST', 'path': path, 'body': data, 'text': rng.choice(WRITTEN), 'authorization': given}
  if rng.random() < (0.05 if given is None else 0.2):
    made |= {
      'method': rng.choice(('GET', 'PUT', 'OPTIONS', 'HEAD', 'é')),
      'path': rng.choice(('/', '/health', '/v1/models', '/x/v1/models', '//', '/é')),
    }
  if rng.random() < 0.1:
    head = f'POST {made["path"]} HTTP/1.1\r\nHost: x\r\n'.encode()
    size = b'Content-Length: %d' % len(data[:100_000])
    lines = b'\r\n'.join(size if rng.random() < 0.4 else rng.choice(HEADERS) for _ in range(rng.choice((1, 1, 2))))
    lines += b''.join(b'\r\nAuthorization: ' + each for each in given or ())
    made['raw'] = head + lines + b'\r\n\r\n' + data[:100_000]
    if rng.random() < 0.5:
      made['raw'] = values.changed_bytes(rng, made['raw'])
  return made


def check(world: Any, case: dict[str, Any]) -> str:
  world.backend.text, given = case['text'], case['authorization']
  app, port = world.public if given is None else world.guarded
  if 'raw' in case:
    return f'raw: {raw(world, port, case)}'
  status, data = asyncio.run(request(app, case))
  text = data.decode()  # UTF-8
  assert status in (200, 400, 401, 404, 405, 413), (status, text[:500])
  if case['path'] == '/health' or given is None or (given and all(each == RIGHT for each in given)):
    assert status != 401, text[:500]
  elif RIGHT not in given:  # of several headers with the right one among them, any may count
    assert status == 401, (status, text[:500])
  if case['path'].endswith('completions') and (case['method'] == 'POST' or status == 401):
    whole(status, text)
  return f'status {status}'


def whole(status: int, text: str) -> None:
  """Assert that an answer has the form that clients read."""
  if status != 200:
    assert json.loads(text)['error']['message'], text[:500]
  elif text.startswith('data: '):
    *events, last, end = text.split('\n\n')
    assert (last, end) == ('data: [DONE]', ''), text[-200:]
    assert all(isinstance(json.loads(event.removeprefix('data: ')), dict) for event in events)
  else:
    choice = json.loads(text)['choices'][0]
    assert choice['message']['role'] == 'assistant'
    assert choice['finish_reason'] in ('stop', 'tool_calls')


async def request(app: Any, case: dict[str, Any]) -> tuple[int, bytes]:
  """Call an ASGI application. Return (status, body). An exception that the application raises is raised here."""
  path, half = case['path'], len(case['body']) // 2
  parts = [{'type': 'http.request', 'body': case['body'][:half], 'more_body': True}]
  parts += [{'type': 'http.request', 'body': case['body'][half:], 'more_body': False}]
  sent: list[dict[str, Any]] = []

  async def receive():
    if parts:
      return parts.pop(0)
    await asyncio.sleep(3600)

  async def send(message):
    sent.append(message)

  headers = [(b'authorization', each) for each in case['authorization'] or ()]
  scope = {'type': 'http', 'method': case['method'], 'path': path, 'raw_path': path.encode(), 'query_string': b'',
           'headers': headers, 'scheme': 'http', 'http_version': '1.1', 'root_path': '', 'server': ('x', 80),
           'client': ('x', 1)}  # fmt: skip
  await app(scope, receive, send)
  return sent[0]['status'], b''.join(message.get('body', b'') for message in sent[1:])


def raw(world: Any, port: int, case: dict[str, Any]) -> str:
  """Send the bytes of a case to a server, then a good request on another connection. Return the status of the first."""
  answer = answered(port, case['raw'], WAIT)
  world.backend.text = 'x'
  path = '/3/v1/chat/completions' if case['authorization'] is None else '/v1/chat/completions'
  head = f'POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(GOOD)}\r\nConnection: close\r\n'.encode()
  good = answered(port, head + b'Authorization: ' + RIGHT + b'\r\n\r\n' + GOOD, LIMIT)
  assert good.startswith(b'HTTP/1.1 200'), good[:200]
  status = answer[9:12].decode(errors='replace')
  assert not status.startswith('5') or status in ('501', '505'), answer[:500]
  if case['authorization'] is not None and status == '200':
    assert TOKEN.encode() in case['raw'], answer[:500]
  return status or 'closed'


def answered(port: int, data: bytes, wait: float) -> bytes:
  """Send bytes, and the end of the input after `wait` seconds without an answer: the server may wait for the rest of a request.

  Returns the first part of the answer; nothing if the server closes the connection, as it does at the end of the input. Raises
  TimeoutError if the server does neither within LIMIT.
  """
  with socket.create_connection(('127.0.0.1', port), timeout=LIMIT) as connection:
    try:
      connection.sendall(data)
      if not select.select([connection], [], [], wait)[0]:
        connection.shutdown(socket.SHUT_WR)
      return connection.recv(1 << 20)
    except ConnectionError:
      return b''
    except OSError as error:
      if error.errno == errno.ENOTCONN:  # from `shutdown`, where the server has reset the connection
        return b''
      raise
