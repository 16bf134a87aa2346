"""What foreign code may do: a table of behaviours by name, for graders and environments that run in other processes.

`act(name)` does one and returns what the code returns. It needs nothing but Python's library and numpy.
"""

import asyncio
import ctypes
import decimal
import fractions
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np


class Odd(float):
  """A number that is not well behaved."""

  def __float__(self):
    raise ValueError('no')


class Liar:
  """An object that claims to be a number."""

  __class__ = property(lambda self: float)

  def __repr__(self):
    raise RuntimeError('no text')


class Mute(Exception):
  """An error without a text."""

  def __str__(self):
    raise KeyboardInterrupt


class Base(BaseException):
  """An error that is no Exception."""


def deep(depth=100_000):
  found = []
  for _ in range(depth):
    found = [found]
  return found


def endless():
  while True:
    yield 1.0


def fork_and_return():
  os.fork()  # both processes return from the grader
  return 1.0


def fork_and_wait():
  if os.fork() == 0:
    time.sleep(0.2)
    os._exit(0)
  return 1.0


def fork_and_leave():
  if os.fork() == 0:
    os.setsid()
    time.sleep(5)
    os._exit(0)
  return 1.0


def flood(write, data, seconds=0.1):
  until = time.monotonic() + seconds
  while time.monotonic() < until:
    write(data)
  return 1.0


def write_to_all(data):
  for fd in range(3, 64):
    try:
      if os.fstat(fd):
        os.write(fd, data)
    except OSError:
      continue
  return 1.0


def closed(*fds):
  for fd in fds:
    try:
      os.close(fd)
    except OSError:
      continue
  return 1.0


def thread(fn, *args):
  threading.Thread(target=fn, args=args).start()
  return 1.0


def ignore_signals():
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  return 1.0


def alarm():
  signal.setitimer(signal.ITIMER_REAL, 0.05)  # the default action ends the process
  time.sleep(0.01)
  return 1.0


def raises(error):
  raise error


def later(fn, *args):
  timer = threading.Timer(0.03, fn, args)
  timer.daemon = True
  timer.start()
  return 1.0


VALUES = {
  'none': None,
  'true': True,
  'text': '1.0',
  'bytes': b'1',
  'nan': float('nan'),
  'inf': float('inf'),
  'huge': 10**400,
  'int': 2**70,
  'complex': 1j,
  'list': [1.0],
  'empty': [],
  'tuple': (1.0, 2.0),
  'dict': {'a': 1},
  'set': {1},
  'object': object(),
  'type': float,
  'numpy': np.float32(0.5),
  'numpy int': np.int64(3),
  'numpy bool': np.bool_(True),
  'numpy nan': np.float32('nan'),
  'array': np.ones(1),
  'arrays': np.ones(3),
  'decimal': decimal.Decimal('0.5'),
  'fraction': fractions.Fraction(1, 3),
  'fraction huge': fractions.Fraction(10**400),
  'odd': Odd(1.0),
  'liar': Liar(),
  'lone': '\ud800',
  'ellipsis': ...,
  'minus': -0.0,
  'tiny': 5e-324,
  'module': os,
  'function': len,
}
ERRORS = {
  'ValueError': ValueError('x' * 100_000),
  'lone': ValueError('\ud800'),
  'mute': Mute(),
  'base': Base('b'),
  'exit': SystemExit(0),
  'keyboard': KeyboardInterrupt(),
  'generator': GeneratorExit(),
  'stop': StopIteration(3),
  'memory': MemoryError(),
  'recursion': RecursionError(),
  'cancelled': asyncio.CancelledError(),
  'group': ExceptionGroup('g', [ValueError()]),
  'async stop': StopAsyncIteration(),
  'os': OSError(9, 'x'),
  'unicode': UnicodeDecodeError('utf-8', b'x', 0, 1, 'r'),
  'pipe': BrokenPipeError(),
  'eof': EOFError(),
  'assertion': AssertionError(),
  'timeout': TimeoutError(),
  'warning': UserWarning('w'),
}
MAY_END = {  # behaviours after which the process may be gone, or its connection; they may also cost the next call of that process
  'exit status': lambda: os._exit(0),
  'exit 77': lambda: os._exit(77),
  'kill': lambda: os.kill(os.getpid(), signal.SIGKILL),
  'segfault': lambda: ctypes.string_at(0),
  'abort': os.abort,
  'group': lambda: os.killpg(0, signal.SIGKILL),
  'stop': lambda: os.kill(os.getpid(), signal.SIGSTOP),
  'close all': lambda: closed(*range(3, 256)),
  'close stdin': lambda: closed(0),
  'close std': lambda: closed(0, 1, 2),
  'write': lambda: write_to_all(b'garbage'),
  'write json': lambda: write_to_all(b'\0\0\0\x02[]'),
  'write length': lambda: write_to_all(b'\x7f\xff\xff\xff'),
  'write deep': lambda: write_to_all(b'\0\0\xc3\x50' + b'[' * 50_000),
  'write answer': lambda: write_to_all(b'\0\0\0\x1d' + b'[[[1.0, "ok", "", {}]], ""]  '),
  'sleep': lambda: time.sleep(60),
  'spin': lambda: re.match(r'(a+)+$', 'a' * 64 + 'b'),
  'loop': lambda: list(endless()),
  'allocate': lambda: bytearray(10**10),
  'alarm': alarm,
  'later': lambda: later(os._exit, 3),
  'later close': lambda: later(closed, *range(3, 256)),
  'lock': lambda: threading.Lock().acquire() and threading.Event().wait(60),
  'exec': lambda: os.execv(sys.executable, [sys.executable, '-c', '']),
  'limit': lambda: sys.setrecursionlimit(30),
  'shutdown': lambda: [socket.socket(fileno=os.dup(fd)).shutdown(2) for fd in range(3, 5)] and 1.0,
  'threads': lambda: [thread(time.sleep, 3) for _ in range(50)] and 1.0,
}
RETURNS = {  # behaviours that return 1.0 and must cost nothing
  'fork': fork_and_return,
  'fork child': fork_and_wait,
  'fork away': fork_and_leave,
  'signals': ignore_signals,
  'flood stdout': lambda: flood(lambda data: os.write(1, data), b'x' * 65536),
  'flood stderr': lambda: flood(sys.stderr.write, 'y' * 999),
  'flood print': lambda: flood(print, 'z' * 999),
  'child': lambda: subprocess.run(['true'], check=True) and 1.0,
  'orphan': lambda: subprocess.Popen(['sleep', '3']) and 1.0,
  'thread': lambda: thread(time.sleep, 0.1),
  'stdin': lambda: 1.0 + len(sys.stdin.read()),
  'chdir': lambda: os.chdir('/') or 1.0,
  'environ': lambda: os.environ.clear() or 1.0,
  'umask': lambda: os.umask(0o777) * 0 + 1.0,
  'deep': lambda: deep() and 1.0,
  'thread dies': lambda: thread(raises, ValueError()),
}


def act(name):
  """Do what a name says. `value X` returns X, `raise X` raises it; other names are those of the tables."""
  what, _, which = name.partition(' ')
  match what:
    case 'value':
      return VALUES[which]
    case 'raise':
      raise ERRORS[which].with_traceback(None)
    case 'ends':
      return MAY_END[which]()
    case 'returns':
      return RETURNS[which]()
  return float(which)  # `score 0.25`
