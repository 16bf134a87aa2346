"""First observations of groups. Environments may raise, hang or return no text."""

import threading
import weakref
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from garbage import Held, no_collections
from simulation import Clock, SimulatedEngine, SimulatedWorkers
from test_episodes import WIDE, Letters

from sprl.config import Rollout
from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny
from sprl.rollout.prompts import ConversationSource, ProblemSource, prompts
from sprl.rollout.scheduler import Scheduler
from sprl.tasks.environments.protocol import EnvironmentFault
from sprl.tasks.grader_pool import Grade
from sprl.tasks.problems import Problem


class Moody:
  """An environment that returns its seed. At given seeds it raises, hangs or returns a number."""

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


def source(env, time_limit=60.0):
  return ConversationSource(lambda number: 10 + number, WIDE, Letters(), lambda call: None, env, time_limit)


def text(ids):
  return ''.join(map(chr, ids))


def test_prompts_are_the_first_observations_by_seed():
  assert [text(ids) for ids in prompts(source(Moody()), 3, 2)] == ['s13/>', 's14/>']


@pytest.mark.parametrize(
  ('mood', 'said'),
  [
    ({'raising': (10,)}, r'environment Moody: reset\(10\).*no lake today'),
    ({'hanging': (10,)}, r'reset\(10\) took longer than config.task.time_limit = 0.2 s'),
    ({'dumb': (10,)}, r'environment Moody: reset\(10\).*42'),
  ],
)
def test_an_environment_that_cannot_be_reset_is_named(mood, said):
  env = Moody(**mood)
  with pytest.raises(EnvironmentFault, match=said):
    source(env, 0.2).prompt(0)
  env.gate.set()


def test_environments_that_cannot_be_reset_are_left_out():
  env = Moody(raising=(10,), hanging=(11,), dumb=(13,))
  assert [text(ids) for ids in prompts(source(env, 2.0), 0, 2)] == ['s12/>', 's14/>']
  env.gate.set()


@pytest.mark.parametrize('mood', [{'raising': (10,)}, {'raising': range(100)}], ids=['one', 'all'])
def test_a_failed_reset_keeps_no_array_of_its_callers_alive(mood):
  environments = source(Moody(**mood))

  def caller():
    array = Held()
    kept.append(weakref.ref(array))
    with suppress(EnvironmentFault):
      prompts(environments, 0, 2)

  kept = []
  with no_collections():
    caller()
    assert kept[0]() is None


def test_prompts_raise_if_no_environment_can_be_reset():
  with pytest.raises(EnvironmentFault, match='no lake today'):
    prompts(source(Moody(raising=range(100))), 0, 2)


def test_prompts_are_ids():
  assert all(ids.dtype == np.int32 for ids in prompts(source(Moody()), 0, 3))


class Refusing(Letters):
  """A codec whose template refuses given first observations."""

  def __init__(self, refused):
    self.refused = refused

  def opening(self, messages):
    if messages[-1]['content'] in self.refused:
      raise TokenizerError('the template refuses the message')
    return super().opening(messages)


def test_groups_whose_messages_the_template_refuses_are_left_out():
  refusing = replace(source(Moody()), codec=Refusing(('s10', 's12')))
  assert [text(ids) for ids in prompts(refusing, 0, 2)] == ['s11/>', 's13/>']
  with pytest.raises(TokenizerError):
    prompts(replace(source(Moody()), codec=Refusing([f's{seed}' for seed in range(30)])), 0, 2)


def test_a_source_is_not_asked_behind_its_last_group():
  refusing = replace(source(Moody()), codec=Refusing(('s11', 's12')))
  assert [text(ids) for ids in prompts(refusing, 0, 3, different=3)] == ['s10/>']
  with pytest.raises(TokenizerError, match='refuses the message'):
    prompts(refusing, 1, 2, different=3)


@pytest.mark.parametrize(
  ('prompts_of', 'said'),
  [
    ({1: 'a question that is much too long'}, 'config.sampling.max_prompt = 4: expected at least'),
    ({1: ''}, 'is empty: expected'),
  ],
  ids=['long', 'empty'],
)
def test_a_problem_whose_prompt_cannot_be_asked_costs_only_its_group(tmp_path, caplog, prompts_of, said):
  """Only the first problems are checked before a run starts."""
  write_tiny(tmp_path)
  tokenizer = Tokenizer.load(tmp_path)

  def problem(number):
    return Problem(f'row {number}', prompts_of.get(number, 'ask'), (), '', {})

  episodes, clock = ProblemSource(problem, tokenizer, max_prompt=4, max_tokens=8), Clock()
  engine = SimulatedEngine(clock, 4, lambda request: 1.0)
  graders = SimulatedWorkers(clock, lambda call: 1.0, lambda call: Grade(float(len(call.completion) % 2), 'ok'))
  scheduler = Scheduler([engine], graders, episodes, Rollout(prompts=2, group=2), clock)
  assert [group.number for group in scheduler.batch()] == [0, 2]
  assert scheduler.counts['failed'] == 1
  assert 'row 1' in caplog.text
  assert said in caplog.text


def test_members_of_a_group_look_up_their_problem_once(tmp_path):
  write_tiny(tmp_path)
  tokenizer, asked = Tokenizer.load(tmp_path), []

  def problem(number):
    asked.append(number)
    return Problem(str(number), 'how many', (), str(number), {})

  episodes = ProblemSource(problem, tokenizer, max_prompt=8, max_tokens=8)
  wanted = [next(episodes.episode(3, uid, attempt=0)) for uid in range(4)]
  assert [w.prompt.tolist() for w in wanted] == [tokenizer.encode('how many')] * 4
  assert episodes.prompt(3).tolist() == tokenizer.encode('how many')
  assert episodes.answer(3) == '3'
  assert asked == [3]
