"""benchmarks/cluster.py and cluster_simulation.py: a small cluster, costs, intervals and choices, against values by hand."""

import cluster
import numpy as np
import pytest
from cluster import EACH, FIXED, FULL, SLOTS, Cluster, Outcome
from cluster_simulation import BOUND, JUDGED, TUNING, best, line, selection

from sprl.config import Rollout
from sprl.rollout.episodes import Generate
from sprl.types import NOTHING, Trajectory

pytestmark = pytest.mark.usefixtures('unchecked')


def test_a_step_s_costs_are_the_line_through_two_batch_sizes():
  rows = [{'case': f'Small {n} dense bf16', 'step ms': ms} for n, ms in ((64, 10.0), (256, 34.0))]
  other = {'case': 'Small 64 sparse fp8', 'step ms': 1.0}
  assert cluster.decode_step([other, *rows], 'Small') == pytest.approx((0.002, 0.000125))


def of_lengths(rollout, gpus, speed, lengths):
  """Return a cluster whose samples have these tokens, [group, member]."""

  def episode(number, member):
    completion = yield Generate(NOTHING, NOTHING, lengths[number % len(lengths)][member])
    return Trajectory.of(completion, reward=float(len(completion.tokens)))

  return Cluster(rollout, gpus, speed, episode)


@pytest.mark.parametrize(
  ('speed', 'seconds'),
  [('batch', 10 * (FIXED + 2 * EACH) + 30 * (FIXED + EACH)), ('fixed', 40 * FULL)],
)
def test_a_synchronous_update_takes_its_rollouts_and_its_training(speed, seconds):
  outcome = of_lengths(Rollout(prompts=1, group=2), 1, speed, [[10, 40]]).run(3, training=2.0)
  assert outcome == pytest.approx(Outcome(seconds + 2.0, dropped=0.0, size=25.0))


def test_a_fraction_of_a_gpu_has_a_fraction_of_the_slots():
  engines = of_lengths(Rollout(prompts=1, group=1), 2.25, 'fixed', [[1]]).scheduler.engines
  assert [engine.capacity for engine in engines] == [SLOTS, SLOTS, SLOTS // 4]


def test_spare_prompts_drop_the_longest_group():
  """Three groups start, and the first two to end count."""
  rollout = Rollout(prompts=2, group=2, order='completion', extra_prompts=1)
  outcome = of_lengths(rollout, 1, 'fixed', [[10, 30], [20, 90], [20, 40]]).run(1)
  assert outcome == pytest.approx(Outcome(40 * FULL, dropped=1 / 3, size=25.0))
  assert selection([outcome], [35.0]) == pytest.approx({'dropped': 1 / 3, 'bias': 25 / 35 - 1})


def test_a_gain_is_the_ratio_of_mean_times_with_an_interval_paired_by_draw():
  """28 over 31 / 3. Its residuals (slow - gain x fast) / mean fast are -0.6868, 0.5619 and 0.1249: standard deviation 0.6336.

  Student's t with 2 degrees of freedom is 4.303 at 97.5 %.
  """
  runs = [Outcome(seconds, 0.0, 1.0) for seconds in (10.0, 20.0, 1.0)]
  row = line('rlvr', 'arm', runs, 'base', [20.0, 60.0, 4.0], gpus=8, published=6.0)
  gain, half = 84 / 31, 4.3027 * 0.6336 / np.sqrt(3)
  assert (row['gain'], row['low'], row['high']) == pytest.approx((gain, gain - half, gain + half), rel=1e-3)
  assert row['seconds'] == pytest.approx(31 / 3)


def test_a_gain_that_an_assumed_input_decides_has_no_verdict():
  row = line('rlvr', 'arm', [1.0, 1.0, 1.0], 'base', [2.0, 3.0, 4.0], gpus=8, published=0.5, assumed=True)
  assert (row['verdict'], row['published']) == (None, 0.5)


def test_a_synchronous_run_has_the_conversations_that_count_where_rollouts_run_ahead():
  """Every call takes a second, and every conversation of the warm updates a minute."""
  shape = (4 * cluster.AGENT_COUNTED * cluster.ENVIRONMENTS, cluster.MEMBERS + 1, 2)
  slow = np.arange(shape[0]) < cluster.AGENT_WARM * cluster.ENVIRONMENTS
  drawn = cluster.Conversations(np.ones(shape, int), np.where(slow[:, None, None], 60.0, 1.0) * np.ones(shape))
  assert drawn.run().seconds == pytest.approx(2.0, abs=0.1)
  assert drawn.barrier_a_turn() == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
  ('published', 'verdict'), [(0.57, 'holds'), (0.58, 'cannot tell'), (6.08, 'cannot tell'), (6.1, 'does not hold')]
)
def test_nine_tenths_of_a_published_gain_are_judged_by_the_interval(published, verdict):
  row = line('rlvr', 'arm', [1.0, 1.0, 1.0], 'base', [2.0, 3.0, 4.0], gpus=8, published=published)  # 0.516 to 5.484
  assert row['verdict'] == verdict


def test_a_bound_has_to_be_passed_as_a_whole():
  row = line('rlvr', 'arm', [1.0, 1.0], 'Proposition 2', [0.95, 0.95], gpus=8, published=BOUND)
  assert row['verdict'] == 'does not hold'


def test_the_best_split_is_chosen_on_other_draws_than_it_is_judged_on():
  seen = set()

  def run(draw, trainers):
    seen.add(draw)
    return Outcome(abs(trainers - 3) + draw / 1000, 0.0, 1.0)

  assert best([1, 2, 3, 4], run) == 3
  assert seen == set(TUNING)
  assert not seen & set(JUDGED)
