"""Mixtures and curricula: shares, the order of each source, boundaries of stages, exact resumption, graders and processes."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sprl.config import MixtureSource, SettingsError, Task
from sprl.config_checks import named_below
from sprl.tasks import graders, problems
from sprl.tasks.grader_pool import grader_pool
from sprl.tasks.problems import Mixture, Problems, holder
from sprl.tasks.prompts import Mix, PromptStream, seed_of
from sprl.tasks.rewards import Sample


def made_of(**sizes):
  """Return the problems of a mixture: `sizes[name]` of each source, with answers such as `a3`."""
  rows = {name: [{'id': str(i), 'prompt': '?', 'answer': f'{name}{i}'} for i in range(n)] for name, n in sizes.items()}
  return Mixture({name: Problems(Task(), some) for name, some in rows.items()})


def stream(mixture, weights, seed=0, prompts=4):
  sources = {name: MixtureSource(weight=weight) for name, weight in weights.items()}
  return PromptStream(mixture, seed, Mix.of(Task(kind='mixture', mixture=sources), mixture, prompts))


def answers(found):
  return [problem.answer for problem in found]


def alone(name, size, seed=0):
  """Return the order of a source that is the only one: answers, endless."""
  return PromptStream(made_of(**{name: size}), seed_of(seed, name))


def parts(found, names):
  """Return the answers of each source, in their order."""
  return {name: [answer for answer in answers(found) if answer.startswith(name)] for name in names}


SIZES = {'a': 30, 'b': 50, 'c': 90}  # grain's shuffle is slow for very few


@pytest.mark.parametrize(
  'weights', [{'a': 1.0, 'b': 1.0, 'c': 2.0}, {'a': 0.1, 'b': 0.7, 'c': 0.2}, {'a': 3.0, 'b': 0.0, 'c': 1.0}]
)
def test_every_source_has_its_share_at_every_moment(weights):
  mixed = stream(made_of(**SIZES), weights)
  found = [mixed.source(i) for i in range(400)]
  total = sum(weights.values())
  for n in (4, 40, 100, 400):
    for name, weight in weights.items():
      assert abs(found[:n].count(name) - n * weight / total) <= 1 + 0.01 * n, (name, n)


@settings(max_examples=6)
@given(
  weights=st.dictionaries(st.sampled_from('abc'), st.integers(1, 5).map(float), min_size=1, max_size=3),
  later=st.dictionaries(st.sampled_from('abc'), st.integers(0, 5).map(float), max_size=3),
  step=st.integers(1, 6),
  seed=st.integers(0, 99),
)
def test_a_source_has_its_own_order_and_no_problem_is_skipped_or_repeated_at_a_boundary(weights, later, step, seed):
  """The problems of a source are those of the source alone: whole epochs, also across changes of the weights."""
  changing = {name: {'0': weight, str(step): later.get(name, weight)} for name, weight in weights.items()}
  assume(any(stages[str(step)] for stages in changing.values()))
  sizes = {name: SIZES[name] for name in weights}
  found = parts(stream(made_of(**sizes), changing, seed, prompts=15).next(100), sizes)
  for name, some in found.items():
    assert some == answers(alone(name, SIZES[name], seed).next(len(some))), name


def test_weights_change_at_exactly_the_position_of_their_step():
  mixed = stream(made_of(**SIZES), {'a': {'0': 1.0, '3': 0.0}, 'b': {'0': 0.0, '3': 1.0}, 'c': {'0': 0.0, '5': 1.0}}, prompts=4)
  sources = ''.join(mixed.source(i) for i in range(28))
  assert (sources[:12], sources[12:20]) == ('a' * 12, 'b' * 8)
  assert sorted(sources[20:]) == ['b'] * 4 + ['c'] * 4
  assert [answer[0] for answer in answers(mixed.next(28))] == list(sources)


def test_two_sources_of_one_size_have_different_orders_that_do_not_depend_on_each_other():
  both = parts(stream(made_of(a=50, b=50), {'a': 1.0, 'b': 1.0}).next(60), 'ab')
  assert [x[1:] for x in both['a']] != [x[1:] for x in both['b']]
  three = parts(stream(made_of(z=40, b=50, a=50), {'z': 1.0, 'b': 2.0, 'a': 2.0}).next(50), 'ab')
  for name, some in three.items():
    assert some == answers(alone(name, 50).next(len(some)))


def test_a_restored_mixture_continues_at_the_exact_next_problem():
  """At the boundaries of stages (36 and 60) and of epochs (30 of `a`) too. The state passes through JSON."""
  weights = {'a': {'0': 1.0, '3': 0.5}, 'b': {'0': 0.0, '3': 1.0, '5': 3.0}}
  whole = answers(stream(made_of(a=30, b=50), weights, prompts=12).next(110))
  for before in (0, 29, 30, 31, 35, 36, 37, 59, 60, 61, 100):
    first = stream(made_of(a=30, b=50), weights, prompts=12)
    first.next(before)
    resumed = stream(made_of(a=30, b=50), weights, prompts=12)
    resumed.restore(json.loads(json.dumps(first.state())))
    assert answers(resumed.next(5)) == whole[before : before + 5], before


@pytest.mark.parametrize(
  ('sizes', 'weights', 'prompts'),
  [
    ({'a': 5, 'b': 8}, {'a': 1.0, 'b': 1.0}, 4),
    ({'a': 5, 'c': 7}, {'a': 1.0, 'c': 1.0}, 4),
    ({'a': 7, 'b': 5}, {'a': 1.0, 'b': 1.0}, 4),
    ({'a': 5, 'b': 7}, {'a': 1.0, 'b': 2.0}, 4),
    ({'a': 5, 'b': 7}, {'a': 1.0, 'b': {'0': 1.0, '9': 2.0}}, 4),
    ({'a': 5, 'b': 7}, {'a': 1.0, 'b': 1.0}, 5),
  ],
)
def test_a_changed_mixture_is_refused(sizes, weights, prompts):
  state = stream(made_of(a=5, b=7), {'a': 1.0, 'b': 1.0}).state()
  stream(made_of(a=5, b=7), {'a': 1.0, 'b': 1.0}).check(json.loads(json.dumps(state)))
  with pytest.raises(ValueError, match='the saved prompt stream has '):
    stream(made_of(**sizes), weights, prompts=prompts).check(state)
  with pytest.raises(ValueError, match='the saved prompt stream has mixture = '):
    PromptStream(made_of(a=5, b=7), 0).check(state)


# --- files -----------------------------------------------------------------------------------------------------------


def write(folder, name, count):
  folder = folder / name
  folder.mkdir(exist_ok=True)
  for split, n in (('train', count), ('test', 2 * count)):
    lines = [json.dumps({'prompt': f'{split} {i}', 'answer': f'{name}{i}'}) for i in range(n)]
    (folder / f'{split}.jsonl').write_text('\n'.join(lines))
  return str(folder)


def task_of(tmp_path, **changes):
  first, second = write(tmp_path, 'first', 3), write(tmp_path, 'second', 4)
  sources = {
    'first': MixtureSource(path=first, suffix='!', grader='exact'),
    'second': MixtureSource(kind='jsonl', path=second, weight=2.0, grader='numeric'),
    'third': MixtureSource(path=second, splits=('train', ''), **changes),
  }
  return Task(kind='mixture', mixture=sources, suffix='?')


def test_a_problem_names_its_source_and_has_the_settings_of_the_source(tmp_path):
  train = problems.load(task_of(tmp_path), 'train')
  assert [p.id for p in train[:4]] == ['first/first/train/0', 'first/first/train/1', 'first/first/train/2', train[3].id]
  assert train[3].id == f'second/{tmp_path}/second/train.jsonl:1'
  assert [(p.prompt, p.extra['grader']) for p in train[2:4]] == [('train 2!', 'first'), ('train 0?', 'second')]
  assert [len(part) for part in train.parts.values()] == [3, 4, 4]
  assert train[-1].answer == 'second3'
  with pytest.raises(IndexError):
    train[11]


def test_the_order_in_which_a_config_names_the_sources_does_not_matter(tmp_path):
  task = task_of(tmp_path)
  turned = replace(task, mixture=dict(reversed(task.mixture.items())))
  one, other = (PromptStream(problems.load(t, 'train'), 0, Mix.of(t, problems.load(t, 'train'), 4)) for t in (task, turned))
  assert [one.source(i) for i in range(20)] == [other.source(i) for i in range(20)]
  assert one.at(0) == other.at(0)
  other.check(one.state())
  with pytest.raises(ValueError, match='the saved prompt stream has mixture'):
    stream(made_of(b=30, a=50), {'a': 1.0, 'b': 1.0}).check(stream(made_of(a=50, b=30), {'a': 1.0, 'b': 1.0}).state())


def test_held_out_problems_are_asked_of_each_source_in_turn(tmp_path):
  test = problems.load(task_of(tmp_path), 'test')
  assert len(test) == 14  # the third source has none
  order = test.in_turn(100)
  assert answers(test[i] for i in order)[:5] == ['first0', 'second0', 'first1', 'second1', 'first2']
  assert sorted(order) == list(range(14))
  assert test.in_turn(3) == order[:3]


def test_the_shares_of_all_processes_are_all_problems(tmp_path):
  task = task_of(tmp_path)
  whole = problems.load(task, 'train')
  shares = [problems.load(task, 'train', process, 3) for process in range(3)]
  assert [shares[holder(i, 3)][i] for i in range(len(whole))] == whole[:]
  for process, share in enumerate(shares):
    for i in range(len(whole)):
      if holder(i, 3) != process:
        with pytest.raises(KeyError):
          share[i]


def test_an_error_names_the_source(tmp_path):
  with pytest.raises(
    SettingsError, match=r"^config\.task\.mixture\.third\.filters = \('level>=3',\): no row has the column level"
  ):
    problems.load(task_of(tmp_path, filters=('level>=3',)), 'train')
  with pytest.raises(SettingsError, match=r'^config\.task\.mixture\.third\.columns: prompt reads the column'):
    problems.load(task_of(tmp_path, columns={'prompt': 'question'}), 'train')


def test_an_error_of_a_grader_names_the_source():
  of = {'': 'config.task.grader', 'first': 'config.task.mixture.first.grader', 'eval/dev': 'config.eval.sets.dev.grader'}
  for name, setting in of.items():
    sources = {'other': Task(grader='exact'), name: Task(grader='/no/such/file.py:grade')}
    with pytest.raises(SettingsError, match=f"^{setting} = '/no/such/file.py:grade': /no/such/file.py: no such file"):
      graders.of_sources(sources)
    (reward,) = graders.of_sources({name: Task(grader='exact')})
    assert reward.setting == f"{setting} = 'exact'"


def test_settings_that_a_source_does_not_have_keep_their_names():
  message = "config.task.rewards = 'x': with config.task.chat = False and config.task.path, not config.task.path_of"
  expected = "config.task.rewards = 'x': with config.task.chat = False and config.eval.sets.a.path, not config.task.path_of"
  assert named_below('eval.sets.a', message) == expected


def test_each_source_has_its_own_grader(tmp_path):
  task = task_of(tmp_path)
  rewards = graders.of_sources({name: source.task(task, source.splits) for name, source in task.mixture.items()})
  with grader_pool(rewards, 1, 60.0, 4.0) as pool:
    tickets = [pool.submit(Sample('', '18.0', '18', extra={'grader': name})) for name in ('first', 'second')]
    found = {}
    while len(found) < 2:
      pool.wait(None)
      found |= pool.poll(tickets)
  assert [found[ticket].score for ticket in tickets] == [0.0, 1.0]  # exact, numeric
  assert [found[ticket].parts for ticket in tickets] == [{}, {}]
  assert graders.of_sources({'': Task(grader='exact')}) == graders.rewards(Task(grader='exact'))


def test_positions_far_away_are_known_without_those_before_them():
  mixed = stream(made_of(**SIZES), {'a': 1.0, 'b': 1.0, 'c': {'0': 1.0, '1000000': 2.0}})
  far = 4 * 1_000_000
  assert [mixed.source(far + i) for i in range(8)].count('c') == 4
  near = [mixed.source(far - i) for i in range(1, 10)]
  assert near.count('c') == 3
  assert all(x != y for x, y in pairwise(near))
