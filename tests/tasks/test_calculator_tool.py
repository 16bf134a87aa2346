"""The calculator: exact values, refusals, and episodes of word problems."""

import ast
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.config import Task
from sprl.tasks.environments import arithmetic
from sprl.tasks.environments.arithmetic import CalculationError, calculate
from sprl.tasks.environments.calculator import MAX_CALCULATIONS, Calculator, gsm8k
from sprl.tasks.environments.protocol import EnvironmentFault, checked_reset, checked_step
from sprl.tasks.problems import Problems


def posed(*answers, **task):
  return Problems(Task(**task), [{'id': f'p{i}', 'prompt': f'Question {i}?', 'answer': a} for i, a in enumerate(answers)])


# --- arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'value'),
  [
    ('3*(4+5)', '27'),
    ('2 ** 10', '1024'),
    ('2**-2', '0.25'),
    ('-2**2', '-4'),
    ('0.1 + 0.2', '0.3'),
    ('1/4', '0.25'),
    ('-1/8', '-0.125'),
    ('1/3', '0.333333333333'),
    ('-2/3', '-0.666666666667'),
    ('10/5', '2'),
    ('7 // 2', '3'),
    ('-7 // 2', '-4'),
    ('7 % 3', '1'),
    ('5.5 % 2', '1.5'),
    ('1,000 * 2', '2000'),
    ('$1,234,567 + 1', '1234568'),
    ('3 × 4 ÷ 2 − 1', '5'),
    ('--3', '3'),
    ('+3', '3'),
    ('.5 + 1.', '1.5'),
    ('1\n+\t1', '2'),
    ('12345678901234567.25 * 1', '12345678901234567.25'),  # more digits than a binary float has
    ('0 ** 0', '1'),
    ('2 ** 64', '18446744073709551616'),
    ('1/1000000000000', '0.000000000001'),
    ('1/10**20', '1e-20'),
  ],
)
def test_calculations_have_exact_values(text, value):
  assert calculate(text) == value


@pytest.mark.parametrize(
  ('text', 'complaint'),
  [
    ('', 'empty'),
    (' \n', 'empty'),
    ('1/0', 'division by zero'),
    ('1 // (2 - 2)', 'division by zero'),
    ('1 % 0', 'division by zero'),
    ('0 ** -1', 'division by zero'),
    ('9**9**9', 'an exponent is a whole number'),
    ('9**9999999999', 'an exponent is a whole number'),
    ('2**0.5', 'an exponent is a whole number'),
    ('2**65', 'an exponent is a whole number'),
    ('(10**60)**60', 'too large'),
    ('(10**60)**-60', 'too large'),
    ('10**64*10**64*10**64*10**64', 'too large'),
    ('9' * 190, 'too large'),
    ('x + 1', 'only numbers'),
    ('abs(1)', 'only numbers'),
    ('__import__("os").system("true")', 'only numbers'),
    ('().__class__', 'only numbers'),
    ('1 .real', 'only numbers'),
    ('1j', 'only numbers'),
    ('1e5', 'only numbers'),
    ('0x10', 'only numbers'),
    ('"a"*9', 'only numbers'),
    ('[1]', 'only numbers'),
    ('1 if 1 else 2', 'only numbers'),
    ('1 < 2', 'only numbers'),
    ('1 = 1', 'only numbers'),
    ('2^3', 'only numbers'),
    ('~1', 'only numbers'),
    ('1 << 99', 'only numbers'),
    ('3, 4', 'only numbers'),
    ('٣', 'only numbers'),
    ('()', 'only numbers'),
    ('...', 'only numbers'),
    ('3(4)', r'a product is written with \*'),
    ('(2+1)(4)', r'a product is written with \*'),
    ('3 +', 'not a well-formed'),
    ('3 4', 'not a well-formed'),
    ('((3)', 'not a well-formed'),
    ('007', 'not a well-formed'),
    ('1.2.3', 'not a well-formed'),
    ('1' + '+1' * 100, 'longer than 200'),
    ('1' + '+1' * 60, 'nested too deeply'),
    ('-' * 100 + '1', 'nested too deeply'),
  ],
)
def test_invalid_calculations_are_refused(text, complaint):
  with pytest.raises(CalculationError, match=complaint):
    calculate(text)


def test_brackets_may_be_nested_up_to_the_parsers_limit():
  assert calculate('(' * 90 + '1' + ')' * 90) == '1'
  with pytest.raises(CalculationError):
    calculate('(' * 199 + '1')


@pytest.mark.parametrize('text', ['9**64**64', '(9**64)**64', '((99**60)**2)**2', '*'.join(['9**64'] * 25)])
def test_the_largest_powers_take_no_time(text):
  start = time.process_time()
  with pytest.raises(CalculationError):
    calculate(text)
  assert time.process_time() - start < 0.5


EXPRESSIONS = st.recursive(
  st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str),
  lambda inner: st.tuples(inner, st.sampled_from(['+', '-', '*', '/']), inner).map(lambda e: f'({e[0]} {e[1]} {e[2]})'),
  max_leaves=8,
)


def exactly(node):
  """Return the exact value of an expression, with the operators of Fraction on literals read as decimals."""
  if isinstance(node, ast.Constant):
    return Fraction(str(node.value))
  left, right = exactly(node.left), exactly(node.right)
  name = {ast.Add: '__add__', ast.Sub: '__sub__', ast.Mult: '__mul__', ast.Div: '__truediv__'}[type(node.op)]
  return getattr(left, name)(right)


@settings(max_examples=200)
@given(EXPRESSIONS.filter(lambda text: len(text) <= arithmetic.MAX_LENGTH))
def test_values_equal_those_of_exact_fractions(text):
  try:
    wanted = exactly(ast.parse(text, mode='eval').body)
  except ZeroDivisionError:
    with pytest.raises(CalculationError, match='division by zero'):
      calculate(text)
    return
  found = Fraction(calculate(text))
  assert abs(found - wanted) <= abs(wanted) * Fraction(1, 10**11)
  if wanted.denominator == 1:
    assert found == wanted


@settings(max_examples=300)
@given(st.text(max_size=220) | st.text('0123456789.+-*/%() ', max_size=220))
def test_any_text_has_a_value_or_is_refused(text):
  try:
    said = calculate(text)
  except CalculationError as error:
    said = str(error)
  else:
    Fraction(said)  # it is a number
  assert 0 < len(said) < 300


# --- episodes --------------------------------------------------------------------------------------------------------------


def test_a_calculation_gets_its_value_and_an_answer_its_score():
  env = Calculator(posed('27'))
  observation, _ = checked_reset(env, 0)
  assert observation.startswith('Question 0?\n\n')
  assert '<calc>3*(4+5)</calc>' in observation
  outcome = checked_step(env, 'Let me see: <calc> 3*(4+5) </calc>')
  assert (outcome.observation, outcome.reward, outcome.done) == ('3*(4+5) = 27', 0.0, False)
  assert outcome.info['metrics'] == {'success': 0.0, 'valid_action': 1.0, 'calculations': 1.0, 'failed_calculations': 0.0}
  outcome = checked_step(env, 'So it is <answer>27</answer>.')
  assert (outcome.reward, outcome.terminated, outcome.truncated) == (1.0, True, False)
  assert outcome.info['metrics']['success'] == 1.0


@pytest.mark.parametrize(
  ('action', 'reward'),
  [
    ('<answer>1,027.0</answer>', 1),
    ('<answer>It is $1027.</answer>', 1),
    ('#### 1027', 1),
    ('#### 1027\nThat leaves 5.', 1),
    ('<answer>1027</answer> #### 5', 1),  # the tag before the mark
    ('<calc>1+1</calc> <answer>1027</answer>', 1),  # an answer ends the episode
    ('<answer>5</answer> <answer>1027</answer>', 1),
    ('<answer>1027</answer> <answer>5</answer>', 0),
    ('1027 <answer>5</answer>', 0),
    ('<answer></answer>', 0),
    ('####', 0),
    ('<answer>none</answer>', 0),
    ('#### 1028', 0),
    ('<answer>2054/2</answer>', 1),
    ('<answer>10/1027</answer>', 0),  # a formula has a value, not a last number
  ],
)
def test_a_final_answer_ends_the_episode_with_its_score(action, reward):
  env = Calculator(posed('1027'))
  checked_reset(env, 0)
  outcome = checked_step(env, action)
  assert (outcome.reward, outcome.terminated) == (reward, True)


def test_a_refusal_is_an_observation_and_the_episode_continues():
  env = Calculator(posed('1'))
  checked_reset(env, 0)
  outcome = checked_step(env, '<calc>1/0</calc> and <calc>2+2</calc> and <calc>9**9**9</calc>')
  first, second, third = outcome.observation.split('\n')
  assert (first, second) == ('1/0: error: division by zero', '2+2 = 4')
  assert third.startswith('9**9**9: error: an exponent')
  assert outcome.info['metrics'] == {'success': 0.0, 'valid_action': 1.0, 'calculations': 3.0, 'failed_calculations': 2.0}
  assert not outcome.done


def test_the_number_of_calculations_in_a_turn_is_limited():
  env = Calculator(posed('1'))
  checked_reset(env, 0)
  assert checked_step(env, '<calc>1+1</calc>' * 100).observation.count('= 2') == MAX_CALCULATIONS


@pytest.mark.parametrize('action', ['', 'It is 1.', '<calc>1+1', '<answer>1'])
def test_an_action_without_calculation_or_answer_costs_a_penalty(action):
  env = Calculator(posed('1'), invalid_penalty=-0.5)
  checked_reset(env, 0)
  outcome = checked_step(env, action)
  assert (outcome.reward, outcome.done, outcome.info['metrics']['valid_action']) == (-0.5, False, 0.0)
  assert 'neither a calculation nor an answer' in outcome.observation


def test_the_last_action_truncates_unless_it_answers():
  env = Calculator(posed('2'), max_actions=2)
  for last, ends in (('<calc>1</calc>', (False, True)), ('<answer>2</answer>', (True, False))):
    checked_reset(env, 0)
    assert not checked_step(env, '<calc>1</calc>').done
    outcome = checked_step(env, last)
    assert (outcome.terminated, outcome.truncated) == ends


def test_the_seed_selects_the_problem_and_all_problems_occur():
  env = Calculator(posed('1', '2', '3'))
  assert [checked_reset(env, seed)[1]['problem'] for seed in (0, 1, 2, 3, 2**40)] == ['p0', 'p1', 'p2', 'p0', f'p{2**40 % 3}']


def test_a_system_message_precedes_the_question():
  env = Calculator(posed('1', system='Be brief.'))
  observation, info = checked_reset(env, 0)
  assert info['messages'] == [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': observation}]


def test_gsm8k_asks_questions_of_the_given_split(tmp_path):
  for split, number in (('train', 5), ('test', 7)):
    (tmp_path / f'{split}.jsonl').write_text(f'{{"question": "Which of {split}?", "answer": "#### {number}"}}')
  for split, number in (('train', 5), ('test', 7)):
    env = gsm8k(str(tmp_path), split)
    assert checked_reset(env, 0)[0].startswith(f'Which of {split}?')
    assert checked_step(env, f'#### {number}').reward == 1.0


def test_a_heading_is_no_final_answer():
  env = Calculator(posed('18'))
  checked_reset(env, 0)
  outcome = checked_step(env, '#### Step 1\n<calc>9*2</calc>')
  assert (outcome.observation, outcome.terminated) == ('9*2 = 18', False)


def test_a_gold_answer_that_is_no_number_is_a_fault():
  env = Calculator(posed('blue'))
  checked_reset(env, 0)
  with pytest.raises(EnvironmentFault, match="environment calculator: step raised ValueError: answer = 'blue'"):
    checked_step(env, '<answer>blue</answer>')


def test_no_problems_are_refused():
  with pytest.raises(ValueError, match='no problems'):
    Calculator([])
