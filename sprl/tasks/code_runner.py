"""The program that runs a model's code: `python -I code_runner.py FD SECONDS MEMORY`. It imports nothing of sprl.

FD is a socket of JSON lines. The grader (sprl/tasks/code_grader.py) sends {"code": text, "imports": text, "helpers": text,
"script": bool}. The program

1. limits its CPU time, memory, files and output, gives up its capabilities, and asks the kernel to refuse new processes,
   signals, sockets, and files outside its folder (`_confine`);
2. runs the code. A script then ends; its output is what the grader compares. Otherwise `imports` run before it, and `helpers`
   after it, which replace functions of the code;
3. otherwise sends the names that the code defines, and answers calls of its functions until the socket closes.

The tests are never in this process. It sends values only, so code that changes `assert`, builtins or comparisons, or that exits,
cannot make a test pass.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

FILE_BYTES = 1 << 24  # of one file, standard output included
OPEN_FILES = 64


def main(fd: int, seconds: float, memory: int) -> None:
  """Run the code that the socket sends."""
  channel = socket.socket(fileno=fd)
  order = json.loads(_line(channel))
  _confine(seconds, memory)
  module = types.ModuleType('__main__' if order['script'] else 'candidate')
  sys.modules[module.__name__] = module
  if order['script']:
    channel.close()
    exec(compile(order['code'], 'candidate.py', 'exec'), module.__dict__)
    return
  objects: list[Any] = []  # what the grader knows by number

  def number(value: Any) -> int:
    objects.append(value)
    return len(objects) - 1

  try:
    for text in (order['imports'], order['code'], order['helpers']):
      exec(compile(text, 'candidate.py', 'exec'), module.__dict__)
    reply = {'value': encoded({name: v for name, v in vars(module).items() if not name.startswith('__')}, number)}
  except BaseException as error:
    reply = _raised(error)
  while True:
    channel.sendall(json.dumps(reply).encode() + b'\n')
    if not (line := _line(channel)):
      os._exit(0)
    try:
      reply = {'value': encoded(_done(json.loads(line), objects), number)}
    except BaseException as error:
      reply = _raised(error)


def _line(channel: socket.socket) -> bytes:
  """Read one message. The grader sends the next one after the reply."""
  line = b''
  while not line.endswith(b'\n') and (part := channel.recv(1 << 16)):
    line += part
  return line


def _done(call: dict[str, Any], objects: list[Any]) -> Any:
  """Make the grader's call of an object, or read one of its attributes."""
  target = objects[call['of']]
  if 'attribute' in call:
    return getattr(target, call['attribute'])
  args, kwargs = decoded(call['args'], objects.__getitem__), decoded(call['kwargs'], objects.__getitem__)
  return target(*args, **kwargs)


def _raised(error: BaseException) -> dict[str, Any]:
  return {'raised': type(error).__name__, 'text': str(error)[:500]}


# --- values as JSON: plain data by value, other objects by number ----------------------------------------------------


def encoded(value: Any, number: Callable[[Any], int]) -> Any:
  """Return a value as JSON. `number(value)` returns the number of an object that is not plain data."""
  match value:
    case None | bool():
      return value
    case str():
      return str(value)
    case int():
      return int(value) if abs(value) < _LONG else {'int': hex(value)}
    case float():
      return float(value)
    case complex():
      return {'complex': [value.real, value.imag]}
    case bytes() | bytearray():
      return {'bytes': bytes(value).hex()}
    case list() | tuple() | set() | frozenset():
      kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
      return {kind.__name__: [encoded(each, number) for each in value]}
    case dict():
      return {'dict': [[encoded(k, number), encoded(v, number)] for k, v in value.items()]}
    case types.ModuleType():
      return {'module': value.__name__}
  if hasattr(value, 'tolist'):  # numpy
    return encoded(value.tolist(), number)
  if hasattr(value, '__next__') or isinstance(value, _VIEWS):
    return {'list': [encoded(each, number) for each in value]}
  return {'object': number(value)}


_LONG = 1 << 1024  # larger ones pass in hexadecimal: Python writes at most 4,300 digits in decimal
_VIEWS = (range, type({}.keys()), type({}.values()), type({}.items()))


def decoded(value: Any, of_number: Callable[[Any], Any]) -> Any:
  """Return the value of its JSON. `of_number` returns an object by its number, or a module by its name.

  Raises ValueError or TypeError for JSON of another form.
  """
  if not isinstance(value, dict):
    return value
  if len(value) != 1:
    raise ValueError('not a value')
  ((kind, inside),) = value.items()
  match kind:
    case 'list' | 'tuple' | 'set' | 'frozenset':
      make = {'list': list, 'tuple': tuple, 'set': set, 'frozenset': frozenset}[kind]
      return make(decoded(each, of_number) for each in inside)
    case 'dict':
      return {decoded(k, of_number): decoded(v, of_number) for k, v in inside}
    case 'int':
      return int(inside, 16)
    case 'complex':
      real, imaginary = inside
      return complex(real, imaginary)
    case 'bytes':
      return bytes.fromhex(inside)
    case 'object' | 'module':
      return of_number(inside)
  raise ValueError(f'no such kind: {kind}')


# --- limits ----------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {  # audit number, refused system calls, numbers of those that are refused with some arguments. The refused ones:
  # fork and vfork where they exist, execve, execveat, socket, ptrace, process_vm_readv, process_vm_writev, unshare, setns, mount,
  # io_uring_setup, kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, pidfd_open, pidfd_getfd, setpgid,
  # setsid
  'x86_64': (
    0xC000003E,
    (57, 58, 59, 322, 41, 101, 310, 311, 272, 308, 165, 425, 62, 200, 234, 129, 297, 424, 434, 438, 109, 112),
    {'clone': 56, 'prlimit64': 302, 'prctl': 157, 'fcntl': 72, 'ioctl': 16},
  ),
  'aarch64': (
    0xC00000B7,
    (221, 281, 198, 117, 270, 271, 97, 268, 40, 425, 129, 130, 131, 138, 240, 424, 434, 438, 154, 157),
    {'clone': 220, 'prlimit64': 261, 'prctl': 167, 'fcntl': 25, 'ioctl': 29},
  ),
}
_CLONE3, _CLONE_THREAD, _EPERM, _ENOSYS = 435, 0x10000, 1, 38
_PARENT_DEATH = 1  # of prctl: the signal on the death of the parent
_OWNERS = {'fcntl': (8, 10, 15), 'ioctl': (0x8901, 0x8902)}  # F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP: send signals
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # what a filter returns
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of a filter
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # places in the data that a filter reads


def _confine(seconds: float, memory: int) -> None:
  """Limit this process. Everything but the limits of resources needs Linux on x86_64 or aarch64."""
  limits = {
    resource.RLIMIT_CPU: int(seconds) + 1, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_NOFILE: OPEN_FILES,
    resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: memory,
  }  # fmt: skip
  if sys.platform != 'linux' or platform.machine() not in _ARCHITECTURES:
    limits[resource.RLIMIT_NPROC] = 256
  for name, most in limits.items():
    _, hard = resource.getrlimit(name)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(name, (most, most))
  if resource.RLIMIT_NPROC in limits:
    return
  libc = ctypes.CDLL(None, use_errno=True)
  libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the grader
  libc.capset(struct.pack('Ii', 0x20080522, 0), bytes(24))  # root may do nothing that needs a capability
  libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
  _restrict_files(libc)
  program = b''.join(struct.pack('HBBI', *each) for each in _filter())
  kept = ctypes.create_string_buffer(program)
  libc.prctl(22, 2, struct.pack('HxxxxxxP', len(program) // 8, ctypes.addressof(kept)), 0, 0)  # PR_SET_SECCOMP


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, the same on both architectures
_OF_FILES, _READ, _WRITE_FILE = 0x4007, 0b1100, 0b10  # rights: those of files that are no folders; read files and folders; write
_READABLE = ('/usr', '/lib', '/lib64', '/bin', '/etc', '/nix/store', '/sys/devices/system/cpu', '/proc/self', '/proc/cpuinfo')
_READABLE += ('/proc/meminfo', '/dev/null', '/dev/zero', '/dev/random', '/dev/urandom', '/dev/stdin')


def _restrict_files(libc: ctypes.CDLL) -> None:
  """Let this process read its folder, Python and the system's libraries, and write in its folder only.

  The kernel then also refuses the environment and the memory of other processes in /proc. Needs Landlock: Linux 5.13 or newer
  that has it enabled. Without it, nothing is restricted.
  """
  version = libc.syscall(_CREATE_RULESET, None, 0, 1)
  if version < 1:
    return
  every = (1 << min(12 + version, 15)) - 1  # version 1 knows 13 rights, versions 2 and 3 one more each
  rules = dict.fromkeys((*_READABLE, sys.prefix, sys.base_prefix, *sys.path), _READ) | {'/dev/null': _READ | _WRITE_FILE}
  rules['.'] = every
  ruleset = libc.syscall(_CREATE_RULESET, struct.pack('Q', every), 8, 0)
  for path, rights in rules.items():
    if os.path.exists(path):
      at = os.open(path, os.O_PATH | os.O_CLOEXEC)
      allowed = every & rights & (-1 if os.path.isdir(path) else _OF_FILES)
      libc.syscall(_ADD_RULE, ruleset, 1, struct.pack('=Qi', allowed, at), 0)
      os.close(at)
  libc.syscall(_RESTRICT_SELF, ruleset, 0)
  os.close(ruleset)


def _filter() -> list[tuple[int, int, int, int]]:
  """The instructions (code, jump if true, jump if false, operand) of a seccomp filter: threads are allowed, processes are not."""
  audit, refused, some = _ARCHITECTURES[platform.machine()]
  refuse = (_RETURN, 0, 0, _ERRNO | _EPERM)

  def judged(name: str, argument: int, *tests: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    return [(_EQUAL, 0, len(tests) + 2, some[name]), (_LOAD, 0, 0, argument), *tests, (_LOAD, 0, 0, _NUMBER)]

  lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
  lines += [(_AT_LEAST, 0, 1, 0x40000000), refuse]  # the x32 calls of x86_64
  for number in refused:
    lines += [(_EQUAL, 0, 1, number), refuse]
  lines += judged('prctl', _FIRST_ARGUMENT, (_EQUAL, 0, 1, _PARENT_DEATH), refuse)
  lines += judged('prlimit64', _FIRST_ARGUMENT, (_EQUAL, 1, 0, 0), refuse)  # 0: this process
  for name, commands in _OWNERS.items():
    lines += judged(name, _SECOND_ARGUMENT, *(each for command in commands for each in ((_EQUAL, 0, 1, command), refuse)))
  lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # glibc then uses clone, whose flags a filter can read
  lines += judged('clone', _FIRST_ARGUMENT, (_ANY_BIT, 1, 0, _CLONE_THREAD), refuse)
  return [*lines, (_RETURN, 0, 0, _ALLOW)]


if __name__ == '__main__':
  main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
