"""Rollouts on separate devices continue in a second thread during an update."""

import time
from types import SimpleNamespace

import pytest

from sprl.config import Run
from sprl.distributed.team import ALONE
from sprl.session import Pump, Session
from sprl.train import train


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
