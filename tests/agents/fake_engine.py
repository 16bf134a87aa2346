"""An engine without a model: it draws random letters, and records every completion that it returns."""

import numpy as np

from sprl.types import Completion


class FakeEngine:
  """Draws letters by (uid, attempt, position), `chunk` tokens at a time. An answer ends with token 2 or at its limit."""

  def __init__(self, capacity=8, chunk=4, stop=0.2):
    self.capacity, self._chunk, self._stop = capacity, chunk, stop
    self._waiting, self._rows = [], []
    self.completions, self.most = [], 0

  @property
  def load(self):
    return len(self._waiting) + len(self._rows)

  def add(self, request):
    self._waiting.append(request)

  def abort(self, uids=None):
    gone = lambda request: uids is None or request.uid in uids  # noqa: E731
    aborted = [self._completion(r, [], 'abort') for r in self._waiting if gone(r)]
    self._waiting = [r for r in self._waiting if not gone(r)]
    aborted += [self._completion(r, tokens, 'abort') for r, tokens in self._rows if gone(r)]
    self._rows = [(r, tokens) for r, tokens in self._rows if not gone(r)]
    return aborted

  def forget(self, uids=None):
    pass

  def swap(self, weights, version):
    pass

  def dispatch(self):
    while self._waiting and len(self._rows) < self.capacity:
      self._rows.append((self._waiting.pop(0), []))
    self.most = max(self.most, len(self._rows))

  @property
  def ready(self):
    return True

  def wait(self, seconds):
    pass

  def collect(self):
    ended, running = [], []
    for request, tokens in self._rows:
      for _ in range(self._chunk):
        draw = np.random.default_rng([request.uid, request.attempt, request.start + len(tokens)])
        tokens.append(2 if draw.random() < self._stop else 3 + int(draw.integers(ord('a'), ord('z'))) - ord('!'))
        if tokens[-1] == 2 or len(tokens) == request.max_tokens:
          ended.append(self._completion(request, tokens, 'stop' if tokens[-1] == 2 else 'length'))
          break
      else:
        running.append((request, tokens))
    self._rows = running
    self.completions += ended
    return ended

  def _completion(self, request, tokens, finish):
    ids = np.array(tokens, np.int32)
    positions = request.start + np.arange(len(ids), dtype=np.int32)
    logp = -(positions + 1).astype(np.float32)
    return Completion(request=request, tokens=ids, logp=logp, version=ids * 0, attended=positions, finish=finish)
