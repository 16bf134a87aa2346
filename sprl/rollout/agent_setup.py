"""Sets up the episodes of agents from the settings of a run: the program, its rows, and the source of its episodes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from sprl import agents
from sprl.agents.pool import AgentPool, Key, Program, check_program
from sprl.config import Run, SettingsError, Task
from sprl.distributed.team import Team
from sprl.foreign import expanded
from sprl.io.tokenizer import Tokenizer
from sprl.rollout.agent_episodes import agent_episode
from sprl.rollout.broadcast import BroadcastWorkers, across
from sprl.rollout.codec import ChatCodec
from sprl.rollout.episodes import Episode, Limits
from sprl.rollout.interfaces import WorkersLike
from sprl.rollout.prompts import seeds, shuffled
from sprl.tasks import tables
from sprl.tasks.problems import digest
from sprl.types import Trajectory

AGENT_OPTIONS = {'python': None, 'port': 0}  # keys of task.args that the agent does not get
AGENT_SECONDS = 3600.0  # to the next request or the end of an agent; then it counts as hung, and its episode is tried again


@dataclass(frozen=True)
class AgentSource:
  """Episodes of agents. The workers are a `sprl.agents.pool.AgentPool`."""

  row: Callable[[int], Mapping[str, Any]]  # of a group, by its number
  limits: Limits
  most: int  # sequences of an episode that are trained
  codec: ChatCodec
  release: Callable[[Key], None]

  def episode(self, number: int, uid: int, attempt: int) -> Episode:
    """An episode with a new agent and the group's row."""
    row = self.row(number)
    return agent_episode(row, self.limits, self.most, self.codec, (uid, attempt), self.release)

  def prompt(self, number: int) -> Int[np.ndarray, ' P']:
    """The ids of the row as text. The agent alone knows the prompt, so this only measures the scales of an FP8 cache."""
    row = self.row(number)
    text = row['prompt'] if isinstance(row.get('prompt'), str) else json.dumps(row)
    return np.array(self.codec.opening([{'role': 'user', 'content': text}])[: self.limits.max_prompt], np.int32)

  def answer(self, number: int) -> str:
    """Return '': only the agent knows the right answer."""
    return ''

  def comparison(self, number: int, trajectories: Sequence[Trajectory]) -> None:
    """Return None: agents reward their own episodes."""
    return None


def rows(
  data: Sequence[Mapping[str, Any]], split: str, seed: Callable[[int], int], shuffle: int | None, number: int
) -> dict[str, Any]:
  """Return the row of group `number`: its columns, if there is data, and `seed` and `split`.

  The data is shuffled again in each epoch by `shuffle`; None: it is in order.
  """
  row: Mapping[str, Any] = {}
  if data:
    row = data[(number if shuffle is None else shuffled(number, shuffle, len(data))) % len(data)]
  return {**row, 'seed': seed(number), 'split': split}


# --- from the settings -----------------------------------------------------------------------------------------------------


def check_agents(task: Task, tokenizer: Tokenizer) -> None:
  """Raise SettingsError or TokenizerError if the program, its rows or the chat template cannot be used."""
  program, options = agent_program(task)
  check_program(program.agent, program.python)
  if type(port := options['port']) is not int or not 0 <= port < 1 << 16:
    raise SettingsError(f"config.task.args['port'] = {port!r}: expected a number from 0 to 65535; 0: a free port")
  for split in ('train', 'test'):
    agent_data(task, split)
  ChatCodec(tokenizer)


def begin_agents(
  run: Run, tokenizer: Tokenizer, team: Team, enter: Callable[[Any], Any]
) -> tuple[WorkersLike, AgentSource, AgentSource, int | None]:
  """Start the server and the host of the agents in process 0.

  Returns workers, the sources for training and evaluation, and the number of held-out rows or tasks; None if it is not known.
  """
  task = run.task
  data = {split: agent_data(task, split) for split in ('train', 'test')}
  program, options = agent_program(task)
  if task.name == 'verifiers':  # the tasks are not known here; the rows of a file are shuffled by `rows`
    program = replace(program, args={**program.args, 'order': run.seed})
  pool = None
  if team.leads:
    limit = task.time_limit or AGENT_SECONDS
    pool = enter(AgentPool(program, run.sampling, run.eval_sampling, run.model.path, limit, task.workers, options['port']))

  def source(split: str) -> AgentSource:
    held_out = split == 'test'
    seed, shuffle = partial(seeds, held_out=held_out, split=False), None if held_out else run.seed
    row = partial(rows, data[split], split, seed, shuffle)
    drawn = run.eval_sampling if held_out else run.sampling
    limits = Limits(task.turns, task.turn_tokens, drawn.max_prompt, drawn.max_tokens)
    release = (lambda key: None) if pool is None else pool.release
    return AgentSource(row, limits, task.branches, ChatCodec(tokenizer), release)

  workers = across(team, BroadcastWorkers, pool)
  held_out = task.args.get('held_out', 0) if task.name == 'verifiers' else len(data['test'])
  return workers, source('train'), source('test'), held_out or None


def agent_program(task: Task) -> tuple[Program, dict[str, Any]]:
  """Return the agent of a task, and the options of `task.args` that are not its arguments."""
  options = {**AGENT_OPTIONS, **{key: value for key, value in task.args.items() if key in AGENT_OPTIONS}}
  args = {key: value for key, value in task.args.items() if key not in AGENT_OPTIONS}
  assert task.name, 'checked with the settings'
  shipped = Path(agents.__file__).parent / 'from_verifiers.py'
  agent = f'{shipped}:agent' if task.name == 'verifiers' else str(expanded(task.name).absolute())
  return Program(agent, args, options['python']), options


def agent_digest(task: Task, split: str) -> int:
  """Return the checksum of the rows of a split; 0 without a file."""
  return 0 if task.path is None else digest(agent_data(task, split))


def agent_data(task: Task, split: str) -> Sequence[Mapping[str, Any]]:
  """Return the rows of a split in `task.path`; none if it is None. Raises SettingsError."""
  if task.path is None:
    return []
  file = expanded(task.path) / f'{split}.jsonl'
  if not file.is_file():
    raise SettingsError(f'config.task.path = {task.path!r}: {file}: no such file')
  found = []
  for line, row in tables.lines(file):
    if taken := sorted(row.keys() & {'seed', 'split'}):
      raise SettingsError(f'{file}:{line}: columns {", ".join(taken)}: expected other names; every row gets `seed` and `split`')
    found.append(row)
  if not found:
    raise SettingsError(f'config.task.path = {task.path!r}: {file} has no rows')
  return found
