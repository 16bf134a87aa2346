"""The scales' life: found on real tokens only, with the weights' latest version, remembered as long as the mode says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.learner.packing import Shape, pack
from sprl.models import transformer
from sprl.models.memory import CausalMemory, Memory
from sprl.sampler import calibrate
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.calibrate import CalibratingMemory
from sprl.settings import DENSE, Quant

KV8 = Quant(sampler='kv8')


@pytest.fixture(scope='module', params=['llama', 'qwen2'])
def world(request):
  config, params = small.model(request.param)
  return config, params, transformer.graph(config), cache_plan(config, DENSE, KV8, 16, 12, 'float32')


@dataclasses.dataclass(frozen=True)
class Watching:
  """A memory that keeps all it is given."""

  inner: object
  seen: list

  def attend(self, layer, q, k, v):
    self.seen.append((q, k, v))
    out, _ = self.inner.attend(layer, q, k, v)
    return out, self


def by_hand(config, params, tokens):
  """[3, L] largest |Q|, |K| without its rotated bias, |V| of one sequence."""
  seen = []
  memory = Watching(CausalMemory.of(jnp.ones((1, len(tokens)), jnp.int32)), seen)
  positions = np.arange(len(tokens))
  transformer.forward(transformer.graph(config), params, jnp.asarray(tokens)[None], jnp.asarray(positions)[None], memory)
  found = []
  for (q, k, v), layer in zip(seen, transformer.layers(params)):
    k = np.asarray(k, np.float64)[0]
    if 'bias' in layer['attention']['k']:
      b = np.asarray(layer['attention']['k']['bias'], np.float64).reshape(-1, config.head_dim)
      half = config.head_dim // 2
      angle = positions[:, None] * config.rope.theta ** (-np.arange(half) / half)
      cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
      k = k - np.concatenate([b[:, :half] * cos - b[:, half:] * sin, b[:, half:] * cos + b[:, :half] * sin], axis=-1)
    found.append([np.abs(np.asarray(q)).max(), np.abs(k).max(), np.abs(np.asarray(v)).max()])
  return np.array(found).T


@pytest.mark.parametrize('biased', [False, True])
def test_every_token_of_every_layer_is_seen_and_no_padding(biased):
  B, T, H, K, D, layers = 2, 24, 4, 2, 16, 3
  segments = np.array([[1] * 20 + [0] * 4, [0] * 3 + [1] * 21])
  inner = CausalMemory.of(jnp.asarray(segments, jnp.int32))
  real = segments > 0
  rng = np.random.default_rng(0)
  bias = tuple(jnp.asarray(rng.normal(size=(B, T, K, D)) * 30, jnp.float32) for _ in range(layers)) if biased else None
  memory = CalibratingMemory.around(inner, layers, jnp.asarray(real, jnp.float32), bias)
  assert isinstance(memory, Memory)
  attend = jax.jit(lambda memory, layer, *qkv: memory.attend(layer, *qkv), static_argnums=1)
  expected = np.zeros((3, layers))
  for layer in (2, 0, 1):
    for again in range(2):  # what was larger before stays
      given = [rng.normal(size=(B, T, heads, D)) * (layer + 1) * (2 - again) for heads in (H, K, K)]
      kept = [given[0], given[1] - np.asarray(bias[layer]) if biased else given[1], given[2]]
      here = [max(np.abs(x[b, t]).max() for b, t in zip(*np.nonzero(real))) for x in kept]
      expected[:, layer] = np.maximum(expected[:, layer], here)
      for x in given:
        x[~real] = 1e6
      given = [jnp.asarray(x, jnp.float32) for x in given]
      out, memory = attend(memory, layer, *given)
      np.testing.assert_allclose(out, attend(inner, layer, *given)[0], rtol=1e-6)
  np.testing.assert_allclose(memory.amax, expected, rtol=1e-6)


def test_prompts_are_looked_at_without_their_padding(world):
  config, params, graph, plan = world
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (16, 3, 7)]
  expected = np.max([by_hand(config, params, prompt) for prompt in prompts[:2]], axis=0)
  for mode, room in (('first_forward', 1), ('trainer', 2), ('running_max', 2)):
    found = calibrate.amax_of_prompts(graph, plan, params, prompts, 2, Quant(sampler='kv8', kv_scale=mode))
    np.testing.assert_allclose(found, room * expected, rtol=1e-5)


def test_a_batch_is_looked_at_microbatch_by_microbatch(world):
  config, params, graph, plan = world
  trajectories = small.rollouts([(5,), (4,), (6,)], (6, 3, 9))
  shape = Shape(micros=4, rows=1, tokens=16, sequences=3, columns=6)
  batch, _ = pack(trajectories, np.ones(3, np.float32), shape, share_prefix=True)
  batch = jax.device_put(batch)
  assert int(batch.used) == 3
  each = [by_hand(config, params, t.tokens) for t in trajectories]
  np.testing.assert_allclose(calibrate.amax_of_batch(graph, plan, params, batch, 0), np.max(each, axis=0), rtol=1e-5)
  np.testing.assert_allclose(calibrate.amax_of_batch(graph, plan, params, batch, 2), np.max(each[:2], axis=0), rtol=1e-5)


def test_only_the_running_maximum_looks_back():
  looks = [np.full((3, 2), x, np.float32) for x in (5.0, 9.0, 2.0, 3.0)]
  for mode, expected in (('trainer', 3.0), ('first_forward', 3.0), ('running_max', 3.0)):
    quant = Quant(sampler='kv8', kv_scale=mode, kv_history=2, kv_margin=1.5)
    history = ()
    for look in looks:
      history = calibrate.remembered(history, look, quant)
    q, k, v = calibrate.scales(history, quant, 2)
    divisors = (200, 200, 100) if mode == 'first_forward' else (448 / 1.5,) * 3
    for scale, divisor in zip((q, k, v), divisors):
      np.testing.assert_allclose(scale, expected / divisor, rtol=1e-6)
  longer = dataclasses.replace(KV8, kv_scale='running_max', kv_history=3)
  history = ()
  for look in looks:
    history = calibrate.remembered(history, look, longer)
  np.testing.assert_allclose(calibrate.scales(history, longer, 2).k, 9.0 * 1.05 / 448, rtol=1e-6)


def test_unit_scales_are_one_and_layers_without_values_too():
  for quant, history in ((Quant(sampler='kv8', kv_scale='unit'), (np.full((3, 2), 7.0, np.float32),)), (KV8, ())):
    for scale in calibrate.scales(history, quant, 2):
      np.testing.assert_array_equal(scale, [1, 1])
  found = np.array([[0.0, 2.0]] * 3, np.float32)
  np.testing.assert_allclose(calibrate.scales((found,), KV8, 2).v, [1, 2 * 1.05 / 448], rtol=1e-6)


def test_weights_that_are_broken_have_no_scales():
  fine = np.ones((3, 2), np.float32)
  assert calibrate.usable(())
  assert calibrate.usable((fine, fine))
  assert not calibrate.usable((fine, np.full((3, 2), np.nan, np.float32)))
