"""Renders chat templates in a separate process with limits on time and memory (sprl/io/template_process.py).

The renderer process starts at the first request and serves all templates, one request at a time. If a template ends the process,
the next request starts a new one.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sprl.foreign import import_path

SECONDS = 5.0  # limit of CPU time for a request
PATIENCE = 60.0  # limit of wall-clock time for a request: a stopped process uses no CPU time
MEMORY = 1 << 29  # bytes of memory that the process may add after its start
_PROGRAM = Path(__file__).with_name('template_process.py')


class TemplateError(ValueError):
  """A template cannot be used. `valid` is False if it does not compile, and True if only its rendering failed."""

  def __init__(self, message: str, valid: bool):
    super().__init__(message)
    self.valid = valid


def variables(source: str) -> frozenset[str]:
  """Return the names of the variables that a template reads. Raises TemplateError if the template does not compile."""
  return frozenset(_renderer.ask({'source': source})['variables'])


def render(source: str, values: Mapping[str, Any], add_generation_prompt: bool, time: str | None = None) -> str:
  """Return the text of a template for values of its variables (JSON data). Raises TemplateError if that fails.

  `time` is what `strftime_now` gives the template, in ISO 8601; None: the time of the clock.
  """
  request = {'source': source, 'variables': values, 'add_generation_prompt': add_generation_prompt, 'time': time}
  return _renderer.ask(request)['text']


def restart() -> None:
  """End the process. The next request starts a new one with the current SECONDS and MEMORY."""
  _renderer.end()


class _Killed(TemplateError):
  """The process was killed, which may not be the fault of the template."""


class _Renderer:
  """The process that renders templates."""

  def __init__(self):
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None

  def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. Raises TemplateError if the template raises, ends the process, or gives no answer.

    A request whose process was killed is asked once more: the system may have killed it for want of memory elsewhere.
    """
    try:
      line = json.dumps(request).encode() + b'\n'
    except RecursionError:  # the parser that accepted the values ran less deep in the call stack
      raise TemplateError('the values of its variables are nested too deeply', True) from None
    with self._lock:
      try:
        reply = self._reply(line)
      except _Killed:
        reply = self._reply(line)
    answer = json.loads(reply)
    if 'error' in answer:
      raise TemplateError(answer['error'], answer['valid'])
    return answer

  def _reply(self, line: bytes) -> bytes:
    """Return the reply to a request. Kills the process after PATIENCE seconds. Raises TemplateError if there is no reply."""
    if self._process is None or self._process.poll() is not None:
      self._process = self._start()
    process, late = self._process, threading.Event()
    assert process.stdin is not None
    assert process.stdout is not None

    def give_up() -> None:
      late.set()
      process.kill()

    timer = threading.Timer(PATIENCE, give_up)  # limits the write too: a stopped process does not empty the pipe
    timer.daemon = True
    timer.start()
    try:
      with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
      reply = process.stdout.readline()
    except BaseException:  # such as Ctrl-C: the next request would read the late reply as its own
      process.kill()
      self._end()
      raise
    finally:
      timer.cancel()
    if reply.endswith(b'\n'):
      return reply
    status = self._end()
    if late.is_set():
      raise _Killed(f'its process gives no answer within {PATIENCE:g} s', True)
    if status == -signal.SIGPROF:
      raise TemplateError(f'it takes more than {SECONDS:g} s of CPU time', True)
    raise (_Killed if status == -signal.SIGKILL else TemplateError)(f'it ended its process (status {status})', True)

  def end(self) -> None:
    """End the process if it is running."""
    with self._lock:
      self._end()

  def _end(self) -> int | None:
    """End the process and return its exit status; None if there is no process. The caller holds the lock."""
    if (process := self._process) is None:
      return None
    self._process = None
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
      process.stdin.close()
    try:
      process.wait(1)
    except subprocess.TimeoutExpired:
      process.kill()
    process.stdout.close()
    return process.wait()

  def _start(self) -> subprocess.Popen:
    # -P keeps the folder of the program off sys.path: some of its modules have names of installed packages.
    return subprocess.Popen(
      [sys.executable, '-P', str(_PROGRAM), str(SECONDS), str(MEMORY)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      process_group=0,  # Ctrl-C in the terminal does not end it
      env={**os.environ, 'PYTHONPATH': import_path()},
    )


_renderer = _Renderer()
atexit.register(_renderer.end)
