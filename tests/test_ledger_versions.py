"""Asynchronous runs: which groups the ledger takes, and which weights it keeps for them. tests/end_to_end has whole ledgers."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.config import Ledger, Rollout, Run
from sprl.ledger import of_one_version, with_version


def rollouts(versions):
  """Return one group of two samples per entry: the versions of the two, or one version."""
  pairs = [v if isinstance(v, tuple) else (v, v) for v in versions]
  made = small.rollouts([(4, 4)] * len(pairs), [3] * len(pairs))
  return [dataclasses.replace(t, version=np.where(t.mask, pairs[t.group][t.uid % 2], -1)) for t in made]


@pytest.mark.parametrize(
  ('versions', 'count', 'version', 'groups'),
  [
    ([3, 4, 3, 3, 4], 4, 3, [0, 0, 2, 2]),
    ([4, 3, 4], 4, 4, [0, 0, 2, 2]),
    ([4, 3, 3, 4], 4, 3, [1, 1, 2, 2]),  # equally many: the oldest
    ([(3, 4), (3, 4), 4], 4, 4, [2, 2]),  # a group of two versions counts for none
    ([(2, 3), (3, 4)], 3, 4, [0, 0, 1]),  # no group of one version: the newest, and the first samples
    ([5] * 3, 2, 5, [0, 0]),
  ],
)
def test_the_ledger_takes_the_version_that_sampled_the_most_groups(versions, count, version, groups):
  found, taken = of_one_version(rollouts(versions), count)
  assert (found, [t.group for t in taken]) == (version, groups)


@pytest.mark.parametrize('alpha', [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize('every', [None, 1, 3])
def test_the_weights_that_a_ledger_reads_are_kept_until_then(alpha, every):
  """Step s trains on samples of the versions s - 1 - ceil(alpha) to s - 1."""
  run, older, last = Run(rollout=Rollout(async_ratio=alpha), ledger=Ledger(every)), {}, 20
  for step in range(1, last):
    window = range(max(step - 1 - math.ceil(alpha), 0), step)
    older = with_version(older, step - 1, {'w': jnp.full(1, step - 1)}, None, run)
    if alpha and every and step % every == 0:
      assert set(older) == set(window)
    later = [s for s in range(step, last + 9) if alpha and every and s % every == 0 and step - 1 >= s - 1 - math.ceil(alpha)]
    if not later:
      assert older == {}
