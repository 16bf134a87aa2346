"""Graders: scores of answers, and names of graders."""

import math
import pickle
import time
from decimal import Decimal
from functools import partial, wraps

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprl.config import SettingsError, Task
from sprl.tasks import graders, problems
from sprl.tasks.rewards import Sample


@pytest.mark.parametrize(
  ('completion', 'answer', 'score'),
  [
    (r'so \boxed{18}', '18', 1),
    (r'\boxed{\frac{36}{2}} it is', '18', 1),
    (r'\boxed{11}, no, \boxed{12}', '12', 1),  # only the last box counts
    (r'\boxed{12}, no, \boxed{11}', '12', 0),
    (r'\boxed{1+x^2}', 'x^2+1', 1),
    ('1+x^2', '$x^2+1$', 1),
    ('x^2-1', 'x^2+1', 0),
    ('The answer is 1/2.', r'\frac{1}{2}', 1),
    (r'It is $\frac{1}{3}$.', '1/2', 0),
    (r'\boxed{0.5}', r'\boxed{\frac12}', 1),
    ('50%', '50', 1),
    ('(1, 2)', '(1,2)', 1),
    ('(2, 1)', '(1,2)', 0),
    ('', '18', 0),
    (r'\boxed{}', '18', 0),
    ('I cannot say', '18', 0),
    (r'\boxed{1.2e5}', '120000', 1),
    (r'\boxed{5.}', '5', 1),
    (r'\boxed{1\,000}', '1000', 1),
    *((r'\boxed{5}', answer, 1) for answer in ('5.', '5 ;', '$5$.', '5 apples.', 'Answer: 5', r'5\$', '5.0')),
    (r'\boxed{1000}', '1,000.', 1),
    (r'\boxed{100,200}', '100,200', 1),
    (r'\boxed{0.00001}', '1e-05', 1),  # not Euler's number - 05
    (r'\boxed{e-5}', '1e-05', 0),
    (r'$\boxed{3}$ and $\boxed{4}$', '3,4', 1),
    (r'$x=\boxed{3}$ or $x=\boxed{4}$', '4', 0),  # one of several guesses
    (r'\boxed{3}. No: \boxed{4}', '4', 1),
    *(
      (completion, 'C', 1) for completion in ('Answer: C', 'so\nThe answer is **(C)**.', '(C)', 'Answer: C. Paris', r'\boxed{C}')
    ),
    *(
      (rf'\boxed{{{box}}}', 'C', 1)
      for box in ('C.', 'C. 5', 'C) 5', 'C: 5', r'\text{(C) } 5', r'\textbf{(C)}\ 5', r'\text{Option C}', r'\mathrm{C}')
    ),
    *(
      (f'So it is so.\n{said}', 'C', 1)
      for said in (
        'The correct choice is (C).',
        'Correct option: C',
        'Therefore, the correct option is C.',
        'The answer is option C.',
      )
    ),
    (r'\boxed{C}', r'\textbf{(C)}\ 5', 1),
    *((rf'\boxed{{{box}}}', 'C', 0) for box in (r'(B)\ 5', 'C, D', 'C + 1', r'(C) \cup (D)', r'(C) + 1', 'CD', '(C)(D)')),
    ('The option is A or C.', 'C', 0),
    (r'\boxed{9^{9^{9}}}', '18', 0),  # without the computation of the power
    ('The answer is $9^{9^9}$.', '18', 0),
    (r'\boxed{2^{2^{2^{2^2}}}}', '18', 0),
    (r'\boxed{2^{2^3}}', '256', 1),
    (r'\boxed{x^2+y^2}', 'y^2+x^2', 1),
    (r'\boxed{10^{1000}}', '10^{1000}', 1),
    ('a' * 40_000, '18', 0),
    ('Answer: B', 'C', 0),
    ('The answer is A cat', 'A', 0),
    *(
      (f'{text} option C.', 'C', 0)
      for text in ('The answer is A, not', 'It cannot be', 'Answer: A. Many prefer', 'Answer: C, or')
    ),
    (r'$\boxed{3}$ and $\boxed{4}$', r'So $\boxed{3}$ and $\boxed{4}$.', 1),
    (r'\boxed{4}', r'So $\boxed{3}$ and $\boxed{4}$.', 0),
    (r'\boxed{3xy}', '3 xy', 1),  # xy is no unit
    (r'\boxed{3}', '3 xy', 0),
    ('C is wrong\nAnswer: B', 'C', 0),
    *(
      (said, 'Paris', 1)
      for said in (r'\boxed{paris}', 'Paris', 'So\nThe answer is: **Paris**.', '<answer> Paris </answer>', '#### Paris')
    ),
    *((said, 'Paris', 0) for said in (r'\boxed{siraP}', 'Not Paris', 'Paris\nor London', 'Answer: Paris, perhaps', '')),
    (r'\boxed{listen}', 'silent', 0),
    ('on', 'no', 0),
    ('The answer is: No.', 'no', 1),
    (r'\boxed{York New}', 'New York', 0),
    (r'\boxed{\text{New  York}}', 'New York', 1),
    (r'\boxed{Evelyn}', r'\text{Evelyn}', 1),
    (r'\boxed{ddo}', r'\text{odd}', 0),
    (r'\boxed{odd}', r'\text{odd}', 1),
    (r'\boxed{\text{no solution}}', 'no solution', 1),
    *((said, 'Paris', 1) for said in ('**Answer**: Paris', '<answer>The answer is Paris</answer>')),
    (r'\boxed{San\ Francisco}', 'San Francisco', 1),
    (r'\boxed{\textit{even}}', 'even', 1),
    (r'\boxed{\theta}', 'theta', 1),
    *((said, 'infinitely many', 1) for said in (r'\boxed{\text{infinitely many}}', 'The answer is infinitely many.')),
    (r'\boxed{\infty}', 'infinity', 1),
    (r'\boxed{bac}', 'abc', 1),  # a product
  ],
)
def test_scores_of_math(completion, answer, score):
  assert graders.math('', completion, answer) == score


@pytest.mark.parametrize(
  ('completion', 'answer', 'score'),
  [
    ('9 * 2 = 18\n#### 18', '18', 1),
    ('#### 18.', '18', 1),
    ('#### 18.0', '18', 1),
    ('#### $18', '18', 1),
    ('#### 18%', '18', 1),
    ('#### 1,000', '1000', 1),
    ('#### 1000', '1,000', 1),
    ('#### 18 dollars', '18', 1),
    ('####18\nThat leaves 5.', '18', 1),  # only the line of the mark counts
    ('#### 17\nwait\n#### 18', '18', 1),
    (r'\boxed{17} #### 18', '18', 1),  # the mark precedes the box
    (r'#### \boxed{18}', '18', 1),
    (r'#### \frac{36}{2}', '18', 1),
    (r'\boxed{18}, not 17', '18', 1),  # the box precedes the last number
    ('#### Step 1: Eggs\n16 - 7 = 9\n#### Step 2: Income\n9 * 2 = 18\n$\\boxed{18}$', '18', 1),  # headings of Markdown
    ('#### Step 1: Eggs\n16 - 7 = 9\n#### Step 2: Income\n9 * 2 = 18\n$\\boxed{18}$', '2', 0),
    ('##### 2. Income\n$\\boxed{18}$', '18', 1),
    ('#### **Answer**\n18', '18', 1),
    ('#### **18**', '18', 1),
    ('#### `18`', '18', 1),
    ('#### ~18', '18', 1),
    ('#### 18 km/h', '18', 1),
    ('#### 18 (per day)', '18', 1),
    ('#### 18 million', '18', 0),
    ('#### 17 or 18', '18', 0),
    ('#### 17, 18', '18', 0),
    (r'\boxed{\$1,000}', '1000', 1),
    (r'\boxed{18 \text{ apples}}', '18', 1),
    (r'\boxed{18 dollars}', '18', 1),
    (r'\boxed{\$18 \text{ per day}}', '18', 1),
    (r'\boxed{\text{18 eggs per day.}}', '18', 1),
    (r'#### \boxed{18 eggs}', '18', 1),
    (r'\boxed{18 million}', '18', 0),
    (r'\boxed{18 or more}', '19', 0),
    (r'\boxed{17, 18}', '18', 0),
    (r'\boxed{5 or 18}', '18', 0),
    (r'\boxed{17 dollars}', '18', 0),
    ('16 - 3 = 13, so 18', '18', 1),
    ('The answer is 18.', '18', 1),
    ('5 - 7 = -2', '-2', 1),
    ('5 - 7 = −2', '-2', 1),  # a typographer's minus
    ('答案是18。', '18', 1),
    ('#### 17', '18', 0),
    ('18 #### 17', '18', 0),
    ('####', '18', 0),
    (r'\boxed{}', '18', 0),
    ('18 apples, or 19', '18', 0),
    ('180', '18', 0),
    ('1.8', '18', 0),
    ('-18', '18', 0),
    ('', '18', 0),
    ('none', '18', 0),
  ],
)
def test_scores_of_gsm8k(completion, answer, score):
  assert graders.gsm8k('', completion, answer) == score


def test_numeric_compares_values_and_exact_compares_text():
  assert graders.numeric('', 'It is 2.50 euros', '2.5') == 1
  assert graders.numeric('', '<answer>3</answer> or 4', '3') == 1
  assert graders.numeric('', 'It is 2.51', '2.5') == 0
  assert graders.numeric('', 'no number', '2.5') == 0
  with pytest.raises(ValueError, match="answer = 'Paris'"):
    graders.numeric('', '3', 'Paris')
  assert graders.exact('', ' Paris\n', 'Paris') == 1
  assert graders.exact('', 'It is Paris', 'Paris') == 0


@pytest.mark.parametrize(
  ('text', 'last'),
  [
    ('5-7', '7'),  # subtracts
    ('x-7', '7'),
    ('(5)-7', '7'),
    ('= -7', '-7'),
    ('=-7', '-7'),
    ('is -$7.50', '-7.50'),
    ('1, 2', '2'),
    ('1,2', '2'),  # no thousands
    ('1,234,567.8', '1234567.8'),
    ('1,2345', '2345'),
    ('7.', '7'),
    ('.5', '.5'),
    ('2.5e-3', '2.5e-3'),
    ('007', '007'),  # as written: a scorer may want the zeros
    ('12km', '12'),
    ('H2O', None),
    ('v1.2.3', None),
    ('none', None),
  ],
)
def test_last_number(text, last):
  assert graders.last_number(text) == last


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_a_number_is_read_in_any_notation(value):
  for text in (f'{value:f}', f'{value:,f}', f'{value:f}.', f' {value:f}% ', f'{value:.15e}'):
    assert graders.number(text) == value
  assert Decimal(graders.last_number(f'From 3 and 4 we get ${value:,f}. Done') or '') == value


@pytest.mark.parametrize('text', ['', 'x', '1 2', '18 apples', '5-7', '1,2', '--1', '1.2.3', '١٢'])
def test_text_that_is_not_exactly_one_number_gives_none(text):
  assert graders.number(text) is None


@pytest.mark.parametrize(
  ('text', 'inner'),
  [
    (r'\boxed{1}', '1'),
    (r'\boxed{ \frac{1}{2} } and on', r'\frac{1}{2}'),
    (r'\boxed{1} \boxed{2}', '2'),
    (r'\boxed{1} \boxed{2', '1'),  # cut off
    (r'\boxed{2', None),
    (r'\boxed{a \boxed{b} c}', 'b'),
    (r'} \boxed{1} } {', '1'),
    (r'{ \boxed{3} and \boxed{4 {', '3'),
    (r'\boxed{}', ''),
    ('2', None),
  ],
)
def test_last_boxed(text, inner):
  assert graders.last_boxed(text) == inner


@pytest.mark.parametrize('between', [',' + 20_000 * ' ' + '!', 20_000 * '$', 'answer ' * 3_000, ' and' * 5_000])
def test_what_stands_between_boxes_takes_time_in_proportion_to_its_length(between):
  text = rf'\boxed{{1}}{between}\boxed{{2}}'
  start = time.process_time()
  assert graders.last_boxes(text)[-1] == '2'
  assert time.process_time() - start < 1


def test_a_box_that_never_ends_takes_time_in_proportion_to_its_length():
  start = time.process_time()
  assert graders.last_boxed(r'\boxed{1}' + r'\boxed{' * 100_000) == '1'
  assert time.process_time() - start < 5  # a scan from each box takes hours


# --- reasoning-gym ---------------------------------------------------------------------------------------------------


def test_a_generators_scorer_gets_the_final_answer_and_partial_scores_count_0():
  task = Task(kind='reasoning_gym', name='chain_sum', args={'max_terms': 2, 'max_digits': 2})
  grade = graders.load(graders.resolve(task))
  for p in problems.load(task, 'train')[:10]:
    wrong = str(int(p.answer) + 1)
    right = [
      p.answer,
      f'The answer is {p.answer}.',
      f'It is {p.answer}.0',
      rf'\boxed{{{p.answer}}} not {wrong}',
      f'5 + 5 = {p.answer}',
    ]
    right.append(f'{wrong} <answer>{p.answer}</answer> {wrong}')
    assert [grade(Sample(p.prompt, text, p.answer, extra=p.extra)) for text in right] == [1.0] * len(right)
    # The scorer gives the third text 1/len(text), because it contains the digits of the answer.
    no = ['', wrong, f'{p.answer} or {wrong}', 'I do not know', f'<answer>{wrong}</answer> {p.answer}']
    assert [grade(Sample(p.prompt, text, p.answer, extra=p.extra)) for text in no] == [0.0] * len(no)


def test_a_scorer_may_accept_several_answers():
  """countdown accepts any expression of the given numbers whose value is the target."""
  task = Task(kind='reasoning_gym', name='countdown')
  grade = graders.load(graders.resolve(task))
  p = problems.load(task, 'train')[0]
  assert grade(Sample(p.prompt, f'<answer>{p.answer}</answer>', p.answer, extra=p.extra)) == 1.0
  assert grade(Sample(p.prompt, f'<answer>({p.answer}) + 0 * 1</answer>', p.answer, extra=p.extra)) == 0.0  # other numbers
  assert grade(Sample(p.prompt, f'<answer>({p.answer})</answer>', p.answer, extra=p.extra)) == 1.0  # another notation


def test_text_answers_are_compared_whole():
  task = Task(kind='reasoning_gym', name='spell_backward')
  grade = graders.load(graders.resolve(task))
  p = problems.load(task, 'train')[0]
  assert grade(Sample(p.prompt, f' {p.answer}\n', p.answer, extra=p.extra)) == 1.0
  assert grade(Sample(p.prompt, f'<answer>{p.answer}</answer>', p.answer, extra=p.extra)) == 1.0
  assert grade(Sample(p.prompt, f'It is {p.answer}', p.answer, extra=p.extra)) == 0.0


# --- naming a grader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('task', 'kind'),
  [
    (Task(), 'gsm8k'),
    (Task(kind='jsonl'), 'math'),
    (Task(kind='reasoning_gym', name='chain_sum'), 'reasoning_gym'),
    (Task(kind='jsonl', grader='exact'), 'exact'),
    (Task(kind='reasoning_gym', name='chain_sum', grader='numeric'), 'numeric'),
  ],
)
def test_auto_selects_the_grader_of_the_data_set(task, kind):
  spec = graders.resolve(task)
  assert spec.kind == kind
  assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_users_function_is_found_and_called(tmp_path):
  (tmp_path / 'beside.py').write_text('HALF = 0.5\n')
  (tmp_path / 'mine.py').write_text('from beside import HALF\ndef grade(prompt, completion, answer):\n  return HALF\n')
  grade = graders.load(graders.resolve(Task(grader=f'{tmp_path}/mine.py:grade')))
  assert grade(Sample('p', 'c', 'a')) == 0.5


def test_a_users_file_is_found_without_running_it(tmp_path):
  (tmp_path / 'mine.py').write_text('grade = lambda p, c, a: 1.0\nraise RuntimeError("ran")\n')
  spec = graders.resolve(Task(grader=f'{tmp_path}/mine.py:grade'))
  with pytest.raises(RuntimeError, match='ran'):
    graders.load(spec)


@pytest.mark.parametrize(
  ('text', 'grader', 'complaint'),
  [
    (
      '',
      'maths',
      r"config\.task\.grader = 'maths': expected one of auto, math, gsm8k, numeric, exact, code, judge, or `file\.py:function`",
    ),
    ('', '{}/none.py:grade', r'none\.py: no such file'),
    ('def score(p, c, a): return 1.0', '{}/mine.py:grade', r'mine\.py has no grade; it has score'),
    (
      'from functools import partial\nTEXT = 1\ndef score(p, c, a):\n  text = c\n  return 1.0\nasync def ask(p, c, a): ...',
      '{}/mine.py:scor',
      r'mine\.py has no scor; it has ask, score$',
    ),
    ('TEXT = 1', '{}/mine.py:grade', r'mine\.py has no grade; it has no function$'),
    ('def grade(:', '{}/mine.py:grade', r'mine\.py is not Python'),
  ],
)
def test_a_missing_grader_is_named(tmp_path, text, grader, complaint):
  (tmp_path / 'mine.py').write_text(text)
  with pytest.raises(SettingsError, match=complaint):
    graders.resolve(Task(grader=grader.format(tmp_path)))


def test_a_function_with_other_arguments_is_refused(tmp_path):
  (tmp_path / 'mine.py').write_text('def grade(completion, colour): return 1.0\n')
  with pytest.raises(TypeError, match="the function wants 'colour'; a reward may take answer, completion, finish"):
    graders.load(graders.resolve(Task(grader=f'{tmp_path}/mine.py:grade')))


def test_scores_are_finite_floats():
  for grade in (graders.math, graders.gsm8k, graders.numeric, graders.exact):
    score = grade('', '18', '18')
    assert isinstance(score, float)
    assert math.isfinite(score)


@pytest.mark.parametrize(
  ('completion', 'answer', 'final'),
  [
    ('<answer></answer> so 7', '7', ''),  # an empty tag is an answer, which is wrong
    (r'<answer> </answer> \boxed{7}', '7', ''),
    ('<answer>I do not know</answer> perhaps 7', '7', ''),
    ('<answer></answer> Paris', 'Paris', ''),
    ('<answer>7</answer> or <answer></answer>', '7', ''),
    (r'<answer>8</answer> \boxed{7} 6', '7', '8'),
    (r'\boxed{7} 6', '7', '7'),
    (r'\boxed{} 6', '7', '6'),
    ('5 6', '7', '6'),
    (r'\boxed{1{,}234}', '1234', '1234'),
    ('<answer>- 5</answer>', '-5', '-5'),
    ('<answer>18 km/h</answer>', '18', '18'),
    (r'\boxed{\frac{12}{4}}', '3', '3'),
    (r'\boxed{\frac{3}{2}}', '2', ''),  # a formula has a value, not a last number
    ('<answer>10/3</answer>', '3', ''),
    (r'\boxed{2^{10}}', '10', ''),
    ('<answer>9^{9^{9}}</answer>', '18', ''),  # is not computed
    ('<answer>9^{99999999}</answer>', '18', ''),
    (r'\boxed{\text{The answer is } 18}', '18', '18'),
    ('<answer>The total is 36/2, which is 18</answer>', '18', '18'),
    (r'\boxed{\text{Yes}}', 'Yes', 'Yes'),
  ],
)
def test_the_final_answer_is_the_last_tag_even_if_it_is_empty(completion, answer, final):
  assert graders.final_answer(completion, answer) == final
  if graders.number(answer) is not None:
    assert graders.numeric('', completion, answer) == float(final == answer)


def test_the_checksum_of_a_users_grader_follows_its_source(tmp_path):
  def found(text):
    (tmp_path / 'mine.py').write_text(text)
    return graders.checksums(graders.rewards(Task(rewards=('math', f'{tmp_path}/mine.py:grade=2'))))

  first = found('def grade(completion): return 1')
  assert list(first) == [f'{tmp_path}/mine.py:grade']
  assert found('def grade(completion): return 2') != first == found('def grade(completion): return 1')
  own = graders.rewards(Task(grader='python:own'), {'own': lambda completion: 1.0})
  assert list(graders.checksums(own)) == ['python:own']


def test_an_edited_class_has_another_checksum():
  class Lake:
    size = 3

  first = Lake

  class Lake:
    size = 4

  assert graders.of_callable(first) == graders.of_callable(first) != graders.of_callable(Lake)


def test_callables_that_hold_other_values_have_other_checksums():
  def scaled(completion, by=1.0):
    return by * len(completion)

  def made(by):
    return lambda completion: by * len(completion)

  class Judge:
    def __init__(self, by):
      self.by, self._asked, self.client = by, by, object()

    def __call__(self, completion):
      return self.by

    def score(self, completion):
      return self.by

  def keyword(by):
    def reward(completion, *, scale=by):
      return scale

    return reward

  def wrapped(by):
    @wraps(scaled)
    def reward(completion):
      return by

    return reward

  def unfilled():
    def reward(completion):
      return later

    if not completions:
      later = 1.0  # never assigned
    return reward

  completions = [1]

  def checksum(function):
    return graders.checksums(graders.rewards(Task(grader='python:own'), {'own': function}))['python:own']

  for make in (
    made,
    Judge,
    lambda by: Judge(by).score,
    lambda by: partial(scaled, by=by),
    lambda by: partial(partial(scaled), by=by),
  ):
    assert checksum(make(1.0)) == checksum(make(1.0)) != checksum(make(2.0))
  assert checksum(scaled) != checksum(partial(scaled, by=1.0))
  assert checksum(keyword(1.0)) == checksum(keyword(1.0)) != checksum(keyword(2.0))
  assert checksum(wrapped(1.0)) == checksum(wrapped(1.0)) != checksum(wrapped(2.0))
  endless: list = []
  endless.append(endless)
  assert checksum(made(endless)) == checksum(made(endless))  # by its source alone
  assert checksum(unfilled()) == checksum(unfilled())
  asked = Judge(1.0)
  asked._asked = 5
  assert checksum(asked) == checksum(Judge(1.0))  # private attributes may count calls
