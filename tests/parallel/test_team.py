"""What process 0 decides all know, in the order in which they ask."""

import threading

import pytest
from teams import together

from sprl.parallel.team import ALONE, Apart


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
