"""A decision of one process reaches all of them, in the order of their calls."""

import threading

import pytest
from teams import together

from sprl.config import SettingsError
from sprl.distributed.team import ALONE, OutOfStep
from sprl.io.tokenizer import TokenizerError


def test_a_broadcast_asks_process_0_only():
  asked = []

  def program(team):
    def decide(what):
      asked.append((team.process, what))
      return {'what': what, 'by': team.process}

    return [team.broadcast('this', lambda: decide(1)), team.broadcast('that', lambda: decide(2))]

  decided = [{'what': 1, 'by': 0}, {'what': 2, 'by': 0}]
  assert together(program, program, program) == [decided] * 3
  assert asked == [(0, 1), (0, 2)]


def test_any_process_may_broadcast():
  def program(team):
    return [team.broadcast('who', lambda: team.process, by) for by in (2, 2, 0, 1, 2)], team.gather('who', lambda: team.process)

  expected = [2, 2, 0, 1, 2], [0, 1, 2]
  assert together(program, program, program) == [expected] * 3


@pytest.mark.parametrize('kind', [SettingsError, TokenizerError])
def test_an_error_of_one_process_is_raised_in_all(kind):
  errors = SettingsError, TokenizerError

  def program(team):
    assert team.fail_together('first', lambda: 10 * team.process, errors) == 10 * team.process
    return team.fail_together('second', read if team.process == 1 else lambda: None, errors)

  def read():
    raise kind('config.task.path: no such file')

  said = together(program, program, program)
  assert [type(error) for error in said] == [SettingsError, kind, SettingsError]
  here, there = 'config.task.path: no such file', 'SPRL_PROCESS=1: config.task.path: no such file'
  assert [str(error) for error in said] == [there, here, there]


def test_a_single_process_decides_for_itself():
  assert ALONE.broadcast('this', lambda: 7) == 7
  assert ALONE.stopped('SIGTERM') == 'SIGTERM'
  assert ALONE.stopped('') == ''
  assert ALONE.leave(3) == 3


def test_processes_at_different_broadcasts_are_out_of_step():
  def one(team):
    return team.broadcast('ready', lambda: True)

  def other(team):
    return team.broadcast('poll', lambda: {})

  said = together(one, other)
  assert said[0] is True
  assert isinstance(said[1], OutOfStep)
  assert "SPRL_PROCESS=1 is at 'poll' (broadcast 1), SPRL_PROCESS=0 at 'ready' (broadcast 1)" in str(said[1])


@pytest.mark.parametrize('asked', [0, 1, 2])
def test_a_signal_to_one_process_stops_all_at_the_same_turn(asked):
  def program(team):
    turns = 0
    while not (why := team.stopped('SIGTERM' if team.process == asked and turns >= 3 else '')):
      turns += 1
    return turns, why

  results = together(program, program, program)
  assert results[0] == results[1] == results[2]
  assert results[0][0] >= 3
  assert results[0][1] == 'SIGTERM'


def test_a_signal_that_comes_before_another_broadcast_is_kept():
  decided = threading.Event()

  def program(team):
    if team.process == 1:
      decided.wait(10)  # too late for this turn
    why = team.stopped('SIGTERM' if team.process == 1 else '')
    decided.set()
    return why, team.broadcast('row', lambda: 'its word', by=1), team.stopped('')

  assert together(program, program) == [('', 'its word', 'SIGTERM')] * 2


def test_a_barrier_waits_for_all():
  order = []

  def program(team):
    if team.process == 2:
      threading.Event().wait(0.3)
    order.append(('comes', team.process))
    team.barrier()
    order.append(('goes', team.process))

  assert together(program, program, program) == [None] * 3
  assert [what for what, _ in order] == ['comes'] * 3 + ['goes'] * 3
