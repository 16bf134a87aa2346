"""What groups begin with, where their environments raise, hang or say what is no text."""

import threading

import numpy as np
import pytest
from test_episodes import WIDE, Letters

from sprl.rollout.sources import Conversations, prompts
from sprl.tasks.environments.protocol import EnvironmentFault


class Moody:
  """Says its seed; at some seeds it raises, at some it hangs, at some it says a number."""

  def __init__(self, raising=(), hanging=(), dumb=()):
    self.raising, self.hanging, self.dumb, self.gate = raising, hanging, dumb, threading.Event()

  def reset(self, seed):
    if seed in self.raising:
      raise RuntimeError('no lake today')
    if seed in self.hanging:
      self.gate.wait()
    return (42 if seed in self.dumb else f's{seed}'), {}

  def step(self, action):
    return '', 0.0, True, False, {}


def told(env, time_limit=0.2):
  return Conversations(lambda number: 10 + number, WIDE, Letters(), lambda key: None, env, time_limit)


def text(ids):
  return ''.join(map(chr, ids))


def test_groups_begin_with_what_the_environment_of_their_seed_says_first():
  assert [text(ids) for ids in prompts(told(Moody()), 3, 2)] == ['s13/>', 's14/>']


@pytest.mark.parametrize(
  ('mood', 'said'),
  [
    ({'raising': (10,)}, r'environment Moody: reset\(10\).*no lake today'),
    ({'hanging': (10,)}, r'reset\(10\) took longer than config.environment.time_limit = 0.2 s'),
    ({'dumb': (10,)}, r'environment Moody: reset\(10\).*42'),
  ],
)
def test_an_environment_that_does_not_begin_is_a_fault_by_name(mood, said):
  env = Moody(**mood)
  with pytest.raises(EnvironmentFault, match=said):
    told(env).prompt(0)
  env.gate.set()


def test_those_that_do_not_begin_are_passed_over():
  env = Moody(raising=(10,), hanging=(11,), dumb=(13,))
  assert [text(ids) for ids in prompts(told(env), 0, 2)] == ['s12/>', 's14/>']
  env.gate.set()


def test_where_none_begins_that_is_said():
  with pytest.raises(EnvironmentFault, match='no lake today'):
    prompts(told(Moody(raising=range(100))), 0, 2)


def test_prompts_are_ids():
  assert all(ids.dtype == np.int32 for ids in prompts(told(Moody()), 0, 3))
