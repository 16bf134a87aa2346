"""Trajectories into the learner's static rows.

A microbatch is R rows of T tokens. Whole sequences are laid into rows first-fit, as many microbatches as it takes; the last
may be part empty, and how many are used is a number, not a shape, so nothing recompiles when lengths change. The samples of
a group may share one copy of their prompt (`share_prefix`), which the attention mask makes exact:

    row       p p p p | a a a | b b | c c c c | . .        prompt, three completions, padding
    segments  1 1 1 1   2 2 2   3 3   4 4 4 4   0 0
    prefixes  0 0 0 0   1 1 1   1 1   1 1 1 1   0 0

Everything the objective sees is a rectangle instead: [B, C], a sequence a row, a completion token a column. A scored
position knows which hidden state predicts it (`source`: for the first completion token, the prompt's last) and a rectangle's
cell knows its scored position (`place`).

On a mesh the rows of a microbatch lie in S shards, R / S rows on each, and so do their scored positions: no hidden state leaves
its devices to be found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sprl.settings import Packing, Rollout, Sampling, SettingsError
from sprl.trajectory import Trajectory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainBatch:
  """Packed rows of all microbatches (A at most, `used` of them filled), and the rectangles of their B sequences."""

  tokens: Int[Array, 'A R T']
  positions: Int[Array, 'A R T']
  segments: Int[Array, 'A R T']
  prefixes: Int[Array, 'A R T']
  source: Int[Array, 'A S N']  # index into the shard's R / S * T = N hidden states: the one that predicts scored position n
  target: Int[Array, 'A S N']  # the token that it predicts
  scored: Int[Array, 'A S']  # scored positions, at the front of the N
  used: Int[Array, '']
  micro: Int[Array, ' B']  # the sequence's microbatch
  place: Int[Array, 'B C']  # the scored position of each cell, of all shards' S * N
  mask: Bool[Array, 'B C']  # tokens that the model wrote
  sampler_logp: Float[Array, 'B C']
  advantage: Float[Array, ' B']
  reward: Float[Array, ' B']
  evicted: Int[Array, 'A R L K T'] | None = None  # when the sampler forgot each token, where the learner is to forget it too
  routes: Int[Array, 'A R T M k'] | None = None  # experts that tokens are to go through; -1: the router's choice

  @property
  def axes(self) -> 'TrainBatch':
    """The names of its arrays' axes: rows are split, rectangles are small and whole on every device."""
    packed = dict.fromkeys(('tokens', 'positions', 'segments', 'prefixes', 'source', 'target'), (None, 'rows', None))
    split = packed | {
      'scored': (None, 'rows'),
      'evicted': (None, 'rows', None, 'kv_heads', None),
      'routes': (None, 'rows', None, None, None),
    }
    axes: Any = {name: None if x is None else split.get(name, (None,) * x.ndim) for name, x in vars(self).items()}
    return TrainBatch(**axes)


@dataclass(frozen=True)
class Shape:
  """The static sizes of a TrainBatch."""

  micros: int  # A
  rows: int  # R
  tokens: int  # T
  sequences: int  # B
  columns: int  # C
  shards: int = 1  # S


def shape(sampling: Sampling, rollout: Rollout, packing: Packing, minibatches: int, shards: int = 1) -> Shape:
  """Sizes that fit any batch the sampling settings can produce, for devices that split rows into so many shards.

  Raises SettingsError: a row too short for the longest sequence, or minibatches that do not divide the prompts.
  """
  if rollout.prompts % minibatches:
    raise SettingsError(
      f'config.optimizer.minibatches = {minibatches}: expected a divisor of config.rollout.prompts = {rollout.prompts}'
    )
  P, C, n = sampling.max_prompt, sampling.max_tokens, rollout.group
  T = packing.row_tokens or -(-(P + (n if packing.share_prefix else 1) * C) // 32) * 32
  if T < P + C:
    raise SettingsError(
      f'config.packing.row_tokens = {T}: expected at least {P + C}, '
      f'config.sampling.max_prompt ({P}) and config.sampling.max_tokens ({C}) together'
    )
  members = min(n, (T - P) // C) if packing.share_prefix else 1  # of a group that are sure to fit beside its prompt
  pieces = rollout.prompts // minibatches * -(-n // members)
  per_row = T // (P + members * C)  # first-fit fills every row but the last with at least as many pieces as this
  rows = -(-pieces // per_row)
  at_once = packing.rows if shards == 1 else min(packing.rows * shards, -(-rows // shards) * shards)
  return Shape(-(-rows // at_once), at_once, T, rollout.prompts // minibatches * n, C, shards)


def pack(
  trajectories: Sequence[Trajectory], advantage: Float[np.ndarray, ' B'], shape: Shape, share_prefix: bool
) -> tuple[TrainBatch, dict[str, float]]:
  """The batch of these trajectories (numpy arrays) and its metrics; sequences whose advantage is NaN are left out.

  Sequence b of the rectangles is trajectory b. Members of a group must stand next to each other to share their prompt.
  Trajectories that record evictions need prompts of their own: samples forget them differently.
  """
  A, R, T, B, C, S = shape.micros, shape.rows, shape.tokens, shape.sequences, shape.columns, shape.shards
  rows = _first_fit(_pieces(trajectories, advantage, T, share_prefix), trajectories, T)
  tokens, positions, segments, prefixes = (np.zeros((A, R, T), np.int32) for _ in range(4))
  N = R // S * T
  source, target = (np.zeros((A, S, N), np.int32) for _ in range(2))
  scored, micro = np.zeros((A, S), np.int32), np.full(B, -1, np.int32)
  place, mask, sampler_logp = np.zeros((B, C), np.int32), np.zeros((B, C), bool), np.zeros((B, C), np.float32)
  forgets = trajectories[0].evicted if trajectories else None
  evicted = None if forgets is None else np.zeros((A, R, *forgets.shape[:2], T), np.int32)
  went = trajectories[0].routes if trajectories else None
  routes = None if went is None else np.full((A, R, T, *went.shape[1:]), -1, went.dtype)

  for index, row in enumerate(rows):
    a, r = divmod(index, R)
    s, within = divmod(r, R // S)
    start, segment = 0, 0
    for piece in row:
      P = trajectories[piece[0]].prompt_length
      prompt_segment = segment = segment + 1
      here = slice(start, start + P)
      tokens[a, r, here] = trajectories[piece[0]].tokens[:P]
      positions[a, r, here], segments[a, r, here] = np.arange(P), prompt_segment
      if routes is not None:
        routes[a, r, here] = _routes(trajectories[piece[0]])[:P]
      last_of_prompt, start = start + P - 1, start + P
      for b in piece:
        trajectory, segment = trajectories[b], segment + 1
        n = len(trajectory.completion)
        here = slice(start, start + n)
        tokens[a, r, here], positions[a, r, here] = trajectory.completion, np.arange(P, P + n)
        segments[a, r, here], prefixes[a, r, here] = segment, prompt_segment
        if (
          evicted is not None and trajectory.evicted is not None
        ):  # prompts are not shared then: this is the sequence whose prompt was just laid down
          evicted[a, r, :, :, start - P : start + n] = trajectory.evicted
        if routes is not None:
          routes[a, r, here] = _routes(trajectory)[P:]
        column = np.flatnonzero(trajectory.mask[P:])
        where = scored[a, s] + np.arange(len(column))
        predictor = np.concatenate([[last_of_prompt], np.arange(start, start + n - 1)])
        source[a, s, where], target[a, s, where] = within * T + predictor[column], trajectory.completion[column]
        place[b, column], mask[b, column], micro[b] = s * N + where, True, a
        sampler_logp[b, column] = trajectory.sampler_logp[P:][column]
        scored[a, s] += len(column)
        start += n

  used = -(-len(rows) // R)
  filled = int(np.count_nonzero(segments))
  metrics = {
    'packing/waste': 1 - filled / (used * R * T) if used else 0.0,
    'packing/tokens': float(filled),
    'packing/microbatches': float(used),
    'packing/tokens_saved_by_sharing': float(sum(len(t.tokens) for t, a in zip(trajectories, micro) if a >= 0) - filled),
  }
  arrays: dict[str, Any] = {  # numpy, until they are put on the devices
    'tokens': tokens, 'positions': positions, 'segments': segments, 'prefixes': prefixes,
    'source': source, 'target': target, 'scored': scored, 'used': np.int32(used),
    'micro': micro, 'place': place, 'mask': mask, 'sampler_logp': sampler_logp,
    'advantage': np.nan_to_num(advantage).astype(np.float32),
    'reward': np.array([t.reward for t in trajectories], np.float32),
    'evicted': evicted, 'routes': routes,
  }  # fmt: skip
  return TrainBatch(**arrays), metrics


def empty(shape: Shape) -> TrainBatch:
  """A batch of such sizes with nothing in it, for what asks for shapes only."""
  batch, _ = pack((), np.zeros(shape.sequences), shape, share_prefix=False)
  reward: Any = np.zeros(shape.sequences, np.float32)
  return replace(batch, reward=reward)


def _pieces(trajectories, advantage, T, share_prefix):
  """Lists of sequences that share one copy of a prompt, each short enough for a row."""
  pieces: list[list[int]] = []
  length, group = 0, None
  for b, trajectory in enumerate(trajectories):
    if np.isnan(advantage[b]) or not trajectory.mask.any():
      continue
    n = len(trajectory.completion)
    same = pieces and trajectory.group == group and _same_prompt(trajectory, trajectories[pieces[-1][0]])
    if share_prefix and same and length + n <= T:
      pieces[-1].append(b)
      length += n
    else:
      pieces.append([b])
      length, group = trajectory.prompt_length + n, trajectory.group
  return pieces


def _routes(trajectory: Trajectory) -> Int[np.ndarray, 'T M k']:
  assert trajectory.routes is not None, 'of one batch all trajectories record their routes, or none does'
  return trajectory.routes


def _same_prompt(one: Trajectory, other: Trajectory) -> bool:
  """False for members whose environment did not begin alike, whatever their seed."""
  return np.array_equal(one.tokens[: one.prompt_length], other.tokens[: other.prompt_length])


def _first_fit(pieces, trajectories, T):
  """Rows of pieces, each piece in the first row with room for it."""
  rows: list[list[list[int]]] = []
  room: list[int] = []
  for piece in pieces:
    size = trajectories[piece[0]].prompt_length + sum(len(trajectories[b].completion) for b in piece)
    row = next((i for i, free in enumerate(room) if size <= free), len(rows))
    if row == len(rows):
      rows.append([])
      room.append(T)
    rows[row].append(piece)
    room[row] -= size
  return rows
