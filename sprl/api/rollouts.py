"""Rollouts in a notebook: samples with their text, rewards and records, as a sequence and as HTML tables."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, overload

import numpy as np
from jaxtyping import Float, Int

from sprl.api.inputs import Reward, rewards_of
from sprl.api.settings import Settings
from sprl.cache.scales import Scales
from sprl.config import Run
from sprl.rollout.episodes import graded
from sprl.rollout.setup import GRADING_MEMORY_GB
from sprl.sampler.engine_config import EngineConfig
from sprl.tasks import graders
from sprl.tasks.grader_pool import GraderPool, Group, grader_pool
from sprl.tasks.problems import Problem
from sprl.tasks.rewards import Sample as Asked
from sprl.types import Trajectory


@dataclass(frozen=True)
class Sample:
  """One completion and its records. Arrays have one entry for each of its C tokens."""

  problem: Problem
  text: str  # the completion, without special tokens, as graders read it
  pieces: tuple[str, ...]  # the text of each token of prompt and completion
  trajectory: Trajectory
  windows: tuple[int | None, ...] = ()  # the sliding window of each layer (ModelConfig.sliding_windows)

  @property
  def prompt(self) -> str:
    """The question."""
    return self.problem.prompt

  @property
  def reward(self) -> float:
    """The reward; 0 before `Rollouts.grade`, and NaN if a grader failed."""
    return self.trajectory.reward if self.trajectory.reward_known else math.nan

  @property
  def finish(self) -> str:
    """Why it ended: `stop` or `length`."""
    return self.trajectory.finish

  @property
  def tokens(self) -> Int[np.ndarray, ' C']:
    """The token ids."""
    return self.trajectory.completion

  @property
  def logp(self) -> Float[np.ndarray, ' C']:
    """The log-probs under the sampler, in nats."""
    return self.trajectory.sampler_logp[self.trajectory.prompt_length :]

  @property
  def attended(self) -> Int[np.ndarray, ' C']:
    """The number of cache slots that each head attended to when the token was drawn."""
    return self.trajectory.attended[self.trajectory.prompt_length :]

  @property
  def visible(self) -> Float[np.ndarray, 'C T'] | None:
    """The share of layers and kv heads whose cache held each of the T tokens when a token of the completion was drawn.

    None unless the sampler recorded evictions (`generate(..., evictions=True)`). A dense cache records none.
    """
    t = self.trajectory
    if t.evicted is None:
      return None
    # The token at position p is drawn by the query at p - 1, which sees the tokens up to p - 1.
    queries = np.arange(t.prompt_length, len(t.tokens)) - 1
    positions = np.arange(len(t.tokens))
    seen = t.evicted[..., None, :] > queries[:, None]  # [L K C T]
    for layer, window in enumerate(self.windows):  # the record of a layer with a window has no evictions
      if window is not None:
        seen[layer] &= positions > queries[:, None] - window
    return seen.mean(axis=(0, 1)) * (positions <= queries[:, None])


def mean_of_known(rewards: Float[np.ndarray, 'G N']) -> float:
  """Return the mean of the rewards that are not NaN; 0 if there are none."""
  known = rewards[np.isfinite(rewards)]
  return float(known.mean()) if len(known) else 0.0


@dataclass(frozen=True)
class Rollouts(Sequence[Sample]):
  """Samples of one sampler, in the order of the prompts. A slice is a tuple of samples."""

  samples: tuple[Sample, ...]
  settings: Settings  # as given to `load` and `sampler`
  run: Run  # the settings of the sampler, with defaults
  engine: EngineConfig
  scales: Scales | None  # of an FP8 cache
  version: int  # number of updates of the sampler's weights
  greedy: bool
  graded: bool = False

  def __len__(self) -> int:
    return len(self.samples)

  @overload
  def __getitem__(self, index: int) -> Sample: ...
  @overload
  def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...
  def __getitem__(self, index):
    return self.samples[index]

  def __iter__(self) -> Iterator[Sample]:
    return iter(self.samples)

  @property
  def trajectories(self) -> list[Trajectory]:
    """The samples as the learner reads them."""
    return [sample.trajectory for sample in self.samples]

  @property
  def texts(self) -> list[str]:
    """The completions."""
    return [sample.text for sample in self.samples]

  @property
  def rewards(self) -> Float[np.ndarray, 'G N']:
    """The rewards: one row for each of the G prompts, one column for each of its N samples; NaN if a grader failed."""
    return np.array([sample.reward for sample in self.samples]).reshape(-1, self.run.rollout.group)

  def keep(self, prompts: Sequence[int] | Sequence[bool] | np.ndarray) -> 'Rollouts':
    """Return the rollouts of some prompts: their numbers, or a truth for each prompt.

    Each new number of prompts compiles another update. To train without the prompts whose samples have equal rewards, which
    teach nothing, `model.update(rollouts, rollout={'equal_groups': 'skip'})` compiles none.

    Raises ValueError if no prompt is left, for a prompt that is named twice, and for truths of another number than the prompts.
    Raises IndexError for a prompt that does not exist.
    """
    N = self.run.rollout.group
    G, asked = len(self.samples) // N, np.asarray(prompts)
    truths = asked.dtype == bool
    if asked.ndim != 1 or not asked.size or (truths and (len(asked) != G or not asked.any())):
      raise ValueError(f'keep({prompts!r:.200}): expected numbers of prompts, or {G} truths of which at least one is true')
    chosen = np.arange(G)[asked].tolist()
    if len(set(chosen)) < len(chosen):
      raise ValueError(f'keep({prompts!r:.200}): expected each prompt once')
    run = replace(self.run, rollout=replace(self.run.rollout, prompts=len(chosen)))
    return replace(self, samples=tuple(sample for g in chosen for sample in self.samples[g * N : (g + 1) * N]), run=run)

  def rows(self) -> list[dict[str, Any]]:
    """Return a row for each sample, for a table: the columns of its question, and what was drawn and graded."""
    return [
      {
        **sample.problem.row,
        'prompt': sample.prompt,
        'completion': sample.text,
        'tokens': len(sample.tokens),
        'finish': sample.finish,
        'logp': float(sample.logp.sum()),
        'reward': sample.reward if self.graded else None,
        **{f'reward/{name}': value for name, value in sample.trajectory.parts.items()},
        'status': sample.trajectory.status,
      }
      for sample in self.samples
    ]

  def grade(self, reward: Reward = None) -> 'Rollouts':
    """Return the rollouts with rewards.

    Args:
      reward: a function, the name of a grader, or several, as `sprl.fit` takes them. None: the grader of the settings.

    If a grader fails, the sample does not train, and `trajectory.status` names the kind of failure. The
    reason of each failure is logged.

    Raises SettingsError for an unknown grader, or a function that needs an argument that does not exist.
    """
    settings, functions = rewards_of(reward)
    task = replace(self.run.task, **settings)
    rewards, columns = graders.rewards(task, functions), frozenset(chain(*(s.problem.row for s in self.samples)))
    executor = task.executor or 'processes'
    with grader_pool(rewards, task.workers, task.time_limit, GRADING_MEMORY_GB, executor, columns=columns) as pool:
      grades = answers(pool, [_asked(sample) for sample in self.samples])
      names = [each.name for each in rewards]
      trajectories = [replace(sample.trajectory, **graded(grade)) for sample, grade in zip(self.samples, grades)]
      if any(each.grader.groupwise for each in rewards):
        N = self.run.rollout.group
        groups = [Group(tuple(map(_asked, self.samples[i : i + N]))) for i in range(0, len(trajectories), N)]
        compared = chain(*answers(pool, groups))
        trajectories = [replace(t, **graded(grade, t, names)) for t, grade in zip(trajectories, compared)]
    samples = tuple(replace(sample, trajectory=trajectory) for sample, trajectory in zip(self.samples, trajectories))
    return replace(self, samples=samples, graded=True)

  def __repr__(self) -> str:
    rewards = f', mean reward {mean_of_known(self.rewards):.3f}' if self.graded else ', not graded'
    if self.graded and not np.isfinite(self.rewards).any():
      rewards = ', no reward known'
    G, N = self.rewards.shape
    return f'Rollouts: {G} prompts x {N} samples{rewards}, {describe(self.run)}, after {self.version} updates'

  def _repr_html_(self) -> str:
    columns = ['prompt', 'completion', 'tokens', 'most slots', *(['reward'] if self.graded else [])]
    rows = [
      [_text(s.prompt), _text(s.text), str(len(s.tokens)), str(int(s.attended.max(initial=0))), f'{s.reward:g}'][: len(columns)]
      for s in self.samples
    ]
    return f'<p>{html.escape(repr(self))}</p>{_table(columns, rows)}'


def _asked(sample: Sample) -> Asked:
  """Return a sample in the form that reward functions get."""
  p, t = sample.problem, sample.trajectory
  return Asked(p.prompt, sample.text, p.answer, p.row, p.messages, tuple(sample.tokens.tolist()), t.finish, p.extra)


def answers(pool: GraderPool, calls: Sequence[Asked | Group]) -> list[Any]:
  """Return the results of the calls, in order."""
  tickets, found = [pool.submit(call) for call in calls], {}
  while len(found) < len(tickets):
    pool.wait(None)
    found |= pool.poll(tickets)
  return [found[ticket] for ticket in tickets]


def describe(run: Run) -> str:
  """Return a short description of the sampler of a run: its cache and its number format."""
  cache = 'dense cache' if run.cache.budget is None else f'{run.cache.method} cache of {run.cache.budget} tokens'
  return cache if run.quant.sampler == 'none' else f'{cache}, {run.quant.sampler}'


@dataclass(frozen=True)
class SideBySide:
  """Completions of the same prompts by several samplers: one row a prompt, one column a sampler."""

  columns: Mapping[str, Rollouts]

  def __repr__(self) -> str:
    lines = []
    for row in zip(*map(firsts, self.columns.values())):
      lines += [row[0].prompt, *(f'  {name}: {sample.text}' for name, sample in zip(self.columns, row)), '']
    return '\n'.join(lines)

  def _repr_html_(self) -> str:
    titles = [f'{name}\n{describe(rollouts.run)}' for name, rollouts in self.columns.items()]
    rows = []
    for row in zip(*map(firsts, self.columns.values())):
      same = min(common(row[0].text, other.text) for other in row)
      rewards = [f'\nreward {s.reward:g}' if r.graded else '' for s, r in zip(row, self.columns.values())]
      shown = [
        f'{_text(s.text[:same])}<mark>{_text(s.text[same:])}</mark><small>{_text(tail)}</small>' for s, tail in zip(row, rewards)
      ]
      rows.append([_text(row[0].prompt), *shown])
    return _table(['prompt', *titles], rows)


def side_by_side(**rollouts: Rollouts) -> SideBySide:
  """Show each sampler's first completion of each prompt side by side. Text is marked from the first difference on.

  Each keyword is the title of a column. Raises ValueError if the rollouts have different prompts.
  """
  asked = {name: [sample.prompt for sample in firsts(each)] for name, each in rollouts.items()}
  if not asked or any(prompts != next(iter(asked.values())) for prompts in asked.values()):
    raise ValueError(f'side_by_side({", ".join(rollouts)}): expected rollouts of the same prompts')
  return SideBySide(rollouts)


def firsts(rollouts: Rollouts) -> tuple[Sample, ...]:
  """Return the first sample of each prompt."""
  return rollouts.samples[:: rollouts.run.rollout.group]


def common(a: str, b: str) -> int:
  """Return the length of the common prefix of two texts."""
  return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# --- HTML --------------------------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Return an HTML table. The cells of `rows` are HTML; the titles are text."""
  style = 'style="text-align: left; vertical-align: top"'
  head = ''.join(f'<th {style}>{_text(title)}</th>' for title in columns)
  body = ''.join('<tr>' + ''.join(f'<td {style}>{cell}</td>' for cell in row) + '</tr>' for row in rows)
  return f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _text(text: str) -> str:
  return html.escape(text).replace('\n', '<br>')
