"""Sparse-RL (arXiv 2601.10079) with models of 1.5 B parameters on GSM8K. It needs a GPU, and has not run.

Time: the planner's lower bounds for an H200 and answers of 300 tokens are 6.3 s for an update of 1,024 sequences and about 2 s
for dense rollouts. Twice that, for 100 steps, is half an hour a run.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.gpu_tasks import GSM8K

BUDGETS, APART = (128, 256), 128
MISMATCH, ROLLOUT = 'rollout_corr/k3_kl', 'time/rollout'


def _arm(name, budget):
  return f'{name}@{budget}', {'arm': name, 'cache.budget': budget, 'cache.interval': 64}


EXPERIMENT = Experiment(
  name='gpu_sparse_rl',
  question='Does Sparse-RL keep the accuracy of 1.5 B parameters on GSM8K, and are its rollouts faster?',
  task=GSM8K,
  arms={'dense': {'arm': 'dense'}}
  | dict(_arm(name, budget) for budget in BUDGETS for name in ('naive', 'sparse_rl'))
  | dict(_arm(name, APART) for name in ('veto_only', 'reweight_only')),
  steps=100,
  series=(MISMATCH, ROLLOUT, 'sparse/accounting_saving', 'sparse/bytes_saving', 'sparse/veto_fraction'),
  shown=(REWARD, MISMATCH, ROLLOUT),
  claims=(
    Claim('Training on dense rollouts improves 1.5 B parameters.', 'all three papers', 'the reward rises',
          (Comparison('dense', BEFORE, 0.05),)),
    Claim('Without a correction, sparse rollouts of 1.5 B parameters lose accuracy against dense ones.', 'Sparse-RL', 'collapse',
          (Comparison('dense', 'naive@128', 0.05),)),
    Claim('With the correction, sparse rollouts of 1.5 B parameters train nearly as well as dense ones.',
          'Sparse-RL, as summaries report it', '96 to 97 % of dense', (Comparison('sparse_rl@256', 'dense', -0.05),)),
    Claim('Rejection and weights are both needed (1.5 B).', 'Sparse-RL', 'both are part of the method',
          (Comparison('sparse_rl@128', 'veto_only@128', 0.03), Comparison('sparse_rl@128', 'reweight_only@128', 0.03))),
    Claim('Sparse rollouts take less time.', 'Sparse-RL', 'cheaper rollouts',
          (Comparison('dense', 'sparse_rl@128', 0.0, ROLLOUT),)),
  ),
  hours=28.0,
  device='one H200',
)  # fmt: skip
