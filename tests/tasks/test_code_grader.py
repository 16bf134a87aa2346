"""The grader `code`: tests of public data sets' forms, and programs that try to pass without being right."""

import ctypes
import errno
import math
import os
import platform
import subprocess
import sys
import tempfile
import time

import pytest
from pools import answers, processes

from sprl.config import Task
from sprl.tasks import graders
from sprl.tasks.code_grader import _may_use, code_of, grade
from sprl.tasks.code_runner import decoded, encoded
from sprl.tasks.grader_pool import Grade, grader_pool
from sprl.tasks.rewards import Sample

SECONDS = 5.0

# Rows with the columns that MBPP, its sanitised form, HumanEval and APPS have. The texts are our own.
MBPP = {
  'text': 'Write a function to find the largest gap between neighbours of a list.',
  'test_setup_code': '',
  'test_list': ['assert gap([1, 4, 6]) == 3', 'assert gap([2, 2]) == 0', 'assert gap([5, 1, 2]) == 4'],
  'challenge_test_list': [],
}
GAP = 'def gap(values):\n  return max(abs(a - b) for a, b in zip(values, values[1:]))\n'
SANITISED = {'test_imports': ['import math'], 'test_list': ['assert math.isclose(half(3), 1.5)']}
HUMAN_EVAL = {
  'prompt': 'from typing import List\n\n\ndef total(values: List[int]) -> int:\n  """Return the sum.\n  """\n',
  'entry_point': 'total',
  'test': 'METADATA = {}\n\ndef check(candidate):\n  assert candidate([]) == 0\n  assert candidate([1, 2]) == 3, "sum"\n',
}
APPS = {'input_output': '{"inputs": ["2\\n3 4\\n", "1\\n5\\n"], "outputs": ["7\\n", ["5"]]}'}
CALLS = {'input_output': '{"fn_name": "pair", "inputs": [[1, 2], [3, 4]], "outputs": [[2, 1], [4, 3]]}'}
WRAPPED = {'input_output': {'fn_name': 'add', 'inputs': [[1, 2], [3, 4]], 'outputs': [[3], [7]]}}
TREE = {  # the test passes objects of the prompt's class to the code, and compares with a helper
  'prompt': 'class Node:\n  def __init__(self, x, below=None): self.x, self.below = x, below\n\n'
  'def same(a, b): return a is b or (a and b and a.x == b.x and same(a.below, b.below))\n',
  'entry_point': 'Solution().double',
  'test': 'def check(candidate):\n  assert same(candidate(Node(1, Node(2))), Node(2, Node(4)))\n',
}
DOUBLE = 'class Solution:\n  def double(self, n): return n and Node(FACTOR * n.x, self.double(n.below))\n'
SHADOWING = {  # the tested function has the name of a builtin
  'code': 'def sum(a, b):\n  return a - b',
  'test_list': ['assert sum(5, 2) == 3', 'assert abs(sum(1, 2)) == 1'],
}
HELPER = {  # the test uses an import and a helper of the prompt
  'prompt': 'import math\n\ndef square(x):\n  return x * x\n\ndef root(y):\n  """Return x with square(x) == y."""\n',
  'entry_point': 'root',
  'test': 'def check(candidate):\n  assert math.fabs(square(candidate(9.0)) - 9.0) < 1e-6\n',
}
SUM = 'n = int(input())\nprint(sum(map(int, input().split())))\n'


def score(code, row):
  return grade(Sample('', code, '', row), SECONDS)


@pytest.mark.parametrize(
  ('row', 'code', 'expected'),
  [
    (MBPP, GAP, 1),
    (MBPP, f'Here it is:\n```python\nwrong\n```\nno,\n```python\n{GAP}```\nDone.', 1),
    (MBPP, f'```\n{GAP}', 1),  # cut off before the fence closes
    (MBPP, GAP.replace('abs', ''), 0),
    (MBPP, '', 0),
    (MBPP, 'def gap(values:', 0),
    (MBPP, 'raise ValueError', 0),
    (SANITISED, 'def half(x): return x / 2', 1),
    (SANITISED, 'def half(x): return x // 2', 0),
    (HUMAN_EVAL, '  return sum(values)\n', 1),  # the body that continues the prompt
    (HUMAN_EVAL, '```python\ndef total(values):\n  return sum(values)\n```', 1),
    (HUMAN_EVAL, 'def total(values: List[int]):\n  return sum(values)\n', 1),  # with an import of the prompt
    ({**HUMAN_EVAL, 'prompt': 'Write total.'}, 'def total(values):\n  return sum(values)\n', 1),
    (HUMAN_EVAL, '  return len(values)\n', 0),
    (HUMAN_EVAL | {'prompt': None}, 'def total(values):\n  return sum(values)\n', 1),
    (SHADOWING, 'def sum(x, y): return x - y', 1),
    (SHADOWING, 'def sum(x, y): return x + y', 0),
    (HELPER, '  return y ** 0.5\n', 1),
    (HELPER, 'def root(y): return y\n', 0),
    (CALLS, 'def pair(a, b): return b, a', 1),
    (CALLS, 'class Solution:\n  def pair(self, a, b): return [b, a]', 1),
    (CALLS, 'class Solution:\n  def pair(self, a: Any, b: Any) -> List[Any]: return [b, a]', 1),  # as in the stubs of such rows
    (CALLS, 'from __future__ import annotations\ndef pair(a, b): return b, a', 1),
    (CALLS, 'def pair(a, b): return a, b', 0),
    (CALLS, 'print(2, 1)', 0),
    (CALLS, 'def pair(a, b): return [[b, a]]', 0),
    (WRAPPED, 'def add(a, b): return a + b', 1),
    (WRAPPED, 'def add(a, b): return [a + b]', 1),
    (WRAPPED, 'def add(a, b): return a - b', 0),
    (TREE, DOUBLE.replace('FACTOR', '2'), 1),
    (TREE, DOUBLE.replace('FACTOR', '3'), 0),
    ({'input_output': {'inputs': [3], 'outputs': [9]}}, 'print(int(input()) ** 2)', 1),
    (APPS, SUM, 1),
    (APPS, SUM.replace('sum', 'max'), 0),
    (APPS, SUM + 'raise SystemExit(1)', 0),
    (APPS, 'def main():\n  ' + SUM.replace('\n', '\n  ') + '\nif __name__ == "__main__": main()', 1),
    ({'input_output': {'inputs': ['4'], 'outputs': ['4']}}, 'print(open("/dev/stdin").read())', 1),
    ({'input_output': {'inputs': ['1\n2'], 'outputs': ['3']}}, 'import sys\nprint(sum(map(int, sys.stdin)), end=" \\n\\n")', 1),
  ],
)
def test_scores_of_code(row, code, expected):
  assert score(code, row) == expected


PLAIN = "[(1, 'a'), {2}, {'k': None}, b'x', 2j, 1.5, True]"
STACK = """
class Stack:
  def __init__(self): self.items = []
  def push(self, x): self.items.append(x)
  def pop(self): return self.items.pop()
"""


@pytest.mark.parametrize(
  ('test', 'code'),
  [
    (f'assert f() == {PLAIN}', f'def f(): return {PLAIN}'),
    ('assert f([(1, {2: 3})]) == (1, {2: 3})', 'def f(x): return x[0]'),
    ("assert f('abc') == {'a': 1, 'b': 1, 'c': 1}", 'from collections import Counter\ndef f(x): return Counter(x)'),
    ('assert f(3) == [0, 1, 2]', 'def f(n): return (i for i in range(n))'),
    ('assert f(2, key=3) == 5', 'def f(n, key): return n + key'),
    ('assert math.isnan(f())', 'import math\ndef f(): return math.nan'),
    ('assert f() == [1, 2]', 'import numpy\ndef f(): return numpy.array([1, 2])'),
    ('assert json.loads(f()) == [1]', 'import json\ndef f(): return "[1]"'),
    ('assert f() == np.float64(0.5)', 'import numpy as np\ndef f(): return 0.5'),
    ('assert calendar(2) == 4', 'def calendar(n): return 2 * n'),  # also the name of a module
    ('assert 0 <= random() < 1', 'from random import random'),
    ('assert f(10**5000) == -10**5000', 'def f(n): return -n'),  # more digits than Python writes
    ('assert twice(f, 3) == 12', 'def f(n): return 2 * n\ndef twice(g, n): return g(g(n))'),
    ('s = Stack(); s.push(3); s.push(4); assert s.pop() == 4; assert s.items == [3]', STACK),
    ('try:\n  f(-1)\nexcept ValueError as error:\n  assert str(error) == "negative"\nelse:\n  assert False',
     'def f(n):\n  if n < 0: raise ValueError("negative")'),
  ],
)  # fmt: skip
def test_values_pass_between_the_tests_and_the_code(test, code):
  assert score(code, {'test_list': [test]}) == 1


FORGERY = """
import os
for fd in range(3, 64):
  try: os.write(fd, b'{"value": true}\\n' * 9)
  except OSError: pass
def gap(v): return 77
"""
MARK = f'{4000 + os.getpid()}.5'  # seconds of a `sleep` that only these tests start
YES = 'class Yes:\n  def __eq__(self, other): return True\n  __ne__ = __lt__ = __gt__ = __eq__\ndef gap(v): return Yes()'
HACKS = {  # where only a refusal or a limit can make the score 0, the function itself is right
  'exit': 'import sys\nsys.exit(0)',
  'exit at once': 'import os\nos._exit(0)',
  'exit in the function': 'import os\ndef gap(values): os._exit(0)',
  'an exception that says success': 'def gap(values): raise SystemExit(0)',
  'equals everything': YES,
  'a number that equals everything': 'class Yes(int):\n  def __eq__(self, other): return True\ndef gap(v): return Yes(77)',
  'no assertions': 'import builtins\nclass Never(BaseException): pass\nbuiltins.AssertionError = Never\ndef gap(v): return 77',
  'builtins': 'import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\ndef gap(v): return 77',
  'a forged value': FORGERY,
  'the closed socket': 'import os\nos.closerange(3, 64)\n' + GAP,
  'tracing': 'import sys\nsys.settrace(lambda *a: None)\ndef gap(v): return 77',
  'a debugger': 'import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\n' + GAP,
  'a signal to the grader': 'import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n' + GAP,
  'an endless loop': 'while True: pass',
  'an endless loop in the function': 'def gap(v):\n  while True: pass',
  'a hang that catches everything': 'import time\nwhile True:\n  try: time.sleep(1)\n  except BaseException: pass',
  'a huge allocation': 'x = bytearray(1 << 33)\n' + GAP,
  'a leak': 'x = []\nwhile True: x.append(bytearray(1 << 24))',
  'a huge value': 'def gap(v): return "x" * (1 << 24)',
  'deep nesting': 'def gap(v):\n  x = []\n  for _ in range(100000): x = [x]\n  return x',
  'a fork bomb': 'import os\nwhile True: os.fork()',
  'a process that leaves its group': 'import os, time\nos.setpgid(0, os.getpgid(os.getppid()))\ntime.sleep(4243)',
  'a child that outlives': f"import subprocess\nsubprocess.Popen(['sleep', '{MARK}'])\n" + GAP,
  'another program': "import os\nos.execv('/bin/true', ['true'])",
  'the network': 'import socket\nsocket.socket()\n' + GAP,
}  # fmt: skip
SHADOWS = {  # wrong code that replaces what its tests use
  'a builtin': ('def f(x): return 0\ndef abs(x): return 0', {'test_list': ['assert abs(f(3) - 1) < 1e-6']}),
  'a type': ('def f(): return ()\ndef set(x): return 0', {'test_list': ['assert set(f()) == set((1, 2))']}),
  'a builtin of check': (
    'def total(values): return 9\ndef abs(x): return 0',
    HUMAN_EVAL | {'test': 'def check(candidate):\n  assert abs(candidate([1]) - 1) < 1e-6\n'},
  ),
  'a module': (
    'class math:\n  @staticmethod\n  def isclose(a, b): return True\ndef half(x): return 0',
    {'test_list': ['assert math.isclose(half(3), 1.5)']},
  ),
  'a module by another': ('import operator as math\ndef half(x): return 0', {'test_list': ['assert math.eq(half(3), 0)']}),
  'a helper of the prompt': ('def square(x): return 9.0\ndef root(y): return 0', HELPER),
  'a helper that compares': (DOUBLE.replace('FACTOR', '3') + 'def same(a, b): return True\n', TREE),
  'the end of a loop': (
    'def f(x): raise StopIteration',
    {'test_list': ['assert all(map(lambda x: f(x) == x, [1, 2]))', 'for a, b in zip(map(f, [1]), [1]): assert a == b']},
  ),
}


def test_names_that_only_a_forged_reply_has_are_left_out():
  assert not _may_use('__builtins__', {}, ())
  assert not _may_use('abs', 1, ())
  assert not _may_use('math', None, {'math'})
  assert _may_use('math', math, {'math'})
  assert _may_use('gap', 1, {'math'})


@pytest.mark.parametrize('name', SHADOWS)
def test_code_cannot_replace_what_its_tests_use(name):
  assert score(*SHADOWS[name]) == 0


SLOW = ('a leak', 'an endless loop', 'an endless loop in the function', 'a hang that catches everything')


@pytest.mark.skipif(sys.platform != 'linux', reason='the kernel refuses processes, signals and sockets on Linux only')
@pytest.mark.parametrize('hack', HACKS)
def test_code_that_is_wrong_cannot_pass(hack):
  start = time.monotonic()
  assert grade(Sample('', HACKS[hack], '', MBPP), 1.0 if hack in SLOW else SECONDS) == 0
  assert time.monotonic() - start < 30
  assert not processes(f'sleep\x00{MARK}')


RAW = """libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
  if libc.syscall(*arguments) < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
FORBIDDEN = {
  'a process': 'os.fork()',
  'another program': "os.execv('/bin/true', ['true'])",
  'a socket': 'socket.socket()',
  'a signal': 'os.kill(os.getppid(), 0)',
  'a queued signal': 'call(SYS_QUEUE, os.getppid(), 0, bytes(128))',
  'a signal when a pipe is ready': 'fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())',
  'another signal for a pipe': 'fcntl.fcntl(0, 10, 9)',
  'limits of the grader': 'resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)',
  'another process group': 'os.setpgid(0, os.getpgid(os.getppid()))',
  'a session': 'os.setsid()',
  'a life after the grader': 'call(SYS_PRCTL, 1, 0, 0)',
  'more memory': 'resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))',
  'a namespace': 'os.unshare(os.CLONE_NEWUSER)',
}


@pytest.mark.skipif(sys.platform != 'linux', reason='the kernel refuses processes, signals and sockets on Linux only')
@pytest.mark.parametrize('call', FORBIDDEN)
def test_the_kernel_refuses_what_code_may_not_do(call):
  numbers = {'x86_64': (129, 157), 'aarch64': (138, 167)}[platform.machine()]
  tried = FORBIDDEN[call].replace('SYS_QUEUE', str(numbers[0])).replace('SYS_PRCTL', str(numbers[1]))
  body = f'def f():\n  try: {tried}\n  except (OSError, ValueError) as e: return str(e)'
  code = f'import ctypes, fcntl, os, resource, socket\n{RAW}{body}'
  assert score(code, {'test_list': ['assert "not permitted" in f() or "not allowed" in f()']}) == 1


def has_landlock() -> bool:
  return sys.platform == 'linux' and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0


ELSEWHERE = {
  'the environment of the grader': "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
  'the memory of the grader': "open(f'/proc/{os.getppid()}/mem', 'r+b')",
  'other processes': "os.listdir('/proc')",
  "a user's file": 'open(SECRET).read()',
  'a new file': "open(SECRET + '.new', 'w')",
  'a removed file': 'os.remove(SECRET)',
  'a truncated file': 'os.truncate(SECRET, 0)',
  'a link to a file': "os.link(SECRET, 'here')",
}


@pytest.mark.skipif(not has_landlock(), reason='needs Landlock: Linux 5.13 or newer')
@pytest.mark.parametrize('call', ELSEWHERE)
def test_the_kernel_refuses_what_is_outside_the_folder(call, tmp_path):
  """The processes of an unprivileged user may read each other; root, without capabilities, may not in any case."""
  secret = tmp_path / 'secret'
  secret.write_text('sk-1')
  tried = ELSEWHERE[call].replace('SECRET', repr(str(secret)))
  code = f'import os\ndef f():\n  try: {tried}\n  except OSError as e: return type(e).__name__\n  return "done"'
  refused = ('PermissionError', 'OSError')  # a link to another folder is a link to another device
  assert score(code, {'test_list': [f'assert f() in {refused}']}) == 1
  assert secret.read_text() == 'sk-1'


def test_the_code_may_use_its_folder_and_libraries():
  code = (
    'import json, os, sqlite3, tempfile, zoneinfo\n'
    'def f():\n'
    '  os.mkdir("a"); open("a/b", "w").write("x"); os.rename("a/b", "c"); os.truncate("c", 0)\n'
    '  open(os.devnull, "w").write("x")\n'
    '  import numpy, random\n'
    '  return os.listdir("."), int(numpy.ones((64, 64)).dot(numpy.ones(64)).sum()), tempfile.gettempdir() == os.getcwd()\n'
  )
  assert score(code, {'test_list': ['r = f()', "assert sorted(r[0]) == ['a', 'c'] and r[1] == 4096"]}) == 1


def test_threads_are_allowed():
  code = 'import threading\ndef f():\n  t = threading.Thread(target=print)\n  t.start()\n  t.join()\n  return 1'
  assert score(code, {'test_list': ['assert f() == 1']}) == 1


def test_a_test_that_catches_everything_does_not_pass_code_that_ended():
  row = {'test_list': ['try:\n  f()\nexcept Exception:\n  pass']}
  assert score('import os\ndef f(): os._exit(0)', row) == 0
  assert score('def f(): raise KeyError', row) == 1


def test_a_program_that_prints_without_end_is_stopped():
  assert score('while True: print("x" * 10000)', APPS) == 0


def test_the_code_finds_an_empty_folder_and_no_secrets(monkeypatch):
  monkeypatch.setenv('OPENAI_API_KEY', 'sk-secret')
  code = 'import os\ndef f(): return os.listdir("."), "OPENAI_API_KEY" in os.environ, os.getcwd() == os.environ["HOME"]'
  assert score(code, {'test_list': ['assert f() == ([], False, True)']}) == 1


def test_a_wrong_test_is_an_error_of_the_row():
  with pytest.raises(SyntaxError):
    score(GAP, {'test_list': ['assert gap(']})
  with pytest.raises(LookupError, match='the row has no tests: expected one of the columns test_list, test, input_output'):
    score(GAP, {'text': 'x'})
  for cases in ({'inputs': [], 'outputs': []}, {'inputs': [], 'outputs': [], 'fn_name': 'gap'}):
    with pytest.raises(LookupError, match=r'input_output.inputs is empty: expected at least one test'):
      score(GAP, {'input_output': cases})


def test_a_package_that_only_the_tests_need_is_named():
  with pytest.raises(ModuleNotFoundError, match='no_such_package'):
    score(GAP, MBPP | {'test_setup_code': 'import no_such_package'})
  assert score('import no_such_package', MBPP) == 0
  assert score('def gap(values): import no_such_package', MBPP) == 0


@pytest.mark.parametrize('row', [MBPP, CALLS, APPS], ids=['tests', 'calls', 'a program'])
@pytest.mark.parametrize(('of', 'name'), [(tempfile, 'TemporaryDirectory'), (subprocess, 'Popen')])
def test_a_machine_without_room_gives_no_verdict(monkeypatch, row, of, name):
  def no_room(*_, **__):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(of, name, no_room)
  with pytest.raises(OSError, match='No space left'):
    score(GAP, row)


def test_tests_of_a_function_without_lists_of_arguments_are_refused():
  row = {'input_output': {'fn_name': 'add', 'inputs': [[1, 2], '3'], 'outputs': [3, 3]}}
  with pytest.raises(TypeError, match=r"input_output\.inputs with fn_name: expected lists of arguments; got '3'"):
    score('def add(a, b): return a + b', row)


def test_rows_without_tests_are_refused_at_the_start():
  with pytest.raises(TypeError, match=r'the rows have no tests: .* test_list, test, input_output; got answer, prompt'):
    graders.load(graders.resolve(Task(grader='code')), ('prompt', 'answer'))


def test_code_is_graded_in_the_pool_and_slow_code_is_wrong_and_not_a_failure():
  rewards = graders.rewards(Task(grader='code', time_limit=1.5))
  with grader_pool(rewards, 1, 1.5, 4.0, columns=MBPP) as pool:
    samples = [Sample('', code, '', MBPP) for code in (GAP, 'while True: pass', GAP)]
    assert answers(pool, *samples) == [Grade(1.0, 'ok'), Grade(0.0, 'ok'), Grade(1.0, 'ok')]


@pytest.mark.parametrize(
  ('completion', 'code'),
  [
    ('x = 1', 'x = 1'),
    ('a\n```py\nx = 1\n```\nb', 'x = 1\n'),
    ('```\n1\n```\n```js\n2\n```', '2\n'),
    ('```Python\n1\n```\nIt prints\n```\n2\n```', '1\n'),
    ('```python\nf(1)\n```\nwith\n```\ndef f(x): return x\n```', 'def f(x): return x\n'),
    ('```py\nx', 'x'),
    ('```py\nx```', 'x'),
    ('1. First\n   ```py\n   if x:\n     y\n   ```', 'if x:\n  y\n'),
    ('```py\n  return x\n```', '  return x\n'),  # the body of a function
    ('~~~py\nx\n~~~', 'x\n'),
    ('```py\nx\n```\n```f(3)``` is 9.', 'x\n'),
    ('```py\nx = "```"\ny\n```', 'x = "```"\ny\n'),
  ],
)
def test_the_code_is_the_last_fenced_block_of_python(completion, code):
  assert code_of(completion) == code


@pytest.mark.parametrize(
  'value', [{'list': 3}, {'dict': [1]}, {'no': []}, {}, {'list': [], 'set': []}, {'bytes': 'x'}, {'complex': []}, {'int': 3}]
)
def test_a_forged_value_is_refused(value):
  with pytest.raises((ValueError, TypeError)):
    decoded(value, lambda number: None)


def test_only_plain_data_is_passed_to_the_code():
  def refuse(value):
    raise TypeError

  value = [1, 'a', None, (2.5, {3: frozenset([4])}), b'\x00']
  assert decoded(encoded(value, refuse), refuse) == value
  with pytest.raises(TypeError):
    encoded([object()], refuse)
