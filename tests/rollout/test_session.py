"""The session: rollouts that continue in a second thread during an update, and the tokens of a run."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from sprl.config import Run
from sprl.distributed.team import ALONE
from sprl.session import Pump, Session
from sprl.train import train
from sprl.types import Completion, Request, Trajectory


class Endless:
  """A scheduler whose rollouts never wait for the learner."""

  idle = False

  def __init__(self, error=None):
    self.turns, self._error = 0, error

  def pump(self, patience):
    time.sleep(0.001)
    self.turns += 1
    if self._error is not None:
      raise self._error


@pytest.mark.parametrize('error', [None, ValueError('of the rollouts')])
def test_an_error_of_the_learner_ends_the_rollouts_before_their_workers(monkeypatch, tmp_path, error):
  workers_ended = []

  class Failing(Session):
    def __init__(self):
      self.learner = SimpleNamespace(pack=self._fail)

    def steps(self):
      return iter([1])

    def rollout(self, step):
      self._pump = self.pump = Pump(Endless(error), ALONE)
      return []

    def _fail(self, trajectories):
      raise MemoryError('of the learner')

  session = Failing()

  def setup(run, workdir, team, stack, *_):
    stack.callback(lambda: workers_ended.append(session.pump._thread.is_alive()))
    return session

  monkeypatch.setattr('sprl.train.setup', setup)
  with pytest.raises(MemoryError, match='of the learner'):
    train(Run(), tmp_path)
  assert workers_ended == [False]


def test_tokens_of_agents_that_are_not_trained_are_counted_as_sampled():
  def trajectory(tokens, **changes):
    ids, logp = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    completion = Completion(request=Request(0, 0, ids[:2], 9), tokens=ids, logp=logp, version=0 * ids, kept=ids, finish='stop')
    return Trajectory.of(completion, **changes)

  episode = trajectory(3, metrics={'agent/tokens_dropped': 6.0}, branches=(trajectory(4),))
  session = SimpleNamespace(
    _rollout_metrics={'async/dropped_tokens': 5.0},
    state=SimpleNamespace(tokens_sampled=100, tokens_trained=10),
    learner=SimpleNamespace(tokens=SimpleNamespace(trained=7)),
    model=SimpleNamespace(weights_seed=None),
  )
  sums = Session._count(session, [episode, trajectory(2)])
  assert sums == {'tokens/sampled': 100 + 3 + 4 + 6 + 2 + 5, 'tokens/trained': 17}
