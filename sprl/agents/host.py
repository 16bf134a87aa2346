"""The host of agent programs: `python host.py CONNECTION LIFELINE LIFELINE_MODULE`. Any Python of 3.9 or later runs it.

It uses the standard library only, because the agents may need another environment than the run. The host imports the agent once,
then forks a process for each episode. So an agent starts in milliseconds, and one that hangs or dies costs its own episode only.

Messages are lines of JSON over the socket CONNECTION. First the run sends {"agent": "file.py:function", "args": {...}}, and the
host replies {"ready": ""}, or the reason why the agent cannot be loaded. Then

    {"run": id, "url": ..., "row": {...}}   starts an episode; its end is {"id": id, "reward": x, "metrics": {...}},
                                            {"id": id, "error": why} or {"id": id, "crash": why}
    {"kill": id}                            ends an episode, without an answer

The kernel kills the host and its agents when the run ends (sprl/tasks/lifeline.py, whose path is LIFELINE_MODULE).
"""

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import math
import os
import platform
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import sysconfig
import time
import traceback
from dataclasses import dataclass

LARGEST_REWARD = 3.4e38  # the learner reads rewards in float32
GLANCE = 0.2  # seconds between two looks at processes that end without a word
LIBRARIES = ('<frozen ', __file__, *(sysconfig.get_path(name) + os.sep for name in ('stdlib', 'purelib', 'platlib')))


@dataclass
class Agent:
  """The process of an episode."""

  number: int
  pipe: int  # where it writes its outcome
  written: bytes = b''
  status: 'int | None' = None  # how it ended, if it was waited for


class Host:
  """The agents of one run."""

  def __init__(self, connection, lifeline, tie):
    self.connection, self.lifeline, self.tie = connection, lifeline, tie
    self.files = resource.getrlimit(resource.RLIMIT_NOFILE)  # limits of an agent
    self.selector = selectors.DefaultSelector()
    self.selector.register(connection, selectors.EVENT_READ)
    self.received = b''
    self.agents = {}  # by pid
    self.agent, self.args = None, {}

  def serve(self):
    """Answer messages until the connection closes."""
    while True:
      for key, _ in self.selector.select(GLANCE if self.agents else None):
        if key.fileobj is self.connection:
          if not self.read():
            return
        elif key.data in self.agents:
          self.hear(key.data)
      for pid in list(self.agents):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
          self.agents[pid].status = status
          self.hear(pid)  # its last words
          if pid in self.agents:
            self.end(pid)

  def read(self):
    """Read messages. Returns whether the connection is open."""
    new = self.connection.recv(1 << 16)
    *lines, self.received = (self.received + new).split(b'\n')
    for line in lines:
      message = json.loads(line)
      if 'run' in message:
        self.start(message)
      elif 'kill' in message:
        for pid in [pid for pid, agent in self.agents.items() if agent.number == message['kill']]:
          self.end(pid, silent=True)
      else:
        self.load(message)
    return bool(new)

  def load(self, message):
    """Import the agent."""
    self.args, why = message['args'], ''
    try:
      path, _, name = message['agent'].rpartition(':')
      sys.path.append(os.path.dirname(path))
      spec = importlib.util.spec_from_file_location('agent_program', path)
      assert spec is not None and spec.loader is not None  # true of every path that ends in .py  # noqa: PT018
      module = sys.modules['agent_program'] = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
      self.agent = function(module, path, name, self.args)
      if prepare := getattr(module, 'prepare_agents', None):
        prepare(**self.args)
      if 'openai' in sys.modules:  # its first request would load these in every process, for half a second
        importlib.import_module('openai.resources')
        platform.platform()
      gc.freeze()  # a collection in a fork would copy the pages that it shares with the host
    except BaseException as error:  # a user's file may also call sys.exit
      why = reason(error)
    self.send({'ready': why})

  def start(self, message):
    """Fork the process of an episode."""
    sys.stdout.flush()
    sys.stderr.flush()
    pipe = ()
    try:
      pipe = ours, theirs = os.pipe()
      pid = os.fork()
    except OSError as error:  # too many open files, or processes
      for end in pipe:
        os.close(end)
      self.send({'id': message['run'], 'crash': f'it cannot be started: {reason(error)}'})
      return
    if pid == 0:
      try:
        self.connection.close()
        for inherited in [ours, *(agent.pipe for agent in self.agents.values())]:
          os.close(inherited)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        os.setpgid(0, 0)  # so that the processes which it starts end with it
        self.hold()
        os.write(theirs, (json.dumps(outcome(self.agent, message['url'], message['row'], self.args)) + '\n').encode())
        os._exit(0)
      finally:
        os._exit(1)
    with contextlib.suppress(OSError):  # the agent does the same; whoever comes first, it is done before a kill
      os.setpgid(pid, pid)
    os.close(theirs)
    os.set_blocking(ours, False)
    self.agents[pid] = Agent(message['run'], ours)
    self.selector.register(ours, selectors.EVENT_READ, pid)

  def hold(self):
    """Tie this process and its group to the run, by a lifeline of its own."""
    with contextlib.suppress(OSError):  # without /proc an agent that hangs outlives a run that was killed
      self.tie['hold'](os.open(f'/proc/self/fd/{self.lifeline}', os.O_RDONLY))

  def hear(self, pid):
    """Read what an agent wrote. A whole line is its outcome, and ends it."""
    try:
      new = os.read(self.agents[pid].pipe, 1 << 16)
    except BlockingIOError:
      return
    self.agents[pid].written += new
    if b'\n' in self.agents[pid].written or not new:
      self.end(pid)

  def end(self, pid, silent=False):
    """Kill the processes of an agent, and report its outcome."""
    agent = self.agents.pop(pid)
    self.selector.unregister(agent.pipe)
    os.close(agent.pipe)
    line, whole, _ = agent.written.partition(b'\n')
    if agent.status is None and not (whole or silent):
      agent.status = how_it_ends(pid)
    self.tie['kill'](pid)  # and the processes that it started
    with contextlib.suppress(ChildProcessError):  # it was waited for before
      os.waitpid(pid, 0)
    if silent:
      return
    if whole:
      self.send(dict(json.loads(line), id=agent.number))
    else:
      status = agent.status or 0
      how = f'killed by {signal.Signals(os.WTERMSIG(status)).name}' if os.WIFSIGNALED(status) else 'it exited'
      self.send({'id': agent.number, 'crash': f'no result: {how}'})

  def send(self, message):
    """Send a message to the run."""
    self.connection.sendall((json.dumps(message) + '\n').encode())


def function(module, path, name, args):
  """Return the agent of a file. Raises AttributeError or TypeError if it is missing, or cannot be called with these arguments."""
  if not hasattr(module, name):
    own = sorted(key for key, value in vars(module).items() if getattr(value, '__module__', '') == module.__name__)
    raise AttributeError(f'{path} has no {name}; it has {", ".join(own) or "no function"}')
  found = getattr(module, name)
  if not callable(found):
    raise TypeError(f'{name} is a {type(found).__name__}: expected a function')
  try:
    signature = inspect.signature(found, follow_wrapped=False)  # a decorator may add arguments
  except ValueError:  # some functions of C have none
    return found
  try:
    signature.bind('', {}, **args)
  except TypeError as error:
    raise TypeError(f'{name}{signature} cannot be called with a URL, a row and config.task.args: {error}') from error
  return found


def how_it_ends(pid):
  """Return the status of a process that has closed its pipe and so is about to end; None if it still runs after a second."""
  for _ in range(100):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
      return status
    time.sleep(0.01)
  return None


def outcome(agent, url, row, args):
  """Call the agent. Returns its reward and metrics, or the error."""
  random.seed()  # a fork has the state of its host
  if 'numpy' in sys.modules:
    sys.modules['numpy'].random.seed()
  try:
    result = agent(url, row, **args)
    if inspect.isawaitable(result):
      result = asyncio.run(wait_for(result))
    reward, metrics = (result['reward'], result.get('metrics') or {}) if isinstance(result, dict) else (result, {})
    numbers = {'reward': reward, **metrics}
    for name, value in numbers.items():
      if not math.isfinite(float(value)):
        raise ValueError(f'{name} is {value!r}: expected a finite number')
    if abs(float(reward)) > LARGEST_REWARD:
      raise ValueError(f'reward is {reward!r}: expected a finite number of float32')
    return {'reward': float(reward), 'metrics': {str(name): float(value) for name, value in metrics.items()}}
  except BaseException as error:  # SystemExit too
    return {'error': reason(error)}


async def wait_for(awaitable):
  """Return the result of any awaitable."""
  return await awaitable


def reason(error):
  """Return the type and the message of an error, and where the user's code raised it.

  At most 500 characters, which UTF-8 can encode.
  """
  try:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(code, line) for code, line in frames if not code.co_filename.startswith(LIBRARIES)]
    place = ''.join(f' ({code.co_filename[-200:]}:{line}, in {code.co_name[-100:]})' for code, line in users[-1:])
    return (f'{type(error).__name__}: {error}'[: 500 - len(place)] + place).encode(errors='replace').decode()
  except BaseException:  # the error's own __str__ fails
    return type(error).__name__


def main(connection, lifeline, tie):
  """Serve one run."""
  tie['hold'](lifeline)
  host = Host(socket.socket(fileno=connection), lifeline, tie)
  allow_many_files()  # each agent has a pipe
  host.serve()


def allow_many_files():
  """Raise this process's limit of open files, usually 1,024, to the hard limit."""
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.suppress(OSError, ValueError):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == '__main__':
  here = os.path.dirname(os.path.realpath(__file__))
  if sys.path and os.path.realpath(sys.path[0]) == here:  # not with PYTHONSAFEPATH
    del sys.path[0]  # its modules would hide those of agents
  main(int(sys.argv[1]), int(sys.argv[2]), runpy.run_path(sys.argv[3]))
