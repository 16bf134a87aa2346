"""Cache scales: measured on real tokens only, with the newest weights, over the history of `quant.kv_scale`."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache.key_bias import KeyBias
from sprl.cache.layout import cache_layout
from sprl.config import DENSE, Quant
from sprl.io.run_state import RunState
from sprl.learner.batch import Shape, pack
from sprl.models import transformer
from sprl.models.attention import Attention, PackedAttention
from sprl.sampler import calibrate
from sprl.sampler.calibrate import CalibratingAttention

KV8 = Quant(sampler='kv8')


@pytest.fixture(scope='module', params=['qwen2', pytest.param('llama', marks=pytest.mark.slow)])
def world(request):
  """(config, params, graphdef, layout) of a family with biased keys. The slow suite adds a family without biases."""
  config, params = small.model(request.param)
  return config, params, transformer.graph(config), cache_layout(config, DENSE, KV8, 16, 12, 'float32')


@dataclasses.dataclass(frozen=True)
class RecordingMemory:
  """A memory that records all queries, keys and values."""

  inner: object
  seen: list

  def attend(self, layer, q, k, v, sliding_window=None):
    self.seen.append((q, k, v))
    out, _ = self.inner.attend(layer, q, k, v, sliding_window)
    return out, self


@partial(jax.jit, static_argnums=0)
def states(config, params, tokens):
  """Return (q, k, v) of each layer for one row. Padding behind the sequence does not change earlier tokens."""
  seen = []
  memory = RecordingMemory(PackedAttention.of(jnp.ones((1, len(tokens)), jnp.int32)), seen)
  transformer.forward(transformer.graph(config), params, tokens[None], jnp.arange(len(tokens))[None], memory)
  return seen


def by_hand(config, params, tokens, positions):
  """Return [3, L]: the largest |Q|, |K| and |V| of one sequence.

  Keys count without their bias rotated to each of the positions and averaged.
  """
  n, found = len(tokens), []
  seen = states(config, params, jnp.asarray(np.pad(tokens, (0, 16 - n))))
  for (q, k, v), layer in zip(seen, transformer.layers(params)):
    k = np.asarray(k, np.float64)[0, :n]
    if 'bias' in layer['attention']['k']:
      b = np.asarray(layer['attention']['k']['bias'], np.float64).reshape(-1, config.head_dim)
      half = config.head_dim // 2
      angle = np.arange(positions)[:, None] * config.rope.theta ** (-np.arange(half) / half)
      cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
      k = k - np.concatenate([b[:, :half] * cos - b[:, half:] * sin, b[:, half:] * cos + b[:, :half] * sin], axis=-1).mean(axis=0)
    found.append([np.abs(np.asarray(q)[0, :n]).max(), np.abs(k).max(), np.abs(np.asarray(v)[0, :n]).max()])
  return np.array(found).T


@pytest.mark.parametrize('biased', [False, True])
def test_memory_sees_every_token_of_every_layer_and_no_padding(biased):
  B, T, H, K, D, layers = 2, 24, 4, 2, 16, 3
  segments = np.array([[1] * 20 + [0] * 4, [0] * 3 + [1] * 21])
  inner = PackedAttention.of(jnp.asarray(segments, jnp.int32))
  real = segments > 0
  rng = np.random.default_rng(0)
  means = tuple(jnp.asarray(rng.normal(size=(K, D)) * 30, jnp.float32) for _ in range(layers))
  bias = KeyBias(means, (None,) * layers) if biased else None
  memory = CalibratingAttention.around(inner, layers, jnp.asarray(real), bias)
  assert isinstance(memory, Attention)
  expected = np.zeros((3, layers))
  rounds = []
  for layer in (2, 0, 1):
    for again in range(2):  # the second values are smaller, so the first maxima stay
      given = [rng.normal(size=(B, T, heads, D)) * (layer + 1) * (2 - again) for heads in (H, K, K)]
      kept = [given[0], given[1] - np.asarray(means[layer]) if biased else given[1], given[2]]
      here = [max(np.abs(x[b, t]).max() for b, t in zip(*np.nonzero(real))) for x in kept]
      expected[:, layer] = np.maximum(expected[:, layer], here)
      for x in given:
        x[~real] = 1e6
      rounds.append((layer, [jnp.asarray(x, jnp.float32) for x in given]))

  @jax.jit
  def attend(memory, inner, given):
    outs = []
    for (layer, _), qkv in zip(rounds, given):
      out, memory = memory.attend(layer, *qkv)
      outs.append((out, inner.attend(layer, *qkv)[0]))
    return memory.amax, outs

  amax, outs = attend(memory, inner, [qkv for _, qkv in rounds])
  np.testing.assert_allclose(amax, expected, rtol=1e-6)
  for out, of_inner in outs:
    np.testing.assert_allclose(out, of_inner, rtol=1e-6)


def test_prompts_count_without_their_padding(world):
  config, params, graph, layout = world
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (16, 3, 7)]
  expected = np.max([by_hand(config, params, prompt, layout.positions) for prompt in prompts[:2]], axis=0)
  for mode, room in (('first_forward', 1), ('learner', 2), ('running_max', 2), ('frozen', 2)):
    found = calibrate.amax_of_prompts(graph, layout, params, prompts, 2, Quant(sampler='kv8', kv_scale=mode))
    np.testing.assert_allclose(found, room * expected, rtol=1e-5)


def test_a_batch_counts_its_filled_microbatches(world):
  config, params, graph, layout = world
  trajectories = small.rollouts([(5,), (4,), (6,)], (6, 3, 9))
  shape = Shape(micros=4, rows=1, tokens=16, sequences=3, columns=6)
  batch, _ = pack(trajectories, np.ones(3, np.float32), shape, share_prefix=True)
  packed = {name: jnp.asarray(getattr(batch, name)) for name in ('tokens', 'positions', 'segments', 'prefixes', 'used')}
  assert int(batch.used) == 3
  each = [by_hand(config, params, t.tokens, layout.positions) for t in trajectories]
  np.testing.assert_allclose(calibrate.amax(graph, layout, params, **packed), np.max(each, axis=0), rtol=1e-5)
  fewer = calibrate.amax(graph, layout, params, **packed | {'used': jnp.int32(2)})
  np.testing.assert_allclose(fewer, np.max(each[:2], axis=0), rtol=1e-5)


def test_scales_of_a_checkpoint_that_has_no_bound_cover_key_biases_at_any_position(world):
  """The history is that of any version: largest values, which do not include what biases may add at other positions."""
  config, params, _, layout = world
  state = RunState.from_json(1, json.loads(json.dumps(RunState(amax=[[[1.0] * 2, [2.0] * 2, [3.0] * 2]]).to_json())))
  history = tuple(np.array(found, np.float32) for found in state.amax)
  bounds = np.zeros(config.num_layers)
  for i, layer in enumerate(transformer.layers(params)):
    if 'bias' in layer['attention']['k']:
      b = np.asarray(layer['attention']['k']['bias'], np.float64).reshape(-1, config.head_dim)
      half = config.head_dim // 2
      bounds[i] = 2 * np.sqrt(b[:, :half] ** 2 + b[:, half:] ** 2).max()  # twice the largest plane
  found = calibrate.scales(history, KV8, layout, params)
  for scale, largest in zip(found, (1.0, 2.0 + bounds, 3.0)):
    np.testing.assert_allclose(scale, np.broadcast_to(largest, 2) * 1.05 / 448, rtol=1e-6)
  assert (bounds > 0).all() == layout.key_bias


def test_only_the_running_maximum_and_frozen_scales_use_earlier_steps():
  looks = [np.full((3, 2), x, np.float32) for x in (9.0, 5.0, *[3.0] * 15)]  # running_max looks back on 16 steps
  for mode, expected in (('learner', 3.0), ('first_forward', 3.0), ('running_max', 5.0), ('frozen', 9.0)):
    quant, history = Quant(sampler='kv8', kv_scale=mode), ()
    for look in looks:
      history = calibrate.remember(history, look, quant)
    divisors = (200, 200, 100) if mode == 'first_forward' else (448 / 1.05,) * 3
    for scale, divisor in zip(unbiased(history, quant), divisors):
      np.testing.assert_allclose(scale, expected / divisor, rtol=1e-6)


def test_scales_are_1_in_unit_mode_and_for_layers_without_values():
  for quant, history in ((Quant(sampler='kv8', kv_scale='unit'), (np.full((3, 2), 7.0, np.float32),)), (KV8, ())):
    for scale in unbiased(history, quant):
      np.testing.assert_array_equal(scale, [1, 1])
  found = np.array([[0.0, 2.0]] * 3, np.float32)
  np.testing.assert_allclose(unbiased((found,), KV8).v, [1, 2 * 1.05 / 448], rtol=1e-6)


def unbiased(history, quant):
  """Return scales of a model of two layers without key biases."""
  config, params = small.model('llama')
  return calibrate.scales(history, quant, cache_layout(config, DENSE, quant, 16, 12, 'float32'), params)


def test_values_that_are_not_finite_give_no_scales():
  fine = np.ones((3, 2), np.float32)
  assert calibrate.usable(())
  assert calibrate.usable((fine, fine))
  assert not calibrate.usable((fine, np.full((3, 2), np.nan, np.float32)))
