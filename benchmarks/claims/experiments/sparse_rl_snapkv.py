"""Sparse-RL with a second compressor, SnapKV: the same budget as the arms of sparse_rl_phases that take the correction apart."""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.tasks import TOTALS

CACHE = {'cache.method': 'snapkv', 'cache.budget': 96, 'cache.interval': 16, 'cache.window': 8}
MISMATCH = 'rollout_corr/k3_kl'

EXPERIMENT = Experiment(
  name='sparse_rl_snapkv',
  question='Does the correction help with SnapKV as with R-KV?',
  task=TOTALS,
  arms={'dense': {'arm': 'dense'}} | {arm: {'arm': arm} | CACHE for arm in ('naive', 'sparse_rl')},
  steps=300,
  settings={'eval.every': 100},
  series=(MISMATCH, 'sparse/accounting_saving', 'sparse/veto_fraction'),
  shown=(REWARD, MISMATCH, 'sparse/veto_fraction'),
  claims=(
    Claim(
      'Without a correction, training on rollouts of SnapKV collapses: it ends below the accuracy before training.',
      'Sparse-RL, as summaries report it', 'collapse', (Comparison(BEFORE, 'naive', 0.03),),
    ),
    Claim('With the correction, training on rollouts of SnapKV ends higher than without it.', 'Sparse-RL', 'no collapse',
          (Comparison('sparse_rl', 'naive', 0.05),)),
    Claim('With the correction, rollouts of SnapKV train nearly as well as dense ones.', 'Sparse-RL, as summaries report it',
          '96 to 97 % of dense', (Comparison('sparse_rl', 'dense', -0.05),),
          reason='This budget is too small for this task: with it SnapKV solves no problem (its rollouts have a reward of 0.10 '
          'to 0.12, which is that of guesses), and the veto rejects 94 % of the sequences. The papers report a mismatch (k3) of '
          'at most about 0.03 nats a token; here it is 0.5. `sparse_rl_snapkv_176` has a larger budget.'),
  ),
  hours=2.4,
  unplanned={'Training with the correction, against no training.': Comparison('sparse_rl', BEFORE, 0.0)},
  note='The rollouts of both sparse arms are guesses. The correction rejects 94 % of the sequences. On average `sparse_rl` then '
  'stays near the accuracy before training, but its seeds differ: they change by -0.26 to +0.16. Seed 4 fell from 0.36 to 0.10. '
  'No arm rejects as many sequences at random.',
)  # fmt: skip
