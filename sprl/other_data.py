"""Other problems for a run or a config, as --data of `sprl.evaluate` gives them: which settings stay, and what grades."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sprl.config import Run, to_dict
from sprl.config_checks import names_of_problems, python_name


def with_data(task: Any, data: str, split: str | None, given: Collection[str] = ()) -> list[str]:
  """Set the problems of a task, a section of a config, to those that --data and --split name. Return warnings.

  The rewards stay, unless they belong to its kind or are functions of a Python program. Other settings about its own problems get
  their defaults. The keys `given`, which the user has set, stay.
  """
  before, defaults = task.to_dict(), to_dict(Run())['task']

  def is_given(name: str) -> bool:
    return any(f'{key}.'.startswith(f'task.{name}.') for key in given)

  graders = [before['grader'], *(reward.rpartition('=')[0] or reward for reward in before['rewards'])]
  kept: tuple[str, ...] = ('grader', 'rewards', *(('judge',) if 'judge' in graders else ()))
  if any(map(python_name, graders)) or is_given('grader') or is_given('rewards'):
    kept = ()
  forgotten = [name for name in names_of_problems(task.kind) if name not in kept and not is_given(name)]
  with task.ignore_type():
    for name in forgotten:
      task[name] = defaults[name]
  if data == 'gsm8k':
    task.kind = 'gsm8k'
  else:
    task.kind, task.path = 'dataset', data
    if split is None and Path(data).expanduser().is_file():
      split = 'train'  # a file is one split of this name
  task.splits = task.splits if split is None else ('train', split)
  selects = ('columns', 'filters') if split is not None else ('columns', 'filters', 'splits')
  found = [
    f'config.task.{name} = {before[name]!r} does not apply to --data; to apply it, set --config.task.{name}'
    for name in selects
    if name in forgotten and before[name] != defaults[name]
  ]
  old, new = graded_by(before), graded_by(task.to_dict())
  if old != new and not is_given('grader') and not is_given('rewards'):
    found.append(f'graded by {", ".join(new)}, not by {", ".join(old)} (config.task.grader)')
  return found


def graded_by(task: Mapping[str, Any]) -> list[str]:
  """Return the names of the rewards of a task, given as a mapping; `auto` is named by the kind of the task."""
  kind, name = task['kind'], task['name']
  if task['rewards'] or task['grader'] != 'auto':
    return list(task['rewards'] or (task['grader'],))
  if kind == 'mixture':
    return ['the graders of its sources']
  return [f'{kind} {name}' if name else 'gsm8k' if kind == 'gsm8k' else 'math']
