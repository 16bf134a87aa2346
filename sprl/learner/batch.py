"""Packing: trajectories into the static rows of the learner.

A microbatch is R rows of T tokens. Whole sequences go into rows first-fit, into as many microbatches as needed; the last may be
partly empty. The number of microbatches in use is a value, not a shape, so nothing recompiles when lengths change. The samples
of a group may share one copy of their prompt (`share_prefix`); the attention mask makes this exact:

    row       p p p p | a a a | b b | c c c c | . .        prompt, three completions, padding
    segments  1 1 1 1   2 2 2   3 3   4 4 4 4   0 0
    prefixes  0 0 0 0   1 1 1   1 1   1 1 1 1   0 0

The objective sees [B, C] arrays instead: one row per sequence, one column per completion token. `predictor` is the index of the
hidden state that predicts a scored position (for the first token of a completion, the state of the prompt's last token).
`place` is the scored position of each element of a [B, C] array.

On a mesh the rows of a microbatch lie in S shards of R / S rows. Their scored positions lie in the same shards, so hidden states
are gathered within their device. If Q devices share a row, the scored positions of a shard are distributed round-robin over Q
parts of its N places, so each device scores almost the same number of positions. Each part is filled from the front.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from sprl.config import Packing, Rollout, Sampling, SettingsError
from sprl.kernels.support import RecordFormat
from sprl.sharding import transfer
from sprl.sharding.rules import shardings
from sprl.types import Trajectory


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainBatch:
  """One minibatch: packed rows of at most A microbatches, and the [B, C] arrays of its B sequences.

  S is the number of shards of the rows, not of cache slots. M: layers with experts; k: experts of a token; W: words of a support.
  """

  tokens: Int[Array, 'A R T']
  positions: Int[Array, 'A R T']  # of each token in its sequence
  segments: Int[Array, 'A R T']  # number of the segment, from 1 in each row; 0 is padding
  prefixes: Int[Array, 'A R T']  # the segment that this one continues; 0: none
  predictor: Int[Array, 'A S N']  # of scored position n: index of the predicting state among the N = R / S * T of the shard
  target: Int[Array, 'A S N']  # of scored position n: the token to predict
  scored: Int[Array, 'A QS']  # number of scored positions in each part of a shard; they fill its N / Q places from the front
  used: Int[Array, '']  # microbatches with tokens
  micro: Int[Array, ' B']  # microbatch of the sequence; -1: left out
  prompt: Int[Array, ' B']  # number of the sequence's prompt among those of the batch
  place: Int[Array, 'B C']  # scored position of the token among the S * N of its microbatch, part by part, then shard by shard
  mask: Bool[Array, 'B C']  # tokens that the model wrote
  sampler_logp: Float[Array, 'B C']
  advantage: Float[Array, ' B']
  reward: Float[Array, ' B']
  evicted: Int[Array, 'A R L K T'] | None = None  # position of the first query that does not see the token (arm learner_mask)
  routes: Int[Array, 'A R T M k'] | None = None  # experts to replay; -1: the router chooses
  support: Integer[Array, 'A S N W'] | None = None  # of scored position n: the tokens that the sampler's filters kept

  @property
  def axes(self) -> 'TrainBatch':
    """Names of the axes of each array. Rows are split over devices, and their tokens over `sequence`.

    The [B, C] arrays are small and replicated.
    """
    packed = dict.fromkeys(('tokens', 'positions', 'segments', 'prefixes', 'predictor', 'target'), (None, 'rows', 'tokens'))
    split = packed | {
      'scored': (None, 'scored_rows'),
      'evicted': (None, 'rows', None, 'kv_heads', None),
      'routes': (None, 'rows', None, None, None),
      'support': (None, 'rows', 'tokens', None),
    }
    axes: Any = {name: None if x is None else split.get(name, (None,) * x.ndim) for name, x in vars(self).items()}
    return TrainBatch(**axes)


@dataclass(frozen=True)
class Shape:
  """Static sizes of a TrainBatch."""

  micros: int  # A
  rows: int  # R
  tokens: int  # T
  sequences: int  # B
  columns: int  # C
  shards: int = 1  # S
  parts: int = 1  # Q


def shape(
  sampling: Sampling, rollout: Rollout, packing: Packing, minibatches: int, shards: int = 1, branches: int = 1, parts: int = 1
) -> Shape:
  """Return sizes that fit any batch of these settings, for devices that split rows into `shards` and a row into `parts` parts.

  `minibatches` divides rollout.prompts. An episode has at most `branches` sequences.

  Raises SettingsError if rows are too short for the longest sequence, or have a number of tokens that is no multiple of `parts`.
  """
  P, C, n = sampling.max_prompt, sampling.max_tokens, rollout.group * branches
  T = packing.row_tokens or -(-(P + (n if packing.share_prefix else 1) * C) // 32) * 32
  T += 0 if packing.row_tokens else -T % parts
  if T % parts:
    raise SettingsError(
      f'config.packing.row_tokens = {T}: expected a multiple of {parts}, the devices that share a row '
      '(config.mesh.learner.sequence)'
    )
  if T < P + C:
    raise SettingsError(
      f'config.packing.row_tokens = {T}: expected at least {P + C}, the sum of config.sampling.max_prompt = {P} and '
      f'config.sampling.max_tokens = {C}'
    )
  members = min(n, (T - P) // C) if packing.share_prefix else 1  # samples of a group that always fit into one row
  pieces = rollout.prompts // minibatches * -(-n // members)
  per_row = T // (P + members * C)  # first-fit fills every row but the last with at least this many pieces
  rows = -(-pieces // per_row)
  micros = -(-rows // (packing.rows * shards))
  return Shape(
    micros=micros,
    rows=-(-rows // (micros * shards)) * shards,  # as few as these microbatches need: padded rows cost as much as full ones
    tokens=T,
    sequences=rollout.prompts // minibatches * n,
    columns=C,
    shards=shards,
    parts=parts,
  )


@dataclass(frozen=True)
class Tokens:
  """Numbers of tokens in the packed rows of a step's minibatches."""

  read: int = 0  # in the rows
  pairs: int = 0  # (query, key) that attention compares: mean over the layers
  trained: int = 0  # that the model wrote and the loss sees

  @classmethod
  def of(cls, batches: Sequence[TrainBatch], windows: Sequence[int | None] = ()) -> 'Tokens':
    """Count the tokens of batches that are numpy arrays. `windows` are those of the layers (ModelConfig.sliding_windows)."""
    real = [np.asarray(batch.segments) > 0 for batch in batches]
    earlier = [np.asarray(batch.positions)[there].astype(np.int64) + 1 for batch, there in zip(batches, real)]
    layers = Counter(windows or (None,))
    pairs = sum(n * sum(int(np.sum(e if w is None else np.minimum(e, w))) for e in earlier) for w, n in layers.items())
    return cls(
      read=sum(int(np.count_nonzero(there)) for there in real),
      pairs=round(pairs / layers.total()),
      trained=sum(int(np.count_nonzero(batch.mask)) for batch in batches),
    )


def pack(
  trajectories: Sequence[Trajectory], advantage: Float[np.ndarray, ' B'], shape: Shape, share_prefix: bool
) -> tuple[TrainBatch, dict[str, float]]:
  """Return the batch of these trajectories as numpy arrays, and its `packing/` metrics.

  Raises RuntimeError if sequences need more rows than `shape` has: members of a group that begin differently share no prompt.

  Row b of a [B, C] array is trajectory b; rows after the last trajectory are empty. Sequences with advantage NaN, or without a
  token of the model, are left out. Members of a group must be adjacent to share their prompt. Trajectories that record evictions
  need `share_prefix` = False, because samples evict different tokens of their prompt. If one trajectory records evictions, routes
  or supports, all must.

  packing/
    tokens                    in the rows, shared prompts counted once
    waste                     share of the used microbatches that is padding
    microbatches              used
    tokens_saved_by_sharing   tokens that separate prompts would add
  """
  support = trajectories[0].support if trajectories else None
  batch = empty(shape, None if support is None else RecordFormat(support.shape[1], support.dtype))
  if trajectories and trajectories[0].evicted is not None:
    L, K, _ = trajectories[0].evicted.shape
    batch = replace(batch, evicted=np.zeros((shape.micros, shape.rows, L, K, shape.tokens), np.int32))
  if trajectories and trajectories[0].routes is not None:
    recorded = trajectories[0].routes
    sizes = (shape.micros, shape.rows, shape.tokens, *recorded.shape[1:])
    batch = replace(batch, routes=np.full(sizes, -1, recorded.dtype))
  batch = replace(
    batch,
    advantage=_rows(np.nan_to_num(advantage).astype(np.float32), shape.sequences),
    reward=_rows(np.array([t.reward for t in trajectories], np.float32), shape.sequences),
    prompt=_rows(np.unique([t.group for t in trajectories], return_inverse=True)[1].astype(np.int32), shape.sequences),
  )
  rows = _first_fit(_pieces(trajectories, advantage, shape.tokens, share_prefix), trajectories, shape.tokens)
  if len(rows) > shape.micros * shape.rows:
    raise RuntimeError(
      f'{len(rows)} rows of tokens do not fit into {shape.micros * shape.rows}: episodes of one group began differently, so they '
      'could not share a prompt. Begin each from the seed of its group, or start a run with config.packing.share_prefix = False '
      '(--from continues from the weights of this one)'
    )
  for index, pieces in enumerate(rows):
    _fill_row(batch, shape, index, pieces, trajectories)

  used = -(-len(rows) // shape.rows)
  filled = int(np.count_nonzero(batch.segments))
  room = used * shape.rows * shape.tokens
  metrics = {
    'packing/waste': 1 - filled / room if used else 0.0,
    'packing/tokens': float(filled),
    'packing/microbatches': float(used),
    'packing/tokens_saved_by_sharing': float(sum(len(t.tokens) for t, a in zip(trajectories, batch.micro) if a >= 0) - filled),
  }
  return replace(batch, used=np.int32(used)), metrics


def _rows(values: np.ndarray, count: int) -> np.ndarray:
  """Return the values [n] followed by zeros, as an array [count]."""
  return np.pad(values, (0, max(0, count - len(values))))


def empty(shape: Shape, support: RecordFormat | None = None) -> TrainBatch:
  """Return a batch of these sizes without tokens, as numpy arrays. `support` is the form of its supports, if it has any."""
  A, R, T, B, C, S = shape.micros, shape.rows, shape.tokens, shape.sequences, shape.columns, shape.shards
  packed, scored, cells = (A, R, T), (A, S, R // S * T), (B, C)
  arrays: dict[str, Any] = {  # numpy until they are placed on the devices
    **{name: np.zeros(packed, np.int32) for name in ('tokens', 'positions', 'segments', 'prefixes')},
    **{name: np.zeros(scored, np.int32) for name in ('predictor', 'target')},
    'scored': np.zeros((A, S * shape.parts), np.int32),
    'used': np.int32(0),
    'micro': np.full(B, -1, np.int32),
    'prompt': np.zeros(B, np.int32),
    'place': np.zeros(cells, np.int32),
    'mask': np.zeros(cells, bool),
    'sampler_logp': np.zeros(cells, np.float32),
    'advantage': np.zeros(B, np.float32),
    'reward': np.zeros(B, np.float32),
    'support': None if support is None else np.zeros((*scored, support.words), support.dtype),
  }
  return TrainBatch(**arrays)


def put(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
  """Place the batch on the devices of the learner, its rows split over them."""
  return transfer.place(batch, shardings(mesh, batch.axes, batch))


def _fill_row(batch: Any, shape: Shape, index: int, pieces: list[list[int]], trajectories: Sequence[Trajectory]) -> None:
  """Write pieces, lists of sequences that share a prompt, into row `index` of the batch's numpy arrays, in place."""
  a, r = divmod(index, shape.rows)
  s, within = divmod(r, shape.rows // shape.shards)
  S, Q, N = shape.shards, shape.parts, batch.predictor.shape[2]
  parts = batch.scored[a, s::S]
  start, segment = 0, 0
  for piece in pieces:
    first = trajectories[piece[0]]
    P = first.prompt_length
    prompt_segment = segment = segment + 1
    here = slice(start, start + P)
    batch.tokens[a, r, here] = first.tokens[:P]
    batch.positions[a, r, here], batch.segments[a, r, here] = np.arange(P), prompt_segment
    if batch.routes is not None:
      assert first.routes is not None, 'all trajectories of a batch record routes, or none'
      batch.routes[a, r, here] = first.routes[:P]
    last_of_prompt, start = start + P - 1, start + P
    for b in piece:
      trajectory, segment = trajectories[b], segment + 1
      n = len(trajectory.completion)
      here = slice(start, start + n)
      batch.tokens[a, r, here], batch.positions[a, r, here] = trajectory.completion, np.arange(P, P + n)
      batch.segments[a, r, here], batch.prefixes[a, r, here] = segment, prompt_segment
      if batch.evicted is not None:  # prompts are not shared then, so the prompt before this completion is its own
        batch.evicted[a, r, :, :, start - P : start + n] = trajectory.evicted
      if batch.routes is not None:
        assert trajectory.routes is not None
        batch.routes[a, r, here] = trajectory.routes[P:]
      column = np.flatnonzero(trajectory.mask[P:])
      number = np.sum(parts) + np.arange(len(column))  # among the scored positions of the shard
      part, within_part = number % Q, number // Q
      position = part * (N // Q) + within_part
      predictor = np.concatenate([[last_of_prompt], np.arange(start, start + n - 1)])
      batch.predictor[a, s, position] = within * shape.tokens + predictor[column]
      batch.target[a, s, position] = trajectory.completion[column]
      if batch.support is not None:
        assert trajectory.support is not None, 'all trajectories of a batch record supports, or none'
        batch.support[a, s, position] = trajectory.support
      batch.place[b, column] = (part * S + s) * (N // Q) + within_part
      batch.mask[b, column], batch.micro[b] = True, a
      batch.sampler_logp[b, column] = trajectory.sampler_logp[P:][column]
      parts += np.bincount(number % Q, minlength=Q).astype(np.int32)
      start += n


def _pieces(trajectories, advantage, T, share_prefix):
  """Return lists of sequences that share one copy of a prompt, each short enough for a row of T tokens."""
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


def _same_prompt(one: Trajectory, other: Trajectory) -> bool:
  """Return whether the prompts are equal: an environment may begin differently for members of one group."""
  return np.array_equal(one.tokens[: one.prompt_length], other.tokens[: other.prompt_length])


def _first_fit(pieces, trajectories, T):
  """Return rows of pieces. Each piece is in the first row of T tokens that has enough free positions."""
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
