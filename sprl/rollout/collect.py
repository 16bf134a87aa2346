"""Prompts as token ids, checks of their lengths, and metrics and sample tables of rollouts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from sprl.cache.kv_cache import KVCache
from sprl.cache.layout import CacheLayout
from sprl.config import SettingsError
from sprl.io.tokenizer import Tokenizer
from sprl.objective.advantages import equal_rewards
from sprl.rollout.repetition import repetition
from sprl.tasks.problems import Problem
from sprl.types import Trajectory, sequences

STATUSES = ('ok', 'timeout', 'crash', 'error', 'invalid')  # of a Grade (sprl/tasks/grader_pool.py)


def encode(problem: Problem, tokenizer: Tokenizer) -> Int[np.ndarray, ' P']:
  """Return the prompt's ids: the chat conversation up to the model's answer, or `Tokenizer.prompt` if there is no chat."""
  ids = tokenizer.chat(problem.messages) if problem.messages else tokenizer.prompt(problem.prompt)
  return np.array(ids, np.int32)


class Length(NamedTuple):
  """The length of a prompt, and its place in the order of asking."""

  place: int
  tokens: int
  id: str  # of the problem


def check_lengths(lengths: Iterable[Length], max_prompt: int) -> None:
  """Raise SettingsError if a prompt has no token, or more than `max_prompt`.

  The error names the first empty prompt, or the longest prompt; of several longest, the one that is asked first.
  """
  found = sorted(lengths)
  for length in found:
    if not length.tokens:
      raise SettingsError(f'config.task: the prompt of {length.id} is empty: expected at least one token')
  if over := [length for length in found if length.tokens > max_prompt]:
    longest = max(over, key=lambda length: length.tokens)
    raise SettingsError(
      f'config.sampling.max_prompt = {max_prompt}: {len(over)} of {len(found)} prompts are longer; expected at least '
      f'{longest.tokens}, the tokens of {longest.id}'
    )


def sample_rows(
  trajectories: Sequence[Trajectory], answer: Callable[[int], str], tokenizer: Tokenizer, count: int | None
) -> list[dict[str, Any]]:
  """Return the rows of a sample table: the first trajectory of each of the first `count` groups; None: all trajectories.

  `answer(number)` is the right answer of a group. Named rewards have columns `reward/NAME`. If all trajectories are shown, the
  column `group` tells which belong together.
  """
  shown: Sequence[Trajectory] = trajectories
  if count is not None:
    first: dict[int, Trajectory] = {}
    for t in trajectories:
      first.setdefault(t.group, t)
    shown = list(first.values())[:count]
  answers = {number: answer(number) for number in dict.fromkeys(t.group for t in shown)}
  return [
    {
      **({'group': t.group} if count is None else {}),
      'prompt': tokenizer.decode(t.tokens[: t.prompt_length].tolist()),
      'completion': tokenizer.decode(t.completion.tolist()),
      'answer': answers[t.group],
      'reward': t.reward,
      **{f'reward/{name}': score for name, score in t.parts.items()},
      'finish': t.finish,
      'tokens': int(t.mask.sum()),
    }
    for t in shown
  ]


def metrics(trajectories: Sequence[Trajectory], layout: CacheLayout, rows: int) -> dict[str, float]:
  """Return metrics of a batch of rollouts: rewards, lengths, and the cache.

  reward/mean and std are over the samples whose reward is known. In a group without one, all rewards count as equal.

  sparse/accounting_saving   share of the tokens in a dense cache that this cache did not attend to
  sparse/cache_bytes         bytes of the cache of `rows` rows
  sparse/bytes_saving        share of the bytes of a dense, unquantised cache that this one saves
  reward/NAME                mean score of one of several rewards, without its weight
  grading/STATUS             samples that were graded with this status
  grading/failed/NAME        samples that one of several rewards could not grade
  judge/NAME                 what the grader `judge` used
  env/NAME                   mean of a metric that environments or agents report for their episodes
  agent/NAME                 mean over the episodes of agents
  completion/turns_cut       share of the answers of a conversation that end at the limit of a turn, mean over the episodes
  fp8/kv_saturation          share of the elements of keys and values that FP8 clamped
  fp8/query_saturation       share of the elements of queries that FP8 clamped, where queries are FP8
  """
  reward = np.array([t.reward for t in trajectories if t.reward_known])
  length = np.array([sum(s.mask.sum() for s in sequences(t)) for t in trajectories])
  turns = [t.metrics.get('agent/turns', max(len(t.rewards), 1)) for t in trajectories]
  of_group: dict[int, list[float]] = {t.group: [] for t in trajectories}
  for t in trajectories:
    of_group[t.group] += [t.reward] if t.reward_known else []
  attended = np.concatenate([t.attended[t.mask] for t in trajectories])
  full = np.concatenate([np.flatnonzero(t.mask) for t in trajectories])  # a dense cache holds all tokens before the drawn one
  size = KVCache.bytes(layout, rows)
  numbers = layout.layers * layout.head_dim * sum(len(t.tokens) for t in trajectories)  # of one head
  fp8: dict[str, float] = {}
  if layout.fp8:
    fp8['fp8/kv_saturation'] = sum(t.saturated for t in trajectories) / (2 * layout.kv_heads * numbers)
  if layout.fp8_queries:
    fp8['fp8/query_saturation'] = sum(t.saturated_queries for t in trajectories) / (layout.heads * numbers)
  reported = {name for t in trajectories for name in t.metrics}
  parts = dict.fromkeys(name for t in trajectories for name in t.parts)
  return {
    'reward/mean': float(reward.mean()) if len(reward) else 0.0,
    'reward/std': float(reward.std()) if len(reward) else 0.0,
    'reward/groups_equal': float(np.mean([equal_rewards(rewards) for rewards in of_group.values()])),
    'completion/length_mean': float(length.mean()),
    'completion/length_max': float(length.max()),
    'completion/turns': float(np.mean(turns)),
    'completion/truncated': float(np.mean([t.finish == 'length' for t in trajectories])),
    'sparse/kept_mean': float(attended.mean()),
    'sparse/kept_peak': float(attended.max()),
    'sparse/accounting_saving': float(1 - attended.sum() / full.sum()) if layout.sparse else 0.0,
    'sparse/compressed': float(np.mean([np.any(t.attended[t.mask] < np.flatnonzero(t.mask)) for t in trajectories])),
    'sparse/cache_bytes': float(size),
    'sparse/bytes_saving': 1 - size / layout.dense_bytes(rows),
    'sparse/repetition': float(np.mean([repetition(t.tokens[t.mask]) for t in trajectories])),
    **reward_parts(trajectories, 'reward'),
    **grading_costs(trajectories),
    **{f'grading/{status}': float(sum(t.status == status for t in trajectories)) for status in STATUSES},
    **{f'grading/failed/{name}': float(sum(name in t.failed for t in trajectories)) for name in parts},
    **{
      name if name.startswith(('agent/', 'completion/')) else f'env/{name}': float(
        np.mean([t.metrics[name] for t in trajectories if name in t.metrics])
      )
      for name in sorted(reported)
    },
    **fp8,
  }


def reward_parts(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
  """Return the mean score by each of several rewards, without its weight, as PREFIX/NAME; {} with one reward.

  A sample that a reward could not grade counts 0 in an evaluation, as in its scores; else it is left out. A mean over none is 0.
  """
  names = dict.fromkeys(name for t in trajectories for name in t.parts)
  counted = {
    name: [t for t in trajectories if name in t.parts and (prefix != 'reward' or name not in t.failed)] for name in names
  }
  return {f'{prefix}/{name}': float(np.mean([t.parts[name] for t in found])) if found else 0.0 for name, found in counted.items()}


def grading_costs(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Return the sums of what grading used, such as judge/tokens; {} without a judge."""
  names = sorted({name for t in trajectories for name in t.costs})
  return {name: float(sum(t.costs.get(name, 0.0) for t in trajectories)) for name in names}


def by_source(
  trajectories: Sequence[Trajectory], sources: Sequence[str], source: Callable[[int], str | None]
) -> dict[str, float]:
  """Return metrics of a batch by the source of its problems: `source(group)` of the names `sources`.

  data/NAME/share    share of the trajectories
  data/NAME/reward   the mean of their known rewards; absent if there are none
  """
  names = {t.group: source(t.group) for t in trajectories} if sources else {}
  found: dict[str, float] = {}
  for name in sources:
    of_name = [t for t in trajectories if names[t.group] == name]
    found[f'data/{name}/share'] = len(of_name) / len(trajectories)
    if rewards := [t.reward for t in of_name if t.reward_known]:
      found[f'data/{name}/reward'] = float(np.mean(rewards))
  return found
