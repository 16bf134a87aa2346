"""The engine: requests in, trajectories out, over a fixed number of rows that are refilled as they finish.

1. requests of one prompt are admitted together: the prompt is prefilled once, and each row starts from a copy of its cache;
2. all rows decode a chunk of steps in one jitted call;
3. the host looks once a chunk: rows that ended, and rows whose text now holds a stop string, leave, and the queue moves up.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from sprl.cache.layer import NEVER
from sprl.cache.plan import CachePlan
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.sampler import decode
from sprl.sampler.served import Served
from sprl.settings import Sampling, SettingsError
from sprl.trajectory import Request, Trajectory

SMALLEST_BUCKET = 32


def prompt_buckets(sampling: Sampling) -> tuple[int, ...]:
  """The padded prompt lengths that prefill is compiled for, ascending; the last is the longest prompt allowed."""
  if sampling.prompt_buckets:
    return sampling.prompt_buckets
  sizes = [SMALLEST_BUCKET]
  while sizes[-1] < sampling.max_prompt:
    sizes.append(sizes[-1] * 2)
  return (*sizes[:-1], sampling.max_prompt) if sizes[-1] > sampling.max_prompt else tuple(sizes)


@dataclass(frozen=True)
class Engine:
  """What stays the same for a run's rollouts.

  `rows` sequences decode side by side; `prefill` distinct prompts go through the network at a time. The log-probs recorded
  are of the distribution after temperature and filters. `plan` is the memory: what is kept of each sequence, and how.
  `text` decodes ids, for stop strings.
  """

  config: ModelConfig
  sampling: Sampling
  plan: CachePlan
  rows: int
  prefill: int
  seed: int
  stop_ids: tuple[int, ...]
  text: Callable[[Sequence[int]], str]

  def generate(self, served: Served, requests: Sequence[Request], version: int = 0) -> list[Trajectory]:
    """One trajectory a request, in the order of the requests.

    Raises SettingsError where a prompt is longer than `sampling.max_prompt`.
    """
    self._check(requests)
    graphdef = transformer.graph(self.config)
    state = decode.empty_rows(self.plan, served, self.rows, self.sampling.max_tokens, jax.random.key(self.seed))
    queue = deque(range(len(requests)))
    running: list[int | None] = [None] * self.rows  # the request in each row
    finished: dict[int, Trajectory] = {}
    while queue or any(r is not None for r in running):
      state = self._admit(graphdef, served, state, requests, queue, running)
      state = decode.decode(graphdef, served, state, self.sampling, self.stop_ids, self.sampling.chunk)
      state = self._collect(state, requests, running, finished, version)
    return [finished[i] for i in range(len(requests))]

  def _check(self, requests):
    longest = prompt_buckets(self.sampling)[-1]
    for request in requests:
      if not 0 < len(request.prompt) <= longest:
        raise SettingsError(
          f'config.sampling.max_prompt = {longest}: request {request.uid} has a prompt of {len(request.prompt)} tokens; '
          'raise the setting or leave such problems out'
        )
      if request.max_tokens > self.sampling.max_tokens:
        raise SettingsError(
          f'config.sampling.max_tokens = {self.sampling.max_tokens}: request {request.uid} asks for {request.max_tokens}'
        )

  def _admit(self, graphdef, served, state, requests, queue, running):
    """Fill free rows from the queue, up to `prefill` distinct prompts at a time."""
    free = [row for row, request in enumerate(running) if request is None]
    if len(free) < min(len(queue), self.rows // self.prefill):  # a prefill is worth a prompt's share of the rows
      return state
    while queue and free:
      prompts: dict[bytes, int] = {}
      parent, uid, limit = np.full(self.rows, -1, np.int32), np.zeros(self.rows, np.int32), np.zeros(self.rows, np.int32)
      while queue and free:
        request = requests[queue[0]]
        key = request.prompt.astype(np.int32).tobytes()
        if key not in prompts and len(prompts) == self.prefill:
          break
        row = free.pop(0)
        running[row] = queue.popleft()
        parent[row] = prompts.setdefault(key, len(prompts))
        uid[row], limit[row] = request.uid, request.max_tokens
      ids = [np.frombuffer(key, np.int32) for key in prompts]
      bucket = next(b for b in prompt_buckets(self.sampling) if b >= max(map(len, ids)))
      tokens, lengths = np.zeros((self.prefill, bucket), np.int32), np.zeros(self.prefill, np.int32)
      for i, prompt in enumerate(ids):
        tokens[i, : len(prompt)], lengths[i] = prompt, len(prompt)
      prefilled = decode.prefill(graphdef, self.plan, served, jnp.asarray(tokens), jnp.asarray(lengths))
      state = decode.admit(
        served, state, prefilled, jnp.asarray(parent), jnp.asarray(uid), jnp.asarray(limit), self.sampling, self.stop_ids
      )
    return state

  def _collect(self, state, requests, running, finished, version):
    """Take the rows that ended out of `running`; end those whose text holds a stop string."""
    busy = [row for row, request in enumerate(running) if request is not None]
    done, count, tokens, logp, kept, saturated = jax.device_get(
      (state.done, state.count, state.tokens, state.logp, state.kept, state.cache.saturated)
    )
    stopped = np.zeros(self.rows, bool)
    for row in busy:
      request = requests[running[row]]
      ids, n = tokens[row], int(count[row])
      cut = self._stop_string(ids[:n])
      if cut is None and not done[row]:
        continue
      stopped[row] = not done[row]
      n = n if cut is None else cut
      stop = cut is not None or (n > 0 and int(ids[n - 1]) in self.stop_ids)
      finished[running[row]] = _trajectory(
        request,
        ids[:n],
        logp[row, :n],
        kept[row, :n],
        version,
        'stop' if stop else 'length',
        int(saturated[row]),
        self._evicted(state, row, len(request.prompt) + n),
      )
      running[row] = None
    return decode.release(state, jnp.asarray(stopped)) if stopped.any() else state

  def _evicted(self, state, row, tokens):
    """[L, K, T]: when the row's tokens were evicted; None where the plan does not write it down."""
    if not (self.plan.record and self.plan.sparse):
      return None
    never = np.full((self.plan.kv_heads, tokens), NEVER, np.int32)
    layers = [layer.evicted for layer in state.cache.layers]
    return np.stack([never if steps is None else np.asarray(steps[row])[:, :tokens] for steps in layers])

  def _stop_string(self, ids) -> int | None:
    """How many tokens it takes until the text holds a stop string; None where it holds none."""
    if not self.sampling.stop:
      return None
    recent = ids[-self.sampling.chunk - max(map(len, self.sampling.stop)) :]  # what came before was looked at before
    if not any(s in self.text(recent.tolist()) for s in self.sampling.stop):
      return None
    low, high = 1, len(ids)  # the text of a prefix only grows: halve until the completing token is found
    while low < high:
      middle = (low + high) // 2
      if any(s in self.text(ids[:middle].tolist()) for s in self.sampling.stop):
        high = middle
      else:
        low = middle + 1
    return low


def _trajectory(request, completion, logp, kept, version, finish, saturated, evicted):
  P, C = len(request.prompt), len(completion)
  prompt = np.zeros(P, np.int32)
  return Trajectory(
    uid=request.uid,
    group=request.group,
    tokens=np.concatenate([request.prompt, completion]).astype(np.int32),
    mask=np.arange(P + C) >= P,
    sampler_logp=np.concatenate([prompt, logp]).astype(np.float32),
    version=np.concatenate([prompt - 1, np.full(C, version)]).astype(np.int32),
    kept=np.concatenate([prompt, kept]).astype(np.int32),
    prompt_length=P,
    finish=finish,
    saturated=saturated,
    evicted=evicted,
  )
