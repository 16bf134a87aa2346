"""Registers the games.

Their tiles come from numpy's generator: in tests beartype draws from that of `random`, in any thread.
"""

import random

import numpy as np

from gem.envs.registration import register


class Game2048:
  def __init__(self, target_tile, max_turns):
    self.max_turns = max_turns
    self.reset()

  def reset(self, seed=None):
    if seed is not None:
      random.seed(seed)
      np.random.seed(seed)
    self.turns, self.tiles = 0, [int(np.random.randint(16))]
    return f'You are playing 2048. {self.tiles}', {'suffix': 'Enter your next move.'}

  def step(self, action):
    self.turns += 1
    self.tiles.append(int(np.random.randint(16)))
    over = self.turns == self.max_turns
    return str(self.tiles), 0.0, over, over, {'suffix': 'Enter your next move.'}

  def sample_random_action(self):
    return '\\boxed{' + random.choice(['up', 'down', 'left', 'right']) + '}'


register('game:Game2048-v0-easy', Game2048, target_tile=64, max_turns=50)
register('game:Game2048-v0-hard', Game2048, target_tile=256, max_turns=100)
