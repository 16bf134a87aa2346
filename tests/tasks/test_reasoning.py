"""Problems of reasoning-gym: deterministic by index, with test questions that training never asks."""

import hashlib
import itertools
import subprocess
import sys

import pytest

from sprl.config import SettingsError, Task
from sprl.tasks import graders, problems, reasoning
from sprl.tasks.rewards import Sample

SUMS = Task(kind='reasoning_gym', name='chain_sum', args={'min_terms': 2, 'max_terms': 2, 'max_digits': 1})
LEGS = Task(kind='reasoning_gym', name='leg_counting')


def load(task, split, seed=0):
  size = 3000 if task is SUMS else 500
  return problems.Problems(task, reasoning.rows(task, split, size, held_out=128 if task is SUMS else 20, seed=seed))


def questions(found):
  return [p.prompt for p in found]


@pytest.mark.parametrize('task', [SUMS, LEGS])
def test_a_problem_depends_on_seed_and_index_only(task):
  one, other = load(task, 'train'), load(task, 'train')
  forward = questions(one[:50])
  backward = [other[i].prompt for i in reversed(range(50))]
  assert forward == backward[::-1]
  assert questions(load(task, 'train', seed=1000)[:50]) != forward


def test_problems_are_the_same_in_another_process():
  program = (
    'from sprl.config import Task; from sprl.tasks import problems; '
    f'print([p.prompt for s in ("train", "test") for p in problems.load(Task(**{vars(LEGS)!r}), s)[:10]])'
  )
  run = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=True, env={'PYTHONPATH': ':'.join(sys.path)}
  )
  assert eval(run.stdout) == [q for split in ('train', 'test') for q in questions(problems.load(LEGS, split)[:10])]


def test_training_never_asks_a_held_out_question():
  """The hash holds out 46 of the 200 sums of two digits. 3000 training problems ask all other sums and none of the 46."""
  every = {
    f'State the final answer to the following arithmetic problem: {a} {sign} {b} ='
    for a, sign, b in itertools.product(range(10), '+-', range(10))
  }
  held_out = {q for q in every if int(hashlib.sha256(q.encode()).hexdigest()[:16], 16) % 4 == 0}
  assert len(held_out) == 46

  assert set(questions(load(SUMS, 'train'))) == every - held_out
  test = questions(load(SUMS, 'test'))
  assert set(test) == held_out
  assert len(test) == 46  # each question once


def test_splits_are_disjoint_for_every_seed():
  test = set(questions(load(LEGS, 'test')))
  assert len(test) == 20
  for seed in range(3):
    train = load(LEGS, 'train', seed=seed)
    assert test.isdisjoint(questions(train))


def test_replacements_repeat_no_problem_of_an_epoch():
  """leg_counting draws from a large space. Its 500 training problems are distinct, with the replaced quarter."""
  assert len(set(questions(load(LEGS, 'train')))) == 500


def test_an_index_beyond_the_size_is_an_error():
  train = load(LEGS, 'train')
  assert len(train) == 500
  with pytest.raises(IndexError):
    train[500]


def test_a_composite_data_set_is_defined_by_its_parts():
  parts = [{'name': 'chain_sum', 'weight': 1.0, 'config': {}}, {'name': 'leg_counting', 'weight': 1.0, 'config': {}}]
  task = Task(kind='reasoning_gym', name='composite', args={'datasets': parts})
  train = load(task, 'train')
  assert {p.extra['entry']['metadata']['source_dataset'] for p in train} == {'chain_sum', 'leg_counting'}
  grade = graders.load(graders.resolve(task))
  assert [grade(Sample(p.prompt, p.answer, p.answer, extra=p.extra)) for p in train[:10]] == [1.0] * 10


@pytest.mark.parametrize(
  ('change', 'complaint'),
  [
    ({'name': 'chain_sums'}, r"config\.task\.name = 'chain_sums': .*chain_sum"),
    ({'args': {'terms': 2}}, r"config\.task\.args has 'terms': chain_sum takes .*max_terms"),
    ({'args': {'min_terms': 3, 'max_terms': 2}}, r'config\.task\.args = .*max_terms must be >= min_terms'),
    ({'args': {'min_terms': 'two'}}, r'config\.task\.args = .*refused by chain_sum \(TypeError'),
    ({'name': 'composite', 'args': {}}, r'config\.task\.args = .*refused by composite'),
  ],
)
@pytest.mark.parametrize('split', ['train', 'test'])
def test_a_data_set_that_cannot_be_generated_is_named(change, complaint, split):
  with pytest.raises(SettingsError, match=complaint):
    problems.load(Task(**{**vars(SUMS), **change}), split)


def test_a_size_that_the_generator_refuses_is_named():
  with pytest.raises(SettingsError, match=r'config\.task\.args = \{\}: 1000000 problems are refused by word_ladder'):
    reasoning.generator('word_ladder', {}, seed=0, size=10**6)


@pytest.mark.parametrize(
  ('held_out', 'split', 'complaint'),
  [(True, 'train', 'every question is held out'), (False, 'test', 'too few distinct questions')],
)
def test_a_generator_whose_questions_are_all_in_one_split_is_named(monkeypatch, held_out, split, complaint):
  monkeypatch.setattr(reasoning, 'is_held_out', lambda question: held_out)
  with pytest.raises(SettingsError, match=rf"config\.task\.name = 'leg_counting', args .*{complaint}"):
    load(LEGS, split)
