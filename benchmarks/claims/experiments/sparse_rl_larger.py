"""Sparse-RL with a second, larger model: does the correction help it as it helps the model of sparse_rl_phases?"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.tasks import LARGER

CACHE = {'cache.method': 'rkv', 'cache.budget': 96, 'cache.interval': 16, 'cache.window': 8}
MISMATCH = 'rollout_corr/k3_kl'

EXPERIMENT = Experiment(
  name='sparse_rl_larger',
  question='Does the correction of Sparse-RL help a model of 2.3 M parameters too?',
  task=LARGER,
  arms={'dense': {'arm': 'dense'}} | {arm: {'arm': arm} | CACHE for arm in ('naive', 'sparse_rl')},
  steps=300,
  settings={'eval.every': 100},
  series=(MISMATCH, 'sparse/accounting_saving', 'sparse/veto_fraction'),
  shown=(REWARD, MISMATCH, 'sparse/veto_fraction'),
  claims=(
    Claim('Training on dense rollouts improves the larger model.', 'all three papers', 'the reward rises',
          (Comparison('dense', BEFORE, 0.1),)),
    Claim('Without a correction, sparse rollouts of the larger model collapse: it ends below the accuracy before training.',
          'Sparse-RL, as summaries report it', 'collapse', (Comparison(BEFORE, 'naive', 0.03),)),
    Claim('With the correction, training the larger model on sparse rollouts ends higher than without it.', 'Sparse-RL',
          'no collapse', (Comparison('sparse_rl', 'naive', 0.05),)),
    Claim('With the correction, sparse rollouts train the larger model nearly as well as dense ones.',
          'Sparse-RL, as summaries report it', '96 to 97 % of dense', (Comparison('sparse_rl', 'dense', -0.05),)),
  ),
  hours=5.9,
  note='The cache has 96 tokens, 45 % of a sequence of 214 tokens. The model of 1.0 M parameters keeps 81 % of the dense '
  'accuracy with this cache, this one 97 %, though its mismatch is larger (k3 0.35, against 0.21). The veto rejects three of '
  'four sequences, so `sparse_rl` trains on a quarter of them. Without a correction the seeds end between 0.27 and 0.80, from '
  '0.50 to 0.57 before training.',
  unplanned={'Training with the correction, against no training.': Comparison('sparse_rl', BEFORE, 0.0)},
)  # fmt: skip
