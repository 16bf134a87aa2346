"""A thread that decodes the requests of a server on one engine, and the backend of an endpoint over it.

Requests may arrive, and be cancelled, at any time. Between two chunks the thread gives new requests to the engine, aborts the
cancelled ones, which frees their rows, and reports the tokens of all others.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from sprl.agents.protocol import Answer, ChatRequest, Distribution, Partial, Refused, message_of
from sprl.config import Sampling
from sprl.io.tokenizer import TemplateArgsError, Tokenizer, TokenizerError
from sprl.sampler.engine import Engine
from sprl.types import Completion, Request

log = logging.getLogger(__name__)

type News = Int[np.ndarray, ' C'] | Completion | Exception  # tokens so far, the end, or why there is none


class Overloaded(Exception):
  """The server accepts no request now: all places are taken, or the engine has stopped."""


@dataclass(frozen=True)
class _Job:
  request: Request
  tell: Callable[[News], Any]  # called in the engine's thread
  grows: bool  # whether to tell the tokens so far after each chunk


class EngineThread:
  """Runs an engine in a thread. A context manager; leaving ends the thread after the chunk under way.

  Args:
    engine: the engine. Only the thread may call it.
    queue: requests that may wait beside those that decode.
  """

  def __init__(self, engine: Engine, queue: int):
    self._engine, self._most, self._places = engine, engine.capacity + queue, 0
    self._changed = threading.Condition()
    self._jobs: dict[int, _Job] = {}  # by uid: all that are not finished
    self._new: list[_Job] = []
    self._cancelled: set[int] = set()
    self._uids = itertools.count()
    self._ends = False
    self.error: Exception | None = None  # the error that ended the thread
    self.ended = threading.Event()
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

  def __enter__(self) -> 'EngineThread':
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    with self._changed:
      self._ends = True
      self._changed.notify()
    self._thread.join()

  @property
  def load(self) -> int:
    """Number of requests that hold a place: their prompts are being encoded, or they wait or decode."""
    return self._places

  @contextlib.contextmanager
  def place(self) -> Iterator[None]:
    """Hold a place for a request from its arrival to its end. Raises Overloaded if all are taken, or the engine has stopped."""
    with self._changed:
      self._check_runs()
      if self._places >= self._most:
        raise Overloaded(f'{self._places} requests wait or run, the most that this server accepts')
      self._places += 1
    try:
      yield
    finally:
      with self._changed:
        self._places -= 1

  def submit(
    self, prompt: Int[np.ndarray, ' P'], given: Int[np.ndarray, ' N'], max_tokens: int, tell: Callable[[News], Any], grows: bool
  ) -> int:
    """Queue a request and return its uid. The caller holds a `place` for it.

    `given` are the tokens behind the prompt that are not sampled. At most `max_tokens` tokens follow them. `tell` is called in
    the engine's thread, the last time with the Completion or an error; if the answer `grows`, also after each chunk, with the
    tokens so far. Raises Overloaded if the engine has stopped, and SettingsError if the request does not fit the engine.
    """
    with self._changed:
      self._check_runs()
      uid = next(self._uids)
      job = _Job(Request(uid, uid, prompt, max_tokens, given), tell, grows)
      self._engine.config.check(job.request)
      self._jobs[uid] = job
      self._new.append(job)
      self._changed.notify()
    return uid

  def cancel(self, uid: int) -> None:
    """End a request and free its row. Does nothing if the request has ended."""
    with self._changed:
      if self._jobs.pop(uid, None) is not None:
        self._cancelled.add(uid)
        self._changed.notify()

  def _check_runs(self) -> None:
    if self._ends or self.error is not None:
      raise Overloaded('the engine has stopped')

  def _run(self) -> None:
    try:
      while self._turn():
        pass
    except Exception as error:
      log.exception('the engine failed')
      self.error = error
    finally:
      with self._changed:
        left, self._jobs = self._jobs, {}
      self.ended.set()
      for job in left.values():
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
          job.tell(self.error or RuntimeError('the server ends'))

  def _turn(self) -> bool:
    """Decode one chunk. Returns False at the end."""
    engine = self._engine
    with self._changed:
      self._changed.wait_for(lambda: self._ends or self._new or self._cancelled or engine.load)
      if self._ends:
        return False
      new, self._new = self._new, []
      cancelled, self._cancelled = self._cancelled, set()
    for job in new:
      engine.add(job.request)
    engine.abort(cancelled)
    if not engine.load:
      return True
    engine.dispatch()
    ended = engine.collect()
    with self._changed:
      ending = [(self._jobs.pop(c.request.uid, None), c) for c in ended]
      growing = [job for job in self._jobs.values() if job.grows]
    for job, completion in ending:
      if job is not None:
        job.tell(completion)
    for job in growing:
      tokens = engine.partial(job.request.uid)
      if tokens is not None and len(tokens):
        job.tell(tokens)
    return True


class Newest:
  """The newest item that a thread has put, for one reader on this event loop. A slow reader misses the items between."""

  def __init__(self):
    self._loop, self._arrived, self._item = asyncio.get_running_loop(), asyncio.Event(), None

  def put(self, item: Any) -> None:
    """Replace the item. Any thread may call this."""
    self._loop.call_soon_threadsafe(self._set, item)

  async def get(self) -> Any:
    """Wait for an item that was not read, and return the newest."""
    await self._arrived.wait()
    self._arrived.clear()
    return self._item

  def _set(self, item: Any) -> None:
    self._item = item
    self._arrived.set()


class EngineBackend:
  """Answers the requests of an endpoint with an engine. Each request is encoded whole: no state is kept between requests."""

  def __init__(self, thread: EngineThread, tokenizer: Tokenizer, sampling: Sampling, model: str):
    self.thread, self.tokenizer, self.sampling, self.model = thread, tokenizer, sampling, model

  def distribution(self, episode: str) -> Distribution:
    """Return how tokens are drawn."""
    return Distribution(self.sampling)

  async def answer(self, episode: str, request: ChatRequest) -> AsyncGenerator[Partial | Answer, None]:
    """Yield the text as it grows, then the Answer. Closing the generator ends the request. Raises Refused."""
    try:
      with self.thread.place():
        ids = await asyncio.to_thread(encoded, self.tokenizer, request)  # a template may take seconds
        prompt, given, room = split(ids, self.sampling)
        news = Newest()
        uid = self.thread.submit(prompt, given, min(room, request.max_tokens or room), news.put, grows=request.stream)
        try:
          while not isinstance(item := await news.get(), Completion):
            if isinstance(item, Exception):
              raise Refused(500, f'the engine stopped: {item}')
            yield Partial(self.tokenizer.decode(item, skip_special=True))
          yield answer_of(self.tokenizer, request, ids, item, f'{uid}')
        finally:
          self.thread.cancel(uid)
    except Overloaded as error:
      raise Refused(429 if self.thread.error is None else 503, str(error), code='overloaded') from None


def encoded(tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
  """Return the ids of a request's conversation up to the answer. Raises Refused if the chat template refuses it."""
  try:
    return tokenizer.chat(request.messages, tools=request.tools, template_args=request.template_args)
  except TokenizerError as error:
    raise refusal(error) from None


def refusal(error: TokenizerError) -> Refused:
  """Return the refusal of a request whose conversation the chat template does not render."""
  return Refused(400, str(error), 'chat_template_kwargs' if isinstance(error, TemplateArgsError) else 'messages')


def split(ids: Sequence[int], sampling: Sampling) -> tuple[Int[np.ndarray, ' P'], Int[np.ndarray, ' N'], int]:
  """Return the prompt, the given tokens behind it, and how many tokens may follow. Raises Refused if none may."""
  P = sampling.max_prompt
  room = sampling.max_tokens - max(0, len(ids) - P)
  if room <= 0:
    limits = f'config.sampling.max_prompt = {P} and config.sampling.max_tokens = {sampling.max_tokens}'
    raise Refused(400, f'the conversation has {len(ids)} tokens, which leaves no room: {limits}', code='context_length_exceeded')
  return np.array(ids[:P], np.int32), np.array(ids[P:], np.int32), room


def answer_of(tokenizer: Tokenizer, request: ChatRequest, prompt_ids: Sequence[int], completion: Completion, name: str) -> Answer:
  """Return the Answer of a completion. `name` begins the ids of its tool calls."""
  ids = completion.tokens.tolist()
  message = message_of(tokenizer.decode(ids, skip_special=True), request.calls, name, request.stop)
  finish = 'tool_calls' if 'tool_calls' in message else 'length' if completion.finish == 'length' else 'stop'
  pieces = [tokenizer.decode([i]) for i in ids] if request.logprobs else []
  return Answer(message, finish, prompt_ids, ids, completion.logp.tolist(), pieces)
