"""Log-probs are passed by name: a swap by position raises. Calls are only traced, so nothing compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Correction, Loss
from sprl.objective.correction import reject, weigh
from sprl.objective.diagnostics import mismatch
from sprl.objective.losses import kl, objective, token_loss
from sprl.types import LogProbs

ARRAY, MASK = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
LOGPROBS = LogProbs(sampler=ARRAY, old=ARRAY, current=ARRAY, ref=ARRAY)
OTHERS = {'advantage': ARRAY, 'reward': np.zeros(2, np.float32), 'weight': ARRAY, 'mask': MASK}

CALLS = {
  'weigh': lambda x: weigh(x, jnp.asarray(MASK), Correction()),
  'reject': lambda x: reject(x, jnp.asarray(MASK), Correction(veto=1e-4)),
  'token_loss': lambda x: token_loss(x, Loss(), 'decoupled', **on_device(OTHERS)),
  'objective': lambda x: objective(x, Loss(), 'decoupled', **on_device(OTHERS), coefficient=jnp.asarray(ARRAY)),
  'objective with kl': lambda x: objective(x, Loss(kl_coef=0.1), 'bypass', **on_device(OTHERS), coefficient=jnp.asarray(ARRAY)),
  'kl': kl,
  'mismatch': lambda x: mismatch(
    x,
    Correction(),
    mask=jnp.asarray(MASK),
    advantage=jnp.asarray(ARRAY),
    weights=weigh(x, jnp.asarray(MASK), Correction()),
    survivors=reject(x, jnp.asarray(MASK), Correction()),
  ),
}


def on_device(arrays):
  return jax.tree.map(jnp.asarray, arrays)


def test_log_probs_have_no_positional_fields():
  with pytest.raises(TypeError, match='positional'):
    LogProbs(ARRAY, ARRAY)


@pytest.mark.parametrize('name', CALLS)
def test_a_bare_array_is_not_accepted_as_log_probs(name):
  jax.eval_shape(CALLS[name], LOGPROBS)
  with pytest.raises(Exception, match='LogProbs'):
    jax.eval_shape(CALLS[name], ARRAY)


@pytest.mark.parametrize('function', [token_loss, objective])
def test_the_other_arrays_of_a_loss_are_keyword_only(function):
  with pytest.raises(TypeError, match='positional'):
    function(LOGPROBS, Loss(), 'decoupled', *OTHERS.values())


@pytest.mark.parametrize(
  ('call', 'missing', 'said'),
  [
    ('weigh', 'old', r'LogProbs\.old'),
    ('reject', 'old', r'LogProbs\.old'),
    ('mismatch', 'old', r'LogProbs\.old'),
    ('token_loss', 'old', r"LogProbs\.current and \.old in mode 'decoupled'"),
    ('token_loss', 'current', r'LogProbs\.current'),
    ('objective with kl', 'ref', r'LogProbs\.current and \.ref'),
    ('kl', 'ref', r'LogProbs\.current and \.ref'),
  ],
)
def test_a_missing_log_prob_is_named(call, missing, said):
  with pytest.raises(ValueError, match=said):
    jax.eval_shape(CALLS[call], dataclasses.replace(LOGPROBS, **{missing: None}))


def test_a_missing_entropy_is_named():
  def call(x):
    return objective(x, Loss(entropy_coef=0.1), 'decoupled', **on_device(OTHERS), coefficient=jnp.asarray(ARRAY))

  with pytest.raises(ValueError, match=r'entropy = None.*loss\.entropy_coef = 0\.1'):
    jax.eval_shape(call, LOGPROBS)


def test_log_probs_are_a_pytree_without_their_missing_fields():
  found = jax.tree.map(lambda x: x + 1, LogProbs(sampler=ARRAY, ref=ARRAY))
  assert (found.old, found.current) == (None, None)
  assert float(found.ref.sum()) == 6.0
