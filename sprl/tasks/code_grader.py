"""The grader `code`: runs the code of a completion against the tests of its row. The score is 1 if all tests pass, else 0.

The code is the last fenced block of the completion, else the whole text. A row has its tests in one of these forms:

    test_list: ['assert add(1, 2) == 3', ...]        statements, after test_setup_code or test_imports (MBPP). `code`, a solution,
                                                     says which functions are tested
    test: 'def check(candidate): ...'                called with the function `entry_point` (HumanEval). If the row's prompt
                                                     followed by the code is valid Python, both run together: the code may be
                                                     only the body of a function, or use imports of the prompt
    input_output: {'inputs': [...], 'outputs': [...]}    what a program must read and print, as an object or as JSON (APPS, TACO).
                                                     With `fn_name`: arguments and values of that function, or of that method
                                                     of a class `Solution`

Each completion runs in a process of its own with limits (sprl/tasks/code_runner.py). Statements and `check` run in the
grading worker. They call the functions of the other process through a socket and get values back. So the graded code can neither
see the tests nor report that they passed. In the tests its names do not replace builtins or modules, and its functions do not
replace those of the prompt. A test that calls a method of a returned object trusts that object. A program is compared by its
standard output, and must exit with status 0.

This is not a sandbox for hostile code. Where the kernel has no Landlock, the process can read and write the files of its user,
and read the environment of other processes.
"""

import ast
import builtins
import importlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sprl.tasks.code_runner import decoded, encoded
from sprl.tasks.lifeline import kill
from sprl.tasks.rewards import Sample

FORMS = ('test_list', 'test', 'input_output')  # columns that hold tests
MEMORY = 2 << 30  # bytes of address space
MESSAGE = 1 << 22  # largest value that the code may send, in bytes
_RUNNER = Path(__file__).with_name('code_runner.py')
# An opening fence has its own line, perhaps indented as part of a list. The closing one begins or ends a line.
_FENCED = re.compile(
  r'^(?P<indent>[ \t]*)(?P<fence>```|~~~)(?P<language>[^`\n]*)\n(?P<code>.*?)(?:^[ \t]*(?P=fence)|(?P=fence)[ \t]*$|\Z)',
  re.DOTALL | re.MULTILINE,
)
_PYTHON = ('python', 'python3', 'py')  # how such a block is marked
_ANNOTATIONS = 'from typing import *'  # the stubs that such rows show use List and others without an import
_MODULES = (  # modules that the tests may use if the code imports them
  'bisect', 'calendar', 'cmath', 'collections', 'copy', 'datetime', 'decimal', 'enum', 'fractions', 'functools', 'hashlib',
  'heapq', 'itertools', 'json', 'math', 'numpy', 'operator', 'random', 're', 'statistics', 'string', 'textwrap', 'time', 'typing',
)  # fmt: skip


def check_columns(columns: Collection[str]) -> None:
  """Raise TypeError if rows of these columns have no tests."""
  if not set(FORMS) & set(columns):
    got = ', '.join(sorted(columns))
    raise TypeError(f'the rows have no tests: expected one of the columns {", ".join(FORMS)}; got {got}')


def grade(sample: Sample, seconds: float) -> float:
  """Return 1 if the code passes all tests of its row within `seconds` in all, else 0.

  Raises LookupError if the row has no test, and TypeError if tests of a function have no lists of arguments.
  """
  code, row, deadline = code_of(sample.completion), sample.row, time.monotonic() + seconds
  if row.get('test_list'):
    setup = '\n'.join([row.get('test_setup_code') or '', *(row.get('test_imports') or ())])
    return float(_passes(code, [setup, *row['test_list']], _defined(row.get('code')), deadline))
  if row.get('test'):
    prompt = row.get('prompt') or ''
    joined = f'{prompt.rstrip()}\n{code}'
    code = joined if _is_python(joined) else code
    tested = {node.id for node in ast.walk(ast.parse(row['entry_point'])) if isinstance(node, ast.Name)}
    helpers = _without(tested, prompt)
    return float(_passes(code, [row['test'], f'check({row["entry_point"]})'], tested, deadline, helpers))
  if row.get('input_output'):
    cases = row['input_output']
    cases = json.loads(cases) if isinstance(cases, str) else cases
    pairs = list(zip(cases['inputs'], cases['outputs'], strict=True))
    if not pairs:
      raise LookupError('input_output.inputs is empty: expected at least one test')
    if name := cases.get('fn_name'):
      if other := [given for given, _ in pairs if not isinstance(given, list)]:
        raise TypeError(f'input_output.inputs with fn_name: expected lists of arguments; got {other[0]!r:.80}')
      return float(_returns(code, name, pairs, deadline))
    return float(all(_prints(code, _text(given), _text(wanted), deadline) for given, wanted in pairs))
  raise LookupError(f'the row has no tests: expected one of the columns {", ".join(FORMS)}')


def code_of(completion: str) -> str:
  """Return the last fenced block of Python of a completion, else its last block, else the whole text.

  A block without a language is Python if it defines something: it may also show what the code prints.
  """
  blocks = [*_FENCED.finditer(completion)]
  *_, block = [None, *blocks, *filter(_of_python, blocks)]
  return re.sub(f'^{block["indent"]}', '', block['code'], flags=re.MULTILINE) if block else completion


def _of_python(block: re.Match[str]) -> bool:
  language = block['language'].strip().lower()
  return language in _PYTHON or (
    not language and re.search(r'^\s*(def|class|import|from) ', block['code'], re.MULTILINE) is not None
  )


def _is_python(code: str) -> bool:
  try:
    ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False
  return True


_DEFINITION = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def _defined(solution: str | None) -> set[str]:
  """Return the names of the functions and classes that a solution defines."""
  body = ast.parse(solution).body if solution and _is_python(solution) else []
  return {each.name for each in body if isinstance(each, _DEFINITION)}


def _without(names: Collection[str], prompt: str) -> str:
  """Return the functions and classes of a prompt in Python, except those of `names`; '' for any other prompt."""
  body = ast.parse(prompt).body if _is_python(prompt) else []
  return '\n'.join(ast.unparse(each) for each in body if isinstance(each, _DEFINITION) and each.name not in names)


def _text(lines: Any) -> str:
  return '\n'.join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


# --- a process for the code ------------------------------------------------------------------------------------------


# UnicodeError needs other arguments. StopIteration would end a loop of the test that calls the code, before its comparisons.
_NOT_RAISED = UnicodeError, StopIteration, StopAsyncIteration


class _Over(Exception):
  """The process of the code has ended, takes too long, or sends something other than a value."""


class Process:
  """The process of one completion. A context manager, which sends the code."""

  def __init__(
    self,
    code: str,
    deadline: float,
    script: bool = False,
    helpers: str = '',
    imports: str = '',
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
  ):
    """Start it. `imports` run before the code. `helpers` are definitions that replace those of it. A script has neither."""
    self._deadline, self.lost = deadline, False
    self._first = {'code': code, 'script': script, 'helpers': helpers, 'imports': imports}
    self._folder = tempfile.TemporaryDirectory()
    self._ours, theirs = socket.socketpair()
    arguments = str(theirs.fileno()), str(max(0.1, deadline - time.monotonic())), str(MEMORY)
    home = self._folder.name
    environment = {'PATH': '/usr/bin:/bin', 'HOME': home, 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}  # no keys
    with theirs:
      try:
        self._process = subprocess.Popen(
          [sys.executable, '-I', str(_RUNNER), *arguments],
          pass_fds=[theirs.fileno()],
          cwd=home,
          process_group=0,
          env=environment,
          stdin=stdin,
          stdout=stdout or subprocess.DEVNULL,
          stderr=subprocess.DEVNULL,
        )
      except OSError:
        self._ours.close()
        self._folder.cleanup()
        raise

  def __enter__(self) -> 'Process':
    try:
      self._send(self._first)
    except _Over:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_) -> None:
    self._ours.close()
    kill(self._process.pid)
    self._process.kill()  # it may have left its group where the kernel filter does not run
    self._process.wait()
    self._folder.cleanup()

  def names(self) -> dict[str, Any]:
    """Return the names that the code defines, with their values. Raises the exception that the code raised."""
    return self._reply()

  def ask(self, **call: Any) -> Any:
    """Make a call in the process and return its value. Raises the exception that the code raises."""
    self._send(call)
    return self._reply()

  def status(self) -> int | None:
    """Wait for the process to end. Return its exit status, or None if the time is up."""
    try:
      return self._process.wait(max(0.0, self._deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
      return None

  def _send(self, message: Mapping[str, Any]) -> None:
    try:
      self._ours.settimeout(self._left())
      self._ours.sendall(json.dumps(message).encode() + b'\n')
    except OSError:
      raise self._over('it ended') from None

  def _reply(self) -> Any:
    data = b''
    while not data.endswith(b'\n'):
      try:
        self._ours.settimeout(self._left())
        part = self._ours.recv(1 << 16)
      except OSError:
        raise self._over('too slow') from None
      data += part
      if not part or len(data) > MESSAGE:
        raise self._over('it ended, or its value is too large')
    try:
      reply = json.loads(data)
      if 'value' in reply:
        return decoded(reply['value'], self._object)
      name, text = str(reply['raised']), str(reply['text'])
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
      raise self._over('it sent no value') from None
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
      raise kind(text)
    raise RuntimeError(f'{name}: {text}')

  def _object(self, number: Any) -> Any:
    if isinstance(number, str):
      return importlib.import_module(number) if number in _MODULES else None
    return Remote(self, int(number))

  def _left(self) -> float:
    if self.lost or (left := self._deadline - time.monotonic()) <= 0:
      raise self._over('the time is over')
    return left

  def _over(self, why: str) -> _Over:
    self.lost = True  # a test that catches every exception must not pass
    return _Over(why)


class Remote:
  """A function or object in the process of the code. It equals only itself, even if the code defines `__eq__`."""

  def __init__(self, process: Process, number: int):
    self._process, self._number = process, number

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Call it with plain data or with other objects of the same process."""
    return self._process.ask(of=self._number, args=encoded(args, _number), kwargs=encoded(kwargs, _number))

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    return self._process.ask(of=self._number, attribute=name)


def _number(value: Any) -> int:
  if not isinstance(value, Remote):
    raise TypeError(f'a test passes a {type(value).__name__} to the code: expected plain data')
  return value._number


def _passes(code: str, tests: Collection[str], tested: Collection[str], deadline: float, helpers: str = '') -> bool:
  """Whether all tests run without an exception, with the names that the code and `helpers` define.

  The functions that are `tested` may have the name of a builtin. Raises SyntaxError for a wrong test,
  ModuleNotFoundError if a test needs a package that is not installed, and OSError if no process can be started.
  """
  trees = [ast.parse(test) for test in tests]
  compiled = [compile(tree, 'test', 'exec') for tree in trees]
  attributes = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
  used = {of.id for of in attributes if isinstance(of, ast.Name)}
  started = Process(code, deadline, helpers=helpers)
  try:
    with started as process:
      names = {name: value for name, value in process.names().items() if name in tested or _may_use(name, value, used)}
      for test in compiled:
        exec(test, names)
      return not process.lost
  except ModuleNotFoundError as error:
    if error.name:  # an error that the code has raised has no name here
      raise
    return False
  except Exception:
    return False


def _may_use(name: str, value: Any, used: Collection[str]) -> bool:
  """Whether tests may use a name of the code: it must not replace a builtin, or a module of which the tests read attributes.

  `used` are the names of which they read attributes. A function of the code may be called `calendar`.
  """
  if name in _MODULES and name in used:
    return value is importlib.import_module(name)
  return not name.startswith('__') and not hasattr(builtins, name)


def _returns(code: str, name: str, pairs: Collection[tuple[Any, Any]], deadline: float) -> bool:
  """Whether a function returns the expected value for each list of arguments.

  Some rows wrap each expected value in a list. If all are lists of one element, the element counts too. Raises OSError if no
  process can be started.
  """
  wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in pairs)
  started = Process(code, deadline, imports=_ANNOTATIONS)
  try:
    with started as process:
      names = process.names()
      function = names[name] if name in names else getattr(names['Solution'](), name)
      for arguments, wanted in pairs:
        value = _as_json(function(*arguments))
        if value != wanted and not (wrapped and [value] == wanted):
          return False
      return not process.lost
  except Exception:
    return False


def _as_json(value: Any) -> Any:
  """Return a value with lists for tuples, as in JSON."""
  match value:
    case list() | tuple():
      return [_as_json(each) for each in value]
    case dict():
      return {str(key): _as_json(each) for key, each in value.items()}
  return value


def _prints(code: str, given: str, expected: str, deadline: float) -> bool:
  """Whether a program that reads `given` prints `expected`, apart from space at the ends of lines, and exits with status 0."""
  with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
    stdin.write(given.encode())
    stdin.seek(0)
    try:
      with Process(code, deadline, script=True, stdin=stdin, stdout=stdout) as process:
        if process.status() != 0:
          return False
    except _Over:
      return False
    stdout.seek(0)
    return _lines(stdout.read().decode(errors='replace')) == _lines(expected)


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.strip().splitlines()]
