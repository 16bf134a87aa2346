"""The learner's calls of a step: minibatches, filtered groups, means over the updates. A stub replaces the update."""

import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl.config import Advantage, Loss, ModelSettings, Optimizer, Packing, Rollout, Run, Sampling, SettingsError
from sprl.io.tokenizer import Tokenizer
from sprl.learner.batch import shape
from sprl.learner.learner import Learner, batch_advantages, minibatches, overlong
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, guarded_step
from sprl.model import Model
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.objective.advantages import ESTIMATORS
from sprl.sharding.mesh import make_mesh
from sprl.types import LogProbs

RUN = Run(
  rollout=Rollout(prompts=4, group=2, equal_groups='skip'),
  sampling=Sampling(max_prompt=4, max_tokens=4),
  advantage=Advantage('dr_grpo'),
  optimizer=Optimizer(minibatches=2, epochs=2),
  packing=Packing(rows=2),
)
REWARDS = (1.0, 0.0, 0.5, 0.5, 0.0, 1.0, 1.0, 0.0)  # the second group's are equal


def rollouts(rewards):
  made = small.rollouts([(2, 3)] * 4, [3] * 4)
  return [dataclasses.replace(t, reward=r) for t, r in zip(made, rewards)]


def learner(update=None, run=RUN):
  mesh = make_mesh(run.mesh.learner, jax.devices()[:1])
  config = tiny('llama')
  model = Model(
    folder=Path(), config=config, tokenizer=object.__new__(Tokenizer), graphdef=transformer.graph(config), mesh=mesh,
    sampler_mesh=mesh, engine_meshes=(mesh,), shares_devices=True,
    dtype=jnp.float32, param_dtype=jnp.float32, lora=run.lora, kernels='auto',
  )  # fmt: skip
  layout = types.SimpleNamespace(fp8=False)
  zero = jnp.zeros((), jnp.int32)
  state = TrainState(params={}, opt_state=(), updates=zero, skipped=zero, bad_streak=zero)
  return Learner(run=run, model=model, layout=layout, jitted_update=update, state=state)


def test_all_sequences_of_an_episode_have_its_advantage_and_it_counts_once_in_its_group():
  episodes, others = rollouts(REWARDS), small.rollouts([(1, 4)], [2], seed=1)
  episodes[1] = dataclasses.replace(episodes[1], branches=tuple(others))
  packing = dataclasses.replace(RUN.packing, share_prefix=False)
  run = dataclasses.replace(RUN, packing=packing)
  sizes = shape(run.sampling, run.rollout, packing, 2, branches=3)
  (batch, metrics), _ = minibatches(episodes, run, sizes)
  assert batch.mask.shape == (2 * 2 * 3, 4)
  np.testing.assert_array_equal(batch.advantage, [0.5, -0.5, -0.5, -0.5, *[0] * 8])  # the mean of two episodes, not of four
  np.testing.assert_array_equal(batch.mask.sum(axis=1), [2, 3, 1, 4, *[0] * 8])
  np.testing.assert_array_equal(batch.micro >= 0, batch.mask.any(axis=1))
  np.testing.assert_array_equal(batch.prompt[:4], [0, 0, 0, 0])
  assert metrics['packing/tokens'] == (3 + 2) + (3 + 3) + (2 + 1) + (2 + 4)
  for b, sequence in enumerate([*episodes[:2], *others]):
    np.testing.assert_array_equal(
      batch.target[batch.micro[b], 0, batch.place[b, : len(sequence.completion)]], sequence.completion
    )


@pytest.mark.parametrize('branches', [1, 3])
@pytest.mark.parametrize('row_tokens', [None, 16, 20])
def test_the_longest_sequences_of_all_episodes_fit(branches, row_tokens):
  packing = Packing(rows=2, share_prefix=False, row_tokens=row_tokens)
  sizes = shape(RUN.sampling, RUN.rollout, packing, 1, branches=branches)
  run = dataclasses.replace(RUN, packing=packing, optimizer=Optimizer(), rollout=Rollout(prompts=4, group=2))
  longest = small.rollouts([(4, 4)] * 4, [4] * 4)
  episodes = [dataclasses.replace(t, branches=(t,) * (branches - 1)) for t in longest]
  ((batch, _),) = minibatches(episodes, run, sizes)
  assert batch.mask.sum() == 8 * branches * 4


def test_each_minibatch_has_its_groups_in_order():
  batches, metrics = learner().pack(rollouts(REWARDS))
  assert [int(batch.used) for batch in batches] == [1, 1]
  np.testing.assert_array_equal(batches[0].reward, REWARDS[:4])
  np.testing.assert_array_equal(batches[1].reward, REWARDS[4:])
  np.testing.assert_array_equal(batches[0].mask.any(axis=1), [True, True, False, False])  # the group of equal rewards is left out
  np.testing.assert_array_equal(batches[0].advantage, [0.5, -0.5, 0, 0])
  assert metrics['packing/tokens'] == (8 + 16) / 2  # two prompts of 3 and completions of 2 + 3, shared; mean of the minibatches


def test_withheld_trajectories_count_in_the_advantages_and_take_no_room():
  made = small.rollouts([(2, 4, 3)] * 4, [3] * 4)
  rewards = (1.0, 0.5, 0.0, 0.25, 1.0, 0.25, 0.0, 0.75, 0.0, 1.0, 0.0, 0.5)
  withheld = [t.uid % 3 == 1 for t in made]
  mixed = [dataclasses.replace(t, reward=r, withheld=w) for t, r, w in zip(made, rewards, withheld)]
  batches, metrics = learner().pack(mixed)
  np.testing.assert_array_equal(batches[0].reward, [1.0, 0.0, 0.25, 0.25])
  np.testing.assert_array_equal(batches[0].advantage, [0.5, -0.5, -0.25, -0.25])  # from the mean of three
  np.testing.assert_array_equal(batches[1].advantage, [-0.25, -0.25, 0.5, 0])
  assert batches[0].mask.sum(axis=1).tolist() == [2, 3, 2, 3]
  assert metrics['packing/tokens'] == 16  # as without the withheld ones


def test_a_minibatch_of_filtered_groups_has_no_batch():
  batches, _ = learner().pack(rollouts((0.5, 0.5, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)))
  assert len(batches) == 1
  np.testing.assert_array_equal(batches[0].reward, REWARDS[4:])
  assert learner().pack(rollouts((0.5,) * 8)) == ([], {})


def test_a_long_completion_loses_reward_in_its_advantage_alone():
  """Completions of 2 and 3 tokens; the last half of 4 tokens costs up to 0.5."""
  run = dataclasses.replace(RUN, advantage=Advantage('dr_grpo', overlong=0.5))
  found = batch_advantages(rollouts((1.0, 1.0, 0.0, 1.0) * 2), dataclasses.replace(run, rollout=Rollout(prompts=4, group=2)))
  np.testing.assert_allclose(found[:4], [0.125, -0.125, -0.375, 0.375])  # penalties 0 and 0.25
  assert np.isnan(batch_advantages(rollouts((0.5,) * 8), run)).all()  # rewards of the group are equal: lengths do not change that
  batches, metrics = learner(run=run).pack(rollouts(REWARDS))
  np.testing.assert_array_equal(batches[0].reward, REWARDS[:4])
  assert metrics['reward/overlong_penalty'] == 0.125


def test_of_the_branches_of_an_episode_the_longest_loses_reward():
  run = dataclasses.replace(RUN, advantage=Advantage('dr_grpo', overlong=0.5), rollout=Rollout(prompts=1, group=2))
  short, long = rollouts(REWARDS)[:2]
  assert len(short.completion) < len(long.completion)
  branched = dataclasses.replace(short, branches=(long,))
  np.testing.assert_array_equal(overlong([short, branched], run), overlong([short, long], run))


def test_filtered_groups_have_advantage_nan():
  found = batch_advantages(rollouts(REWARDS), RUN)
  np.testing.assert_array_equal(found, [0.5, -0.5, np.nan, np.nan, -0.5, 0.5, 0.5, -0.5])
  unfiltered = dataclasses.replace(RUN, rollout=dataclasses.replace(RUN.rollout, equal_groups='train'))
  np.testing.assert_array_equal(batch_advantages(rollouts(REWARDS), unfiltered)[2:4], 0)


def test_skipped_groups_count_in_the_mean_of_the_batch():
  run = dataclasses.replace(RUN, advantage=Advantage('reinforce_baseline'))
  found = batch_advantages(rollouts((1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)), run)
  np.testing.assert_array_equal(found, [np.nan] * 6 + [-0.875, 0.125])


def test_a_sample_whose_grader_failed_enters_no_mean_and_does_not_train():
  made = small.rollouts([(2, 4, 3)] * 4, [3] * 4)
  rewards = (-3.0, 0.0, -1.0, -2.0, 0.0, -2.0, -1.0, -1.0, -1.0, -1.0, -3.0, -2.0)
  unknown = {1, 4}  # their rewards of 0 would be the best of their groups
  graded = [dataclasses.replace(t, reward=r, reward_known=i not in unknown) for i, (t, r) in enumerate(zip(made, rewards))]
  run = dataclasses.replace(RUN, rollout=Rollout(prompts=4, group=3))
  found = batch_advantages(graded, run)
  np.testing.assert_array_equal(found, [-1, np.nan, 1, 0, np.nan, 0, 0, 0, 0, 1, -1, 0])
  skipped = batch_advantages(graded, dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, equal_groups='skip')))
  np.testing.assert_array_equal(skipped, [-1, np.nan, 1, *[np.nan] * 6, 1, -1, 0])
  batches, _ = learner(run=run).pack(graded)
  assert [batch.mask.any(axis=1).tolist() for batch in batches] == [[True, False, True, True, False, True], [True] * 6]


def test_an_estimator_that_returns_nan_is_refused(monkeypatch):
  monkeypatch.setitem(ESTIMATORS, 'grpo', lambda reward, group, valid: 0 * reward / 0)
  run = dataclasses.replace(RUN, advantage=Advantage('grpo'))
  with np.errstate(invalid='ignore'), pytest.raises(SettingsError, match=r"config\.advantage\.estimator = 'grpo'.* nan "):
    batch_advantages(rollouts(REWARDS), run)


def test_an_estimator_without_a_function_is_refused_before_the_first_rollout():
  with pytest.raises(SettingsError, match=r"config\.advantage\.estimator = 'other'"):
    learner(run=dataclasses.replace(RUN, advantage=Advantage('other')))  # type: ignore[arg-type]


def test_metrics_are_means_over_the_updates_except_the_largest_values():
  seen = []

  def update(state, batch, logprobs, base):
    assert logprobs is of_batch[id(batch)]
    seen.append(batch)
    count = len(seen)
    largest = np.float32([0.1, 12, 0.1, 0.1][count - 1])
    streak = np.int32([1, 2, 0, 0][count - 1])
    metrics = {'update/loss': np.float32(count), 'update/bad_streak': streak, 'rollout_corr/abs_dlogp_max': largest}
    return dataclasses.replace(state, updates=state.updates + jax.device_put(np.int32(1))), jax.device_put(metrics)

  subject = learner(update)
  batches, _ = subject.pack(rollouts(REWARDS))
  logprobs = [LogProbs(sampler=batch.sampler_logp) for batch in batches]
  of_batch = {id(batch): each for batch, each in zip(batches, logprobs)}
  expected = {'update/loss': 2.5, 'update/bad_streak': 2.0, 'rollout_corr/abs_dlogp_max': 12.0}
  assert subject.update(batches, logprobs) == expected
  assert [batch is batches[i] for batch, i in zip(seen, (0, 1, 0, 1))] == [True] * 4  # two epochs, in order
  assert int(subject.state.updates) == 4
  assert subject.update([], []) == {}


def test_the_rate_ends_at_the_end_of_its_schedule_whatever_is_left_out():
  """A step has two minibatches and two epochs. The gradient is 1, so an SGD update moves the weight by its rate."""
  settings = dataclasses.replace(RUN.optimizer, name='sgd', schedule='linear', learning_rate=12.0, clip_norm=None)
  run = dataclasses.replace(RUN, optimizer=settings, steps=3)
  optimizer, weights = make_optimizer(settings, 3 * 4), []

  @jax.jit
  def step(state):
    return guarded_step(state, optimizer, {'w': jnp.ones(())}, jnp.zeros(()), jnp.ones((), jnp.int32))[0]

  def update(state, batch, logprobs, base):
    state = step(state)
    weights.append(float(jax.device_get(state.params['w'])))
    return state, {}

  subject = learner(update, run)
  subject.state = jax.device_put(TrainState.create({'w': jnp.zeros(())}, optimizer), subject.model.replicated)
  half_filtered = (0.5, 0.5, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
  for rewards in (half_filtered, (0.5,) * 8, half_filtered):
    batches, _ = subject.pack(rollouts(rewards))
    subject.update(batches, [LogProbs(sampler=batch.sampler_logp) for batch in batches])
  np.testing.assert_allclose(
    -np.diff([0.0, *weights]), [10, 9, 2, 1], rtol=1e-5
  )  # steps have the rates 12 to 9, 8 to 5 and 4 to 1
  assert subject.learning_rate == pytest.approx(1.0)
  assert int(subject.state.updates) == 4  # updates taken, which the scales of the cache belong to
  assert step._cache_size() == 1  # no second compilation: the count keeps its sharding


def test_without_scoring_only_the_samplers_log_probs_are_passed():
  run = dataclasses.replace(RUN, optimizer=Optimizer())
  subject = learner(run=run)
  batches, _ = subject.pack(rollouts(REWARDS))
  same, [logprobs] = subject.score(batches)
  assert same[0] is batches[0]
  assert (logprobs.sampler is batches[0].sampler_logp, logprobs.old, logprobs.ref, logprobs.current) == (True, None, None, None)


def test_a_cache_without_fp8_has_no_scales_to_measure():
  subject = learner()
  subject.measure_scales(subject.pack(rollouts(REWARDS))[0])
  assert (subject.calibrates, subject.scales_current, subject.amax) == (False, True, ())


def test_implicit_transfers_are_refused_during_an_update():
  def update(state, batch, logprobs, base):
    return state, {'update/loss': jnp.sin(np.float32(1)), 'update/bad_streak': 0}

  subject = learner(update)
  batches, _ = subject.pack(rollouts(REWARDS))
  with pytest.raises(Exception, match='transfer'):
    subject.update(batches, [LogProbs(sampler=batch.sampler_logp) for batch in batches])


def test_the_reference_chooses_its_own_experts_where_the_update_replays_others():
  """The routes are those of other weights, the rollout's: under them the reference would be another model."""
  config, params = small.model('qwen3_moe', num_hidden_layers=1)
  run = dataclasses.replace(RUN, optimizer=Optimizer(), loss=Loss(kl_coef=0.1), model=ModelSettings(path='x', router_replay='R3'))
  made = rollouts((1.0, 0.0) * 4)
  routes = [np.broadcast_to(np.array([4, 5], np.int8), (len(t.tokens), 1, 2)) for t in made]
  made = [dataclasses.replace(t, routes=r) for t, r in zip(made, routes, strict=True)]
  subject = learner(run=run)
  model = dataclasses.replace(subject.model, config=config, graphdef=transformer.graph(config))
  subject = dataclasses.replace(subject, model=model, reference=params)
  [batch], _ = subject.pack(made)
  _, [logprobs] = subject.score([batch])
  expected = small.rectangle(made, [small.teacher_forced(config, params, t) for t in made], batch.mask.shape[1])
  np.testing.assert_allclose(np.asarray(logprobs.ref), expected, atol=1e-4)
