"""What process 0 decides all know, in the order in which they ask."""

import threading

import pytest
from teams import together

from sprl.io.tokenizer import TokenizerError
from sprl.parallel.team import ALONE, Apart
from sprl.settings import SettingsError


def test_process_0_decides():
  asked = []

  def program(team):
    def decide(what):
      asked.append((team.process, what))
      return {'what': what, 'by': team.process}

    return [team.agree('this', lambda: decide(1)), team.agree('that', lambda: decide(2))]

  decided = [{'what': 1, 'by': 0}, {'what': 2, 'by': 0}]
  assert together(program, program, program) == [decided] * 3
  assert asked == [(0, 1), (0, 2)]


def test_any_process_may_tell_the_others():
  def program(team):
    return [team.agree('who', lambda: team.process, by) for by in (2, 2, 0, 1, 2)], team.each('who', lambda: team.process)

  expected = [2, 2, 0, 1, 2], [0, 1, 2]
  assert together(program, program, program) == [expected] * 3


@pytest.mark.parametrize('kind', [SettingsError, TokenizerError])
def test_what_is_refused_in_one_process_is_refused_in_all(kind):
  refusals = SettingsError, TokenizerError

  def program(team):
    assert team.unless_refused('first', lambda: 10 * team.process, refusals) == 10 * team.process
    return team.unless_refused('second', read if team.process == 1 else lambda: None, refusals)

  def read():
    raise kind('config.task.path: no such file')

  said = together(program, program, program)
  assert [type(error) for error in said] == [SettingsError, kind, SettingsError]
  here, there = 'config.task.path: no such file', 'SPRL_PROCESS=1: config.task.path: no such file'
  assert [str(error) for error in said] == [there, here, there]


def test_alone_one_decides_for_oneself():
  assert ALONE.agree('this', lambda: 7) == 7
  assert ALONE.stopped('SIGTERM') == 'SIGTERM'
  assert ALONE.stopped('') == ''
  assert ALONE.leave(3) == 3


def test_processes_that_ask_for_different_things_are_told():
  def one(team):
    return team.agree('ready', lambda: True)

  def other(team):
    return team.agree('poll', lambda: {})

  said = together(one, other)
  assert said[0] is True
  assert isinstance(said[1], Apart)
  assert "SPRL_PROCESS=1 asks about 'poll' (1), SPRL_PROCESS=0 about 'ready' (1)" in str(said[1])


@pytest.mark.parametrize('asked', [0, 1, 2])
def test_a_signal_to_one_stops_all_at_the_same_turn(asked):
  def program(team):
    turns = 0
    while not (why := team.stopped('SIGTERM' if team.process == asked and turns >= 3 else '')):
      turns += 1
    return turns, why

  results = together(program, program, program)
  assert results[0] == results[1] == results[2]
  assert results[0][0] >= 3
  assert results[0][1] == 'SIGTERM'


def test_a_signal_while_another_is_waited_for_is_not_lost():
  decided = threading.Event()

  def program(team):
    if team.process == 1:
      decided.wait(10)  # too late for this turn
    why = team.stopped('SIGTERM' if team.process == 1 else '')
    decided.set()
    return why, team.agree('row', lambda: 'its word', by=1), team.stopped('')

  assert together(program, program) == [('', 'its word', 'SIGTERM')] * 2


def test_the_end_waits_for_all():
  order = []

  def program(team):
    if team.process == 2:
      threading.Event().wait(0.3)
    order.append(('comes', team.process))
    team.meet()
    order.append(('goes', team.process))

  assert together(program, program, program) == [None] * 3
  assert [what for what, _ in order] == ['comes'] * 3 + ['goes'] * 3
