"""Router replay R2: all updates of a batch use the experts of the old policy's scoring (docs/methods/fp8.md, Router replay)."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from test_ledger import opened, sampled

from sprl.config import UNQUANTISED, Cache, Optimizer
from sprl.learner.learner import Learner
from sprl.learner.logprobs import ForwardConfig, score_and_route
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update

pytestmark = pytest.mark.slow


def test_both_updates_of_a_batch_use_the_experts_of_its_scoring(tmp_path):
  world = opened(tiny.write_inputs(tmp_path, 'qwen3_moe'), router_replay='R2')
  run, model, params = world
  *_, trajectories = sampled(world, Cache(), UNQUANTISED)
  run = replace(run, rollout=replace(run.rollout, prompts=2), loss=replace(run.loss, kl_coef=0.0))
  run = replace(run, optimizer=Optimizer(learning_rate=0.02, epochs=2))
  optimizer, given = make_optimizer(run.optimizer, 1), []
  update = make_update(model.graphdef, optimizer, UpdateConfig.of(run, model.dtype))

  def watched(state, batch, logprobs, base):
    given.append((jax.device_get(state.params), batch, logprobs.old))
    return update(state, batch, logprobs, base)

  layout = model.cache_layout(run.sampling, Cache(), UNQUANTISED)
  learner = Learner(run=run, model=model, layout=layout, jitted_update=watched, state=TrainState.create(params, optimizer))
  batches, _ = learner.pack([replace(t, reward=float(t.uid % 3)) for t in trajectories])
  learner.update(*learner.score(batches))

  def scored(weights, batch):
    return score_and_route(model.graphdef, weights, batch, ForwardConfig.of(run, model.dtype))

  (before, batch, old), (moved, again, same) = given
  logp, chosen = scored(before, replace(batch, routes=None))
  real = np.asarray(batch.segments) > 0
  for each in (batch, again):
    np.testing.assert_array_equal(np.asarray(each.routes)[real], np.asarray(chosen)[real])
  for each in (old, same):
    np.testing.assert_allclose(each, logp, atol=1e-6)
  free, elsewhere = scored(moved, replace(batch, routes=None))
  replayed, taken = scored(moved, again)
  np.testing.assert_array_equal(np.asarray(taken)[real], np.asarray(chosen)[real])
  assert np.mean(np.asarray(elsewhere)[real] != np.asarray(chosen)[real]) > 0.01  # the router's own choices change
  assert np.abs(np.asarray(replayed) - np.asarray(free))[np.asarray(batch.mask)].max() > 1e-3
