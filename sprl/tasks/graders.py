"""Graders: functions of (prompt, completion, answer) that return a reward, and how a task names its grader.

`math`     1 if the last box, else the text or its last expression, equals the answer mathematically (math-verify)
`gsm8k`    1 if the text after the last `####`, else the last box, else the last number, has the value of the answer
`numeric`  1 if the last number of the final answer has the value of the answer
`exact`    1 if the whole completion is the answer, apart from surrounding space

A reasoning-gym task uses the scorer of its data set. That scorer gives partial marks to any text that contains the answer (0.05
for `The answer is 7` where 7 is right). So it is given the final answer only, and only full marks count as reward 1. The final
answer is the last `<answer>` tag, else the last box, else the whole text; if the answer is a number, the last number in it.
"""

import ast
import functools
import importlib.machinery
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from sprl.config import SettingsError, Task
from sprl.config_checks import GRADERS, grader_file

Grader = Callable[[str, str, str, Mapping[str, Any]], Any]  # (prompt, completion, answer, a Problem's extra)


@dataclass(frozen=True)
class GraderSpec:
  """A grader by name, which a worker process loads."""

  label: str  # its name in messages
  kind: str  # math, gsm8k, numeric, exact, reasoning_gym, file, function
  name: str = ''  # reasoning_gym: the data set; file: the function
  path: str = ''  # file: absolute
  args: Mapping[str, Any] = field(default_factory=dict)  # reasoning_gym: arguments of the data set
  function: Callable[..., Any] | None = None  # function: the Python object, which threads of this process call


# --- from a task to its grader ---------------------------------------------------------------------------------------


def resolve(task: Task) -> GraderSpec:
  """Return the task's grader, found but not loaded: a user's file is parsed here and run in the grading processes.

  Raises SettingsError for an unknown grader, and for a file that is missing, is not Python, or lacks the function.
  """
  if task.grader == 'auto':
    if task.kind == 'reasoning_gym':
      assert task.name, 'checked with the settings'
      return GraderSpec(f'auto ({task.name})', 'reasoning_gym', task.name, args=task.args)
    return GraderSpec('auto', 'gsm8k' if task.kind == 'gsm8k' else 'math')
  if task.grader in GRADERS:
    return GraderSpec(task.grader, task.grader)
  if (found := grader_file(task.grader)) is None:
    raise SettingsError(f'config.task.grader = {task.grader!r}: expected one of {", ".join(GRADERS)}, or `file.py:function`')
  path, function = Path(found[0]).expanduser().absolute(), found[1]
  if not path.is_file():
    raise SettingsError(f'config.task.grader = {task.grader!r}: {path}: no such file')
  try:
    names = _names(ast.parse(path.read_bytes()))
  except (SyntaxError, ValueError) as error:
    raise SettingsError(f'config.task.grader = {task.grader!r}: {path} is not Python: {error}') from error
  if function not in names and '*' not in names:
    raise SettingsError(f'config.task.grader = {task.grader!r}: {path} has no {function}; it has {", ".join(sorted(names))}')
  return GraderSpec(task.grader, 'file', function, str(path))


def _names(module: ast.Module) -> set[str]:
  """Return the names that a module defines, assigns or imports, and '*' for a star import."""
  found = set()
  for node in ast.walk(module):
    match node:
      case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
        found.add(name)
      case ast.alias(name=name, asname=other):
        found.add(other or name)
  return found


def from_function(function: Callable[..., Any]) -> GraderSpec:
  """Return the grader that calls a Python object: f(prompt, completion, answer), or by name if it has a parameter `row`.

  `row` is the whole row of a problem, with all of its columns. Raises SettingsError if the function takes other arguments.
  """
  label = getattr(function, '__name__', repr(function))
  try:
    _arguments(function)
  except (TypeError, ValueError) as error:
    raise SettingsError(
      f'reward = {label}: expected a function of (prompt, completion, answer), or of some of these and `row`: {error}'
    ) from None
  return GraderSpec(label, 'function', function=function)


def _arguments(function: Callable[..., Any]) -> tuple[str, ...] | None:
  """Return the names by which a function is given its arguments; None: by position. Raises TypeError if it takes others."""
  signature = inspect.signature(function)
  if 'row' not in signature.parameters:
    signature.bind('prompt', 'completion', 'answer')
    return None
  names = tuple(name for name in ('prompt', 'completion', 'answer', 'row') if name in signature.parameters)
  signature.bind(**dict.fromkeys(names))
  return names


def _by_name(function: Callable[..., Any]) -> Grader:
  names = _arguments(function)

  def grade(prompt: str, completion: str, answer: str, extra: Mapping[str, Any]) -> Any:
    if names is None:
      return function(prompt, completion, answer)
    given = {'prompt': prompt, 'completion': completion, 'answer': answer, 'row': extra.get('row', {})}
    return function(**{name: given[name] for name in names})

  return grade


def load(spec: GraderSpec) -> Grader:
  """Load the grader. Raises any error of a user's file, and TypeError if the function takes other arguments."""
  match spec.kind:
    case 'reasoning_gym':
      return _reasoning_gym(spec)
    case 'function':
      assert spec.function is not None
      return _by_name(spec.function)
    case 'file':
      function = _from_file(spec)
    case _:
      function = {'math': math, 'gsm8k': gsm8k, 'numeric': numeric, 'exact': exact}[spec.kind]
      function('', r'\boxed{\frac{1}{2}}', '0.5')  # loads sympy and its grammars before the first sample's clock starts
  return lambda prompt, completion, answer, extra: function(prompt, completion, answer)


def _from_file(spec: GraderSpec) -> Callable[[str, str, str], float]:
  path = Path(spec.path)
  sys.path.append(str(path.parent))  # the file may import its neighbours; last, so that they shadow nothing
  loader = importlib.machinery.SourceFileLoader('user_grader', str(path))
  module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec('user_grader', loader, origin=str(path)))
  sys.modules['user_grader'] = module
  loader.exec_module(module)
  function = getattr(module, spec.name)
  inspect.signature(function).bind('prompt', 'completion', 'answer')
  return function


def _reasoning_gym(spec: GraderSpec) -> Grader:
  from sprl.tasks import reasoning

  scorer = reasoning.generator(spec.name, spec.args, seed=0, size=1).score_answer

  def grade(prompt: str, completion: str, answer: str, extra: Mapping[str, Any]) -> float:
    return float(scorer(final_answer(completion, answer), extra['entry']) >= 1)

  return grade


# --- graders ---------------------------------------------------------------------------------------------------------


def math(prompt: str, completion: str, answer: str) -> float:
  """Return 1 if the last box equals the answer mathematically; without a box, if the text or its last expression does."""
  return float(_same_mathematics(last_boxed(completion), completion, answer))


def gsm8k(prompt: str, completion: str, answer: str) -> float:
  """Return 1 if the final number has the value of the answer. After `####` or in a box it may be an expression."""
  _, mark, after = completion.rpartition('####')
  text = after.strip().partition('\n')[0] if mark else last_boxed(completion) or last_number(completion) or ''
  if number(text) is not None and number(answer) is not None:
    return float(number(text) == number(answer))
  return float(_same_mathematics(None if mark else text, text, answer))


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

  parse = functools.partial(math_verify.parse, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
  readings = [rf'\boxed{{{boxed}}}'] if boxed else [text] if _PROSE.search(text) else [rf'\boxed{{{text.strip()}}}', text]
  wanted = parse(rf'\boxed{{{last_boxed(answer) or answer.strip().strip("$")}}}')
  return any(math_verify.verify(wanted, parse(reading), timeout_seconds=None) for reading in readings)


# --- reading a completion --------------------------------------------------------------------------------------------

# A minus after a digit, letter or closing bracket is a subtraction; elsewhere it is a sign: `5-7` ends in 7, `= -2` in -2.
_NUMBER = re.compile(
  r'(?:(?<![A-Za-z0-9_.)\]}])(?P<sign>[-+])|(?<![A-Za-z0-9_.]))[$€£]?'
  r'(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?%?'
)
_TAG = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)
_PROSE = re.compile(r'[A-Za-z]{2,}\s+[A-Za-z]{2,}|\n')  # two words, or two lines


def final_answer(completion: str, answer: str) -> str:
  """Return the last <answer> tag, else the last box, else the whole text; if `answer` is a number, its last number or ''."""
  tagged = last_tagged(completion)
  text = tagged if tagged is not None else last_boxed(completion) or completion
  return (last_number(text) or '') if number(answer) is not None else text.strip()


def last_tagged(text: str) -> str | None:
  """Return the content of the last complete <answer> tag, or None."""
  *_, last = [None, *_TAG.findall(text)]
  return last


def last_boxed(text: str) -> str | None:
  r"""Return the content of the last complete `\boxed{...}`, with balanced braces, or None."""
  start = len(text)
  while (start := text.rfind(r'\boxed{', 0, start)) >= 0:
    depth = 0
    for end in range(start + len(r'\boxed'), len(text)):
      depth += (text[end] == '{') - (text[end] == '}')
      if depth == 0:
        return text[start + len(r'\boxed{') : end].strip()
  return None


def last_number(text: str) -> str | None:
  """Return the last number in the text as written, without thousands commas, currency and percent signs."""
  *_, last = [None, *_NUMBER.finditer(text.replace('\u2212', '-'))]
  return last and (last['sign'] or '') + last['digits'].replace(',', '') + (last['exponent'] or '')


def number(text: str) -> Decimal | None:
  """Return the value of a text that is one number (`18`, `-1,000.0`, `$18.`, `50%` as 50), or None."""
  text = text.strip().removesuffix('.').replace('\u2212', '-')
  return Decimal(last_number(text) or '') if _NUMBER.fullmatch(text) else None
