"""Helpers for agent tests: count the sampled and trained token segments."""

from collections import Counter

import numpy as np

from sprl.types import sequences


def trained(trajectory):
  """Return a Counter of the trained token segments of an episode: (start in the sequence, tokens, sampler log-probs)."""
  found = Counter()
  for sequence in sequences(trajectory):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.mask, [0]])))
    for start, end in edges.reshape(-1, 2):
      found[start, tuple(sequence.tokens[start:end]), tuple(sequence.sampler_logp[start:end])] += 1
  return found


def drawn(engine, uid):
  """Return a Counter of the segments that `engine` sampled for `uid`: (start in the sequence, tokens, sampler log-probs)."""
  return Counter((c.request.start, tuple(c.tokens), tuple(c.logp)) for c in engine.completions if c.request.uid == uid)
