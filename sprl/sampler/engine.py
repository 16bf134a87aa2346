"""The engine: continuous batching over a fixed number of rows.

Requests are added and finish between chunks of decode steps. A chunk is one jitted call:

    engine.add(request) ...        # at any time: puts the request in the queue
    engine.dispatch()              # moves requests from the queue to free rows, starts a chunk
    done = engine.collect()        # waits for the oldest chunk; returns the requests that ended and frees their rows

1. Requests with the same prompt, one behind the other in the queue, share one prefill. Each row starts on a copy of its cache.
2. All rows decode one chunk of steps. Meanwhile the host may do other work.
3. Rows that ended, and rows whose text contains a stop string, become free.

Chunks of fixed length look ahead (`EngineConfig.in_flight`): the next chunk is in the devices' queue before the host collects the
last one, so the devices do not wait for the host. A free row then starts one chunk later. Tokens stay the same, because draws
depend on requests and positions.

A request with `keep` leaves its cache to a later request that `continues` it: the next turn of a conversation reads only the
tokens that are new (sprl/sampler/kept.py). Without the cache it reads all of them, with the same result.

`swap` changes the weights between chunks. Running rows and kept caches then continue with their old keys and values
(`rollout.sync = keep`). To recompute them with the new weights, abort the requests, add `completion.rest()` of each, and `forget`
the kept caches.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np
from jaxtyping import Int

from sprl.cache.layer import NEVER
from sprl.sampler import decode
from sprl.sampler.buckets import bucket, padded
from sprl.sampler.engine_config import EngineConfig, empty_rows
from sprl.sampler.kept import Ended, KeptCaches
from sprl.sampler.running import Chunk, Row, Usage
from sprl.sampler.stop_strings import StopStrings
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.transfer import fetch
from sprl.types import NOTHING, Completion, Request, Trajectory

type Text = tuple[bytes, bytes]  # the tokens of a request's prompt, and its given tokens, as int32

LATE = 300.0  # seconds of a chunk after which its device may hang
POLL = 2e-4  # seconds between two checks whether a chunk is over


class Engine:
  """Samples requests with one set of weights at a time. Not thread-safe.

  `version` is the number of steps behind the weights; each token records it.
  """

  def __init__(self, config: EngineConfig, weights: SamplerWeights, version: int = 0):
    if config.layout.fp8 and weights.scales is None:
      raise ValueError('weights.scales = None: expected the scales of the FP8 cache (sprl/sampler/calibrate.py)')
    self.config, self.version = config, version
    self.weights: SamplerWeights | None = weights
    self.usage = Usage()
    self._waiting: deque[Request] = deque()
    # The last prefill under these weights: the index of each text, the prompts, the batch's shape.
    self._prompts: tuple[dict[Text, int], decode.Prompts, tuple[int, int]] | None = None
    self._rows: list[Row | None] = [None] * config.rows
    self._kept = KeptCaches(config.layout, config.kept_caches, config.mesh)
    self._stop = StopStrings(config.sampling.stop, config.text) if config.sampling.stop else None
    self._state: decode.DecodeState | None = None  # created by the first dispatch
    self._chunks: deque[Chunk] = deque()  # in the devices' queue, the oldest first
    self._finished: list[Completion] = []  # ended in chunks that `swap` or `unload` collected; for the next `collect`
    self._since: float | None = None  # when the previous chunk was collected, or the first was dispatched
    self._idle = 0.0  # when the devices finished the last chunk that was collected

  @property
  def capacity(self) -> int:
    """The number of requests that can run side by side."""
    return self.config.rows

  @property
  def load(self) -> int:
    """The number of requests that wait or run, or that ended and were not collected."""
    return len(self._waiting) + sum(row is not None for row in self._rows) + len(self._finished)

  def add(self, request: Request) -> None:
    """Put a request in the queue. Raises SettingsError if it does not fit (EngineConfig.check)."""
    self.config.check(request)
    self._waiting.append(request)

  def abort(self, uids: Collection[int] | None = None) -> list[Completion]:
    """End these requests, and return the tokens that the last `collect` saw of each. None: end all, after the chunks under way.

    One of these requests that runs in a chunk keeps its row until this chunk is collected. Its experts are not returned: that
    would wait for the chunk.
    """
    if uids is None:
      self._settle()
    wanted = {r.uid for r in self._waiting} | {r.request.uid for r in self._rows if r} if uids is None else set(uids)
    aborted = []
    gone = np.zeros(len(self._rows), bool)
    for i, row in enumerate(self._rows):
      if row is not None and row.request.uid in wanted and not row.aborted:
        routes = None if self._chunks else self._routes(i, row.request.start + len(row.tokens))
        aborted.append(self._completion(row, 'abort', routes=routes))
        row.aborted = gone[i] = True
    aborted += [self._completion(Row(request, self.version), 'abort') for request in self._waiting if request.uid in wanted]
    self._waiting = deque(request for request in self._waiting if request.uid not in wanted)
    free = gone & [all(chunk.rows[i] is not row for chunk in self._chunks) for i, row in enumerate(self._rows)]
    self._rows = [None if left else row for left, row in zip(free, self._rows)]
    self._release(free)
    self._since = self._since if self.load else None
    return aborted

  def partial(self, uid: int) -> Int[np.ndarray, ' C'] | None:
    """Return the tokens that the last `collect` saw of a request; None if it neither waits nor runs. Reads no device."""
    for row in self._rows:
      if row is not None and row.request.uid == uid and not row.aborted:
        return np.array(row.tokens, np.int32)
    return NOTHING if any(request.uid == uid for request in self._waiting) else None

  def forget(self, uids: Collection[int] | None = None) -> None:
    """Drop the kept caches of these sequences, or all. A request that continues one reads all its tokens."""
    self._kept.forget(uids)

  def swap(self, weights: SamplerWeights, version: int) -> None:
    """Use other weights from the next chunk on.

    Running rows and kept caches keep their keys and values; an FP8 cache takes the new scales.
    """
    self._settle()
    self._kept.swap(weights)
    if self._state is not None and weights.scales is not None:
      self._state = decode.rescale.on(self.config.mesh)(self._state, weights)
    self.weights, self.version, self._prompts = weights, version, None

  def unload(self) -> None:
    """Free the weights until the next `swap`. Free the rows too if no request runs, and the kept caches if none is kept."""
    self._settle()
    self._kept.unload()
    self.weights = self._prompts = self._since = None
    if not any(row is not None for row in self._rows):
      self._state = None

  def dispatch(self) -> None:
    """Fill free rows from the queue and start chunks up to `EngineConfig.in_flight`. Starts none if no request waits or runs.

    A chunk behind the first is started only if a request may outlast the chunks before it. Running rows wait while new tokens
    behind kept caches, and at most one batch of prompts, are read.
    """
    self._since = self._since or time.perf_counter()
    config, weights = self.config, self.weights
    assert weights is not None, 'no weights: swap some in first'
    if self._state is None:
      self._state = empty_rows(config, weights)
    while self._prefill_next(weights):
      if any(row is not None and row.tokens for row in self._rows):
        break
    while len(self._chunks) < config.in_flight and self._left() > len(self._chunks) * config.sampling.chunk:
      self._start_chunk(weights)

  def _left(self) -> int:
    """Return the most tokens that a running request may draw in decode steps after the last `collect`.

    It is at least 1 if a request runs, so that a chunk reports its end; 0 if none runs.
    """
    left = [row.request.max_tokens - max(len(row.tokens), 1) for row in self._rows if row is not None]
    return max(1, *left) if left else 0

  def _start_chunk(self, weights: SamplerWeights) -> None:
    config, sampling = self.config, self.config.sampling
    before = self._chunks[-1] if self._chunks else None
    # A row's news begin at the number of tokens that the chunk before leaves, which only the devices know yet.
    goes_on = [before is not None and row is before.rows[i] for i, row in enumerate(self._rows)]
    known = np.array([0 if row is None else len(row.tokens) for row in self._rows], np.int32)
    run, news_since = decode.decode.on(config.mesh), decode.news_since.on(config.mesh)
    self._state = run(
      config.graphdef, weights, self._state, sampling, config.stop_ids, steps=sampling.chunk, fixed=config.fixed_chunks
    )
    since = known if before is None else before.news['count']
    news = news_since(self._state, since, np.where(goes_on, -1, known).astype(np.int32), sampling.chunk + 1)
    self._chunks.append(Chunk(news, list(self._rows), self.version, time.perf_counter()))

  @property
  def ready(self) -> bool:
    """Whether `collect` returns without waiting: the oldest chunk is over, or none runs."""
    return not self._chunks or self._chunks[0].ready

  def wait(self, seconds: float) -> None:
    """Wait until the oldest chunk is over, at most `seconds`, but without end for a chunk that has taken LATE seconds.

    If a device hangs, this thread then stands still. The watchdog of a run over several processes notices that. It would not
    notice a caller that goes on asking. A chunk that is only slow delays other engines, results of workers and signals.
    """
    start = time.perf_counter()
    while not self.ready and ((now := time.perf_counter()) < start + seconds or now > self._chunks[0].launched + LATE):
      time.sleep(POLL)

  def collect(self) -> list[Completion]:
    """Wait for the oldest chunk. Returns the requests that ended in it or whose text now contains a stop string."""
    finished, self._finished = self._finished, []
    if self._chunks:
      finished += self._collect_chunk(self._chunks.popleft())
    self._since = self._since if self.load else None
    return finished

  def _settle(self) -> None:
    """Collect the chunks that are in the devices' queue. The next `collect` returns the requests that ended."""
    while self._chunks:
      self._finished += self._collect_chunk(self._chunks.popleft())
    self._since = self._since if self.load else None

  def _collect_chunk(self, chunk: Chunk) -> list[Completion]:
    """Wait for a chunk and record its tokens. Returns the requests that ended, whose rows are free and whose caches are kept."""
    news = self._fetch_news(chunk)
    finished, drawn, to_keep = [], [0], []
    stopped = np.zeros(len(self._rows), bool)
    for i, row in enumerate(chunk.rows):
      if row is None or row is not self._rows[i]:  # the request left its row before this chunk was collected
        continue
      done, new = bool(news['done'][i]), row.record(news, i, chunk.version)
      first = new == len(row.tokens)  # `insert` draws a row's first token, not a decode step
      drawn.append(new - first)
      self.usage.first += first
      completion = None if row.aborted else self._ended(i, row, new, done)
      if completion is None and not row.aborted:
        continue
      self._rows[i], stopped[i] = None, not done
      if completion is not None:
        finished.append(completion)
        if self._may_keep(row, len(completion.tokens), done):
          to_keep.append(Ended(i, row.request, completion.tokens))
    self._keep(to_keep)
    self._release(stopped)
    self.usage.chunks += 1
    self.usage.steps += self.config.sampling.chunk if self.config.fixed_chunks else max(drawn)
    self.usage.tokens += sum(drawn)
    now = time.perf_counter()
    self.usage.busy += now - (self._since or now)
    self._since = now
    return finished

  def _fetch_news(self, chunk: Chunk) -> dict[str, np.ndarray]:
    """Wait for a chunk and return its `news`. Counts the time in which the devices had a chunk to work on."""
    news = fetch(chunk.news)
    over = chunk.over or time.perf_counter()
    self.usage.waited += over - max(chunk.launched, self._idle)
    self._idle = over
    return news

  def _ended(self, i: int, row: Row, new: int, done: bool) -> Completion | None:
    """Return the completion of row i if it is done or its `new` last tokens end a stop string; None if it goes on."""
    cut = self._stop_string(row, new)
    if cut is None and not done:
      return None
    n = len(row.tokens) if cut is None else cut
    stop = cut is not None or (n > 0 and row.tokens[n - 1] in self.config.stop_ids)
    records = self._evicted(i, row.request.start + n), self._routes(i, row.request.start + n)
    return self._completion(row, 'stop' if stop else 'length', n, *records)

  def _may_keep(self, row: Row, n: int, done: bool) -> bool:
    """Whether the cache of a row that ended after token n is to be kept, and still has all tokens before that one.

    A row that is not done goes on in the next chunk.
    """
    whole = n == len(row.tokens) and (done or not self._chunks)
    return row.request.keep and n > 0 and (whole or not self.config.layout.forgets)

  def _keep(self, ended: Sequence[Ended]) -> None:
    if ended:
      assert self.weights is not None
      assert self._state is not None
      awaited = {request.continues for request in self._waiting}
      self._kept.keep(self.weights, self._state, ended, awaited, self.config.prefill)

  def _prefill_next(self, weights: SamplerWeights) -> bool:
    """Fill free rows from the queue, with at most one prefill. Returns whether it made one."""
    config = self.config
    self._insert(weights)
    while self._go_on(weights):
      pass
    free = sum(row is None for row in self._rows)
    worth = min(len(self._waiting), config.rows // config.prefill)  # wait until a prompt's share of the rows is free
    if not self._waiting or free < max(worth, 1):
      return False
    texts: dict[Text, int] = {}
    for request in islice(self._waiting, free):
      if (text := self._text(request)) not in texts and len(texts) == config.prefill:
        break
      texts.setdefault(text, len(texts))
    prompts, givens = ([np.frombuffer(part, np.int32) for part in parts] for parts in zip(*texts))
    width = bucket(config.buckets, max(map(len, prompts)))
    together = 1 if len(texts) == 1 else config.prefill  # rows become free one by one, so most prompts come alone
    tokens = padded(prompts, together, width)
    if any(map(len, givens)):
      tokens += padded(givens, together, config.sampling.max_tokens)
    self._prompts = None  # frees the caches of the prompts before: they may take gigabytes
    prefilled = decode.prefill.on(config.mesh)(config.graphdef, config.layout, weights, *tokens)
    self._prompts = texts, prefilled, (together, width)
    self.usage.prefills += 1
    self.usage.read += sum(map(len, prompts)) + sum(map(len, givens))
    self._insert(weights)
    return True

  def _go_on(self, weights: SamplerWeights) -> bool:
    """Start waiting requests on the kept caches that they continue, at most `config.prefill`. Returns whether it started any."""
    config = self.config
    free = sum(row is None for row in self._rows)
    first: dict[tuple[int, int] | None, Request] = {}  # request of each cache, by the cache's key
    for request in islice(self._waiting, free):
      if len(first) < config.prefill and self._kept.extended_by(request):
        first.setdefault(request.continues, request)
    if not first:
      return False
    found = list(first.values())
    self._waiting = deque(request for request in self._waiting if request is not first.get(request.continues))
    together = 1 if len(found) == 1 else config.prefill
    prompts, known = self._kept.go_on(config.graphdef, weights, found, together, config.reply_buckets)
    self.usage.prefix_hits += len(found)
    self.usage.prefix_tokens += known
    self.usage.read += sum(request.start for request in found) - known
    self._start(weights, prompts, list(enumerate(found)))
    return True

  def _insert(self, weights: SamplerWeights) -> None:
    """Start the first requests of the queue on the last prefilled prompts, as long as they match and rows are free."""
    if self._prompts is None:
      return
    texts, prompts, shape = self._prompts
    free = sum(row is None for row in self._rows)
    starts = []
    while self._waiting and len(starts) < free and (text := self._text(self._waiting[0])) in texts:
      if self._kept.extended_by(self._waiting[0]):
        break
      starts.append((texts[text], self._waiting.popleft()))
    self.usage.prefix_misses += sum(request.continues is not None for _, request in starts)
    self._start(weights, prompts, starts, shape)

  def _start(
    self,
    weights: SamplerWeights,
    prompts: decode.Prompts,
    starts: Sequence[tuple[int, Request]],
    prefilled: tuple[int, int] | None = None,
  ) -> None:
    """Start each of these requests in a free row, on one of the prompts by its index. `prefilled`: the shape of their prefill."""
    if not starts:
      return
    config, B = self.config, self.config.rows
    new = decode.NewRows(np.full(B, -1, np.int32), *np.zeros((3, B), np.int32))
    free = [i for i, row in enumerate(self._rows) if row is None]
    for row, (parent, request) in zip(free, starts):
      self._rows[row], new.parent[row] = Row(request, self.version, prefilled=prefilled), parent
      new.uid[row], new.attempt[row], new.limit[row] = request.uid, request.attempt, request.max_tokens
    assert self._state is not None
    insert = decode.insert.on(config.mesh)
    self._state = insert(weights, self._state, prompts, new, config.sampling, config.stop_ids)

  def _text(self, request: Request) -> 'Text':
    prompt, given = request.prompt.astype(np.int32), request.given.astype(np.int32)
    if not self.config.layout.sparse:  # without eviction a given token is read like a prompt's
      prompt, given = np.concatenate([prompt, given]), NOTHING
    return prompt.tobytes(), given.tobytes()

  def _release(self, which: np.ndarray) -> None:
    if which.any() and self._state is not None:
      self._state = decode.release.on(self.config.mesh)(self._state, which)

  def _evicted(self, row: int, tokens: int) -> Int[np.ndarray, 'L K T'] | None:
    """Return the first position that no longer saw each token; None if the layout does not record it."""
    layout = self.config.layout
    if not (layout.record and layout.sparse) or self._state is None:
      return None
    never = np.full((layout.kv_heads, tokens), NEVER, np.int32)
    layers = [layer.evicted for layer in self._state.cache.layers]
    return np.stack([never if steps is None else fetch(steps[row])[:, :tokens] for steps in layers])

  def _routes(self, row: int, tokens: int) -> Int[np.ndarray, 'T M k'] | None:
    """Return the experts of the row's tokens; None if the layout does not record them."""
    routes = None if self._state is None else self._state.routes
    return None if routes is None else fetch(routes[row])[:tokens].copy()  # a view would keep all positions of the row alive

  def _completion(self, row: Row, finish: str, n: int | None = None, evicted=None, routes=None) -> Completion:
    """Return the first `n` tokens of a row, by default all, with their records."""
    form, support = self.config.support, row.support[:n]
    return Completion(
      request=row.request,
      tokens=np.array(row.tokens[:n], np.int32),
      logp=np.array(row.logp[:n], np.float32),
      version=np.array(row.version[:n], np.int32),
      attended=np.array(row.attended[:n], np.int32),
      finish=finish,
      saturated=row.saturated,
      saturated_queries=row.saturated_queries,
      evicted=evicted,
      routes=routes,
      support=None if form is None else np.array(support, form.dtype).reshape(len(support), form.words),
      prefilled=row.prefilled,
    )

  def _stop_string(self, row: Row, new: int) -> int | None:
    """Return the number of the row's tokens up to the end of the first stop string; None if its `new` last tokens end none."""
    if self._stop is None:
      return None
    earlier = row.request.given[len(row.request.given) - row.request.resumed :].tolist()
    cut = self._stop.cut(earlier + row.tokens, new)
    return None if cut is None else cut - len(earlier)


def generate(config: EngineConfig, weights: SamplerWeights, requests: Sequence[Request], version: int = 0) -> list[Trajectory]:
  """Sample one trajectory for each request, in the requests' order.

  Raises SettingsError if a request does not fit (EngineConfig.check).
  """
  engine = Engine(config, weights, version)
  for request in requests:
    engine.add(request)
  finished: dict[tuple[int, int], Trajectory] = {}
  while engine.load:
    engine.dispatch()
    for completion in engine.collect():
      finished[completion.request.uid, completion.request.attempt] = Trajectory.of(completion, start_version=version)
  return [finished[r.uid, r.attempt] for r in requests]
