"""Eviction methods of an extension: what they are given, and the error where they read or return something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.cache.attend import attend
from sprl.cache.eviction import METHODS, Method, Scored
from sprl.cache.kv_cache import KVCache, Step
from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Quant, SettingsError
from sprl.models.config import tiny

B, T, H, K, D, BUDGET = 3, 9, 4, 2, 4, 6


def compressed(quant, monkeypatch, method, **others):
  """Return the cache of prompts of 9 tokens after `method`, in place of keydiff, has kept 6 of them; the newest 2 always."""
  monkeypatch.setitem(METHODS, 'keydiff', method)
  settings = Cache(method='keydiff', budget=BUDGET, interval=2, window=2, **others)
  layout = cache_layout(tiny('llama', num_hidden_layers=1, head_dim=D), settings, quant, T, 4, 'float32')
  scales = Scales(*(jnp.array([scale]) for scale in (0.013, 0.017, 0.019)))
  rng = np.random.default_rng(0)
  qkv = (jnp.asarray(rng.normal(size=(B, T, n, D)), jnp.float32) for n in (H, K, K))
  step = Step(jnp.full(B, T))
  return jax.jit(lambda *qkv: attend(0, KVCache.empty(layout, B, T, scales=scales), step, *qkv)[1])(*qkv)


@pytest.mark.parametrize('quant', [Quant(), Quant(sampler='kv8')], ids=['float32', 'FP8'])
def test_a_method_sees_the_values_that_the_cache_stores(monkeypatch, quant):
  first = Method(lambda view, cache: Scored(view.v[..., 0], view.v[..., 0]), carries=True)
  cache = compressed(quant, monkeypatch, first)
  held = cache.layers[0]
  kept = np.asarray(cache.values(0, held))[:, :, :BUDGET, 0]
  np.testing.assert_array_equal(held.carried[:, :, :BUDGET], kept)
  rng = np.random.default_rng(0)
  _, _, v = (rng.normal(size=(B, T, n, D)) for n in (H, K, K))
  largest = np.sort(np.swapaxes(v, 1, 2)[:, :, : T - 2, 0], axis=-1)[:, :, -(BUDGET - 2) :]
  np.testing.assert_allclose(np.sort(kept[:, :, : BUDGET - 2], axis=-1), largest, rtol=0.07)


@pytest.mark.parametrize(('flag', 'first'), [('carries', -1), ('accumulates', 0)])
def test_a_stored_number_starts_at_minus_1_or_as_a_sum_at_0(monkeypatch, flag, first):
  cache = compressed(Quant(), monkeypatch, Method(lambda view, cache: Scored(view.carried, view.carried), **{flag: True}))
  held = cache.layers[0].carried
  np.testing.assert_array_equal(held[:, :, BUDGET:], first)
  if flag == 'carries':
    np.testing.assert_array_equal(held, first)
  else:  # each kept token has been attended to
    assert np.all(held[:, :, :BUDGET] > 0)


@pytest.mark.parametrize('read', [lambda view: view.q.sum(), lambda view: view.q_position[0], lambda view: view.carried * 1])
def test_a_method_cannot_read_what_it_does_not_ask_for(monkeypatch, read):
  with pytest.raises((TypeError, AttributeError), match='NoneType'):
    compressed(Quant(), monkeypatch, Method(lambda view, cache: Scored(view.k[..., 0] + read(view), view.carried)))


@pytest.mark.parametrize(
  ('score', 'carries', 'found'),
  [
    (lambda view: Scored(view.k, view.carried), False, r'float32\[2, 9, 4\], None; '),
    (lambda view: Scored(view.k[:, 0, 0], view.carried), False, r'float32\[2\], None; '),
    (lambda view: view.k[..., 0], False, r'float32\[2, 9\]; '),
    (lambda view: Scored(view.carried, view.carried), False, r'None, None; '),
    (lambda view: Scored(view.k[..., 0], view.k[..., 0]), False, r'float32\[2, 9\], float32\[2, 9\]; .* stores no numbers'),
    (lambda view: Scored(view.k[..., 0], view.k[0, 0]), True, r'float32\[2, 9\], float32\[4\]; .* numbers of this shape'),
  ],
)
def test_scores_of_another_shape_are_refused(monkeypatch, score, carries, found):
  with pytest.raises(SettingsError, match=rf"config\.cache\.method = 'keydiff'.*{found}"):
    compressed(Quant(), monkeypatch, Method(lambda view, cache: score(view), carries=carries))


@pytest.mark.parametrize('scope', ['head', 'layer'])
def test_nan_is_the_lowest_score(monkeypatch, scope):
  def score(view, cache):
    slots = jnp.arange(view.k.shape[1], dtype=jnp.float32)
    known = jnp.broadcast_to(jnp.where(slots % 2 == 0, jnp.nan, -slots), view.k.shape[:2])
    return Scored(known.at[-1, 0].set(jnp.inf if scope == 'layer' else jnp.nan), None)  # of the sum of heads it makes NaN too

  cache = compressed(Quant(), monkeypatch, Method(score), scope=scope)
  # Of the tokens 0 to 6 outside the window the scores of 1, 3 and 5 are known; the newest two stay.
  assert {1, 3, 5, 7, 8} < set(np.asarray(cache.layers[0].position)[0, 0, :BUDGET].tolist())
