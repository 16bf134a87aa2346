"""The expected update on two arms, whose policy gradient is known, under settings drawn at random.

An answer is arm 0 (one token) or arm 1 (two tokens; the second has no effect). Tokens 2 and 3 are improbable answers, which
filters exclude. The reward is 1 for one of the arms. The test enumerates all groups of answers, so an expectation is a sum
without sampling noise. Filters, log-probs, corrections and losses are sprl's. The reference policy gradient is in NumPy.
"""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import (
  Advantage,
  Cache,
  Correction,
  Dppo,
  Loss,
  ModelSettings,
  Optimizer,
  Rollout,
  Run,
  Sampling,
  SettingsError,
  Topr,
)
from sprl.config_checks import validate
from sprl.kernels.linear_logprob import linear_logprob
from sprl.kernels.support import RecordFormat, support_mask
from sprl.learner.update import needs_old_logprobs
from sprl.objective.advantages import advantages
from sprl.objective.correction import reject, weigh
from sprl.objective.losses import VARIANTS, aggregation, objective
from sprl.sampler.draw import draw
from sprl.types import LogProbs

V, GROUP = 4, 2
ANSWERS = [(0,), (2,), (3,), *((1, second) for second in range(V))]
MASK = RecordFormat(1, jnp.uint32)
FILTERS = {  # name -> settings, form of the record
  'none': (Sampling(), None),
  'top_k': (Sampling(top_k=2), RecordFormat(2, jnp.int32)),
  'top_p': (Sampling(top_k=3, top_p=0.9), RecordFormat(3, jnp.int32)),
  'min_p': (Sampling(min_p=0.2), MASK),
  'mask of top_p': (Sampling(top_p=0.9), MASK),
}
OLD = np.float32([[1.0, 0.8, -2.0, -2.5], [0.5, 0.0, -0.3, -2.5]])  # logits of the first token, and of arm 1's second
SPARSE = np.float32([[-0.15, 0.1, 0.2, -0.1], [0.2, -0.1, 0.1, 0.1]])  # change by eviction and FP8
STALE = np.float32([[0.3, -0.2, 0.1, 0.2], [-0.2, 0.3, 0.1, 0.0]])  # change by one more update
DRIFT = np.float32([[-0.05, 0.04, 0.0, 0.02], [0.03, -0.02, 0.0, 0.0]])  # change by the previous update on the same batch


def refused(run):
  try:
    validate(run)
  except SettingsError:
    return True
  return False


def probabilities(logits, kept):
  p = np.where(kept, np.exp(np.float64(logits)), 0)
  return p / p.sum(axis=1, keepdims=True)


def policy_gradient(logits, kept, good):
  """Return the gradient of the expected reward, p (R - J), of the policy that is restricted to the kept tokens."""
  p = probabilities(logits, kept)
  reward = np.arange(V) == good
  return np.stack([p[0] * (reward - p[0] @ reward), np.zeros(V)])


def expected_update(run, sampling, form, *, sampler, old, current, good):
  """Return minus the expected gradient of the loss by the logits, over all groups of GROUP answers, and the kept tokens."""
  kept, support = np.ones((2, V), bool), None
  if form is not None:
    support = draw(jnp.asarray(sampler), jnp.zeros((2, 2)), sampling, form).support
    kept = np.asarray(support_mask(support, V))
  p = probabilities(sampler, kept)
  chance = {answer: float(np.prod([p[state, token] for state, token in enumerate(answer)])) for answer in ANSWERS}
  groups = [group for group in itertools.product(ANSWERS, repeat=GROUP) if all(chance[answer] > 0 for answer in group)]
  tokens = np.array([[(*answer, 0)[:2] for answer in group] for group in groups])
  mask = np.array([[[True, len(answer) == 2] for answer in group] for group in groups])
  reward = np.array([[float(answer[0] == good) for answer in group] for group in groups], np.float32)
  together, everyone = np.zeros(GROUP, np.int32), np.ones(GROUP, bool)
  A = np.stack([advantages(r, together, everyone, run.advantage) for r in reward]).astype(np.float32)

  def logprobs_of(logits, tokens):
    """Return the log-probs of the tokens of a group [B, 2]. The logits of a state are its hidden state."""
    hidden = jnp.broadcast_to(logits, (GROUP, 2, V)).reshape(-1, V)
    over = None if support is None else jnp.tile(support, (GROUP, 1))
    return linear_logprob(hidden, jnp.eye(V), tokens.reshape(-1), support=over)[0].reshape(GROUP, 2)

  def loss(logits, tokens, mask, reward, A):
    now = logprobs_of(logits, tokens)
    scored = needs_old_logprobs(run.correction, run.optimizer.updates)
    before = logprobs_of(jnp.asarray(old), tokens) if scored else jax.lax.stop_gradient(now)
    logprobs = LogProbs(sampler=logprobs_of(jnp.asarray(sampler), tokens), old=before, current=now)
    of_current = run.correction.mode == 'bypass' and run.loss.variant == 'reinforce'
    compared = LogProbs(sampler=logprobs.sampler, old=now if of_current else before)
    weight = weigh(compared, mask, run.correction, jnp.asarray(together)).weight
    surviving = reject(logprobs, mask, run.correction).mask
    coefficient = aggregation(surviving=surviving, mask=mask, prompt=jnp.asarray(together), settings=run.loss)
    advantage = jnp.broadcast_to(A[:, None], mask.shape)
    return objective(
      logprobs, run.loss, run.correction.mode, advantage=advantage, reward=reward, weight=weight, mask=mask,
      coefficient=coefficient,
    )[0]  # fmt: skip

  gradients = jax.vmap(jax.grad(loss), (None, 0, 0, 0, 0))(jnp.asarray(current), *map(jnp.asarray, (tokens, mask, reward, A)))
  weights = np.array([np.prod([chance[answer] for answer in group]) for group in groups])
  return -np.einsum('g,gsv->sv', weights, np.asarray(gradients, np.float64)), kept


def run_of(variant, mode, level, ahead, updates, topr='token', estimator='dr_grpo', **correction):
  return Run(
    model=ModelSettings(path='x'),
    cache=Cache(budget=64),  # rollouts evict, so that the sampler differs
    advantage=Advantage(estimator),
    correction=Correction(mode=mode, level=level, **correction),
    loss=Loss(variant=variant, topr=Topr(level=topr)),
    optimizer=Optimizer(minibatches=updates),
    rollout=Rollout(async_ratio=float(ahead)),
  )


CHOICES = {
  'variant': sorted(VARIANTS),
  'mode': ['decoupled', 'bypass'],
  'level': [None, None, None, 'token', 'segment', 'sequence', 'geometric'],  # None often: most losses in bypass mode need it
  'weight': ['truncate', 'clip', 'icepop'],
  'topr': ['token', 'geometric', 'sequence'],
  'estimator': ['grpo', 'dr_grpo', 'rloo'],
  'kept': sorted(FILTERS),
  'ahead': [False, True],
  'updates': [1, 2],
  'good': [0, 1],
}


def of_case(case):
  return run_of(**{name: value for name, value in case.items() if name not in ('kept', 'good')})


def accepted(count):
  """Draw this many cases. Return those whose settings are accepted."""
  rng = np.random.default_rng(17)
  cases = [{name: values[rng.integers(len(values))] for name, values in CHOICES.items()} for _ in range(count)]
  cases = [case | ({'weight': 'truncate'} if case['level'] is None else {}) for case in cases]  # without a weight, it has no form
  return [case for case in cases if not refused(of_case(case))]


CASES = accepted(150)


@pytest.mark.parametrize('case', CASES, ids=lambda case: '-'.join(map(str, case.values())))
def test_the_expected_update_points_the_right_way_if_the_settings_are_accepted(case):
  kept, good = case['kept'], case['good']
  run = of_case(case)
  current = OLD + (DRIFT if case['updates'] > 1 else 0)
  sampler = OLD + SPARSE + (STALE if case['ahead'] else 0)
  sampling, form = FILTERS[kept]
  update, tokens = expected_update(run, sampling, form, sampler=sampler, old=OLD, current=current, good=good)
  wanted = policy_gradient(current, tokens, good)
  along = float(np.sum(update * wanted))
  # A clip may remove all tokens that have moved in the right direction. The update is then 0, but never against the gradient.
  # With wide bounds the same settings do update.
  clips = case['variant'] in ('ppo', 'gspo', 'segment', 'dppo_kl') and (case['mode'] == 'bypass' or case['updates'] > 1)
  if clips:
    assert along >= 0
    wide = replace(run, loss=replace(run.loss, clip_low=0.99, clip_high=20.0, dppo_kl=Dppo(delta=1.0)))
    update, _ = expected_update(wide, sampling, form, sampler=sampler, old=OLD, current=current, good=good)
    along = float(np.sum(update * wanted))
    assert along > 0.5 * np.linalg.norm(update) * np.linalg.norm(wanted), (update, wanted)
    assert along > 0.01 * float(np.sum(wanted**2))
  else:
    assert along > 0.01 * float(np.sum(wanted**2))
    assert along > 0.5 * np.linalg.norm(update) * np.linalg.norm(wanted), (update, wanted)


def test_the_accepted_cases_have_every_variant_and_filter():
  assert len(CASES) >= 50
  assert {case['variant'] for case in CASES} == set(VARIANTS)
  assert {case['kept'] for case in CASES} == set(FILTERS)


@pytest.mark.parametrize('kept', sorted(FILTERS))
@pytest.mark.parametrize('variant', ['reinforce', 'ppo'])
def test_untruncated_sequence_weights_give_the_policy_gradient_itself(variant, kept):
  """With dr_grpo and sums over tokens, the factor is 1 - 1/n for any sampler: the baseline contains the answer itself."""
  run = run_of(variant, 'decoupled', 'sequence', False, 1, cap=1e9)
  run = Run(**vars(run) | {'loss': Loss(variant=variant, aggregate='seq-mean-token-sum')})
  sampling, form = FILTERS[kept]
  update, tokens = expected_update(run, sampling, form, sampler=OLD + SPARSE + STALE, old=OLD, current=OLD, good=1)
  np.testing.assert_allclose(update, (1 - 1 / GROUP) * policy_gradient(OLD, tokens, 1), atol=1e-6)


@pytest.mark.parametrize('kept', sorted(FILTERS))
def test_equal_policies_have_log_rho_0_under_every_filter(kept):
  """Rules that accept only ratios near 1 then keep every token."""
  sampling, form = FILTERS[kept]
  changes = {'reject': ('token_k1=1.00001', 'seq_mean_k1=1.00001')}
  run = run_of('reinforce', 'decoupled', 'token', False, 1, **changes)
  with_rules, tokens = expected_update(run, sampling, form, sampler=OLD, old=OLD, current=OLD, good=0)
  run = run_of('reinforce', 'decoupled', None, False, 1)
  without, _ = expected_update(run, sampling, form, sampler=OLD, old=OLD, current=OLD, good=0)
  np.testing.assert_allclose(with_rules, without, atol=1e-6)
  assert np.sum(with_rules * policy_gradient(OLD, tokens, 0)) > 0.01
