"""Chat templates, rendered in a process of their own with limits of time and memory (sprl/io/template_process.py).

The process starts with the first template and serves all templates of this process, one request at a time. If a template ends it,
the next request starts another.
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

SECONDS = 5.0  # of CPU time for a request
MEMORY = 1 << 29  # bytes that the process may add to those of its start
_PROGRAM = Path(__file__).with_name('template_process.py')


class TemplateError(ValueError):
  """A template that cannot be used. `valid` says whether it could be compiled, so that its rendering failed."""

  def __init__(self, message: str, valid: bool):
    super().__init__(message)
    self.valid = valid


def variables(source: str) -> frozenset[str]:
  """Return the names of the variables that a template reads. Raises TemplateError if it is not valid."""
  return frozenset(_renderer.ask({'source': source})['variables'])


def render(source: str, values: Mapping[str, Any], add_generation_prompt: bool) -> str:
  """Return the text of a template for the values of its variables, which JSON can hold. Raises TemplateError."""
  request = {'source': source, 'variables': values, 'add_generation_prompt': add_generation_prompt}
  return _renderer.ask(request)['text']


def restart() -> None:
  """Let the next template start a new process, with the limits that then hold."""
  _renderer.end()


class _Renderer:
  """The process that renders templates."""

  def __init__(self):
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None

  def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. Raises TemplateError for an error of the template or the end of the process."""
    line = json.dumps(request).encode() + b'\n'
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._process = self._start()
      process = self._process
      assert process.stdin is not None
      assert process.stdout is not None
      try:
        with contextlib.suppress(BrokenPipeError):
          process.stdin.write(line)
          process.stdin.flush()
        reply = process.stdout.readline()
      except BaseException:  # such as Ctrl-C: the answer would be taken for that to the next request
        self._end()
        raise
      if not reply:
        status = self._end()
        slow = status == -signal.SIGPROF
        raise TemplateError(f'it takes more than {SECONDS:g} s' if slow else f'it ended its process (status {status})', True)
    answer = json.loads(reply)
    if 'error' in answer:
      raise TemplateError(answer['error'], answer['valid'])
    return answer

  def end(self) -> None:
    """End the process, if it runs."""
    with self._lock:
      self._end()

  def _end(self) -> int | None:
    """End the process and return its status: its own, if it has ended by itself."""
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
    # -P: the folder of the program has modules with names of packages.
    return subprocess.Popen(
      [sys.executable, '-P', str(_PROGRAM), str(SECONDS), str(MEMORY)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      process_group=0,  # Ctrl-C in the terminal does not end it
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )


_renderer = _Renderer()
atexit.register(_renderer.end)
