"""Sparse-RL (arXiv 2601.10079) with models of 1.5 B parameters on GSM8K. It needs a GPU, and has not run.

Time: the planner's lower bounds for an H200 and answers of 300 tokens are 6.3 s for an update of 1,024 sequences and about 2 s
for dense rollouts. Twice that, for 100 steps, is half an hour a run. Prompt and answer have about 400 tokens, so that budgets of
128 and 256 are a third and two thirds of a sequence. `sparse_rl_code` has no arm: it refuses a budget below the longest prompt.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment, arm_named, under
from claims.gpu_tasks import GSM8K, MARGIN

BUDGETS, APART = (128, 256), 128
MISMATCH, ROLLOUT = 'rollout_corr/k3_kl', 'time/rollout'
LEARNS = Comparison('dense', BEFORE, 3 * MARGIN)


def _arm(name, budget):
  return f'{name}@{budget}', arm_named(name) | {'cache.budget': budget, 'cache.interval': 64}


EXPERIMENT = Experiment(
  name='gpu_sparse_rl',
  question='Does Sparse-RL keep the accuracy of 1.5 B parameters on GSM8K, and are its rollouts faster?',
  task=GSM8K,
  arms={'dense': {'arm': 'dense'}}
  | dict(_arm(name, budget) for budget in BUDGETS for name in ('naive', 'sparse_rl'))
  | dict(_arm(name, APART) for name in ('veto_only', 'reweight_only', 'random_veto', 'learner_mask')),
  steps=100,
  series=(MISMATCH, ROLLOUT, 'sparse/accounting_saving', 'sparse/bytes_saving', 'sparse/veto_fraction'),
  shown=(REWARD, MISMATCH, ROLLOUT),
  inference={f'R-KV {budget}': _arm('naive', budget)[1] for budget in BUDGETS},
  asked=('dense', 'sparse_rl@128', 'sparse_rl@256'),
  claims=(
    Claim('Training on dense rollouts improves 1.5 B parameters.', 'all three papers', 'the reward rises',
          (LEARNS,)),
    *(
      Claim(f'Without a correction, sparse rollouts of 1.5 B parameters end more than 0.05 below dense ones (budget {budget}).',
            'Sparse-RL, as summaries report it', 'collapse', (Comparison('dense', f'naive@{budget}', 0.05),))
      for budget in BUDGETS
    ),
    *(
      Claim(f'With the correction, sparse rollouts of 1.5 B parameters train nearly as well as dense ones (budget {budget}).',
            'Sparse-RL, as summaries report it', '96 to 97 % of dense',
            (Comparison(f'sparse_rl@{budget}', 'dense', -MARGIN),), given=LEARNS)
      for budget in BUDGETS
    ),
    Claim('Rejection and weights are both needed (1.5 B).', 'Sparse-RL', 'both are part of the method',
          (Comparison('sparse_rl@128', 'veto_only@128', 0.03), Comparison('sparse_rl@128', 'reweight_only@128', 0.03))),
    Claim('It matters which sequences are rejected (1.5 B).', 'Sparse-RL', 'those that the dense policy finds near impossible',
          (Comparison('sparse_rl@128', 'random_veto@128', 0.03),)),
    Claim('A learner that sees only the tokens that the sampler saw trains as well as the correction (1.5 B).',
          'not in the paper', '-', (Comparison('learner_mask@128', 'sparse_rl@128', -MARGIN),), given=LEARNS),
    Claim('A policy of 1.5 B parameters that was trained on sparse rollouts answers better from a sparse cache.', 'Sparse-RL',
          'more robust than dense', (Comparison('sparse_rl@128', 'dense', 0.03, measure=under('R-KV 128')),)),
    Claim('Sparse rollouts take less time.', 'Sparse-RL', 'cheaper rollouts',
          (Comparison('dense', 'sparse_rl@128', 0.0, ROLLOUT),)),
  ),
  hours=40.0,
  device='one H200',
)  # fmt: skip
