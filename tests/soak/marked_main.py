"""sprl.main that writes what it does to the file that SOAK_MARKS names. Arguments: those of sprl.main.

A line is written before and after each phase of PHASES, when a checkpoint is restored, and when a step gets its groups. A line is
one write to a file, so it survives a SIGKILL that follows. The driver (kills.py) waits for these lines to choose its moment.
"""

import json
import os
import threading
import time
from functools import wraps

import sprl.io.templates
import sprl.learner.restore
import sprl.summary
import sprl.train
from sprl import command_line, hooks, main
from sprl.io.checkpoint import Checkpoints
from sprl.learner.learner import Learner
from sprl.session import Session

PHASES = (
  ('setup', sprl.train, 'setup'),
  ('template', sprl.io.templates, 'variables'),
  ('template', sprl.io.templates, 'render'),
  ('compile', sprl.train, 'compile_programs'),
  ('restore', Checkpoints, 'restore'),
  ('evaluate', Session, 'evaluate'),
  ('rollout', Session, 'rollout'),
  ('ledger', hooks.LedgerHook, '__call__'),
  ('score', Learner, 'score'),
  ('update', Learner, 'update'),
  ('sync', Session, 'sync'),
  ('log', hooks, 'log_step'),
  ('save', Session, 'save'),
  ('commit', Checkpoints, '_commit'),
  ('seal', Checkpoints, '_seal'),
  ('finish', Session, 'finish'),
  ('export', sprl.learner.restore, 'export'),
  ('report', sprl.summary, 'closing_report'),
)
_file = os.open(os.environ['SOAK_MARKS'], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(**line) -> None:
  os.write(_file, (json.dumps({'time': time.monotonic(), 'thread': threading.get_ident(), **line}) + '\n').encode())


def marked(phase, function, note=lambda result, *arguments: {}):
  """Return the function with a mark before and after each call. `note` makes what the second mark says of a call."""

  @wraps(function)
  def call(*arguments, **options):
    mark(begin=phase)
    said = {}
    try:
      result = function(*arguments, **options)
      said = note(result, *arguments)
      return result
    finally:
      mark(end=phase, **said)

  return call


def restored(result, *_):
  return {'resumed': result.step if result else 0}


def groups(trajectories, _, step):
  """The groups of a step, with the samples of each that the step gets. They are on file before the update begins."""
  return {'step': step, 'uids': sorted((t.group, t.uid) for t in trajectories)} if trajectories else {}


NOTES = {'restore': restored, 'rollout': groups}
for name, owner, attribute in PHASES:
  setattr(owner, attribute, marked(name, getattr(owner, attribute), *filter(None, [NOTES.get(name)])))
mark(begin='main')
command_line.start(main.main)
