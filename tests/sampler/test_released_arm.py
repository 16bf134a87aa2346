"""The arm `sparse_rl_code` against what the authors of Sparse-RL released (docs/methods/sparse.md, The released code)."""

import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.cache import eviction
from sprl.cache.layout import cache_layout
from sprl.config import Cache, ModelSettings, Packing, Quant, Rollout, Run, Sampling, SettingsError, to_dict
from sprl.config_reader import resolve
from sprl.learner.batch import pack, shape
from sprl.objective.correction import reject, weigh
from sprl.objective.losses import ratio_bounds
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import LogProbs, Request

CONFIG = Path(__file__).parents[2] / 'configs' / 'qwen_gsm8k.py'
SAMPLING = Sampling(temperature=0.9, max_tokens=30, max_prompt=12, prompt_buckets=(12,), chunk=10)
CAP, LOW, HIGH, VETO = 1.5, 0.5, 1.5, 1e-4  # of the released mis.yaml


def run_of(arm='sparse_rl_code', **changes):
  return resolve(to_dict(Run(arm=arm, model=ModelSettings('some/model'), **changes)))


def test_the_arm_has_the_choices_of_the_released_code():
  run = run_of(cache=Cache(budget=512))
  c = run.correction
  assert (c.mode, c.level, c.weight, c.cap, c.normalise) == ('decoupled', 'token', 'truncate', CAP, 'micro')
  assert (c.reject, c.veto) == ((f'token_k1={LOW}:{HIGH}',), VETO)
  assert (run.cache.method, run.cache.scope, run.cache.interval, run.cache.rkv.mix) == ('rkv', 'global', 128, 0.1)
  assert eviction.eviction_window(run.cache) == 8
  assert (eviction.POOL, eviction.SIMILARITY) == (7, 0.5)
  assert resolve(to_dict(run)) == run


def test_the_arm_of_the_paper_chooses_by_head_and_normalises_the_batch():
  run = run_of('sparse_rl', cache=Cache(budget=64))
  assert (run.correction.normalise, run.correction.reject, run.cache.scope) == ('global', (), 'head')


def test_the_config_has_the_hyperparameters_of_the_released_run():
  config = runpy.run_path(str(CONFIG))['get_config']()
  config.arm, config.cache.budget, config.packing.rows = 'sparse_rl_code', 512, 1
  run = resolve(config)
  loss, o, sampling = run.loss, run.optimizer, run.sampling
  assert (loss.variant, ratio_bounds(loss), loss.aggregate) == ('ppo', (0.8, 1.2), 'seq-mean-token-mean')
  assert (loss.kl_coef, loss.kl_estimator, loss.entropy_coef) == (1e-4, 'k3', 0.0)
  assert (o.name, o.learning_rate, o.schedule, o.b1, o.b2, o.weight_decay) == ('adamw', 1e-6, 'constant', 0.9, 0.98, 0.1)
  assert (o.minibatches, run.rollout.prompts, run.rollout.group) == (1024 // 256, 128, 8)
  assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 4096)
  assert (run.advantage.estimator, run.packing.row_tokens, run.packing.rows) == ('grpo', 8192, 1)


@pytest.mark.parametrize(('budget', 'accepted'), [(511, False), (512, True)])
def test_the_arm_refuses_prompts_that_it_would_compress(budget, accepted):
  def made():
    return run_of(cache=Cache(budget=budget), sampling=Sampling(max_prompt=512))

  if accepted:
    assert made().cache.budget == budget
  else:
    with pytest.raises(SettingsError, match=r'config\.cache\.budget = 511: expected at least config\.sampling\.max_prompt = 512'):
      made()


# --- the arm at work ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def world():
  """(run, trajectories that the arm sampled, their dense log-probs)."""
  run = run_of(cache=Cache(budget=14, interval=4, window=4), sampling=SAMPLING, rollout=Rollout(prompts=2, group=3))
  config, params = small.model('qwen3', num_hidden_layers=2)
  layout = cache_layout(config, run.cache, Quant(), 12, 30, 'float32', record=True)
  engine = EngineConfig(config, SAMPLING, layout, rows=6, prefill=2, seed=0, stop_ids=(), text=lambda ids: '')
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 259, n).astype(np.int32) for n in (12, 5)]
  requests = [Request(3 * g + k, g, prompt, 30 - 3 * k) for g, prompt in enumerate(prompts) for k in range(3)]
  trajectories = generate(engine, sampler_weights(params, jnp.dtype('float32')), requests)
  return run, trajectories, [small.teacher_forced(config, params, t, SAMPLING.temperature) for t in trajectories]


def test_all_layers_and_heads_evict_the_same_tokens(world):
  _, trajectories, _ = world
  for t in trajectories:
    np.testing.assert_array_equal(t.evicted, np.broadcast_to(t.evicted[:1, :1], t.evicted.shape))
    assert len(np.unique(t.evicted)) > 2  # several compressions


def released(dense, sampled, micros):
  """Return (weights, surviving tokens) of each sequence in float64, as the released mis.py computes them."""
  weights, survive = [], []
  for old, sparse in zip(dense, sampled):
    ratio = [np.exp(min(max(a - b, -20), 20)) for a, b in zip(old, sparse)]
    vetoed = any(a - b < np.log(VETO) for a, b in zip(old, sparse))
    weights.append([min(r, CAP) for r in ratio])
    survive.append([LOW <= r <= HIGH and not vetoed for r in ratio])
  for micro in set(micros):
    members = [b for b, m in enumerate(micros) if m == micro]
    mean = sum(sum(weights[b]) for b in members) / sum(len(weights[b]) for b in members)
    for b in members:
      weights[b] = [w / mean for w in weights[b]]
  return weights, survive


def test_weights_have_mean_1_in_each_microbatch_and_the_mask_is_the_released_one(world):
  run, trajectories, dense = world
  packing = Packing(row_tokens=128, rows=1)
  batch, _ = pack(trajectories, np.ones(6, np.float32), shape(SAMPLING, run.rollout, packing, 1), True)
  assert len(set(batch.micro.tolist())) == 2
  old = small.rectangle(trajectories, dense, 30)
  logprobs = LogProbs(sampler=jnp.asarray(batch.sampler_logp), old=jnp.asarray(old))
  got = weigh(logprobs, jnp.asarray(batch.mask), run.correction, jnp.asarray(batch.micro))
  surviving = reject(logprobs, jnp.asarray(batch.mask), run.correction).mask
  written = [(d[t.mask], t.sampler_logp[t.mask]) for d, t in zip(dense, trajectories)]
  weights, survive = released(*zip(*written), batch.micro.tolist())
  for b, row in enumerate(np.asarray(batch.mask)):
    np.testing.assert_allclose(np.asarray(got.weight)[b, row], weights[b], rtol=1e-4)
    np.testing.assert_array_equal(np.asarray(surviving)[b, row], survive[b])
  first, *_, last = (np.mean(np.asarray(got.applied)[batch.micro == i][batch.mask[batch.micro == i]]) for i in range(2))
  assert abs(first - last) > 1e-3  # one mean for the whole batch would be another
  assert 0.02 < np.mean(np.concatenate(survive)) < 0.98  # the token mask removes some tokens
