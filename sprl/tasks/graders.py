"""Graders: functions of a sample that return its score, and how a task names its grader or several rewards.

`math`     1 if the last box, else the text or its last expression, equals the answer mathematically (math-verify)
`gsm8k`    1 if the text after the last `####`, else the last box, else the last number, has the value of the answer
`numeric`  1 if the last number of the final answer has the value of the answer
`exact`    1 if the whole completion is the answer, apart from surrounding space
`code`     1 if the code of the completion passes the tests of the row (sprl/tasks/code_grader.py)
`judge`    the score that a language model behind an HTTP endpoint gives (sprl/tasks/judge.py)

A user's grader is a function in a file or a Python callable; sprl/tasks/rewards.py describes the forms that it may have.

A task of several sources has a grader for each (`of_sources`). A problem names the grader of its source.

A reasoning-gym task uses the scorer of its data set. That scorer gives partial marks to any text that contains the answer (0.05
for `The answer is 7` where 7 is right). So it is given the final answer only, and only full marks count as reward 1. The final
answer is the last `<answer>` tag, else the last box, else the whole text; if the answer is a number, the last number in it.
"""

import ast
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from sprl.config import SettingsError, Task
from sprl.config_checks import GRADERS, python_name, reward_name, weighted
from sprl.foreign import checksum, expanded, imported, split_reference
from sprl.tasks import code_grader, judge
from sprl.tasks.rewards import Grader, for_groups, for_samples, is_async, is_groupwise

SECONDS, ASYNC_SECONDS = 10.0, 60.0  # for grading a sample, unless task.time_limit is set; the second: by an async grader


def time_limit(asynchronous: bool) -> float:
  """Return the seconds that a grader may take unless task.time_limit is set."""
  return ASYNC_SECONDS if asynchronous else SECONDS


@dataclass(frozen=True)
class GraderSpec:
  """A grader by name, which a worker loads."""

  label: str  # its name in messages
  kind: str  # math, gsm8k, numeric, exact, code, judge, reasoning_gym, file, function
  name: str = ''  # reasoning_gym: the data set; file: the function
  path: str = ''  # file: absolute
  source: bytes = b''  # file: its content when the run began, also for workers that start later
  args: Mapping[str, Any] = field(default_factory=dict)  # reasoning_gym: of the data set; code: seconds; judge: task.judge
  function: Callable[..., Any] | None = None  # function: a Python callable, which runs in a thread of this process
  groupwise: bool = False  # whether it grades all samples of a prompt at once
  asynchronous: bool = False  # whether it is an `async def`


@dataclass(frozen=True)
class Reward:
  """One of the rewards of a task."""

  name: str  # in metrics; '' for the only reward of a task without task.rewards
  weight: float
  grader: GraderSpec
  setting: str  # what names it in messages: a setting with its value
  source: str | None = None  # of the problems that it grades (the entry `grader` of their `extra`); None: all problems


# --- from a task to its rewards --------------------------------------------------------------------------------------


def rewards(task: Task, functions: Mapping[str, Callable[..., Any]] | None = None, key: str = 'task') -> tuple[Reward, ...]:
  """Return the rewards of a task: those of task.rewards, or task.grader alone with weight 1.

  `functions` are the callables that graders called `python:NAME` stand for. `key` names the settings that have the grader. Raises
  SettingsError as `resolve` does.
  """

  def reward(name: str, weight: float, grader: str, setting: str) -> Reward:
    return Reward(name, weight, resolve(replace(task, grader=grader), functions, setting), setting)

  if not task.rewards:
    return (reward('', 1.0, task.grader, f'config.{key}.grader = {task.grader!r}'),)
  return tuple(
    reward(reward_name(grader), weight, grader, f'config.task.rewards: {grader!r}')
    for grader, weight in map(weighted, task.rewards)
  )


def of_sources(sources: Mapping[str, Task], functions: Mapping[str, Callable[..., Any]] | None = None) -> tuple[Reward, ...]:
  """Return the rewards of several sources of problems, each with the settings of its task. Raises SettingsError as `resolve`.

  The name of a source is '' for the task itself, `eval/NAME` for an entry of eval.sets, else that of an entry of task.mixture.
  """
  several = len(sources) > 1

  def key(name: str) -> str:
    return f'eval.sets.{name.removeprefix("eval/")}' if name.startswith('eval/') else f'task.mixture.{name}' if name else 'task'

  return tuple(
    replace(reward, source=name) if several else reward
    for name, task in sources.items()
    for reward in rewards(task, functions, key(name))
  )


def resolve(task: Task, functions: Mapping[str, Callable[..., Any]] | None = None, where: str = '') -> GraderSpec:
  """Return the task's grader, found but not loaded: a user's file is parsed here and run in the grading processes.

  `where` begins the messages of errors; '': task.grader with its value.

  Raises SettingsError for an unknown grader, and for a file that is missing, is not Python, or lacks the function.
  """
  where = where or f'config.task.grader = {task.grader!r}'
  if task.grader == 'auto':
    if task.kind == 'reasoning_gym':
      assert task.name, 'checked with the settings'
      return GraderSpec(f'auto ({task.name})', 'reasoning_gym', task.name, args=task.args)
    return GraderSpec('auto', 'gsm8k' if task.kind == 'gsm8k' else 'math')
  if task.grader == 'code':  # slow code scores 0 before the pool ends the grader, which would count as its failure
    return GraderSpec('code', 'code', args={'seconds': 0.8 * (task.time_limit or SECONDS)})
  if task.grader == 'judge':
    judge.settings(task.judge)
    args = {**task.judge, 'seconds': 0.9 * (task.time_limit or ASYNC_SECONDS)}
    return GraderSpec('judge', 'judge', args=args, asynchronous=True)
  if task.grader in GRADERS:
    return GraderSpec(task.grader, task.grader)
  if (name := python_name(task.grader)) is not None:
    if name not in (functions or {}):
      known = ', '.join(f'python:{each}' for each in functions or {}) or 'none'
      raise SettingsError(f'{where}: no such function was given to sprl; expected one of these: {known}')
    return from_function((functions or {})[name], task.grader)
  if (found := split_reference(task.grader)) is None:
    raise SettingsError(f'{where}: expected one of {", ".join(GRADERS)}, or `file.py:function`')
  path, function = expanded(found[0]).absolute(), found[1]
  if not path.is_file():
    raise SettingsError(f'{where}: {path}: no such file')
  try:
    source = path.read_bytes()
    module = ast.parse(source)
  except (SyntaxError, ValueError) as error:
    raise SettingsError(f'{where}: {path} is not Python: {error}') from error
  names = _names(module)
  if function not in names and '*' not in names:
    has = sorted(node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    raise SettingsError(f'{where}: {path} has no {function}; it has {", ".join(has) or "no function"}')
  groupwise, asynchronous = _form(module, function)
  return GraderSpec(task.grader, 'file', function, str(path), source, groupwise=groupwise, asynchronous=asynchronous)


def from_function(function: Callable[..., Any], label: str = '') -> GraderSpec:
  """Return the grader that calls a Python function. It runs in a thread of this process, which no time limit can stop."""
  label = label or getattr(function, '__name__', type(function).__name__)
  groupwise = is_groupwise(inspect.signature(function).parameters)
  return GraderSpec(label, 'function', function=function, groupwise=groupwise, asynchronous=is_async(function))


def checksums(rewards: Sequence[Reward]) -> dict[str, str]:
  """Return a checksum of each user's grader by its name: of its file, or of the function and the simple values that it holds."""
  found = {}
  for spec in (reward.grader for reward in rewards):
    if spec.kind == 'file':
      found[spec.label] = checksum(spec.source)
    elif spec.function is not None:
      found[spec.label] = of_callable(spec.function)
  return found


def of_callable(function: Callable[..., Any]) -> str:
  """Return a checksum of a function or class and of the simple values that it holds."""
  try:
    content = _content(function)
  except (ValueError, RecursionError):  # a closure that is not filled yet, or a value that contains itself
    content = _source(function)
  return checksum((content if isinstance(content, str) else repr(content)).encode())


def _content(of: Any) -> Any:
  """Return what tells a callable from others: its source, and the simple values that it holds.

  These are defaults, values of a closure, arguments of a partial, and public attributes of an object.
  """
  match of:
    case partial():
      return [_content(each) for each in (of.func, *of.args, *chain(*sorted(of.keywords.items())))]
    case type():
      return _source(of)
    case types.MethodType():
      return _content(of.__func__), _attributes(of.__self__)
    case types.FunctionType():
      held = [cell.cell_contents for cell in of.__closure__ or ()], of.__defaults__, of.__kwdefaults__
      wrapped = getattr(of, '__wrapped__', None)
      values = [*map(_simple, held), _content(wrapped) if wrapped else None]
      return (_source(of), values) if any(values) else _source(of)
  return (_source(type(of)), _attributes(of)) if callable(of) else _simple(of)


def _attributes(of: Any) -> Any:
  return _simple({name: value for name, value in getattr(of, '__dict__', {}).items() if not name.startswith('_')})


def _simple(value: Any) -> Any:
  """Return a number, a text, or lists and mappings of these. Of anything else the type, as its text may differ between starts."""
  match value:
    case None | bool() | int() | float() | str() | bytes():
      return value
    case list() | tuple():
      return [_simple(each) for each in value]
    case Mapping():
      return {str(name): _simple(each) for name, each in value.items()}
  return type(value).__qualname__


def _source(of: Any) -> str:
  """Return the source of a function or class, or its name if Python does not find that."""
  try:
    return inspect.getsource(of)
  except (OSError, TypeError):
    return getattr(of, '__qualname__', '')


def _names(module: ast.Module) -> set[str]:
  """Return the names that a module defines, assigns or imports, and '*' for a star import."""
  found = set()
  for node in ast.walk(module):
    match node:
      case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
        found.add(node.name)
      case ast.Name(id=name, ctx=ast.Store()):
        found.add(name)
      case ast.alias(name=name, asname=other):
        found.add(other or name)
  return found


def _form(module: ast.Module, function: str) -> tuple[bool, bool]:
  """Return whether a function that the module defines is groupwise, and whether it is async. Other functions: neither."""
  groupwise = asynchronous = False
  for node in ast.walk(module):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
      groupwise = is_groupwise([each.arg for each in (*node.args.args, *node.args.kwonlyargs)])
      asynchronous = isinstance(node, ast.AsyncFunctionDef)
  return groupwise, asynchronous


# --- from a name to a function ---------------------------------------------------------------------------------------


def load(spec: GraderSpec, columns: Collection[str] = ('answer',)) -> Callable[[Any], Any]:
  """Return the function of a Sample, or of the samples of a prompt if the grader is groupwise.

  `columns` are the columns that rows have. Raises any error of a user's file, and TypeError if the function needs a parameter
  that there is not, or if a grader of sprl compares with answers and no row has one.
  """
  match spec.kind:
    case 'reasoning_gym':
      return _reasoning_gym(spec)
    case 'code':
      code_grader.check_columns(columns)
      return partial(code_grader.grade, seconds=spec.args['seconds'])
    case 'judge':
      return judge.load(spec.args)
    case 'file':
      function = _from_file(spec)
    case 'function':
      function = spec.function
      assert function is not None
    case _:
      if 'answer' not in columns:
        raise TypeError(f'the rows have no `answer` to compare with; they have {", ".join(sorted(columns))}')
      function = {'math': math, 'gsm8k': gsm8k, 'numeric': numeric, 'exact': exact}[spec.kind]
      function('', r'\boxed{\frac{1}{2}}', '0.5')  # loads sympy and its grammars before the first sample's clock starts
  return for_groups(function, columns) if spec.groupwise else for_samples(function, columns)


def _from_file(spec: GraderSpec) -> Callable[..., Any]:
  module = imported(Path(spec.path), spec.source)
  function = getattr(module, spec.name)
  if (is_groupwise(inspect.signature(function).parameters), is_async(function)) != (spec.groupwise, spec.asynchronous):
    raise TypeError(f'{spec.label}: a function with `completions`, or an `async def`, must be defined in this file by its name')
  return function


def _reasoning_gym(spec: GraderSpec) -> Grader:
  from sprl.tasks import reasoning

  scorer = reasoning.generator(spec.name, spec.args, seed=0, size=1).score_answer
  return lambda s: float(scorer(final_answer(s.completion, s.answer), s.extra['entry']) >= 1)


# --- graders ---------------------------------------------------------------------------------------------------------


def math(prompt: str, completion: str, answer: str) -> float:
  """Return 1 if the last box equals the answer mathematically; without a box, if the text or its last expression does.

  Boxes with only `,`, `and` or `or` between them are one answer. If the answer is a letter, it is also read from `(C) 5` in a
  box, and without a box from `Answer: C`, `The correct option is C` or `(C)` in the last line. If the answer is in words, the
  words must be equal: mathematics reads them as products of letters, in any order.
  """
  boxed = ', '.join(last_boxes(completion)) or None
  if boxed is not None and (value := number(_plain(boxed))) is not None and value == number(answer):
    return 1.0
  if (letter := _letter(answer)) and (chosen := _choice(completion) if boxed is None else _letter(boxed)):
    return float(chosen == letter)
  if _is_worded(bare := _bare(answer)):
    return float(_worded(_said(completion) if boxed is None else boxed) == _worded(bare))
  return float(_same_mathematics(boxed, completion, answer))


def gsm8k(prompt: str, completion: str, answer: str) -> float:
  """Return 1 if the final number has the value of the answer.

  After `####` or in a box it may be an expression, or have a unit in words.
  """
  line = marked(completion)
  text = (last_boxed(completion) or last_number(completion) or '') if line is None else last_boxed(line) or line
  value = quantity(text)
  if value is not None and number(answer) is not None:
    return float(value == number(answer))
  # `#### 18 (per day)` is 18, but `#### 17 or 18` is not.
  whole = text != line or len(_NUMBER.findall(text)) > 1 or _NO_UNIT.search(text)
  return float(_same_mathematics(text if whole else None, text, answer))


def numeric(prompt: str, completion: str, answer: str) -> float:
  """Return 1 if the last number of the final answer has the value of the answer. Raises ValueError if that is not a number."""
  wanted = number(answer)
  if wanted is None:
    raise ValueError(f'answer = {answer!r}: the numeric grader expects a number')
  return float(number(final_answer(completion, answer)) == wanted)


def exact(prompt: str, completion: str, answer: str) -> float:
  """Return 1 if the completion is the answer, apart from space around both."""
  return float(completion.strip() == answer.strip())


def _same_mathematics(boxed: str | None, text: str, answer: str) -> bool:
  """Whether math-verify finds `boxed` equal to the answer; without a box, `text` or its last expression.

  The time limits of math-verify are off: they are alarms, which some computations ignore. The grading pool kills workers instead.
  """
  import math_verify

  parse = partial(math_verify.parse, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
  if len(boxed or '') > _LONG or (_is_endless(boxed or text) and not _is_endless(answer)):
    return False
  expression = boxed or ('' if len(text) > _LONG or _PROSE.search(text) else text.strip())
  readings = [rf'\boxed{{{expression}}}'] * bool(expression) + [text] * (not boxed)
  wanted = parse(rf'\boxed{{{_bare(answer)}}}')
  return any(math_verify.verify(wanted, parse(reading), timeout_seconds=None) for reading in readings)


def _choice(completion: str) -> str | None:
  """Return the letter that the last line of a completion gives: after `answer`, or alone. None if it names several."""
  chosen = _CHOICE.fullmatch(completion.rstrip().rpartition('\n')[2][-200:])
  return None if chosen is None or _OTHER_CHOICE.search(chosen[2] or '') else chosen[1] or chosen[3]


def _letter(text: str) -> str | None:
  """Return the letter of a choice that a short text gives, with or without what the choice says: `C`, `(C) 5`, `C. Paris`."""
  found = _LETTER.fullmatch(_LATEX_TEXT.sub(r'\1', text).strip())
  return None if found is None else found[1] or found[2]


def _worded(text: str) -> str:
  """Return a text in small letters, without LaTeX's commands for text and without marks around it."""
  plain = re.sub(r'\\[ ,;:!]|~', ' ', _LATEX_TEXT.sub(r' \1 ', text))
  return ' '.join(plain.casefold().split()).strip('#$*_"\'`.,;:! ')


def _is_worded(answer: str) -> bool:
  r"""Whether an answer is in words: `\text{odd}` is, `abc`, a product, is not."""
  text = _worded(answer)
  return _TEXT.fullmatch(text) is not None or (_LATEX_TEXT.search(answer) is not None and _PHRASE.fullmatch(text) is not None)


def _said(completion: str) -> str:
  """Return what a completion without a box says in the end: its last tag, else the last line, from `answer is` on."""
  said = last_tagged(completion)
  if said is None:
    said = marked(completion) or completion.rstrip().rpartition('\n')[2]
  return _ANSWER.split(said[-_LONG:])[-1]


def _is_endless(text: str) -> bool:
  """Whether a text has a tower of powers that takes too long to compute."""
  return any(more or len(low) > 4 or int(low) ** min(int(high[:2]), 20) > 10_000 for low, high, more in _TOWER.findall(text))


def _bare(answer: str) -> str:
  """Return the right answer as an expression: the content of its last boxes, without a full stop at its end or a `$` around it.

  A number is written without an exponent, which math-verify reads as Euler's number.
  """
  text = _ANSWER.sub('', ', '.join(last_boxes(answer)) or answer.strip())
  if not text.endswith(r'\right.'):
    text = text.rstrip('.,; ')
  if pair := re.fullmatch(r'\$+([^$]*)(?<!\\)\$+', text):
    text = pair[1].strip()
  text = text.removesuffix(r'\$')
  value = None if '%' in text or ',' in text else number(text)  # `100,200` may be two numbers
  return text if value is None else format(value, 'f')


# --- reading a completion --------------------------------------------------------------------------------------------

# A minus after a digit, letter or closing bracket is a subtraction; elsewhere it is a sign: `5-7` ends in 7, `= -2` in -2.
_NUMBER = re.compile(
  r'(?:(?<![A-Za-z0-9_.)\]}])(?P<sign>[-+])|(?<![A-Za-z0-9_.]))[$€£]?'
  r'(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?%?'
)
_WORDS = re.compile(r'\s+[A-Za-z]{2,}(?:[\s.,/]+[A-Za-z]{2,})*[\s.]*')
_NO_UNIT = re.compile(  # words that change the value of a number before them
  r'\b(and|or|to|plus|minus|times|over|half|halves|thirds?|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|pi|squared|'
  r'cubed)\b', re.IGNORECASE
)  # fmt: skip
_LATEX_TEXT = re.compile(r'\\(?:text|textrm|textbf|textit|texttt|textsf|emph|mathrm|mathbf|mbox)\s*\{([^{}]*)\}')
_FORMULA = re.compile(r'[\\^]|(?<=[0-9)}])\s*/')
_SEPARATED = re.compile(r'(?<=[0-9])(?:\{,\}|,?\\[!,;: ])\s*(?=[0-9]{3}(?![0-9]))')  # thousands in LaTeX
_HUGE = re.compile(r'\^[^}]*\^|\^\s*\{?\s*[0-9]{4}|[0-9]{4}\s*!|!\s*!')  # in a formula for a number: it may have no end
_JOINT = re.compile(r'(?:,|;|and|or|, ?and|, ?or)(?: ?[A-Za-z] ?=)?')
_TAG = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)
_HEADING = re.compile(r'#*\s*[*_]*(?:[0-9]+[.:)]\s+)?[*_]*[A-Za-z]{2,}')  # after ####: `Answer`, `Step 2: Income`, `2. Income`
_ANSWER = re.compile(r'(?:the\s+)?(?:final\s+)?answer[\s*_]*(?:is|:|=)\s*', re.IGNORECASE)
_LETTER = re.compile(  # `(C)`, `(C) 5`, `C. 5`; not `(A) \cup B`
  r'(?i:(?:option|choice)\s+)?(?:\(([A-J])\)(?:\\?[\s~]+(?![-+*/=<>]|\\(?:cup|cap|times|cdot|to|leq?|geq?|neq?|pm|in)\b).*|[.:].*)?|'
  r'([A-J])(?:[.:)].*)?)', re.DOTALL
)  # fmt: skip
_CHOICE = re.compile(
  r'.*?\b(?i:answer|option|choice)\b[\s*_]*(?i:is|:)[\s*_:]*(?i:(?:option|choice)\s+)?\(?([A-J])(?:[.,:;)*_](.*))?|'
  r'[\s*_]*\(?([A-J])[.)*_]*'
)
_OTHER_CHOICE = re.compile(r'\b(?i:answer|choice|option)\W+(?:(?i:is)\W+)?[A-J]\b')
_PHRASE = re.compile(r"[a-z]{2,}(?:[ '-]+[a-z]+)*")
_SYMBOLS = 'inf|infty|infinity|alpha|beta|gamma|delta|epsilon|zeta|theta|iota|kappa|lambda|sigma|upsilon|omega'
_TEXT = re.compile(  # with four letters or more in a word: `abc` is a product
  rf'(?!(?:{_SYMBOLS})$)(?:yes|no|(?=.*[a-z]{{4}}){_PHRASE.pattern})'
)
_LONG = 1000  # characters of the longest expression: reading one takes a millisecond per character
_TOWER = re.compile(r'\^\s*\{?\s*([0-9]+)\s*\^\s*\{?\s*([0-9]+)(\s*\^)?')  # powers of powers
_PROSE = re.compile(r'(?<![A-Za-z])[A-Za-z]{2,}+\s+[A-Za-z]{2}|\n')  # two words, or two lines


def final_answer(completion: str, answer: str) -> str:
  """Return the last <answer> tag, else the last box, else the whole text; if `answer` is a number, its last number or ''.

  Of a formula in a tag or box, the value counts: `answer` if it has this value, else ''.
  """
  tagged = last_tagged(completion)
  chosen = tagged if tagged is not None else last_boxed(completion) or None
  if number(answer) is None:
    return (completion if chosen is None else _LATEX_TEXT.sub(r'\1', chosen)).strip()
  if chosen is not None and quantity(chosen) is None and _is_formula(_LATEX_TEXT.sub(r' \1 ', _plain(chosen))):
    return answer if not _HUGE.search(chosen) and _same_mathematics(chosen, chosen, answer) else ''
  return last_number(completion if chosen is None else _plain(chosen)) or ''


def _is_formula(text: str) -> bool:
  return _FORMULA.search(text) is not None and _PROSE.search(text) is None


def marked(text: str) -> str | None:
  """Return the line after the last `####`, or None. A Markdown heading that starts with a word is no such line."""
  lines = (after.strip().partition('\n')[0].strip('*_` ').lstrip('~') for after in text.split('####')[1:])
  *_, last = [None, *(line for line in lines if not _HEADING.match(line))]
  return last


def last_tagged(text: str) -> str | None:
  """Return the content of the last complete <answer> tag, or None."""
  *_, last = [None, *_TAG.findall(text)]
  return last


_BRACES = re.compile(r'\\boxed\{|[{}]')


def last_boxed(text: str) -> str | None:
  r"""Return the content of the last complete `\boxed{...}`, with balanced braces, or None."""
  *_, last = [None, *(content for _, _, content in _boxes(text))]
  return last


def _boxes(text: str) -> list[tuple[int, int, str]]:
  """Return (start, end, content) of the complete boxes in which there is no other, in their order."""
  opened: list[re.Match[str]] = []
  found: list[tuple[int, int, str]] = []
  for brace in _BRACES.finditer(text):
    if brace[0] != '}':
      opened.append(brace)
    elif opened:
      first = opened.pop()
      if first[0] != '{' and not (found and found[-1][0] > first.start()):
        found.append((first.start(), brace.end(), text[first.end() : brace.start()].strip()))
  return found


def last_boxes(text: str) -> list[str]:
  r"""Return the contents of the last boxes with only `,`, `and` or `or` between them, as in `\boxed{3} or \boxed{4}`."""
  found = _boxes(text)
  first = len(found) - 1
  while first > 0 and _JOINT.fullmatch(' '.join(text[found[first - 1][1] : found[first][0]].replace('$', ' ').split())):
    first -= 1
  return [content for _, _, content in found[max(first, 0) :]]


def last_number(text: str) -> str | None:
  """Return the last number in the text as written, without thousands commas, currency and percent signs."""
  *_, last = [None, *_NUMBER.finditer(text.replace('\u2212', '-'))]
  return last and (last['sign'] or '') + last['digits'].replace(',', '') + (last['exponent'] or '')


def number(text: str) -> Decimal | None:
  """Return the value of a text that is one number (`18`, `-1,000.0`, `$18.`, `50%` as 50), or None."""
  text = text.strip().removesuffix('.').replace('\u2212', '-')
  return Decimal(last_number(text) or '') if _NUMBER.fullmatch(text) else None


def _plain(text: str) -> str:
  """Return a text with the commas of thousands in place of LaTeX's, and without a space behind its sign."""
  return re.sub(r'^\s*-\s+(?=[0-9.$])', '-', _SEPARATED.sub(',', text))


def quantity(text: str) -> Decimal | None:
  r"""Return the value of a text that is one number, perhaps with a unit in words (`18 eggs`, `18\text{ eggs}`), or None."""
  text = _LATEX_TEXT.sub(r' \1 ', _plain(text)).replace(r'\$', '$').strip()
  first, _, _ = text.partition(' ')
  words = text[len(first) :]
  return number(first if _WORDS.fullmatch(words) and not _NO_UNIT.search(words) else text)
