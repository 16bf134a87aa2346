"""An environment whose actions say how it is to behave, in a file of its own: processes of lanes import it by name."""

import math
import os
import threading

ENTERED, GATE = threading.Event(), threading.Event()  # a call hangs; and may go on


class Scripted:
  """Echoes what it is told with its salt, the seed and the count of its steps, unless the action is one of those below."""

  def __init__(self, salt):
    self.salt, self.seed, self.steps = salt, None, 0

  def reset(self, seed):
    self.seed = seed
    return f'{self.salt}: reset {seed}', {}

  def step(self, action):
    self.steps += 1
    match action:
      case 'raise':
        raise ValueError('no such door')
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
    return f'{self.salt}: {action} {self.seed}.{self.steps}', float(self.steps), False, False, {}
