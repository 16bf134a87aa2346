"""The session: rollouts that continue in a second thread during an update, and the tokens of a run."""

import time
import weakref
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from garbage import Held, no_collections

from sprl.config import Run
from sprl.distributed.team import ALONE
from sprl.io.checkpoint import CheckpointError, Checkpoints
from sprl.rollout.scheduler import Stalled
from sprl.session import Pace, Pump, Session
from sprl.train import close_checkpoints, train
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


class Saved(Session):
  """A session that only saves, or fails to."""

  def __init__(self, step, processes=1, fails=False):
    self.state, self.team, self.fails, self.saves = SimpleNamespace(step=step), SimpleNamespace(processes=processes), fails, []

  def save_whole(self):
    if self.fails:
      raise OSError('disk full')
    self.saves.append(self.state.step)


@pytest.mark.parametrize(
  ('step', 'processes', 'error', 'saves'),
  [
    (3, 1, ValueError, [3]),
    (3, 1, Stalled, [3]),
    (0, 1, ValueError, []),  # nothing is done yet
    (3, 2, Stalled, [3]),  # all processes raise it
    (3, 2, ValueError, []),  # perhaps only one process has it, and a save waits for all
  ],
)
def test_the_steps_before_an_error_of_rollouts_or_an_evaluation_are_saved(step, processes, error, saves):
  session = Saved(step, processes)
  with pytest.raises(error, match='of the rollouts'), session.saved_on_error():
    raise error('of the rollouts')
  assert session.saves == saves


def test_an_error_of_the_save_does_not_hide_the_one_before_it(caplog):
  with pytest.raises(ValueError, match='of the rollouts'), Saved(3, fails=True).saved_on_error():
    raise ValueError('of the rollouts')
  assert 'step 3 is not saved: OSError: disk full' in caplog.text


def test_an_error_of_the_last_save_is_raised_alone_and_logged_beside_another(caplog):
  class Failed(Checkpoints):
    def __init__(self):
      pass

    def close(self):
      raise CheckpointError('disk full')

  def run(error):
    with ExitStack() as stack:
      stack.push(partial(close_checkpoints, Failed()))
      if error is not None:
        raise error

  with pytest.raises(CheckpointError, match='disk full'):
    run(None)
  with pytest.raises(ValueError, match='a guard'):
    run(ValueError('a guard'))
  assert 'disk full' in caplog.text


@pytest.mark.parametrize('ending', ['stop', 'end'])
def test_an_error_of_the_rollouts_keeps_no_array_of_the_run_alive(ending):
  class Failing(Endless):
    def pump(self, patience):
      raise ValueError('of the rollouts')

  def run():
    weights, scheduler = Held(), Failing()
    kept.extend(map(weakref.ref, (weights, scheduler)))
    pump = Pump(scheduler, ALONE)
    pump._thread.join()
    getattr(pump, ending)()

  kept = []
  with no_collections():
    with pytest.raises(ValueError, match='of the rollouts') if ending == 'stop' else nullcontext():
      run()
    assert [each() for each in kept] == [None, None]


def test_a_step_frees_its_arrays_before_evaluation_and_the_next_rollouts(monkeypatch, tmp_path):
  kept = []

  def made(*_):
    array = Held()
    kept.append(weakref.ref(array))
    return array

  class Two(Session):
    def __init__(self):
      self.learner = SimpleNamespace(pack=lambda t: ([made()], {}), score=lambda b: ([made()], made()), update=lambda b, p: {})

    def steps(self):
      return iter([1, 2])

    def rollout(self, step):
      assert all(array() is None for array in kept)
      return [made()]

    def sync(self, batches):
      assert any(array() is not None for array in kept)

    def finish_step(self, step, metrics):
      assert all(array() is None for array in kept)

    def end_rollouts(self):
      pass

    def finish(self):
      raise EOFError

  monkeypatch.setattr('sprl.train.setup', lambda *_: Two())
  with no_collections(), pytest.raises(EOFError):
    train(Run(), tmp_path)
  assert len(kept) == 8


def test_tokens_of_agents_that_are_not_trained_are_counted_as_sampled():
  def trajectory(tokens, **changes):
    ids, logp = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    completion = Completion(
      request=Request(0, 0, ids[:2], 9), tokens=ids, logp=logp, version=0 * ids, attended=ids, finish='stop'
    )
    return Trajectory.of(completion, **changes)

  episode = trajectory(3, metrics={'agent/tokens_dropped': 6.0}, branches=(trajectory(4),))
  session = SimpleNamespace(
    state=SimpleNamespace(tokens_sampled=100, tokens_trained=10),
    learner=SimpleNamespace(tokens=SimpleNamespace(trained=7)),
    model=SimpleNamespace(weights_seed=None),
  )
  sums = Session._count(session, [episode, trajectory(2)], {'async/dropped_tokens': 5.0})
  assert sums == {'tokens/sampled': 100 + 3 + 4 + 6 + 2 + 5, 'tokens/trained': 17}


def test_the_speed_of_rollouts_that_run_ahead_counts_the_step_that_filled_the_window():
  pace = Pace(async_ratio=9.0)
  assert pace.step(1000, 10.0) == 100.0
  for _ in range(9):  # these take groups of the first step
    assert 99.0 < pace.step(0, 0.01) < 100.0


def test_the_speed_of_synchronous_rollouts_is_that_of_the_step():
  pace = Pace(async_ratio=0.0)
  assert [pace.step(1000, 10.0), pace.step(300, 1.0)] == [100.0, 300.0]
