"""What tests of agents check: tokens that were drawn and trained, and processes that are left."""

import time
from collections import Counter
from pathlib import Path

import numpy as np

from sprl.types import sequences


def trained(trajectory):
  """Return the runs of tokens of the model in an episode: (position, tokens, log-probs)."""
  found = Counter()
  for sequence in sequences(trajectory):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.mask, [0]])))
    for start, end in edges.reshape(-1, 2):
      found[start, tuple(sequence.tokens[start:end]), tuple(sequence.sampler_logp[start:end])] += 1
  return found


def drawn(engine, uid):
  return Counter((c.request.start, tuple(c.tokens), tuple(c.logp)) for c in engine.completions if c.request.uid == uid)


def alive(pid):
  try:
    return Path(f'/proc/{pid}/stat').read_text().split(')')[-1].split()[0] != 'Z'
  except OSError:
    return False


def wait_until(condition, seconds=20):
  until = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < until
    time.sleep(0.01)
