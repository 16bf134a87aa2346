"""Problems as ids before a rollout, and what there is to say of trajectories after it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from sprl.cache.kv_cache import KVCache
from sprl.cache.plan import CachePlan
from sprl.io.tokenizer import Tokenizer
from sprl.settings import SettingsError
from sprl.tasks.problems import Problem
from sprl.trajectory import Trajectory

STATUSES = ('ok', 'timeout', 'crash', 'error', 'invalid')  # of a Grade


def encode(problem: Problem, tokenizer: Tokenizer) -> Int[np.ndarray, ' P']:
  """The prompt's ids: the conversation up to where the model's answer begins, or the plain text where there is none."""
  ids = tokenizer.chat(problem.messages) if problem.messages else tokenizer.encode(problem.prompt)
  return np.array(ids, np.int32)


class Length(NamedTuple):
  """How many tokens a prompt has, and where it is in the order of asking."""

  place: int
  tokens: int
  id: str  # the problem's


def check_lengths(lengths: Iterable[Length], max_prompt: int) -> None:
  """Raises SettingsError where a prompt is longer than `config.sampling.max_prompt`, naming the longest, or has no token; of
  several, the one that is asked first."""
  found = sorted(lengths)
  for length in found:
    if not length.tokens:
      raise SettingsError(f'config.task: the prompt of {length.id} is empty: expected a token or more')
  if over := [length for length in found if length.tokens > max_prompt]:
    longest = max(over, key=lambda length: length.tokens)
    raise SettingsError(
      f'config.sampling.max_prompt = {max_prompt}: {len(over)} of {len(found)} prompts are longer; expected at least '
      f'{longest.tokens}, the tokens of {longest.id}'
    )


def sample_rows(
  trajectories: Sequence[Trajectory], answer: Callable[[int], str], tokenizer: Tokenizer, count: int
) -> list[dict[str, Any]]:
  """Rows of a sample table: the first trajectory of each of the first `count` groups; `answer` is a group's right one."""
  first: dict[int, Trajectory] = {}
  for t in trajectories:
    first.setdefault(t.group, t)
  return [
    {
      'prompt': tokenizer.decode(t.tokens[: t.prompt_length].tolist()),
      'completion': tokenizer.decode(t.completion.tolist()),
      'answer': answer(t.group),
      'reward': t.reward,
      'finish': t.finish,
      'tokens': int(t.mask.sum()),
    }
    for t in list(first.values())[:count]
  ]


def metrics(trajectories: Sequence[Trajectory], plan: CachePlan, rows: int) -> dict[str, float]:
  """Rewards and lengths of a batch of rollouts, and what its cache kept and took.

  sparse/accounting_saving   share of the tokens that a dense cache would have attended to and this one did not
  sparse/cache_bytes         all that `rows` rows take; sparse/bytes_saving: against dense keys and values, unquantised
  grading/ok, timeout ...    how many were graded with what success; env/NAME is what an environment says of its episodes
  fp8/kv_saturation          share of the keys' and values' numbers that FP8 had to clamp
  """
  reward = np.array([t.reward for t in trajectories])
  length = np.array([t.mask.sum() for t in trajectories])
  group = np.array([t.group for t in trajectories])
  equal = [np.ptp(reward[group == g]) == 0 for g in np.unique(group)]
  kept = np.concatenate([t.kept[t.mask] for t in trajectories])
  full = np.concatenate([np.flatnonzero(t.mask) for t in trajectories])  # a dense cache holds all tokens before the one drawn
  size = KVCache.bytes(plan, rows)
  evicting = sum(map(plan.evicts, range(plan.layers))) / plan.layers
  numbers = 2 * plan.layers * plan.kv_heads * plan.head_dim * sum(len(t.tokens) for t in trajectories)
  fp8 = {'fp8/kv_saturation': sum(t.saturated for t in trajectories) / numbers} if plan.fp8 else {}
  said = {name for t in trajectories for name in t.metrics}
  return {
    'reward/mean': float(reward.mean()),
    'reward/std': float(reward.std()),
    'reward/groups_equal': float(np.mean(equal)),
    'completion/length_mean': float(length.mean()),
    'completion/length_max': float(length.max()),
    'completion/turns': float(np.mean([max(len(t.rewards), 1) for t in trajectories])),
    'completion/truncated': float(np.mean([t.finish == 'length' for t in trajectories])),
    'sparse/kept_mean': float(kept.mean()),
    'sparse/kept_peak': float(kept.max()),
    'sparse/accounting_saving': float(1 - kept.sum() / full.sum()) * evicting,
    'sparse/compressed': float(np.mean([np.any(t.kept[t.mask] < np.flatnonzero(t.mask)) for t in trajectories])),
    'sparse/cache_bytes': float(size),
    'sparse/bytes_saving': 1 - size / plan.dense_bytes(rows),
    **{f'grading/{status}': float(sum(t.status == status for t in trajectories)) for status in STATUSES},
    **{f'env/{name}': float(np.mean([t.metrics[name] for t in trajectories if name in t.metrics])) for name in sorted(said)},
    **fp8,
  }
