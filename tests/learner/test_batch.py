"""Packing: the example of the docstring as literals, and the invariants of every batch."""

import dataclasses

import numpy as np
import pytest
import small
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sprl.config import Packing, Rollout, Sampling, SettingsError
from sprl.learner.batch import Shape, pack, shape
from sprl.types import Trajectory


def trajectory(prompt, completion, group=0, mask=None):
  P, n = len(prompt), len(completion)
  mask = np.array([0] * P + (mask or [1] * n), bool)
  logp = np.where(mask, -np.arange(P + n) / 8, 0).astype(np.float32)
  tokens = np.array([*prompt, *completion], np.int32)
  return Trajectory(0, group, tokens, mask, logp, mask - 1, mask * 1, P, 'length', reward=float(n))


EXAMPLE = [trajectory([10, 11, 12, 13], c) for c in ([1, 2, 3], [4, 5], [6, 7, 8, 9])]


def test_three_completions_sharing_a_prompt():
  batch, metrics = pack(
    EXAMPLE, np.array([1.0, -2.0, 0.5], np.float32), Shape(micros=1, rows=1, tokens=15, sequences=3, columns=4), share_prefix=True
  )
  assert batch.tokens.tolist() == [[[10, 11, 12, 13, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]]]
  assert batch.positions.tolist() == [[[0, 1, 2, 3, 4, 5, 6, 4, 5, 4, 5, 6, 7, 0, 0]]]
  assert batch.segments.tolist() == [[[1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 0, 0]]]
  assert batch.prefixes.tolist() == [[[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]]
  assert batch.scored.tolist() == [[9]]
  assert batch.predictor[0, 0, :9].tolist() == [3, 4, 5, 3, 7, 3, 9, 10, 11]
  assert batch.target[0, 0, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
  assert batch.place.tolist() == [[0, 1, 2, 0], [3, 4, 0, 0], [5, 6, 7, 8]]
  assert batch.mask.astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
  assert batch.micro.tolist() == [0, 0, 0]
  assert batch.prompt.tolist() == [0, 0, 0]
  assert int(batch.used) == 1
  assert batch.sampler_logp[1].tolist() == [-4 / 8, -5 / 8, 0, 0]
  assert batch.advantage.tolist() == [1.0, -2.0, 0.5]
  assert batch.reward.tolist() == [3.0, 2.0, 4.0]
  assert metrics == {
    'packing/waste': pytest.approx(2 / 15),
    'packing/tokens': 13.0,
    'packing/microbatches': 1.0,
    'packing/tokens_saved_by_sharing': 8.0,  # 7 + 6 + 8 - 13
  }


def test_unshared_prompts_in_two_microbatches_of_two_rows():
  batch, metrics = pack(
    EXAMPLE, np.ones(3, np.float32), Shape(micros=3, rows=2, tokens=8, sequences=3, columns=4), share_prefix=False
  )
  assert batch.tokens.tolist() == [
    [[10, 11, 12, 13, 1, 2, 3, 0], [10, 11, 12, 13, 4, 5, 0, 0]],
    [[10, 11, 12, 13, 6, 7, 8, 9], [0] * 8],
    [[0] * 8, [0] * 8],
  ]
  assert batch.segments[0].tolist() == [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2, 0, 0]]
  assert batch.prefixes[0].tolist() == [[0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0]]
  assert batch.scored.tolist() == [[5], [4], [0]]
  assert batch.predictor[0, 0, :5].tolist() == [3, 4, 5, 8 + 3, 8 + 4]
  assert batch.predictor[1, 0, :4].tolist() == [3, 4, 5, 6]
  assert batch.micro.tolist() == [0, 0, 1]
  assert batch.place.tolist() == [[0, 1, 2, 0], [3, 4, 0, 0], [0, 1, 2, 3]]
  assert int(batch.used) == 2
  assert metrics['packing/waste'] == pytest.approx(1 - 21 / 32)  # of the used microbatches
  assert metrics['packing/tokens_saved_by_sharing'] == 0


def test_only_tokens_of_the_model_are_scored():
  turns = trajectory([10, 11], [1, 2, 8, 9, 3], mask=[1, 1, 0, 0, 1])  # 8 and 9 are an environment's
  batch, _ = pack([turns], np.ones(1, np.float32), Shape(micros=1, rows=1, tokens=8, sequences=1, columns=6), share_prefix=True)
  assert batch.tokens[0, 0].tolist() == [10, 11, 1, 2, 8, 9, 3, 0]
  assert batch.scored.tolist() == [[3]]
  assert batch.predictor[0, 0, :3].tolist() == [1, 2, 5]
  assert batch.target[0, 0, :3].tolist() == [1, 2, 3]
  assert batch.mask.astype(int).tolist() == [[1, 1, 0, 0, 1, 0]]
  assert batch.place.tolist() == [[0, 1, 0, 0, 2, 0]]
  assert batch.sampler_logp[0].tolist() == [-2 / 8, -3 / 8, 0, 0, -6 / 8, 0]


def test_supports_lie_beside_their_targets():
  """Two members share a prompt; the first has two tokens of an environment. The support of token t is {t, 100 + t}."""
  turns, other = trajectory([10, 11], [1, 2, 8, 9, 3], mask=[1, 1, 0, 0, 1]), trajectory([10, 11], [4, 5])
  made = [dataclasses.replace(t, support=np.array([[v, 100 + v] for v in t.tokens[t.mask]], np.int32)) for t in (turns, other)]
  sizes = Shape(micros=1, rows=2, tokens=10, sequences=2, columns=5, shards=2)
  batch, _ = pack(made, np.ones(2, np.float32), sizes, share_prefix=True)
  assert batch.support.shape == (1, 2, 10, 2)
  assert batch.target[0, 0, :5].tolist() == [1, 2, 3, 4, 5]
  assert batch.support[0, 0, :5].tolist() == [[v, 100 + v] for v in (1, 2, 3, 4, 5)]
  assert not batch.support[0, 1].any()
  apart, _ = pack(made, np.array([np.nan, 1.0], np.float32), sizes, share_prefix=True)
  assert apart.support[0, 0, :2].tolist() == [[4, 104], [5, 105]]
  assert pack([turns, other], np.ones(2, np.float32), sizes, share_prefix=True)[0].support is None


def test_a_batch_in_which_some_sequences_lack_their_supports_is_refused():
  recorded = dataclasses.replace(trajectory([10], [1]), support=np.ones((1, 2), np.int32))
  with pytest.raises(AssertionError, match='record supports'):
    pack([recorded, trajectory([10], [2])], np.ones(2, np.float32), Shape(1, 1, 10, 2, 5), share_prefix=True)


def test_sequences_without_advantage_or_tokens_are_left_out():
  """A sequence with a NaN advantage, or without a token of the model, takes no space and is not counted."""
  trajectories = [*EXAMPLE, trajectory([20, 21], [], group=1), trajectory([20, 21], [7], group=1)]
  advantage = np.array([np.nan, 1.0, np.nan, 1.0, 1.0], np.float32)
  batch, metrics = pack(trajectories, advantage, Shape(micros=1, rows=1, tokens=15, sequences=5, columns=4), share_prefix=True)
  assert batch.tokens.tolist() == [[[10, 11, 12, 13, 4, 5, 20, 21, 7, 0, 0, 0, 0, 0, 0]]]
  assert batch.segments.tolist() == [[[1, 1, 1, 1, 2, 2, 3, 3, 4, 0, 0, 0, 0, 0, 0]]]
  assert batch.micro.tolist() == [-1, 0, -1, -1, 0]
  assert batch.mask.any(axis=1).tolist() == [False, True, False, False, True]
  assert np.isfinite(batch.advantage).all()
  assert metrics['packing/tokens'] == 9
  assert metrics['packing/tokens_saved_by_sharing'] == 0


def test_a_batch_of_left_out_sequences_is_empty():
  batch, metrics = pack(
    EXAMPLE, np.full(3, np.nan, np.float32), Shape(micros=1, rows=1, tokens=15, sequences=3, columns=4), share_prefix=True
  )
  assert (int(batch.used), batch.mask.any(), metrics['packing/waste']) == (0, False, 0.0)


def contexts(batch):
  """Return (tokens seen, target) of every cell, read off the packed rows token by token."""
  cells = {}
  S, N = batch.predictor.shape[1:]
  Q = batch.scored.shape[1] // S
  for b, c in np.argwhere(batch.mask):
    a, (part, n) = batch.micro[b], divmod(int(batch.place[b, c]), N // Q)
    q, s = divmod(part, S)
    n += q * (N // Q)
    r, at = divmod(s * N + int(batch.predictor[a, s, n]), batch.tokens.shape[2])
    assert r * S // batch.tokens.shape[1] == s  # the row is one of the shard's
    segment, prefix = batch.segments[a, r, at], batch.prefixes[a, r, at]
    seen = [i for i in range(at + 1) if batch.segments[a, r, i] in (segment, prefix) and batch.segments[a, r, i]]
    # The last token of a prompt predicts for its completions, which do not see each other.
    assert batch.positions[a, r, seen].tolist() == list(range(len(seen)))
    cells[int(b), int(c)] = (batch.tokens[a, r, seen].tolist(), int(batch.target[a, s, n]))
  return cells


@hypothesis_settings(max_examples=60)
@given(data=st.data(), share=st.booleans(), shards=st.sampled_from([1, 2, 3, 8]), parts=st.sampled_from([1, 1, 2, 4]))
def test_a_batch_fits_its_shape_and_scores_each_token_once(data, share, shards, parts):
  P, C = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 10))
  rollout = Rollout(prompts=data.draw(st.integers(1, 5)), group=data.draw(st.integers(1, 5)))
  row_tokens = data.draw(st.sampled_from([0, P + C, P + C + 3, P + 2 * C, 3 * (P + C)]))
  row_tokens += -row_tokens % parts
  packing = Packing(row_tokens=row_tokens, rows=data.draw(st.integers(1, 3)), share_prefix=share)
  sizes = shape(Sampling(max_prompt=P, max_tokens=C), rollout, packing, 1, shards, parts=parts)
  lengths = data.draw(st.lists(st.integers(0, C), min_size=rollout.group * rollout.prompts, max_size=100).map(tuple))
  groups = [lengths[g * rollout.group : (g + 1) * rollout.group] for g in range(rollout.prompts)]
  prompts = data.draw(st.lists(st.integers(1, P), min_size=rollout.prompts, max_size=rollout.prompts))
  trajectories = small.rollouts(groups, prompts)
  left_out = data.draw(st.sets(st.integers(0, len(trajectories) - 1)))
  advantage = np.array([np.nan if i in left_out else 1.0 for i in range(len(trajectories))], np.float32)

  batch, metrics = pack(trajectories, advantage, sizes, share)

  cells = contexts(batch)
  expected = {
    (b, c): (t.tokens[: t.prompt_length + c].tolist(), int(t.completion[c]))
    for b, t in enumerate(trajectories)
    if b not in left_out
    for c in range(len(t.completion))
  }
  assert cells == expected
  assert int(batch.used) <= sizes.micros
  assert not batch.segments[int(batch.used) :].any()
  assert batch.scored.sum() == len(expected)
  places = {(int(batch.micro[b]), int(batch.place[b, c])) for b, c in expected}
  N = batch.predictor.shape[2] // parts  # of a part of a shard
  assert places == {(a, s * N + n) for a, s in np.ndindex(batch.scored.shape) for n in range(batch.scored[a, s])}
  of_shards = batch.scored.reshape(-1, parts, shards)
  assert (of_shards.max(1) - of_shards.min(1)).max() <= 1  # devices that share a row score as many positions
  assert metrics['packing/tokens'] == np.count_nonzero(batch.segments)


@hypothesis_settings(max_examples=80)
@given(data=st.data(), share=st.booleans())
def test_the_shape_is_never_too_small(data, share):
  P, C = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
  prompts, group = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
  row_tokens = data.draw(st.one_of(st.none(), st.integers(P + C, 6 * (P + C))))
  packing = Packing(row_tokens=row_tokens, rows=data.draw(st.integers(1, 3)), share_prefix=share)
  sizes = shape(Sampling(max_prompt=P, max_tokens=C), Rollout(prompts=prompts, group=group), packing, 1)
  length = st.sampled_from([1, C // 3 + 1, C // 2 + 1, C])
  trajectories = small.rollouts(
    [[data.draw(length) for _ in range(group)] for _ in range(prompts)],
    [data.draw(st.sampled_from([1, P // 2 + 1, P])) for _ in range(prompts)],
  )
  batch, _ = pack(trajectories, np.ones(len(trajectories), np.float32), sizes, share)
  assert batch.mask.any(axis=1).all()


def test_sizes_by_hand():
  sampling, rollout = Sampling(max_prompt=10, max_tokens=6), Rollout(prompts=4, group=3)
  assert shape(sampling, rollout, Packing(rows=2), 1) == Shape(micros=2, rows=2, tokens=32, sequences=12, columns=6)
  # Unshared: rows of 16 rounded up to 32, two sequences a row, 12 sequences in 6 rows.
  assert shape(sampling, rollout, Packing(rows=2, share_prefix=False), 1) == Shape(
    micros=3, rows=2, tokens=32, sequences=12, columns=6
  )
  # Rows of 20: a prompt and one completion each.
  assert shape(sampling, rollout, Packing(rows=4, row_tokens=20), 1) == Shape(
    micros=3, rows=4, tokens=20, sequences=12, columns=6
  )
  assert shape(sampling, rollout, Packing(rows=2), 2) == Shape(micros=1, rows=2, tokens=32, sequences=6, columns=6)
  # Fewer rows than a microbatch may have, and a number of rows that it does not divide: no microbatch has more than it needs.
  assert shape(sampling, rollout, Packing(rows=8), 1) == Shape(micros=1, rows=4, tokens=32, sequences=12, columns=6)
  five = Rollout(prompts=5, group=3)
  assert shape(sampling, five, Packing(rows=4), 1) == Shape(micros=2, rows=3, tokens=32, sequences=15, columns=6)
  # Four rows: each of two shards has at most two rows at a time; half of eight shards have none.
  assert shape(sampling, rollout, Packing(rows=2), 1, 2) == Shape(micros=1, rows=4, tokens=32, sequences=12, columns=6, shards=2)
  assert shape(sampling, rollout, Packing(rows=1), 1, 2) == Shape(micros=2, rows=2, tokens=32, sequences=12, columns=6, shards=2)
  assert shape(sampling, rollout, Packing(rows=2), 1, 8) == Shape(micros=1, rows=8, tokens=32, sequences=12, columns=6, shards=8)


def test_rows_shorter_than_the_longest_sequence_are_refused():
  with pytest.raises(SettingsError, match=r'packing\.row_tokens = 15: expected at least 16'):
    shape(Sampling(max_prompt=10, max_tokens=6), Rollout(prompts=4, group=3), Packing(row_tokens=15), 1)


def test_rows_that_devices_cannot_share_are_refused():
  settings = Sampling(max_prompt=6, max_tokens=10), Rollout(prompts=1, group=1)
  with pytest.raises(SettingsError, match=r'packing\.row_tokens = 18: expected a multiple of 4.*mesh\.learner\.sequence'):
    shape(*settings, Packing(row_tokens=18), 1, parts=4)
  assert shape(*settings, Packing(), 1, parts=3).tokens == 33  # 16 rounded up to 32, and to a multiple of 3


def test_members_of_a_group_need_not_be_adjacent():
  a, b = EXAMPLE[:2]
  other = dataclasses.replace(trajectory([30], [9]), group=5)
  batch, _ = pack(
    [a, other, b], np.ones(3, np.float32), Shape(micros=1, rows=1, tokens=20, sequences=3, columns=4), share_prefix=True
  )
  assert contexts(batch)[2, 1] == ([10, 11, 12, 13, 4], 5)


def test_members_with_different_prompts_share_none():
  """If an environment begins differently for the members of a group, each member has its own prompt in the row."""
  (first, other) = small.rollouts([(3, 4)], (5,))
  changed = other.tokens.copy()
  changed[2] = (changed[2] + 1) % 259
  other = dataclasses.replace(other, tokens=changed)
  sizes = shape(Sampling(max_prompt=8, max_tokens=8), Rollout(prompts=1, group=2), Packing(row_tokens=32, rows=1), 1)
  batch, _ = pack([first, other], np.ones(2, np.float32), sizes, True)
  laid = batch.tokens.ravel()[: 2 * 5 + 3 + 4]
  np.testing.assert_array_equal(laid, np.concatenate([first.tokens, other.tokens]))
  small_row = shape(Sampling(max_prompt=5, max_tokens=4), Rollout(prompts=1, group=2), Packing(row_tokens=13, rows=1), 1)
  with pytest.raises(RuntimeError, match=r'2 rows of tokens do not fit into 1: .*config\.packing\.share_prefix = False'):
    pack([first, other], np.ones(2, np.float32), small_row, True)


@pytest.mark.parametrize('share', [True, False])
def test_routes_lie_beside_their_tokens(share):
  """A shared prompt has the experts of its first member. The sampler does not read the last token, so its entry is -1."""
  made = []
  for i, t in enumerate(EXAMPLE):
    routes = np.stack([t.tokens + 20 * i, t.tokens + 20 * i + 1], axis=-1).astype(np.int8)[:, None]
    routes[-1] = -1
    made.append(dataclasses.replace(t, routes=routes))
  sizes = Shape(micros=2, rows=2, tokens=15 if share else 8, sequences=3, columns=4)
  batch, _ = pack(made, np.ones(3, np.float32), sizes, share_prefix=share)
  first, second, third = (t.routes for t in made)
  rows = [[first, second[4:], third[4:]]] if share else [[first], [second], [third]]
  expected = np.full((4, sizes.tokens, 1, 2), -1, np.int8)
  for row, parts in zip(expected, rows):
    routes = np.concatenate(parts)
    row[: len(routes)] = routes
  assert (batch.routes.shape, batch.routes.dtype) == ((2, 2, sizes.tokens, 1, 2), np.int8)
  np.testing.assert_array_equal(batch.routes.reshape(expected.shape), expected)
