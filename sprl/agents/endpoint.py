"""The endpoint: an ASGI application of OpenAI's chat completions, over a backend that answers.

    POST {prefix}/v1/chat/completions
    GET  {prefix}/v1/models
    GET  /health

With a token, requests other than /health need the header `Authorization: Bearer TOKEN`, else they get status 401.

If a client disconnects, the endpoint closes the backend's generator of its answer, and so the backend can free what it uses.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, Protocol, runtime_checkable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sprl.agents import protocol
from sprl.agents.protocol import Answer, ChatRequest, Distribution, Partial, Refused
from sprl.agents.tool_calls import before, visible

MAX_BODY = 1 << 25  # bytes of a request
CLIENT_CLOSED = 499  # status, seen by nobody, of a request whose client disconnected


@runtime_checkable
class Backend(Protocol):
  """Answers requests."""

  model: str  # the name of the model

  def distribution(self, episode: str) -> Distribution:
    """Return how the tokens of an episode are drawn. `episode` is that of `answer`."""
    ...

  def answer(self, episode: str, request: ChatRequest) -> AsyncGenerator[Partial | Answer, None]:
    """Yield the text as it grows, if the backend knows it, and then the Answer. Raises Refused.

    `episode` is the part of the URL that names an episode, '' if there is none.
    """
    ...


def application(backend: Backend, prefix: str = '', token: str | None = None) -> Starlette:
  """Return the endpoint. `prefix` may contain `{episode}`. `token` is what clients must show; None: nothing."""

  async def chat(request: Request) -> Any:
    episode = request.path_params.get('episode', '')
    try:
      asked = protocol.read(await _json(request), backend.distribution(episode))
      pieces = backend.answer(episode, asked)
      try:
        first = await _unless_disconnected(request, anext(pieces))
        if asked.stream:
          return _EventStream(_events(asked, first, pieces, backend.model), pieces)
        while not isinstance(first, Answer):
          first = await _unless_disconnected(request, anext(pieces))
      except BaseException:
        await pieces.aclose()
        raise
      await pieces.aclose()
      return JSONResponse(protocol.completion(asked, first, backend.model))
    except Refused as error:
      headers = {'retry-after': '1'} if error.status in (429, 503) else None
      return JSONResponse(error.body(), error.status, headers)
    except (_Disconnected, ClientDisconnect):
      return Response(status_code=CLIENT_CLOSED)

  async def models(request: Request) -> JSONResponse:
    entry = {'id': backend.model, 'object': 'model', 'created': 0, 'owned_by': 'sprl'}
    return JSONResponse({'object': 'list', 'data': [entry]})

  async def health(request: Request) -> JSONResponse:
    return JSONResponse({'status': 'ok'})

  async def unknown(request: Request, error: Exception) -> JSONResponse:
    status = getattr(error, 'status_code', 500)
    return JSONResponse(Refused(status, f'{request.method} {request.url.path}: {_detail(error)}').body(), status)

  return Starlette(
    routes=[
      Route(f'{prefix}/v1/chat/completions', chat, methods=['POST']),
      Route(f'{prefix}/v1/models', models),
      Route('/health', health),
    ],
    middleware=[Middleware(_Authorised, token=token)] if token else [],
    exception_handlers={404: unknown, 405: unknown, Exception: unknown},
  )


class _Authorised:
  """Refuses requests without the token, before their body is read. /health needs none: it says nothing about the model."""

  def __init__(self, app: ASGIApp, token: str):
    self._app, self._expected = app, f'Bearer {token}'.encode()

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    given = Headers(scope=scope).get('authorization', '').encode('latin-1')  # ASGI's encoding of headers
    if scope['path'] == '/health' or hmac.compare_digest(given, self._expected):
      await self._app(scope, receive, send)
      return
    refused = Refused(
      401, 'expected the header `Authorization: Bearer TOKEN`, with the token of this server', code='invalid_api_key'
    )
    await JSONResponse(refused.body(), 401, {'www-authenticate': 'Bearer'})(scope, receive, send)


def _detail(error: Exception) -> str:
  return str(getattr(error, 'detail', '')) or f'{type(error).__name__}: {error}'


async def _json(request: Request) -> Any:
  body = bytearray()
  async for part in request.stream():
    body += part
    if len(body) > MAX_BODY:
      raise Refused(413, f'the request has more than {MAX_BODY} bytes')
  try:
    found = json.loads(body.decode())
    if b'\\u' in body:
      json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON, but UTF-8 cannot encode it
  except (ValueError, RecursionError) as error:
    raise Refused(400, f'the body is not JSON in UTF-8: {error}') from None
  return found


async def _events(
  asked: ChatRequest, first: Partial | Answer, pieces: AsyncIterator[Partial | Answer], model: str
) -> AsyncIterator[str]:
  """Yield the server-sent events of a stream."""
  chunks = protocol.Chunks(asked, model)
  piece = first
  try:
    while not isinstance(piece, Answer):
      text = before(piece.text.rstrip('\ufffd'), asked.stop)  # U+FFFD: a character whose bytes are not complete
      for chunk in chunks.delta(text if asked.calls == 0 else visible(text)):
        yield f'data: {json.dumps(chunk)}\n\n'
      piece = await anext(pieces)
    for chunk in chunks.end(piece):
      yield f'data: {json.dumps(chunk)}\n\n'
  except Refused as error:
    yield f'data: {json.dumps(error.body())}\n\n'
  yield 'data: [DONE]\n\n'


# --- clients that disconnect -----------------------------------------------------------------------------------------------


class _Disconnected(Exception):
  """The client closed the connection."""


async def _unless_disconnected[T](request: Request, wanted: Awaitable[T]) -> T:
  """Return what `wanted` returns. Raises _Disconnected, and cancels `wanted`, if the client closes the connection before."""
  return await _unless(request.receive, wanted)


async def _unless[T](receive: Any, wanted: Awaitable[T]) -> T:
  task, gone = asyncio.ensure_future(wanted), asyncio.ensure_future(_disconnect(receive))
  try:
    await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
      return task.result()
    raise _Disconnected
  finally:
    for each in (task, gone):
      each.cancel()
    await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Any) -> None:
  while (await receive())['type'] != 'http.disconnect':
    pass


class _EventStream(Response):
  """Sends events until there are no more or the client disconnects; then closes the generator `source` behind them."""

  def __init__(self, events: AsyncIterator[str], source: AsyncGenerator):
    super().__init__(headers={'content-type': 'text/event-stream; charset=utf-8', 'cache-control': 'no-cache'})
    self._events, self._source = events, source

  async def __call__(self, scope, receive, send) -> None:
    headers = [(key, value) for key, value in self.raw_headers if key != b'content-length']
    try:
      await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
      await _unless(receive, self._send_all(send))
    except (_Disconnected, OSError):
      pass
    finally:
      await self._source.aclose()

  async def _send_all(self, send) -> None:
    async for event in self._events:
      await send({'type': 'http.response.body', 'body': event.encode(), 'more_body': True})
    await send({'type': 'http.response.body', 'body': b'', 'more_body': False})
