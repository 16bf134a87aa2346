"""Set-up over several processes: each process checks its share of the problems, and process 0 checks the environments."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from pools import answers
from teams import together

from sprl.config import Evaluation, ModelSettings, Run, Sampling, SettingsError, Task
from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny
from sprl.rollout.prompts import prompts, seeds
from sprl.rollout.setup import Inputs, RolloutSetup, check_inputs
from sprl.tasks import problems
from sprl.tasks.environment_pool import Call
from sprl.tasks.environments.user_file import load_class
from sprl.types import Completion, Request, Trajectory


def run_on(folder, questions, **columns):
  """Return a run that trains on these questions and evaluates on the first of them."""
  for name, some in (('train', questions), ('test', questions[:1])):
    lines = [json.dumps({'prompt': question, 'answer': '', **columns}) for question in some]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines))
  task = Task(kind='jsonl', path=str(folder))
  return Run(steps=1, model=ModelSettings(str(folder)), task=task, sampling=Sampling(max_prompt=256), eval=Evaluation(problems=1))


def tiny_completion(prompt):
  one = np.ones(1, np.int32)
  logp = np.zeros(1, np.float32)
  return Completion(request=Request(0, 0, prompt, 1), tokens=one, logp=logp, version=one, attended=one, finish='stop')


GAME = """
MADE = []

class Game:
  def __init__(self, greeting):
    MADE.append(self)
    self.greeting, self.closed = greeting, 0

  def reset(self, seed):
    if not self.greeting:
      raise RuntimeError('no players')
    return f'{self.greeting} {seed}', {}

  def step(self, action):
    return '', 0.0, True, False, {}

  def close(self):
    self.closed += 1
"""


def run_of_game(folder, greeting='Hello', source=GAME):
  """Return (a run that plays the game, the list of all games that are made)."""
  (folder / 'game.py').write_text(source)
  task = Task(kind='environment', name=f'{folder / "game.py"}:Game', args={'greeting': greeting}, chat=False)
  game = load_class(task.name, (), '')  # imports the file once, before the threads that stand for processes do
  run = Run(seed=3, steps=1, model=ModelSettings(str(folder)), task=task, sampling=Sampling(max_prompt=256))
  return run, sys.modules[game.__module__].MADE


def open_in_processes(run, tokenizer, processes):
  """Return the results of RolloutSetup.open in each process of a team."""
  return together(*[lambda team: RolloutSetup.open(run, tokenizer, team)] * processes)


TEMPLATE = "{% if 'Sesame' in messages[0].content %}{{ raise_exception('closed') }}{% endif %}{{ messages[0].content }}"


def test_held_out_problems_that_are_also_trained_on_are_warned_of(tmp_path, caplog):
  write_tiny(tmp_path)
  run = run_on(tmp_path, ['How?', 'Why?'])  # it evaluates on the first
  RolloutSetup.open(run, Tokenizer.load(tmp_path))
  assert caplog.messages == ['1 of 1 held-out problems are also trained on']
  caplog.clear()
  RolloutSetup.open(replace(run, task=replace(run.task, splits=('train[1:]', 'test'))), Tokenizer.load(tmp_path))
  assert caplog.messages == []


def test_a_failing_chat_template_ends_all_processes(tmp_path):
  write_tiny(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(TEMPLATE)
  said = open_in_processes(run_on(tmp_path, ['How?', 'Open Sesame!', 'Why?']), Tokenizer.load(tmp_path), 3)
  assert [type(error) for error in said] == [SettingsError, TokenizerError, SettingsError]
  assert all('the chat template failed' in str(error) and 'closed' in str(error) for error in said)


def test_too_long_prompts_are_counted_over_all_processes(tmp_path):
  write_tiny(tmp_path)
  run, tokenizer = run_on(tmp_path, ['?' * n for n in (20, 400, 30, 600, 10, 500, 280)]), Tokenizer.load(tmp_path)
  (alone,) = open_in_processes(run, tokenizer, 1)  # one process holds all problems
  longest = len(tokenizer.chat([{'role': 'user', 'content': '?' * 600}]))
  assert f'4 of 7 prompts are longer; expected at least {longest}, the tokens of {tmp_path}/train.jsonl:4' in str(alone)
  for processes in (2, 3):
    said = open_in_processes(run, tokenizer, processes)
    assert [(type(error), str(error)) for error in said] == [(SettingsError, str(alone))] * processes


def test_process_0_finds_the_rewards_for_all(tmp_path):
  """The other machines may lack the file of a reward. All processes know that groups are compared."""
  write_tiny(tmp_path)
  tokenizer, rewards = Tokenizer.load(tmp_path), tmp_path / 'rewards.py'
  rewards.write_text('def rank(completions, parity):\n  return [1.0 for _ in completions]\n')
  run = run_on(tmp_path, ['1?', '2?', '3?'], parity=1)
  run = replace(run, task=replace(run.task, rewards=('exact', f'{rewards}:rank=0.5')))

  def program(team):
    with ExitStack() as stack:
      _, source, held_out = RolloutSetup.open(run, tokenizer, team).begin(stack.enter_context)
      completion = Trajectory.of(tiny_completion(source.prompt(0)))
      return [each.comparison(0, [completion]) is not None for each in (source, held_out.source)]

  assert together(program, program) == [[True, True]] * 2
  rewards.write_text('def rank(completions, colour): ...')
  said = together(program)
  names = 'answer, completion_ids, completions, finish, messages, parity'
  assert f"the function wants 'colour'; a reward may take {names}" in str(said[0])


@pytest.mark.parametrize(('text', 'remarked'), [('seed', False), ('len(MADE) + next(COUNT)', True)])
def test_an_environment_whose_equal_seeds_differ_is_warned_of(tmp_path, caplog, text, remarked):
  write_tiny(tmp_path)
  source = GAME.replace('{seed}', f'{{{text}}}').replace('MADE = []', 'import itertools\nMADE, COUNT = [], itertools.count()')
  run, _ = run_of_game(tmp_path, source=source)
  RolloutSetup.open(run, Tokenizer.load(tmp_path))
  assert any('with the same seed gave different first observations' in said for said in caplog.messages) == remarked


def test_only_process_0_makes_environments(tmp_path):
  """All processes know the first observations, in training and in evaluation."""
  write_tiny(tmp_path)
  (run, made), tokenizer = run_of_game(tmp_path), Tokenizer.load(tmp_path)

  def program(team):
    with ExitStack() as stack:
      _, source, held_out = RolloutSetup.open(run, tokenizer, team).begin(stack.enter_context)
      return [[tokenizer.decode(ids) for ids in prompts(each, 0, 2)] for each in (source, held_out.source)]

  [train, test], *others = together(program, program, program)
  first, second = (int(text.removeprefix('Hello ')) for text in train)
  assert first % 2 == 0
  assert second == first + 2
  assert test == ['Hello 1\n', 'Hello 3\n']
  said = [train, test]
  assert others == [said] * 2
  with_followers = len(made)
  assert together(program) == [said]
  assert with_followers == len(made) - with_followers > 0


def test_every_environment_that_a_run_makes_is_closed(tmp_path):
  write_tiny(tmp_path)
  run, made = run_of_game(tmp_path)
  with ExitStack() as stack:
    workers, source, held_out = RolloutSetup.open(run, Tokenizer.load(tmp_path)).begin(stack.enter_context)
    prompts(source, 0, 2), prompts(held_out.source, 0, 2)
    answers(workers, Call((0, 0), 'reset', 0))
  assert len(made) == 5  # two for the check of the first observation, for the prompts of both splits, and of the episode
  assert [game.closed for game in made] == [1] * 5


ROWS = """
class Rows:
  def reset(self, seed):
    return f'row {seed % ROWS}', {}

  def step(self, action):
    return '', 0.0, True, False, {}
"""
SPLIT = '  def __init__(self, split):\n    pass\n'


@pytest.mark.parametrize(
  ('rows', 'more', 'asked'),
  [
    (9, '', [1, 3, 5, 7, 0]),  # the environment does not tell that it has rows
    (4, '  def __len__(self):\n    return 4\n', [1, 3]),
    (6, '  def __len__(self):\n    return 6\n', [1, 3, 5]),
    (1, '  def __len__(self):\n    return 1\n', [0]),
    (5, '  def __len__(self):\n    return 5\n', [1, 3]),
    (4, SPLIT + '  def __len__(self):\n    return 4\n', [0, 1, 2, 3]),
  ],
  ids=['endless', 'four', 'six', 'one', 'odd', 'split'],
)
def test_an_evaluation_plays_no_episode_of_an_environment_twice(tmp_path, rows, more, asked):
  write_tiny(tmp_path)
  (tmp_path / 'rows.py').write_text(ROWS.replace('ROWS', str(rows)) + more)
  task = Task(kind='environment', name=f'{tmp_path / "rows.py"}:Rows', chat=False)
  run = Run(steps=1, task=task, sampling=Sampling(max_prompt=256), eval=Evaluation(problems=5))
  tokenizer = Tokenizer.load(tmp_path)
  load_class(task.name, (), '')  # imports the file once, before the threads that stand for processes do

  def program(team):
    with ExitStack() as stack:
      held_out = RolloutSetup.open(run, tokenizer, team).begin_evaluation(stack.enter_context)
      return [tokenizer.decode(held_out.source.prompt(number)) for number in range(held_out.count)]

  assert together(program, program) == [[f'row {row}\n' for row in asked]] * 2


def asked_by(folder, environment, seed, count):
  """Return what the first `count` groups of training ask, and the first two of evaluation: rows of `environment`, or seeds."""
  write_tiny(folder)
  (folder / 'rows.py').write_text(environment)
  task = Task(kind='environment', name=f'{folder / "rows.py"}:Rows', chat=False)
  run = Run(seed=seed, steps=1, task=task, sampling=Sampling(max_prompt=256), eval=Evaluation(problems=2))
  tokenizer = Tokenizer.load(folder)
  with ExitStack() as stack:
    _, source, held_out = RolloutSetup.open(run, tokenizer).begin(stack.enter_context)
    prompts_of = [(source, number) for number in range(count)], [(held_out.source, number) for number in range(2)]
    return [[int(tokenizer.decode(each.prompt(number)).removeprefix('row ')) for each, number in some] for some in prompts_of]


@pytest.mark.parametrize(
  ('length', 'split', 'train', 'test'),
  [(6, '', [0, 2, 4], [1, 3]), (7, '', [0, 2, 4], [1, 3]), (5, SPLIT, [0, 1, 2, 3, 4], [0, 1])],
  ids=['even', 'odd', 'split'],
)
def test_the_seed_of_a_run_shuffles_the_rows_of_an_environment_in_every_epoch(tmp_path, length, split, train, test):
  source = ROWS.replace('ROWS', str(length)) + split + f'  def __len__(self):\n    return {length}\n'
  (one, held_out), (other, held_out_too) = (asked_by(tmp_path, source, seed, 6 * len(train)) for seed in (0, 1))
  for order in (one, other):
    epochs = [order[i : i + len(train)] for i in range(0, len(order), len(train))]
    assert [sorted(epoch) for epoch in epochs] == [train] * 6
    assert len({*map(tuple, epochs)}) > 1
  assert one != other
  assert held_out == held_out_too == test


@pytest.mark.parametrize(('split', 'step'), [('', 2), (SPLIT, 1)], ids=['even seeds', 'split'])
def test_runs_with_other_seeds_ask_other_episodes_of_an_endless_environment(tmp_path, split, step):
  source = ROWS.replace('seed % ROWS', 'seed') + split
  (one, held_out), (other, held_out_too) = (asked_by(tmp_path, source, seed, 20) for seed in (0, 2**32 - 1))
  for seeds_of_groups in (one, other):
    assert seeds_of_groups == [seeds_of_groups[0] + step * i for i in range(20)]
    assert 0 <= seeds_of_groups[0] < 2**30
    assert seeds_of_groups[0] % step == 0
  assert not {*one} & {*other}
  assert held_out == held_out_too


@pytest.mark.parametrize('rows', [2, 5, 8, 9])
def test_training_asks_no_row_that_evaluation_asks(rows):
  """Where the environment does not tell the splits apart. No two groups have a seed in common."""
  found = [[seeds(number, held_out, split=False, rows=rows) for number in range(3 * rows)] for held_out in (False, True)]
  train, test = ({seed % rows for seed in some} for some in found)
  assert len(train) == len(test) == rows // 2
  assert not train & test
  assert len({*found[0], *found[1]}) == 6 * rows


def test_a_resumed_run_notices_other_questions_answers_or_another_order(tmp_path):
  write_tiny(tmp_path)

  def opened(*questions, **columns):
    return RolloutSetup.open(run_on(tmp_path, questions, **columns), Tokenizer.load(tmp_path))

  saved = opened('1?', '2?').state()
  opened('1?', '2?', note='of no prompt').check(saved, tmp_path)
  opened('1?', '3?').check({key: value for key, value in saved.items() if key != 'rows'}, tmp_path)  # of an older checkpoint
  for other in (('1?', '3?'), {}), (('2?', '1?'), {}), (('1?', '2?'), {'answer': '4'}):
    with pytest.raises(SettingsError, match=f'the run of {tmp_path} began with other problems: the rows differ'):
      opened(*other[0], **other[1]).check(saved, tmp_path)
  task = run_on(tmp_path, ['1?', '2?', '3?']).task
  assert problems.load(task, 'train', 0, 2).digest == problems.load(task, 'train', 1, 2).digest  # also over processes


def test_an_environment_that_cannot_be_reset_ends_all_processes(tmp_path):
  write_tiny(tmp_path)
  run, _ = run_of_game(tmp_path, greeting='')
  said = open_in_processes(run, Tokenizer.load(tmp_path), 2)
  assert [type(error) for error in said] == [SettingsError] * 2
  assert str(said[1]) == f'SPRL_PROCESS=0: {said[0]}'
  assert 'config.task.name' in str(said[0])
  assert 'no players' in str(said[0])


def test_rows_in_memory_and_settings_must_belong_together():
  rows = Run(task=Task(kind='rows'))
  with pytest.raises(SettingsError, match=r"config.task.kind = 'rows'.*sprl.fit"):
    check_inputs(rows, Inputs())
  with pytest.raises(SettingsError, match=r"config.task.kind = 'gsm8k'"):
    check_inputs(Run(), Inputs(train=[{'prompt': ''}]))
  with pytest.raises(SettingsError, match=r"config.task.kind = 'gsm8k': expected 'environment'"):
    check_inputs(Run(), Inputs(environment=dict))
  with pytest.raises(SettingsError, match=r"config.task.executor = 'processes'"):
    check_inputs(Run(task=Task(kind='environment', name='Game', executor='processes')), Inputs(environment=dict))
  check_inputs(rows, Inputs(train=[{'prompt': '?'}], test=[{'prompt': '?'}]))
