"""The engine's rows at work: continuous batching over a fixed number of them.

Requests are added and leave between chunks of decode steps. A chunk is one jitted call:

    slots.add(request) ...         # at any time: into the queue
    slots.dispatch()               # the queue into free rows (one prefill at most while others wait), and a chunk started
    done = slots.collect()         # the host's one look: what ended has left, and its row is free

1. requests of one prompt, one behind the other, prefill it once, and each row starts from a copy of its cache;
2. all rows decode a chunk of steps; the host may do other things meanwhile;
3. rows that ended, and rows whose text now holds a stop string, leave, and the queue moves up.

New weights may be swapped in between chunks. What is running then goes on with the keys and values it has (`keep`); for them to
be computed anew, abort the requests and add what is left of them.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

import jax
import numpy as np

from sprl.cache.layer import NEVER
from sprl.parallel.transfer import fetch, home
from sprl.sampler import decode
from sprl.sampler.engine import Engine
from sprl.sampler.served import Served
from sprl.trajectory import NOTHING, Completion, Request, Trajectory

type Text = tuple[bytes, bytes]  # a request's prompt and what is given behind it, as int32

NAP = 2e-4  # seconds between two looks whether a chunk is over


@dataclass
class _Row:
  """What the host knows of a row at work: its request, and what it had drawn at the last look."""

  request: Request
  tokens: list[int] = field(default_factory=list)
  logp: list[float] = field(default_factory=list)
  version: list[int] = field(default_factory=list)
  kept: list[int] = field(default_factory=list)
  prefilled: tuple[int, int] | None = None  # shape of the batch that its prompt was read in
  aborted: bool = False  # in the middle of a chunk: nobody wants what it draws, and it leaves after it


@dataclass
class Usage:
  """What the rows were used for since the last `reset`."""

  chunks: int = 0
  steps: int = 0  # decode steps, of all rows together one each
  tokens: int = 0  # drawn in them
  prefills: int = 0
  waited: float = 0.0  # seconds in which the devices had a chunk to work on
  busy: float = 0.0  # seconds with something to do, until the end of the last collect

  def metrics(self, rows: int) -> dict[str, float]:
    """The share of row-steps that drew a token, and what it took."""
    return {
      'engine/occupancy': self.tokens / max(self.steps * rows, 1),
      'engine/chunks': float(self.chunks),
      'engine/prefills': float(self.prefills),
    }

  @property
  def host_overhead(self) -> float:
    """The share of its time in which the devices waited for the host; at least, for a chunk is over when the host looks."""
    return 1 - self.waited / self.busy if self.busy else 0.0


class Slots:
  """The rows of an engine, at work for one user. Not for threads: one caller at a time."""

  def __init__(self, engine: Engine, served: Served, version: int = 0):
    self.engine, self.version = engine, version
    self.served: Served | None = served
    self.usage = Usage()
    self._waiting: deque[Request] = deque()
    # The last prompts that were prefilled, with these weights; and the shape of their batch.
    self._prompts: tuple[dict[Text, int], decode.Prompts, tuple[int, int]] | None = None
    self._rows: list[_Row | None] = [None] * engine.rows
    self._state: decode.Rows | None = None  # made when there is something to do
    self._chunk: dict[str, jax.Array] | None = None  # what the chunk under way will have to say
    self._since: float | None = None  # when the devices were through with the chunk before, or the first was begun
    self._launched = 0.0  # when they had the one under way
    self._over: float | None = None  # when it was found to be over

  @property
  def capacity(self) -> int:
    """Requests that can run side by side."""
    return self.engine.rows

  @property
  def load(self) -> int:
    """Requests that wait or run."""
    return len(self._waiting) + sum(row is not None for row in self._rows)

  def add(self, request: Request) -> None:
    """Queues a request. Raises SettingsError where it does not fit (Engine.check)."""
    self.engine.check(request)
    self._waiting.append(request)

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """Ends these requests (None: all) where they are, and returns what they had drawn at the last look."""
    wanted = {r.uid for r in self._waiting} | {r.request.uid for r in self._rows if r} if uids is None else set(uids)
    aborted = []
    gone = np.zeros(len(self._rows), bool)
    for i, row in enumerate(self._rows):
      if row is not None and row.request.uid in wanted and not row.aborted:
        aborted.append(_completion(row, 'abort'))
        row.aborted = gone[i] = True
    aborted += [_completion(_Row(request), 'abort') for request in self._waiting if request.uid in wanted]
    self._waiting = deque(request for request in self._waiting if request.uid not in wanted)
    if self._chunk is None:
      self._rows = [None if left else row for left, row in zip(gone, self._rows)]
      self._release(gone)
    return aborted

  def swap(self, served: Served, version: int) -> None:
    """Other weights from the next chunk on. Rows at work keep their keys and values, FP8 ones on the new scales."""
    assert self._chunk is None, 'a chunk is under way: collect it first'
    if self._state is not None and served.scales is not None:
      self._state = decode.rescale(self._state, served)
    self.served, self.version, self._prompts = served, version, None

  def unload(self) -> None:
    """Lets go of the weights until the next swap, and of the rows' memory where none is at work."""
    assert self._chunk is None, 'a chunk is under way: collect it first'
    self.served = self._prompts = self._since = None
    if not any(row is not None for row in self._rows):
      self._state = None

  def dispatch(self) -> None:
    """Admits what waits, and starts a chunk; does nothing where nothing runs."""
    self._since = self._since or time.perf_counter()
    engine, served = self.engine, self.served
    assert served is not None, 'no weights: swap some in first'
    if self._state is None:
      with jax.default_device(home(served.head.sharding)):
        key = jax.random.key(engine.seed)
        self._state = decode.empty_rows(engine.plan, served, engine.rows, engine.sampling.max_tokens, key)
    while self._admit(served):
      if any(row is not None and row.tokens for row in self._rows):
        break  # what runs already has waited for one prefill, which is enough
    if not any(row is not None for row in self._rows):
      return
    since = np.array([0 if row is None else len(row.tokens) for row in self._rows], np.int32)
    self._state = decode.decode(engine.graphdef, served, self._state, engine.sampling, engine.stop_ids, engine.sampling.chunk)
    self._chunk = decode.read(self._state, since, engine.sampling.chunk + 1)
    self._launched, self._over = time.perf_counter(), None

  @property
  def ready(self) -> bool:
    """Whether the chunk under way is over, or there is none."""
    if self._over is None and self._done():
      self._over = time.perf_counter()
    return self._over is not None

  def _done(self) -> bool:
    return self._chunk is None or all(x.is_ready() for x in self._chunk.values())  # pyright: ignore[reportAttributeAccessIssue]

  def wait(self, seconds: float) -> None:
    """Until it is over, or so many seconds are."""
    start = time.perf_counter()
    while not self.ready and time.perf_counter() < start + seconds:
      time.sleep(NAP)

  def collect(self) -> list[Completion]:
    """Waits for the chunk and returns the requests that ended in it, or by it hold a stop string."""
    if self._chunk is None:
      return []
    news, self._chunk = fetch(self._chunk), None
    self.usage.waited += (self._over or time.perf_counter()) - self._launched
    finished, drawn = [], [0]
    stopped = np.zeros(len(self._rows), bool)
    for i, row in enumerate(self._rows):
      if row is None:
        continue
      before = len(row.tokens)
      new = int(news['count'][i]) - before
      row.tokens += news['tokens'][i, :new].tolist()
      row.logp += news['logp'][i, :new].tolist()
      row.kept += news['kept'][i, :new].tolist()
      row.version += [self.version] * new
      drawn.append(new - (before == 0))  # a row's first token is drawn as it is admitted
      cut = None if row.aborted else self._stop_string(row)
      if cut is None and not news['done'][i] and not row.aborted:
        continue
      self._rows[i], stopped[i] = None, not news['done'][i]
      if row.aborted:
        continue
      n = len(row.tokens) if cut is None else cut
      stop = cut is not None or (n > 0 and row.tokens[n - 1] in self.engine.stop_ids)
      finish = 'stop' if stop else 'length'
      records = self._evicted(i, row.request.start + n), self._routes(i, row.request.start + n)
      finished.append(_completion(row, finish, n, int(news['saturated'][i]), *records))
    self._release(stopped)
    self.usage.chunks += 1
    self.usage.steps += max(drawn)
    self.usage.tokens += sum(drawn)
    now = time.perf_counter()
    self.usage.busy += now - (self._since or now)
    self._since = now if self.load else None
    return finished

  def _admit(self, served: Served) -> bool:
    """Fills free rows from the queue, with one prefill at most; False where that makes none."""
    engine = self.engine
    self._fork(served)
    free = sum(row is None for row in self._rows)
    worth = min(len(self._waiting), engine.rows // engine.prefill)  # a prefill is worth a prompt's share of the rows
    if not self._waiting or free < max(worth, 1):
      return False
    texts: dict[Text, int] = {}
    for request in islice(self._waiting, free):
      if (text := self._text(request)) not in texts and len(texts) == engine.prefill:
        break
      texts.setdefault(text, len(texts))
    prompts, givens = ([np.frombuffer(part, np.int32) for part in parts] for parts in zip(*texts))
    bucket = next(b for b in engine.buckets if b >= max(map(len, prompts)))
    together = 1 if len(texts) == 1 else engine.prefill  # while rows free up one by one, most prompts come alone
    tokens = padded(prompts, together, bucket)
    if any(map(len, givens)):
      tokens += padded(givens, together, engine.sampling.max_tokens)
    self._prompts = texts, decode.prefill(engine.graphdef, engine.plan, served, *tokens), (together, bucket)
    self.usage.prefills += 1
    self._fork(served)
    return True

  def _fork(self, served: Served) -> None:
    """Admits the requests at the queue's head whose prompts are the last that were prefilled, as far as rows are free."""
    if self._prompts is None:
      return
    (texts, prompts, shape), engine, B = self._prompts, self.engine, self.engine.rows
    free = deque(i for i, row in enumerate(self._rows) if row is None)
    parent, (uid, attempt, limit) = np.full(B, -1, np.int32), np.zeros((3, B), np.int32)
    while self._waiting and free and (text := self._text(self._waiting[0])) in texts:
      row, request = free.popleft(), self._waiting.popleft()
      self._rows[row], parent[row] = _Row(request, prefilled=shape), texts[text]
      uid[row], attempt[row], limit[row] = request.uid, request.attempt, request.max_tokens
    if (parent >= 0).any():
      assert self._state is not None
      self._state = decode.admit(served, self._state, prompts, parent, uid, attempt, limit, engine.sampling, engine.stop_ids)

  def _text(self, request: Request) -> 'Text':
    prompt, given = request.prompt.astype(np.int32), request.given.astype(np.int32)
    if not self.engine.plan.sparse:  # to a memory that forgets nothing, prompt and continuation are one
      prompt, given = np.concatenate([prompt, given]), NOTHING
    return prompt.tobytes(), given.tobytes()

  def _release(self, which: np.ndarray) -> None:
    if which.any() and self._state is not None:
      self._state = decode.release(self._state, which)

  def _evicted(self, row: int, tokens: int):
    """[L, K, T]: when the row's tokens were evicted; None where the plan does not write it down."""
    plan = self.engine.plan
    if not (plan.record and plan.sparse) or self._state is None:
      return None
    never = np.full((plan.kv_heads, tokens), NEVER, np.int32)
    layers = [layer.evicted for layer in self._state.cache.layers]
    return np.stack([never if steps is None else fetch(steps[row])[:, :tokens] for steps in layers])

  def _routes(self, row: int, tokens: int):
    """[T, M, k]: the experts that the row's tokens went through; None where the plan does not write it down."""
    routes = None if self._state is None else self._state.routes
    return None if routes is None else fetch(routes[row])[:tokens]

  def _stop_string(self, row: _Row) -> int | None:
    """How many of the row's tokens it takes until the completion's text holds a stop string; None where it holds none."""
    sampling, text = self.engine.sampling, self.engine.text
    if not sampling.stop:
      return None
    earlier = row.request.given[len(row.request.given) - row.request.resumed :].tolist()
    ids = earlier + row.tokens

    def stops(some: list[int]) -> bool:
      return any(s in text(some) for s in sampling.stop)

    longest = max(len(s.encode()) for s in sampling.stop)  # in tokens, each of which is a byte at least
    if not stops(ids[-sampling.chunk - 1 - longest :]):  # what came before was looked at before
      return None
    low, high = len(earlier) + 1, len(ids)  # the text of a prefix only grows: halve until the completing token is found
    while low < high:
      middle = (low + high) // 2
      if stops(ids[:middle]):
        high = middle
      else:
        low = middle + 1
    return low - len(earlier)


def generate(engine: Engine, served: Served, requests: Sequence[Request], version: int = 0) -> list[Trajectory]:
  """One trajectory a request, in the order of the requests.

  Raises SettingsError where a request does not fit the sampling settings (Engine.check).
  """
  slots = Slots(engine, served, version)
  for request in requests:
    slots.add(request)
  finished: dict[tuple[int, int], Trajectory] = {}
  while slots.load:
    slots.dispatch()
    for completion in slots.collect():
      finished[completion.request.uid, completion.request.attempt] = Trajectory.of(completion, start_version=version)
  return [finished[r.uid, r.attempt] for r in requests]


def padded(rows: Collection[np.ndarray], count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Right-padded rows [count, width] and their lengths."""
  padded, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)], lengths[i] = row, len(row)
  return padded, lengths


def _completion(row: _Row, finish: str, n: int | None = None, saturated: int = 0, evicted=None, routes=None) -> Completion:
  ints, logp = (np.array(x[:n], np.int32) for x in (row.tokens, row.version, row.kept)), np.array(row.logp[:n], np.float32)
  tokens, version, kept = ints
  return Completion(row.request, tokens, logp, version, kept, finish, saturated, evicted, routes, row.prefilled)
