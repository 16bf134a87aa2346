"""An environment whose actions select its behaviour. Worker processes and Ray actors import it by name."""

import asyncio
import math
import os
import threading
import time

ENTERED, GATE = threading.Event(), threading.Event()  # a hanging call has begun; a hanging call may return


class Scripted:
  """Returns each action with the seed and the step number. The actions that `step` lists behave otherwise."""

  def __init__(self):
    self.seed, self.steps = None, 0

  def reset(self, seed):
    self.seed = seed
    return f'reset {seed}', {'unknown': object(), 'metrics': {'valid': True}}

  def step(self, action):
    self.steps += 1
    match action:
      case 'raise':
        raise ValueError('no such door')
      case 'cancel':
        raise asyncio.CancelledError
      case 'interrupt':
        raise KeyboardInterrupt
      case 'number':
        return 7, 0.0, False, False, {}
      case 'nan':
        return '', math.nan, False, False, {}
      case 'hang':
        ENTERED.set()
        GATE.wait(60)
      case 'die':
        os._exit(3)
      case 'pid':
        return str(os.getpid()), 0.0, False, False, {}
    return f'{action} {self.seed}.{self.steps}', float(self.steps), False, False, {}


class Lasting(Scripted):
  """An environment that has a file from its reset until it is closed, which takes a moment."""

  def __init__(self, folder):
    super().__init__()
    self.folder = folder

  def reset(self, seed):
    (self.folder / str(seed)).touch()
    return super().reset(seed)

  def close(self):
    time.sleep(0.2)
    (self.folder / str(self.seed)).unlink()
