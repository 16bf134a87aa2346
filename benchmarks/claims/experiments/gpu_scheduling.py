"""ROLL Flash (arXiv 2510.11345) on one GPU: what do replication, redundancy and running ahead save until a score is reached?

It needs a GPU, and has not run. Engine and learner take turns on the GPU. `groups` reserves rows for the samples of a prompt
until all end. `replication` schedules each sample alone, which is continuous batching and sprl's default: the baseline.
`redundant` runs 8 more groups and trains on the first 128 to end. `ahead` lets samples be up to 2 updates old.

Time: as in gpu_sparse_rl, half an hour a run.
"""

from claims.experiment import REWARD, Claim, Comparison, Experiment, time_to
from claims.gpu_tasks import GSM8K

# Between the published greedy scores before training, 0.62 and 0.73 (Qwen2.5 report, arXiv 2412.15115). Sampled at temperature 1,
# both models begin lower. A run that does not reach it leaves its claims undecided, so a pilot has to check that runs do.
SCORE = 0.70
TO_SCORE = time_to(SCORE)
LENGTH = 'completion/length_mean'

EXPERIMENT = Experiment(
  name='gpu_scheduling',
  question='What do scheduling, redundancy and running ahead save on one GPU until a policy reaches a score?',
  task=GSM8K,
  arms={
    'replication': {},
    'groups': {'rollout.replicate_prompts': False},
    'redundant': {'rollout.order': 'completion', 'rollout.extra_prompts': 8},
    'ahead': {'rollout.async_ratio': 2.0},
  },
  steps=100,
  settings={'eval.every': 5, 'preset': 'token_is', 'cache.budget': None},
  series=('time/rollout', LENGTH, 'async/age_mean', 'async/dropped_tokens', 'async/dropped_reward_bias'),
  shown=(REWARD, 'time/rollout', LENGTH),
  claims=(
    Claim('Replication saves a tenth of the time to a score (logarithm: 0.1).', 'ROLL Flash, second-hand',
          '1.30 to 1.84 times as fast', (Comparison('groups', 'replication', 0.1, TO_SCORE),)),
    Claim('Redundant groups save time to a score.', 'ROLL Flash, second-hand', '3.4 with queue scheduling',
          (Comparison('replication', 'redundant', 0.0, TO_SCORE),)),
    Claim('Redundant groups do not shorten the answers by more than 10 tokens.', 'not in the paper', '-',
          (Comparison('redundant', 'replication', -10.0, LENGTH),)),
    Claim('Running ahead saves time to a score, though learner and engine take turns on one GPU.', 'ROLL Flash',
          'up to 2.24 times as fast, with GPUs of its own', (Comparison('replication', 'ahead', 0.0, TO_SCORE),)),
    Claim('Running ahead, and redundant groups, end as accurate as the baseline.', 'ROLL Flash', 'on par',
          (Comparison('ahead', 'replication', -0.03), Comparison('redundant', 'replication', -0.03))),
  ),
  hours=16.0,
  device='one H200',
)  # fmt: skip
