"""Drawing a token: filters against loops, draws against the distribution, log-probs against float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Sampling
from sprl.kernels.support import record_format
from sprl.sampler.draw import candidates, draw, logp_of, uniforms

SETTINGS = [
  Sampling(),
  Sampling(temperature=0.7),
  Sampling(top_k=5),
  Sampling(top_p=0.6),
  Sampling(min_p=0.2),
  Sampling(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
]
B, V = 32, 300  # two blocks of the search, the second one ragged


@partial(jax.jit, static_argnames='sampling')
def drawn(logits, uniform, given, sampling):
  token, logp, support = draw(logits, uniform, sampling, record_format(sampling, V))
  return {
    'filtered': probabilities(logits, sampling) if sampling.temperature else logits,
    'token': token,
    'logp': logp,
    'logp_of_drawn': logp_of(logits, token, sampling, support),
    'logp_of_given': logp_of(logits, given, sampling, support),
  }


def probabilities(logits, sampling):
  """Return the probabilities [B, V] after temperature and filters."""
  found = candidates(logits, sampling)
  p = jax.nn.softmax(found.logits)
  return p if found.ids is None else jnp.zeros(logits.shape).at[jnp.arange(len(p))[:, None], found.ids].set(p)


@cache
def sample(sampling):
  """Return (random logits [B, V], a given token of each row, results of `draw` and `logp_of`)."""
  rng = np.random.default_rng(1)
  logits, uniform = rng.normal(0, 2, (B, V)).astype(np.float32), rng.random((B, 2)).astype(np.float32)
  given = rng.integers(0, V, B).astype(np.int32)
  given[0] = logits[0].argmin()  # the first to be filtered
  return logits, given, jax.device_get(drawn(logits, uniform, given, sampling))


def by_hand(logits, sampling):
  """Return float64 probabilities of one row: temperature, then top-k, top-p and min-p, one token at a time."""
  logits = [float(x) / sampling.temperature for x in logits]
  kept = set(range(len(logits)))
  if sampling.top_k:
    kth = sorted(logits, reverse=True)[min(sampling.top_k, len(logits)) - 1]
    kept = {i for i in kept if logits[i] >= kth}
  if sampling.top_p < 1:
    total, before, nucleus = sum(np.exp(logits[i]) for i in kept), 0.0, set()
    for i in sorted(kept, key=lambda i: -logits[i]):
      if before < sampling.top_p:
        nucleus.add(i)
      before += np.exp(logits[i]) / total
    kept = nucleus
  if sampling.min_p:
    top = max(logits[i] for i in kept)
    kept = {i for i in kept if np.exp(logits[i] - top) >= sampling.min_p}
  p = np.array([np.exp(x) if i in kept else 0.0 for i, x in enumerate(logits)])
  return p / p.sum()


@pytest.mark.parametrize('sampling', SETTINGS)
def test_filters_equal_loops(sampling):
  logits, _, got = sample(sampling)
  np.testing.assert_allclose(got['filtered'], [by_hand(row, sampling) for row in logits], atol=1e-6)


def test_filters_by_literals():
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]]))

  def kept(**settings):
    return (probabilities(logits, Sampling(**settings)) > 0)[0].tolist()

  assert kept() == [True] * 4
  assert kept(top_k=2) == [True, True, False, False]
  assert kept(top_k=4) == kept(top_k=9) == [True] * 4
  assert kept(top_p=0.4) == [True, False, False, False]  # the likeliest token always stays
  assert kept(top_p=0.6) == [True, True, False, False]  # the token with which the sum exceeds 0.6 stays
  assert kept(min_p=0.29) == [True, True, True, False]  # 0.15 / 0.5 = 0.3


def test_of_tokens_that_tie_with_the_kth_the_first_stay():
  kept = probabilities(jnp.array([[1.0, 3.0, 2.0, 2.0]]), Sampling(top_k=2)) > 0
  assert kept[0].tolist() == [False, True, True, False]


@pytest.mark.parametrize('sampling', SETTINGS)
def test_the_log_prob_is_of_the_filtered_distribution(sampling):
  logits, _, got = sample(sampling)
  expected = [np.log(by_hand(row, sampling)[t]) for row, t in zip(logits, got['token'])]
  np.testing.assert_allclose(got['logp'], expected, atol=1e-5)


@pytest.mark.parametrize('sampling', [*SETTINGS, Sampling(temperature=0.0)])
def test_logp_of_a_drawn_token_equals_the_log_prob_of_draw(sampling):
  _, _, got = sample(sampling)
  np.testing.assert_allclose(got['logp_of_drawn'], got['logp'], atol=2e-6)


@pytest.mark.parametrize('sampling', SETTINGS)
def test_a_filtered_token_has_log_prob_minus_infinity(sampling):
  logits, given, got = sample(sampling)
  with np.errstate(divide='ignore'):
    expected = [np.log(by_hand(row, sampling)[t]) for row, t in zip(logits, given)]
  assert np.isinf(expected[0]) == (sampling not in SETTINGS[:2])
  np.testing.assert_allclose(got['logp_of_given'], expected, atol=1e-5)


@pytest.mark.parametrize(
  ('V', 'sampling'),
  [(10, Sampling()), (700, Sampling(temperature=0.8)), pytest.param(700, Sampling(top_k=30), marks=pytest.mark.slow)],
)
def test_draws_follow_the_distribution(V, sampling):
  """Chi-square of 40,000 draws. 700 is not a multiple of the search's blocks, and its last token is made likely."""
  logits = np.random.default_rng(V).normal(0, 1.5, V).astype(np.float32)
  logits[-1] = logits.max()
  p, n = by_hand(logits, sampling), 40_000
  zeros = jnp.zeros(n, jnp.int32)

  @jax.jit
  def tokens(logits):
    random = uniforms(jax.random.key(7), jnp.arange(n), zeros, zeros)
    return draw(jnp.broadcast_to(logits, (n, V)), random, sampling)[0]

  token = tokens(logits)
  count = np.bincount(token, minlength=V)
  assert not count[p == 0].any()
  likely = p * n >= 10
  observed = np.append(count[likely], count[~likely & (p > 0)].sum())
  expected = np.append(p[likely], p[~likely].sum()) * n
  observed, expected = observed[expected > 0], expected[expected > 0]
  degrees = len(expected) - 1
  chi = ((observed - expected) ** 2 / expected).sum()
  assert abs(chi - degrees) < 4 * np.sqrt(2 * degrees), (chi, degrees)


@pytest.mark.parametrize('V', [3, 256, 300, 1000])
def test_ends_of_the_unit_interval_draw_ends_of_the_support(V):
  logits = np.full((2, V), -np.inf, np.float32)
  first, last = 1, V - 2
  logits[:, [first, last]] = 0.0
  uniform = np.repeat(np.array([[0.0], [np.nextafter(np.float32(1), np.float32(0))]], np.float32), 2, axis=1)
  token, logp, _ = jax.jit(partial(draw, sampling=Sampling()))(logits, uniform)
  assert token.tolist() == [first, last]
  np.testing.assert_allclose(logp, [0.0 if first == last else -np.log(2)] * 2, atol=1e-6)


def test_a_token_without_mass_is_never_drawn():
  """XLA sums long rows in a tree, so a cumulative sum can grow by rounding at an entry of 0. The random numbers aim there."""
  V = 600 * 256
  logits = np.full((1, V), -np.inf, np.float32)
  rng = np.random.default_rng(0)
  alive = rng.choice(V, 50, replace=False)
  logits[0, alive] = 3 * rng.normal(size=50)
  mass = np.exp(logits - logits.max()).reshape(600, 256).sum(axis=1)
  edges = np.float32(np.cumsum(mass)[mass > 0] / mass.sum())
  near = np.concatenate([np.nextafter(edges, d) for d in (np.float32(0), np.float32(2))] + [edges])
  steps = np.concatenate([near + k * np.spacing(near) for k in range(-4, 5)]).clip(0, 1 - 1e-7)
  uniform = np.stack([steps, np.full_like(steps, 0.5)], axis=1)
  one = jax.jit(lambda u: draw(jnp.asarray(logits), u[None], Sampling()))
  token, logp, _ = jax.lax.map(lambda u: jax.tree.map(lambda x: x[0], one(u)), jnp.asarray(uniform, jnp.float32))
  assert np.isin(token, alive).all()
  assert np.isfinite(logp).all()


def test_greedy_takes_the_likeliest_with_log_prob_0():
  logits = jnp.array([[0.0, 2.0, 1.0], [3.0, -1.0, 3.0]])
  token, logp, _ = draw(logits, jnp.full((2, 2), 0.9), Sampling(temperature=0.0))
  assert token.tolist() == [1, 0]
  assert logp.tolist() == [0.0, 0.0]


def test_random_numbers_depend_on_uid_attempt_and_position_only():
  numbers, seed, zeros = jax.jit(uniforms), jax.random.key(3), jnp.zeros(50, jnp.int32)

  def some(seed, *which):
    return np.asarray(numbers(seed, *(jnp.array([*x, *range(50 - len(x))], jnp.int32) for x in which)))[: len(which[0])]

  a = some(seed, [5, 6, 7], [0, 0, 1], [0, 1, 2])
  b = some(seed, [7, 9, 5, 6], [1, 0, 0, 0], [2, 0, 0, 1])
  np.testing.assert_array_equal(a, b[[2, 3, 0]])
  for which in range(3):
    varied = [zeros, zeros, zeros]
    varied[which] = jnp.arange(50)
    assert len(np.unique(np.asarray(numbers(seed, *varied)))) == 100
  assert not np.array_equal(a, some(jax.random.key(4), [5, 6, 7], [0, 0, 1], [0, 1, 2]))


def test_filters_whose_bound_is_met_exactly():
  """Probabilities of 1/2, 1/4, 1/8 and 1/8, which are exact: the smallest set for top-p, at least the fraction for min-p."""
  logits = jnp.asarray(np.log(np.float32([[0.5, 0.25, 0.125, 0.125]])))
  p = np.asarray(jax.nn.softmax(logits))[0]
  np.testing.assert_array_equal(p, [0.5, 0.25, 0.125, 0.125])

  def kept(**settings):
    return int((probabilities(logits, Sampling(**settings)) > 0).sum())

  assert [kept(top_p=bound) for bound in (0.5, 0.51, 0.75, 0.76)] == [1, 2, 2, 4]  # the last two tie, so both stay
  assert [kept(min_p=bound) for bound in (0.25, 0.26, 0.5, 0.51)] == [4, 2, 2, 1]
