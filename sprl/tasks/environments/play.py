"""A random agent, to try an environment without a model."""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sprl.tasks.environments.protocol import EnvironmentFault, Outcome, checked_reset, checked_step, episode_metrics

_WORDS = ('<answer>', '</answer>', '<calc>', '</calc>', 'left', 'Up', '7', '-1', '3*4', '\\boxed{2}', '#### 5', '', 'é', '\n')


@dataclass(frozen=True)
class Episode:
  """The record of an episode."""

  observations: tuple[str, ...]  # that of reset, then one per step
  actions: tuple[str, ...]
  outcomes: tuple[Outcome, ...]  # one per action; one fewer after a fault
  finish: Literal['terminated', 'truncated', 'max_turns', 'fault']
  fault: str = ''  # message of the EnvironmentFault

  @property
  def reward(self) -> float:
    """The sum of the rewards of the steps."""
    return sum(outcome.reward for outcome in self.outcomes)

  @property
  def metrics(self) -> dict[str, float]:
    """The metrics of the episode, from its infos."""
    return episode_metrics([outcome.info for outcome in self.outcomes])


def random_episode(env: Any, seed: int, rng: np.random.Generator, max_turns: int) -> Episode:
  """Play episode `seed` with at most `max_turns` random actions. A fault ends the episode and is recorded."""
  observations: list[str] = []
  actions: list[str] = []
  outcomes: list[Outcome] = []
  finish, fault = 'max_turns', ''
  try:
    observations.append(checked_reset(env, seed)[0])
    while len(outcomes) < max_turns:
      actions.append(random_action(env, rng))
      outcome = checked_step(env, actions[-1])
      outcomes.append(outcome)
      observations.append(outcome.observation)
      if outcome.done:
        finish = 'terminated' if outcome.terminated else 'truncated'
        break
  except EnvironmentFault as error:
    finish, fault = 'fault', str(error)
  return Episode(tuple(observations), tuple(actions), tuple(outcomes), finish, fault)


def random_action(env: Any, rng: np.random.Generator) -> str:
  """Return an action of `sample_random_action`, or random words if the environment has no such method."""
  method = getattr(env, 'sample_random_action', None)
  if method is None:
    return ''.join(rng.choice(_WORDS, size=rng.integers(8)))
  return method(rng) if inspect.signature(method).parameters else method()
