"""Evaluations and rollouts that a signal or failing environments end: no step is lost, and a resumed run evaluates."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from teams import together

from sprl.config import Checkpoint, Evaluation, Run, SettingsError, Task
from sprl.distributed.team import ALONE
from sprl.hooks import evaluate_and_save
from sprl.io.run_state import RunState
from sprl.rollout.evaluate import refused
from sprl.rollout.scheduler import Stalled
from sprl.session import Session, StepReport, check_graded
from sprl.types import Trajectory


def session_of(step: int, result, logged=()) -> tuple[Session, list[str]]:
  """Return a session after `step` of 6 steps, and what it does: it evaluates, saves, or waits for the checkpoint.

  Its evaluation returns `result`, or raises it. The log has the evaluations of the steps `logged`.
  """
  session, calls = Session.__new__(Session), []
  session.run = Run(steps=6, eval=Evaluation(every=3), checkpoint=Checkpoint(every=None))
  session.state = RunState(step=step, before={'metrics': {}})
  session.run_log, session.team, session.model = SimpleNamespace(evaluated={*logged}), ALONE, None
  session.learner = SimpleNamespace(state=SimpleNamespace(params={}))
  session.stop = SimpleNamespace(received='')

  def evaluate():
    calls.append('evaluate')
    if isinstance(result, Exception):
      raise result
    return result

  session.evaluate, session.save = evaluate, lambda: calls.append('save')
  session.checkpoints = SimpleNamespace(wait=lambda: calls.append('wait'))
  return session, calls


def end_step(session: Session) -> None:
  evaluate_and_save(session, StepReport(session.state.step, (), {}, {}, 0.0))


@pytest.mark.parametrize(('step', 'calls'), [(2, []), (3, ['evaluate', 'save']), (5, []), (6, ['evaluate', 'save'])])
def test_a_step_is_saved_with_its_evaluation_also_if_a_signal_ends_that(step, calls):
  for result in ({'metrics': {}}, {}):  # {}: a signal came
    session, done = session_of(step, result)
    end_step(session)
    assert done == calls


def test_an_evaluation_of_which_all_episodes_fail_costs_no_step():
  session, done = session_of(3, Stalled('3 groups in a row were given up'))
  with pytest.raises(Stalled):
    end_step(session)
  assert done == ['evaluate', 'save', 'wait']


def test_all_processes_wait_until_the_checkpoint_before_an_error_is_complete():
  """Process 0 alone completes it. The end of another process would end process 0 meanwhile."""
  complete = threading.Event()

  def program(team):
    session, _ = session_of(3, {})
    session.team = team
    session.checkpoints = SimpleNamespace(wait=lambda: team.leads and (time.sleep(0.3), complete.set()))
    session.save_whole()
    return complete.is_set()

  assert together(program, program) == [True, True]


@pytest.mark.parametrize(('step', 'calls'), [(0, []), (4, ['save', 'wait'])])
def test_rollouts_that_all_fail_cost_no_step(step, calls):
  session, done = session_of(step, {})

  def batch(stopped):
    raise Stalled('256 groups in a row were given up')

  session.timeline, session.scheduler = SimpleNamespace(now=lambda: 0.0), SimpleNamespace(batch=batch)
  with pytest.raises(Stalled):
    session.rollout(step + 1)
  assert done == calls


@pytest.mark.parametrize(
  ('step', 'logged', 'evaluations'), [(3, (0,), 1), (3, (0, 3), 0), (4, (0, 3), 0), (6, (0, 3), 1)],
  ids=['missing', 'logged', 'not due', 'last'],
)  # fmt: skip
def test_a_resumed_run_begins_with_the_evaluation_that_was_ended(step, logged, evaluations):
  session, done = session_of(step, {'metrics': {}}, logged)
  assert list(session.steps()) == list(range(step + 1, 7))
  assert done == ['evaluate', 'save'] * evaluations  # the checkpoint gets its score


def answer(status, failed=(), named=()):
  whole, one = np.zeros(2, np.int32), np.zeros(2, np.float32)
  parts = dict.fromkeys(named, 0.0)
  return Trajectory(0, 0, whole, whole > 0, one, whole, whole, 1, 'stop', status=status, failed=failed, parts=parts)


def test_an_answer_is_refused_if_every_reward_fails_for_good():
  assert refused(answer('error'))
  assert refused(answer('invalid', ('math', 'brief'), ('math', 'brief')))
  assert not any(map(refused, (answer('ok'), answer('timeout'), answer('error', ('brief',), ('math', 'brief')))))


@pytest.mark.parametrize(
  ('task', 'result', 'said'),
  [
    (Task(grader='mine.py:f'), {'failure': 'KeyError'}, r"config\.task\.grader = 'mine\.py:f': no answer .* KeyError"),
    (Task(rewards=('math', 'brief')), {'failure': 'x'}, r'config\.task\.rewards = '),
    (Task(kind='mixture'), {'failure': 'x'}, r'config\.task\.mixture: '),
    (Task(kind='environment'), {'failure': '', 'sets': {'aime': {'failure': 'x'}}}, r'config\.eval\.sets\.aime: '),
  ],
)
def test_rewards_that_refuse_every_answer_end_the_run_with_their_setting(task, result, said):
  with pytest.raises(SettingsError, match=said):
    check_graded(Run(task=task), result)
  check_graded(Run(task=task), {'failure': ''})
  check_graded(Run(task=task), {})  # a signal ended the evaluation


def test_a_run_whose_last_evaluation_is_ended_is_not_complete():
  ended, _ = session_of(6, {})
  ended.stop.received = 'SIGTERM'
  assert not ended.finish().completed
  session, _ = session_of(6, {'metrics': {}})
  assert session.finish().completed
