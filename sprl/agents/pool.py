"""Agents and their requests: the workers of a run whose episodes are programs that call the model over HTTP.

Each episode has a URL of its own. The scheduler asks for the next thing that an episode needs, as it asks an environment:

    submit(Call(key, 'run', row))         the agent starts             -> Asked (a chat request), or Ended
    submit(Call(key, 'answer', answer))   its request gets an answer   -> Asked (the next request), or Ended
    release(key)                          the agent is killed

The agent is a separate process (host.py). Requests of one episode are answered one after the other, in the order of arrival. An
agent that raises, ends or exceeds the time limit gives a Failure, and the scheduler tries its episode again.
"""

import asyncio
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sprl.agents import host
from sprl.agents.extra import check_installed
from sprl.agents.protocol import Answer, ChatRequest, Distribution, Partial, Refused
from sprl.config import Sampling, SettingsError
from sprl.foreign import import_path
from sprl.tasks import lifeline
from sprl.tasks.worker_pool import LOSSES, START_SECONDS, Failure, pause_before
from sprl.tasks.workers import OF_WORKERS, DaemonThread

type Key = tuple[int, int]  # (uid, attempt) of an episode

PREFIX = '/episodes/{episode}'


@dataclass(frozen=True)
class Call:
  """What an episode asks of its agent."""

  key: Key
  method: str  # run or answer
  argument: Any  # run: the row; answer: an Answer, or Refused


@dataclass(frozen=True)
class Asked:
  """A request of an agent. `lost`: the answer to the request before this one reached no client."""

  request: ChatRequest
  lost: bool = False


@dataclass(frozen=True)
class Ended:
  """The end of an agent. `cut`: a limit refused one of its requests. If it raised after that, its reward is 0."""

  reward: float
  metrics: Mapping[str, float] = field(default_factory=dict)
  lost: bool = False
  cut: bool = False


@dataclass(frozen=True)
class Program:
  """An agent: a function of a file, in the environment of an interpreter."""

  agent: str  # file.py:function
  args: Mapping[str, Any]  # keyword arguments
  python: str | None = None  # the interpreter; None: that of the run


@dataclass(eq=False)
class _Asking:
  request: ChatRequest
  answer: Callable[[Answer | Refused], None]
  gone: bool = False  # whether its client disconnected


@dataclass(eq=False)
class _Episode:
  """An agent that runs or waits for its start."""

  key: Key
  number: int  # of the process, in the messages to the host
  row: Mapping[str, Any]
  ticket: int | None = None  # of the call that waits
  begins: float = 0.0  # not before this time, after a failed attempt
  started: bool = False
  asking: deque[_Asking] = field(default_factory=deque)
  answering: _Asking | None = None
  end: Ended | Failure | None = None
  deadline: float = float('inf')  # of its next request or its end; while a request is answered, it has none
  refused: bool = False  # whether its last request was refused
  lost: bool = False
  cut: bool = False


class AgentPool:
  """The agents of a run, and the server that they call. A context manager; its calls are of type Call.

  Args:
    program: the agent.
    sampling: how the engines draw in training; requests for another distribution are refused.
    evaluation: the same in evaluation, for rows whose split is `test`.
    model: the name of the model.
    limit: seconds that an agent may take to its next request or its end. The time in which the model writes does not count.
    most: agents of a split at a time, training or evaluation; others wait. None: no limit.
    port: of the server; 0: a free one.
    now: the clock, in seconds.

  Raises:
    SettingsError: on entering, if the agent cannot be loaded or the port cannot be used; later, if its host ends repeatedly.
  """

  def __init__(
    self,
    program: Program,
    sampling: Sampling,
    evaluation: Sampling,
    model: str,
    limit: float,
    most: int | None = None,
    port: int = 0,
    now: Callable[[], float] = time.monotonic,
  ):
    from sprl.agents.endpoint import application  # imported late: the packages are an extra
    from sprl.agents.server import ServerThread, bound

    self.program, self.model, self._limit, self._now = program, model, limit, now
    self._training, self._evaluation = Distribution(sampling), Distribution(evaluation, evaluation=True)
    self._most = most or sys.maxsize
    self._changed = threading.Condition()
    self._episodes: dict[Key, _Episode] = {}
    self._by_token: dict[str, _Episode] = {}
    self._tickets = itertools.count()
    self._numbers = itertools.count()
    self._fresh = False  # whether a result may have arrived after the last poll
    self._losses = 0
    self._host: _Host | None = None
    self._server = ServerThread(application(self, PREFIX), bound(port=port, settings=('host', "config.task.args['port']")))

  def __enter__(self) -> 'AgentPool':
    try:
      self._host = self._start_host()
      host.allow_many_files()  # each waiting agent has a connection. Now, because the host gives agents the limit it began with
      self._server.__enter__()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_) -> None:
    with self._changed:
      for key in list(self._episodes):
        self._remove(key)
    if self._host is not None:
      self._host.end()
    self._server.__exit__()

  # --- the scheduler's calls -----------------------------------------------------------------------------------------------

  def submit(self, call: Call) -> int:
    """Start an agent, or answer its request. Returns the ticket of its next request or its end."""
    with self._changed:
      ticket = next(self._tickets)
      if call.method == 'run':
        self._remove(call.key)
        begins = self._now() + pause_before(call.key[1])
        episode = self._episodes[call.key] = _Episode(call.key, next(self._numbers), call.argument, begins=begins)
        self._by_token[secrets.token_urlsafe(16)] = episode
      else:
        episode = self._episodes[call.key]
        self._reply(episode, call.argument)
      episode.ticket = ticket
      self._fresh |= self._ready(episode)  # it may have sent its next request before
      self._start_agents()
    return ticket

  def cancel(self, ticket: int) -> None:
    """Forget a ticket. `release` ends the agent."""
    with self._changed:
      for episode in self._episodes.values():
        if episode.ticket == ticket:
          episode.ticket = None

  def poll(self, wanted: Collection[int]) -> dict[int, Any]:
    """Return the wanted results that are ready, by ticket: Asked, Ended or Failure."""
    with self._changed:
      self._replace_host()
      self._fresh, found = False, {}
      for episode in self._episodes.values():
        if self._waits(episode) and self._now() >= episode.deadline:
          self._time_out(episode, 'asked nothing')
        if episode.ticket in wanted and (result := self._next(episode)) is not None:
          found[episode.ticket], episode.ticket = result, None
      self._start_agents()
      return found

  def wait(self, seconds: float | None) -> None:
    """Wait until a result arrives that the last poll has not seen, at most `seconds` (None: no limit).

    Results that it has seen may stay: an evaluation does not want those of training.
    """
    with self._changed:
      if self._fresh:
        return
      deadlines = [episode.deadline for episode in self._episodes.values() if self._waits(episode)]
      deadlines += [episode.begins for episode in self._episodes.values() if episode.begins > self._now()]
      left = max(0.0, min(deadlines, default=float('inf')) - self._now())
      timeout = min(left, float('inf') if seconds is None else seconds)
      self._changed.wait(None if timeout == float('inf') else timeout)

  def release(self, key: Key) -> None:
    """End an agent, if it runs, and its requests."""
    with self._changed:
      self._remove(key)
      self._start_agents()

  # --- the endpoint's calls ------------------------------------------------------------------------------------------------

  def distribution(self, episode: str) -> Distribution:
    """Return how the tokens of an episode are drawn."""
    with self._changed:
      found = self._by_token.get(episode)
    return self._evaluation if found is not None and found.row.get('split') == 'test' else self._training

  async def answer(self, episode: str, request: ChatRequest) -> AsyncGenerator[Partial | Answer, None]:
    """Yield the answer to a request of an agent. Raises Refused."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer | Refused] = loop.create_future()

    def reply(answer: Answer | Refused) -> None:
      loop.call_soon_threadsafe(lambda: future.done() or future.set_result(answer))

    asking = _Asking(request, reply)
    with self._changed:
      if (found := self._by_token.get(episode)) is None:
        raise Refused(404, 'the episode of this URL is over', code='episode_over')
      found.asking.append(asking)
      self._wake()
    try:
      answer = await future
    finally:
      with self._changed:
        if not future.done() or future.cancelled():
          asking.gone = True
    if isinstance(answer, Refused):
      raise answer
    yield answer

  # --- one episode, under the lock -----------------------------------------------------------------------------------------

  def _ready(self, episode: _Episode) -> bool:
    return episode.end is not None or any(not a.gone for a in episode.asking)

  def _waits(self, episode: _Episode) -> bool:
    """Return whether a call waits for this agent."""
    return episode.ticket is not None and not self._ready(episode)

  def _next(self, episode: _Episode) -> Asked | Ended | Failure | None:
    """Return what an episode waits for, if it is there."""
    while episode.end is None and episode.asking:
      asking = episode.asking.popleft()
      if not asking.gone:
        episode.answering = asking
        lost, episode.lost = episode.lost, False
        return Asked(asking.request, lost)
    if isinstance(episode.end, Failure) and episode.cut:
      kind = episode.end.kind  # an agent that crashes is tried again, whatever was refused before
      if kind == 'error' or (kind == 'timeout' and episode.refused):
        return Ended(0.0, {}, episode.lost, cut=True)
    if isinstance(episode.end, Ended):
      return Ended(episode.end.reward, episode.end.metrics, episode.lost, episode.cut)
    return episode.end

  def _reply(self, episode: _Episode, answer: Answer | Refused) -> None:
    """Answer the request under way, unless its client has disconnected. The agent's time runs again.

    It does not begin again if the request before was refused too. Otherwise an agent that always tries again would never end.
    """
    if (asking := episode.answering) is not None:
      episode.answering, episode.lost = None, asking.gone and isinstance(answer, Answer)
      episode.cut |= isinstance(answer, Refused) and answer.code in LIMITS
      asking.answer(answer)
    refused_again = episode.refused and isinstance(answer, Refused)
    episode.refused = isinstance(answer, Refused)
    if not refused_again:
      episode.deadline = self._now() + self._limit
    elif self._now() >= episode.deadline and episode.end is None:
      self._time_out(episode, 'made no request that can be answered')

  def _time_out(self, episode: _Episode, did: str) -> None:
    """Kill an agent that exceeds the time limit. `did` is what it did until then."""
    self._stop(episode)
    episode.end = Failure('timeout', f'the agent {did} for {self._limit:g} s (config.task.time_limit)')

  def _remove(self, key: Key) -> None:
    """End an episode and answer its open requests."""
    if (episode := self._episodes.pop(key, None)) is None:
      return
    self._by_token = {token: other for token, other in self._by_token.items() if other is not episode}
    self._stop(episode)
    for asking in [*episode.asking, *filter(None, [episode.answering])]:
      asking.answer(Refused(410, 'the episode is over', code='episode_over'))

  def _stop(self, episode: _Episode) -> None:
    """Kill the process of an agent, if it runs."""
    if episode.started and episode.end is None and self._host is not None:
      self._host.send({'kill': episode.number})
    episode.started = False

  def _start_agents(self) -> None:
    """Start the agents that wait and whose pause is over, the oldest first, while there may be more of their split.

    The splits are counted apart. During an evaluation nothing answers the agents of training, so they would keep its places.
    """
    running = Counter(episode.row.get('split') for episode in self._episodes.values() if episode.started)
    for token, episode in self._by_token.items():
      split = episode.row.get('split')
      waits = not episode.started and episode.end is None and episode.begins <= self._now()
      if waits and running[split] < self._most and self._host is not None:
        url = f'http://127.0.0.1:{self._server.port}{PREFIX.format(episode=token)}/v1'
        self._host.send({'run': episode.number, 'url': url, 'row': episode.row})
        episode.started, episode.deadline = True, self._now() + self._limit
        running[split] += 1

  # --- the host ------------------------------------------------------------------------------------------------------------

  def _start_host(self) -> '_Host':
    started = _Host(self.program, self._heard)
    if why := started.ready(START_SECONDS):
      started.end()
      raise SettingsError(f'config.task.name: the agent {self.program.agent} cannot be loaded: {why}')
    return started

  def _heard(self, message: Mapping[str, Any]) -> None:
    """Note the end of an agent. Called in the thread of the host."""
    with self._changed:
      episode = next((e for e in self._episodes.values() if e.number == message.get('id')), None)
      if episode is not None and episode.end is None:
        if 'reward' in message:
          episode.end, self._losses = Ended(message['reward'], message['metrics']), 0
        else:
          kind = 'error' if 'error' in message else 'crash'
          episode.end = Failure(kind, f'the agent failed: {message[kind]}')
        episode.started = False
      self._wake()

  def _wake(self) -> None:
    """End a wait. Called under the lock."""
    self._fresh = True
    self._changed.notify_all()

  def _replace_host(self) -> None:
    """Start another host if the host has ended. Its agents, which ended with it, fail."""
    if self._host is None or not self._host.died:
      return
    self._host.end()
    self._losses += 1
    if self._losses > LOSSES:
      raise SettingsError(f'config.task.name: the host of the agents {self.program.agent} ended {self._losses} times in a row')
    for episode in self._episodes.values():
      if episode.started and episode.end is None:
        episode.end, episode.started = Failure('crash', 'the host of the agents ended'), False
    self._host = self._start_host()


LIMITS = ('context_length_exceeded', 'turn_limit_exceeded')  # codes of refusals that cut an episode short


class _Host:
  """The process of host.py, and two threads: one reads its messages, the other writes.

  A write waits while the connection is full. The pool writes under its lock, which the reader needs too. If the pool waited for
  the write, the host could wait at the same time for its own messages to be read.
  """

  def __init__(self, program: Program, heard: Callable[[Mapping[str, Any]], None]):
    ours, theirs = socket.socketpair()
    held, self._lifeline = os.pipe()
    environment = {**os.environ, **OF_WORKERS}
    if program.python is None:  # another interpreter has packages of its own
      environment['PYTHONPATH'] = import_path()
    with theirs:
      descriptors = theirs.fileno(), held
      command = [program.python or sys.executable, host.__file__, *map(str, descriptors), lifeline.__file__]
      self._process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0, env=environment)
    os.close(held)
    self._connection, self._heard, self._writer = ours, heard, DaemonThread()
    self._ready: str | None = None
    self._answered = threading.Event()
    self.died = False
    self.send({'agent': program.agent, 'args': dict(program.args)})
    threading.Thread(target=self._read, name='agents', daemon=True).start()

  def ready(self, seconds: float) -> str:
    """Wait until the agent is loaded. Returns why it cannot be, or ''."""
    if not self._answered.wait(seconds):
      return f'not ready after {seconds:g} s'
    return 'its process ended' if self._ready is None else self._ready

  def send(self, message: Mapping[str, Any]) -> None:
    """Queue a message. It is lost if the host has ended, which the reader notices."""
    self._writer.submit(self._connection.sendall, (json.dumps(message) + '\n').encode())

  def end(self) -> None:
    """Kill the host and its agents."""
    if self._lifeline >= 0:
      lifeline.kill(self._process.pid)
      os.close(self._lifeline)  # the kernel kills the agents, which have groups of their own
      self._lifeline = -1
      self._process.wait()
      self._writer.end()
      self._connection.close()

  def _read(self) -> None:
    received = b''
    try:
      while new := self._connection.recv(1 << 16):
        *lines, received = (received + new).split(b'\n')
        for message in map(json.loads, lines):
          if 'ready' in message:
            self._ready = message['ready']
            self._answered.set()
          else:
            self._heard(message)
    except (OSError, ValueError):
      pass
    self.died = True
    self._answered.set()
    self._heard({})  # wakes the pool


def check_program(agent: str, python: Any) -> None:
  """Raise SettingsError if the file of an agent, its interpreter or the packages of the endpoint are missing."""
  check_installed("config.task.kind = 'agent'")
  file = Path(agent.rpartition(':')[0])
  if not file.is_file():
    raise SettingsError(f'config.task.name = {agent!r}: {file}: no such file')
  if python is not None and not (isinstance(python, str) and os.access(python, os.X_OK)):
    raise SettingsError(f"config.task.args['python'] = {python!r}: expected an interpreter that can be executed")
