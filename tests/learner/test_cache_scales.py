"""Scales of the FP8 cache from update to update: frozen at the first rollout, or measured again with the newest weights."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.config import Quant, Rollout, Run, Sampling
from sprl.io.run_state import RunState
from sprl.io.tokenizer import Tokenizer
from sprl.learner.learner import Learner
from sprl.learner.state import TrainState
from sprl.model import Model
from sprl.models import transformer
from sprl.rollout import collect
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sharding.mesh import make_mesh
from sprl.types import Request

PROMPTS = [np.arange(3 + 7 * i, 9 + 7 * i, dtype=np.int32) for i in range(4)]
REQUESTS = [Request(2 * g + k, g, prompt, 6) for g, prompt in enumerate(PROMPTS) for k in range(2)]


def learner(mode):
  """Return a learner before its first update, with the scales of the first rollout."""
  run = Run(
    sampling=Sampling(max_prompt=6, max_tokens=6, prompt_buckets=(6,)),
    rollout=Rollout(prompts=4, group=2),
    quant=Quant(sampler='w8a8_kv8', kv_scale=mode, arithmetic='blockwise'),
  )
  config, params = small.model('llama', num_hidden_layers=1)
  mesh = make_mesh(run.mesh.learner, jax.devices()[:1])
  model = Model(
    folder=Path(), config=config, tokenizer=object.__new__(Tokenizer), graphdef=transformer.graph(config), mesh=mesh,
    sampler_mesh=mesh, engine_meshes=(mesh,), shares_devices=True,
    dtype=jnp.float32, param_dtype=jnp.float32, lora=run.lora, kernels='auto',
  )  # fmt: skip
  layout = model.cache_layout(run.sampling, run.cache, run.quant)
  zero = jnp.zeros((), jnp.int32)
  state = TrainState(params=params, opt_state=(), updates=zero, skipped=zero, bad_streak=zero)
  subject = Learner(run=run, model=model, layout=layout, jitted_update=None, state=state)
  assert not subject.scales_current
  subject.measure_scales_on_prompts(PROMPTS)
  assert subject.scales_current
  return subject


def rollouts(subject, weights):
  """Return trajectories that these weights sample, and their metrics."""
  engine = EngineConfig(
    subject.model.config, subject.run.sampling, subject.layout, rows=8, prefill=4, seed=0, stop_ids=(), text=lambda ids: ''
  )
  trajectories = generate(engine, weights, REQUESTS)
  return trajectories, collect.metrics(trajectories, subject.layout, 8)


def update(subject, factor):
  """Multiply the projections of queries and keys by a factor, as one update, and measure scales on a batch."""
  params = jax.tree.map(lambda w: w, subject.state.params)  # a copy of the tree
  attention = params['layers'][0]['attention']
  for name in ('q', 'k'):
    attention[name]['kernel'] = attention[name]['kernel'] * factor
  subject.state = dataclasses.replace(subject.state, params=params, updates=subject.state.updates + 1)
  subject.measure_scales(subject.pack(small.rollouts([(5, 6)] * 4, [6] * 4))[0])


def resumed(subject):
  """Return the learner that a resumed run opens, as `Session.save` and `train.open_learner` do."""
  saved = RunState(amax=[found.tolist() for found in subject.amax], calibrated_updates=subject.calibrated_updates)
  state = RunState.from_json(1, json.loads(json.dumps(saved.to_json())))
  amax = tuple(np.array(found, np.float32) for found in state.amax)
  return dataclasses.replace(subject, amax=amax, calibrated_updates=state.calibrated_updates)


def as_bytes(scales):
  return [np.asarray(x).tobytes() for x in scales]


@pytest.mark.parametrize('mode', ['frozen', 'learner'])
def test_frozen_scales_stay_and_saturate_where_measured_scales_follow_the_weights(mode):
  """Four times the projections exceed the headroom of the first scales, which is 2.1."""
  subject = learner(mode)
  first = subject.sampler_weights()
  _, before = rollouts(subject, first)
  assert (before['fp8/kv_saturation'], before['fp8/query_saturation']) == (0, 0)
  update(subject, 4.0)
  assert subject.scales_current
  second = subject.sampler_weights()
  _, after = rollouts(subject, second)
  codes = [weights.params['layers'][0]['attention']['k']['kernel'] for weights in (first, second)]
  np.testing.assert_allclose(codes[1].scale, 4 * codes[0].scale, rtol=1e-6)  # scales of weights are never frozen
  if mode == 'frozen':
    assert as_bytes(second.scales) == as_bytes(first.scales)
    assert after['fp8/kv_saturation'] > 1e-3
    assert after['fp8/query_saturation'] > 1e-3
  else:
    assert np.all(np.asarray(second.scales.k) > 1.5 * np.asarray(first.scales.k))
    assert (after['fp8/kv_saturation'], after['fp8/query_saturation']) == (0, 0)


def test_a_resumed_run_keeps_frozen_scales_bit_for_bit():
  subject = learner('frozen')
  first = as_bytes(subject.sampler_weights().scales)
  update(subject, 4.0)
  again = resumed(subject)
  assert again.scales_current  # so set-up does not measure them again
  assert as_bytes(again.sampler_weights().scales) == first
  again.measure_scales_on_prompts(PROMPTS)
  update(again, 2.0)
  assert as_bytes(again.sampler_weights().scales) == first


def test_scales_cover_every_minibatch_of_a_step():
  """Two batches are measured in both orders: the scales are those of the larger values of either."""
  subject = learner('learner')
  batches = [subject.pack(small.rollouts([(5, 6)] * 4, [6] * 4, seed=seed))[0][0] for seed in range(2)]

  def largest(of):
    subject.measure_scales(of)
    return subject.amax[-1]

  alone = [largest([batch]) for batch in batches]
  assert np.any(alone[0] > alone[1])
  assert np.any(alone[0] < alone[1])
  for order in (batches, batches[::-1]):
    np.testing.assert_allclose(largest(order), np.maximum(*alone), rtol=1e-6)
