"""Reward functions: what they get by name, several with weights, and groupwise ones."""

import pytest
from pools import answers

from sprl.config import SettingsError, Task
from sprl.tasks import graders, problems
from sprl.tasks.grader_pool import Grade, Group, grader_pool
from sprl.tasks.rewards import Sample, for_groups, for_samples

ROW = {'answer': 7, 'hint': 'count', 'level': 3}
MESSAGES = ({'role': 'user', 'content': 'how many?'},)
SAMPLE = Sample('how many?', 'seven', '7', ROW, MESSAGES, (5, 6), 'length')
EVERYTHING = {
  'prompt': 'how many?', 'completion': 'seven', 'answer': '7', 'row': ROW, 'messages': list(MESSAGES), 'tokens': [5, 6],
  'finish': 'length', 'hint': 'count', 'level': 3,
}  # fmt: skip


# --- one sample ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', EVERYTHING)
def test_a_parameter_gets_the_value_of_its_name(name):
  function = eval(f'lambda {name}: {name}')
  assert for_samples(function, ROW)(SAMPLE) == EVERYTHING[name]


def test_keyword_arguments_get_everything():
  assert for_samples(lambda **kwargs: kwargs, ROW)(SAMPLE) == EVERYTHING
  assert for_samples(lambda completion, **others: others, ROW)(SAMPLE) == {
    name: value for name, value in EVERYTHING.items() if name != 'completion'
  }


def test_the_answer_is_the_text_that_graders_get_and_the_row_has_the_column():
  assert for_samples(lambda answer, row: (answer, row['answer']), ROW)(SAMPLE) == ('7', 7)


@pytest.mark.parametrize(
  'function',
  [
    lambda question, text, truth: (question, text, truth),
    lambda prompt, response, answer: (prompt, response, answer),
    lambda *args: args,
    lambda p, c, a, /: (p, c, a),
    lambda prompt, text, truth, digits=3: (prompt, text, truth),
    lambda prompt, completion, answer: (prompt, completion, answer),
  ],
)
def test_three_other_names_are_the_prompt_the_completion_and_the_answer(function):
  assert for_samples(function, ROW)(SAMPLE) == ('how many?', 'seven', '7')


def test_a_column_goes_before_a_call_by_position():
  assert for_samples(lambda prompt, completion, level: level, ROW)(SAMPLE) == 3
  assert for_samples(lambda level, completion, answer: (level, completion, answer), ROW)(SAMPLE) == (3, 'seven', '7')
  assert for_samples(lambda hint, level, answer: (hint, level, answer), ROW)(SAMPLE) == ('count', 3, '7')
  assert for_samples(lambda completion, *args, **kwargs: completion, ROW)(SAMPLE) == 'seven'


def test_an_unknown_third_name_is_an_error_and_not_the_answer():
  with pytest.raises(TypeError, match="wants 'difficulty'"):
    for_samples(lambda prompt, completion, difficulty: difficulty, ROW)


def test_a_column_in_the_third_place_is_not_the_answer():
  with pytest.raises(TypeError, match="wants 'x'"):
    for_samples(lambda x, y, level: level, ROW)


@pytest.mark.parametrize('function', [lambda question, level, answer: level, lambda hint, text, truth: text])
def test_a_column_in_any_other_place_prevents_a_call_by_position(function):
  with pytest.raises(TypeError, match=r"wants '(question|text)'"):
    for_samples(function, ROW)


@pytest.mark.parametrize(
  ('function', 'name'),
  [
    (lambda response, ground_truth, question: 0.0, 'response'),
    (lambda question, ground_truth, response: 0.0, 'question'),
    (lambda data_source, solution_str, ground_truth, extra_info=None: 0.0, 'data_source'),  # of verl
  ],
)
def test_usual_names_in_another_order_prevent_a_call_by_position(function, name):
  with pytest.raises(TypeError, match=f"wants '{name}'"):
    for_samples(function, ROW)


def test_usual_names_in_the_order_of_the_arguments_are_called_by_position():
  assert for_samples(lambda query, response, target: (query, response, target), ROW)(SAMPLE) == ('how many?', 'seven', '7')


def test_a_decorator_without_the_names_of_its_function_is_refused():
  def decorated(*args, **kwargs):
    return args, kwargs

  with pytest.raises(TypeError, match=r'needs functools\.wraps'):
    for_samples(decorated, ROW)


def test_extra_positions_are_no_missing_column():
  assert for_samples(lambda completion, answer, *extra: (completion, answer, extra), ROW)(SAMPLE) == ('seven', '7', ())


def test_graders_that_compare_with_answers_refuse_rows_without_any():
  for name in ('math', 'gsm8k', 'numeric', 'exact'):
    with pytest.raises(TypeError, match='no `answer` to compare with; they have prompt, truth'):
      graders.load(graders.resolve(Task(grader=name)), ('prompt', 'truth'))


@pytest.mark.parametrize(
  ('function', 'warns'), [(lambda completion, answer: 1.0, True), (lambda completion, answer='': 1.0, False)]
)
def test_a_function_that_needs_answers_is_named_if_no_row_has_one(caplog, function, warns):
  rewards = graders.rewards(Task(grader='python:right'), {'right': function})
  with grader_pool(rewards, 1, 10.0, 4.0, columns=('prompt',)) as pool:
    assert answers(pool, SAMPLE)[0].score == 1.0
  said = "config.task.grader = 'python:right': no row has an `answer`; the function gets an empty text for it"
  assert (said in caplog.messages) == warns


def test_a_parameter_with_a_default_is_optional():
  assert for_samples(lambda completion, level=1, colour='red': (level, colour), ROW)(SAMPLE) == (3, 'red')


@pytest.mark.parametrize(
  'function', [lambda colour: 1, lambda completion, answer, colour: 1, lambda a, b: 1, lambda a, b, c, d: 1, lambda *, a, b, c: 1]
)
def test_an_unknown_parameter_is_refused_with_the_names_that_there_are(function):
  with pytest.raises(TypeError, match=r'wants .*; a reward may take answer, completion, finish, hint, level, messages, prompt'):
    for_samples(function, ROW)


def test_a_row_without_the_column_is_an_error_that_names_it():
  grade = for_samples(lambda completion, hint: 1.0, ROW)
  with pytest.raises(LookupError, match="the row has no column 'hint'"):
    grade(Sample('p', 'c', 'a', {'level': 3}))


# --- all samples of a prompt -----------------------------------------------------------------------------------------


def two_samples():
  return [Sample('p', text, '7', ROW, MESSAGES, ids, end) for text, ids, end in (('a', (1,), 'stop'), ('bb', (1, 2), 'length'))]


def test_a_groupwise_function_gets_lists():
  def rank(prompts, completions, answer, tokens, finish, hint, **kwargs):
    return prompts, completions, answer, tokens, finish, hint, sorted(kwargs)

  found = for_groups(rank, ROW)(two_samples())
  assert found == (
    ['p', 'p'], ['a', 'bb'], ['7', '7'], [[1], [1, 2]], ['stop', 'length'], ['count', 'count'],
    ['completion_ids', 'level', 'messages', 'row'],
  )  # fmt: skip


def test_token_ids_have_the_name_of_trl_too():
  assert for_groups(lambda completions, completion_ids: completion_ids, ROW)(two_samples()) == [[1], [1, 2]]


def test_a_groupwise_function_with_an_unknown_parameter_is_refused():
  with pytest.raises(TypeError, match="wants 'colour'; a reward may take answer, completion_ids, completions, finish, hint"):
    for_groups(lambda completions, colour: 1, ROW)


@pytest.mark.parametrize(
  ('scores', 'statuses', 'reason'),
  [
    ('[1, 2.5]', ['ok', 'ok'], ''),
    ('__import__("numpy").array([1, 2.5])', ['ok', 'ok'], ''),
    ('[1.0, None]', ['ok', 'invalid'], 'returned a NoneType'),
    ('[float("nan"), 1.0]', ['invalid', 'ok'], 'returned nan'),
    ('[1.0]', ['invalid', 'invalid'], 'returned 1 scores of 2 samples'),
    ('1.0', ['invalid', 'invalid'], 'returned a float, expected a list of numbers'),
    ('1 / 0', ['error', 'error'], 'ZeroDivisionError'),
  ],
)
def test_scores_of_a_group(scores, statuses, reason):
  function = eval(f'lambda completions: {scores}')
  rewards = graders.rewards(Task(grader='python:rank'), {'rank': function})
  with grader_pool(rewards, 1, 10.0, 4.0) as pool:
    ((first, second),) = answers(pool, Group(tuple(two_samples())))
  assert [first.status, second.status] == statuses
  assert all(reason in grade.reason for grade in (first, second) if grade.status != 'ok')
  assert first.score == (1.0 if first.status == 'ok' else 0.0)
  assert second.score == ({'ok': 2.5}.get(second.status, 0.0) if first.status == 'ok' else float(second.status == 'ok'))


# --- several rewards -------------------------------------------------------------------------------------------------

STYLE = """
import os, time

def brief(completion):
  if completion == 'hang': time.sleep(60)
  if completion == 'die': os._exit(3)
  return len(completion)

def calm(completion):
  if completion == 'raise': raise ValueError('no')
  return 1.0

def rank(completions):
  return [float(sorted(completions).index(each)) for each in completions]
"""


def styled(folder, *rewards, **others):
  (folder / 'style.py').write_text(STYLE)
  return Task(kind='jsonl', rewards=tuple(each.format(f'{folder}/style.py') for each in rewards), **others)


def test_the_score_is_the_weighted_sum_and_the_parts_are_unweighted(tmp_path):
  rewards = graders.rewards(styled(tmp_path, 'exact', '{}:brief=-0.25', '{}:rank=10', '{}:calm=2'))
  assert [(r.name, r.weight) for r in rewards] == [('exact', 1.0), ('brief', -0.25), ('rank', 10.0), ('calm', 2.0)]
  with grader_pool(rewards, None, 10.0, 4.0) as pool:
    right, wrong = answers(pool, Sample('p', ' 7 ', '7'), Sample('p', 'seven', '7'))
    assert right == Grade(1 - 0.25 * 3 + 2, 'ok', parts={'exact': 1.0, 'brief': 3.0, 'calm': 1.0})
    assert wrong == Grade(0 - 0.25 * 5 + 2, 'ok', parts={'exact': 0.0, 'brief': 5.0, 'calm': 1.0})
    (group,) = answers(pool, Group((Sample('p', 'z', '7'), Sample('p', 'y', '7'))))
    assert group == [Grade(10.0, 'ok', parts={'rank': 1.0}), Grade(0.0, 'ok', parts={'rank': 0.0})]


def test_a_reward_that_fails_is_named_and_the_others_are_graded(tmp_path):
  rewards = graders.rewards(styled(tmp_path, '{}:brief=0.5', '{}:calm=3'))
  with grader_pool(rewards, 2, 2.0, 4.0) as pool:
    found = answers(pool, *(Sample('p', text, '') for text in ('hang', 'die', 'raise', 'fine')))
  assert [(g.score, g.status, g.failed) for g in found] == [
    (3.0, 'timeout', ('brief',)), (3.0, 'crash', ('brief',)), (2.5, 'error', ('calm',)), (5.0, 'ok', ())
  ]  # fmt: skip
  assert [g.reward_known for g in found] == [False, False, False, True]
  assert found[1].parts == {'brief': 0.0, 'calm': 1.0}
  assert found[2].reason.startswith('calm: ValueError: no (')


def test_a_metric_that_fails_leaves_the_reward_known(tmp_path):
  rewards = graders.rewards(styled(tmp_path, 'exact', '{}:brief=0'))
  with grader_pool(rewards, 2, 2.0, 4.0) as pool:
    failed, fine = answers(pool, Sample('p', 'hang', 'hang'), Sample('p', 'seven', 'seven'))
  assert (failed.score, failed.reward_known, failed.failed) == (1.0, True, ('brief',))
  assert fine == Grade(1.0, 'ok', parts={'exact': 1.0, 'brief': 5.0})


def test_a_sample_without_a_reward_of_its_own_is_graded_at_once():
  rewards = graders.rewards(Task(grader='python:rank'), {'rank': lambda completions: [1.0] * len(completions)})
  with grader_pool(rewards, 1, 10.0, 4.0) as pool:
    assert answers(pool, SAMPLE) == [Grade(0.0, 'ok')]


@pytest.mark.parametrize('groupwise', [False, True])
def test_a_reward_that_returns_none_leaves_the_sample_to_the_others(groupwise):
  def maths(completion):
    return 1.0 if completion == 'a' else None

  def code(completion):
    return 0.5 if completion == 'bb' else None

  def of_all(function):
    return lambda completions: [function(each) for each in completions]

  functions = {each.__name__: of_all(each) if groupwise else each for each in (maths, code)}
  rewards = graders.rewards(Task(rewards=('python:maths', 'python:code=2.0')), functions)
  with grader_pool(rewards, 1, 10.0, 4.0) as pool:
    found = answers(pool, Group(tuple(two_samples())))[0] if groupwise else answers(pool, *two_samples())
  assert found == [Grade(1.0, 'ok', parts={'maths': 1.0}), Grade(1.0, 'ok', parts={'code': 0.5})]


def test_a_sample_to_which_only_a_reward_of_weight_0_applies_has_no_known_reward():
  functions = {'right': lambda completion: None, 'length': lambda completion: len(completion)}
  rewards = graders.rewards(Task(rewards=('python:right', 'python:length=0')), functions)
  with grader_pool(rewards, 1, 10.0, 4.0) as pool:
    (found,) = answers(pool, SAMPLE)
  assert (found.status, found.reward_known, found.parts) == ('invalid', False, {'right': 0.0, 'length': 5.0})


def test_a_sample_to_which_no_reward_applies_has_no_known_reward():
  rewards = graders.rewards(
    Task(rewards=('python:one', 'python:two')), {'one': lambda completion: None, 'two': lambda answer: None}
  )
  with grader_pool(rewards, 1, 10.0, 4.0) as pool:
    (found,) = answers(pool, SAMPLE)
  assert (found.status, found.reward_known, found.failed) == ('invalid', False, ('one', 'two'))


def test_a_python_callable_runs_in_this_process():
  seen = []

  class Judge:
    def __call__(self, completion, level):
      seen.append(completion)
      return level

  rewards = graders.rewards(Task(rewards=('exact', 'python:judge=2')), {'judge': Judge()})
  with grader_pool(rewards, 1, 30.0, 4.0, columns=ROW) as pool:
    assert answers(pool, SAMPLE) == [Grade(6.0, 'ok', parts={'exact': 0.0, 'judge': 3.0})]
  assert seen == ['seven']


def test_a_cancelled_sample_is_dropped_from_all_rewards(tmp_path):
  rewards = graders.rewards(styled(tmp_path, '{}:brief', '{}:calm'))
  with grader_pool(rewards, 1, 10.0, 4.0) as pool:
    pool.cancel(pool.submit(Sample('p', 'hang', '')))
    cancelled = pool.submit(Sample('p', 'x', ''))
    pool.cancel(cancelled)
    assert pool.poll([cancelled]) == {}
    assert not pool._owners


@pytest.mark.parametrize(
  ('rewards', 'complaint'),
  [
    (('{}:none',), r"config\.task\.rewards: '.*style\.py:none': .*style\.py has no none; it has brief, calm"),
    (
      ('python:judge',),
      r"'python:judge': no such function was given to sprl; expected one of these: none",
    ),
  ],
)
def test_a_reward_that_does_not_exist_is_named(tmp_path, rewards, complaint):
  with pytest.raises(SettingsError, match=complaint):
    graders.rewards(styled(tmp_path, *rewards))


def test_a_reward_that_cannot_be_loaded_is_named(tmp_path):
  (tmp_path / 'other.py').write_text('def grade(colour): return 1.0')
  rewards = graders.rewards(styled(tmp_path, '{}:brief', f'{tmp_path}/other.py:grade'))
  with pytest.raises(SettingsError, match=r"other\.py:grade: TypeError: the function wants 'colour'"):
    grader_pool(rewards, 1, 10.0, 4.0).__enter__()


@pytest.mark.parametrize('definition', ['rank = lambda completions: [1.0]', 'from elsewhere import rank'])
def test_a_groupwise_function_that_its_file_does_not_define_is_refused(tmp_path, definition):
  (tmp_path / 'elsewhere.py').write_text('def rank(completions): return [1.0]\n')
  (tmp_path / 'mine.py').write_text(definition)
  with pytest.raises(TypeError, match='a function with `completions`, or an `async def`, must be defined in this file'):
    graders.load(graders.resolve(Task(grader=f'{tmp_path}/mine.py:rank')))


def test_rewards_of_one_file_share_its_module(tmp_path):
  (tmp_path / 'twice.py').write_text(
    'seen = []\ndef a(completion): seen.append(1); return 1.0\ndef b(completion): return len(seen)'
  )
  a, b = (graders.load(graders.resolve(Task(grader=f'{tmp_path}/twice.py:{name}'))) for name in 'ab')
  assert (a(SAMPLE), b(SAMPLE)) == (1.0, 1)


# --- rows of the sources ---------------------------------------------------------------------------------------------


def test_all_columns_of_a_jsonl_row_reach_the_problem(tmp_path):
  (tmp_path / 'train.jsonl').write_text('{"prompt": "2 + 3?", "answer": 5, "level": 3, "tests": ["a", "b"]}\n')
  (problem,) = problems.load(Task(kind='jsonl', path=str(tmp_path)), 'train')
  assert problem.row == {'prompt': '2 + 3?', 'answer': 5, 'level': 3, 'tests': ['a', 'b']}
  assert problem.answer == '5'


def test_the_row_of_a_generated_problem_is_its_entry():
  problem = problems.load(Task(kind='reasoning_gym', name='chain_sum'), 'train')[0]
  assert problem.row['answer'] == problem.answer
  assert problem.row['question'] in problem.prompt
