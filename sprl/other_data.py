"""Replaces the problems of a task by those of `--data` of `sprl.evaluate`: which settings stay, and which graders apply."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from sprl.config import Run, SettingsError, in_sections, to_dict
from sprl.config_checks import names_of_problems, python_name
from sprl.foreign import expanded

NONE: Mapping[str, Any] = MappingProxyType({})


def with_data(
  task: Any, data: str, split: str | None, given: Collection[str] = (), sets: Mapping[str, Mapping[str, Any]] = NONE
) -> list[str]:
  """Set the problems of a task, a section of a config, to those that --data and --split name. Return warnings.

  `grader` and `rewards` stay. If one is a function of a Python program, or the user sets one, those that the user did not set get
  their defaults; the default `auto` is the grader of the new kind. `judge` stays if a reward or one of the held-out `sets` uses
  it. Other settings about the task's own problems get their defaults. The keys `given`, which the user has set, stay.

  Raises SettingsError if the user has set `kind` or `path`, or `splits` beside --split.
  """
  before, defaults = task.to_dict(), to_dict(Run())['task']

  def is_given(name: str) -> bool:
    return any(in_sections(key, [f'task.{name}']) for key in given)

  for name, flag in (('kind', f'--data={data}'), ('path', f'--data={data}'), ('splits', f'--split={split}')):
    if is_given(name) and (name != 'splits' or split is not None):
      raise SettingsError(f'config.task.{name}: expected not to be set with {flag}, which replaces it')
  replaced = any(map(python_name, graders_of(before))) or is_given('grader') or is_given('rewards')
  kept = ('judge',) if replaced else ('grader', 'rewards', 'judge')
  forgotten = [name for name in names_of_problems(task.kind) if name not in kept and not is_given(name)]
  with task.ignore_type():
    for name in forgotten:
      task[name] = defaults[name]
  if data == 'gsm8k':
    task.kind = 'gsm8k'
  else:
    task.kind, task.path = 'dataset', data
    if split is None and not is_given('splits') and expanded(data).is_file():
      split = 'train'  # a file is one split of this name
  if split is not None:
    task.splits = ('train', split)
  if 'judge' not in (*graders_of(task.to_dict()), *(each.get('grader') for each in sets.values())) and not is_given('judge'):
    task.judge = defaults['judge']
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


def graders_of(task: Mapping[str, Any]) -> list[str]:
  """Return the grader and the rewards of a task, given as a mapping, without the weights, which may still be wrong."""
  return [task['grader'], *(reward.rpartition('=')[0] or reward for reward in task['rewards'])]


def graded_by(task: Mapping[str, Any]) -> list[str]:
  """Return the rewards of a task, given as a mapping, with weights as written (`judge=0.5`). `auto` is named by its kind."""
  kind, name = task['kind'], task['name']
  if task['rewards'] or task['grader'] != 'auto':
    return list(task['rewards'] or (task['grader'],))
  if kind == 'mixture':
    return ['the graders of its sources']
  return [f'{kind} {name}' if name else 'gsm8k' if kind == 'gsm8k' else 'math']
