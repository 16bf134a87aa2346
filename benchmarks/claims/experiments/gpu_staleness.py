"""ROLL Flash (arXiv 2510.11345) with models of 1.5 B parameters on GSM8K: do off-policy losses train well on stale samples?

It needs a GPU, and has not run. As staleness, with a real model. Engine and learner take turns on the GPU. alpha is the staleness
bound, and the engine has rows for all groups of the window. So an update has 128 sequences, an eighth of the recipe's: at alpha =
8 the engine then has 1,152 rows, for which there is memory (51 GB for the cache). After an update it reads the tokens of its rows
again under the new weights. That is part of the measured time of rollouts, and may take as long as drawing the new tokens. As
engine and learner take turns, this time shows what more rows save, not what overlap saves (gpu_scheduling asks for the time to a
score). In bfloat16 sampler and learner differ by rounding, so that `fresh` stands for all losses up to that difference.

Time: for answers of 300 tokens the planner's lower bounds for an H200 are 0.8 s for an update and about 0.5 s for its rollouts.
Twice that, for 400 updates, is 17 minutes a run. Evaluations take about 3 more, and reading tokens again 7.
"""

from claims.experiment import REWARD, Claim, Comparison, Experiment
from claims.experiments.staleness import CORRECTED, arms, learns, on_par
from claims.gpu_tasks import GSM8K, MARGIN

ALPHAS = (1, 2, 4, 8)
RATES = {'recipe': 1e-6, 'high': 4e-6}
PROMPTS, GROUP = 16, 8  # of an update
CASES = [(alpha, 'recipe') for alpha in ALPHAS] + [(8, 'high')]

EXPERIMENT = Experiment(
  name='gpu_staleness',
  question='Do off-policy losses train 1.5 B parameters as well on samples of older weights, and is it faster?',
  task=GSM8K,
  arms=arms(CASES, RATES, PROMPTS * GROUP),
  steps=400,
  settings={
    'eval.every': 100, 'cache.budget': None, 'rollout.prompts': PROMPTS, 'rollout.group': GROUP, 'optimizer.minibatches': 1,
  },
  series=('rollout_corr/k3_kl', 'async/age_mean', 'async/token_lag_mean', 'time/rollout'),
  shown=(REWARD, 'time/rollout'),
  claims=(
    *(
      Claim(f'Training on fresh samples improves 1.5 B parameters ({rate} learning rate).', 'all three papers',
            'the reward rises', (learns(rate, 3 * MARGIN),))
      for rate in RATES
    ),
    *(
      on_par('With 1.5 B parameters, losses made for stale samples do as well as on fresh ones', CORRECTED, alpha, rate, 'on par',
             MARGIN)
      for alpha, rate in CASES
    ),
    *(
      on_par('With 1.5 B parameters, PPO, which is not made for stale samples, does as well too', ('ppo',), alpha, rate, 'on par',
             MARGIN)
      for alpha, rate in CASES
    ),
    *(
      Claim(f'Rollouts of an update take less time with the rows of a staleness of {alpha}.', 'not in the paper', '-',
            (Comparison('fresh@recipe', f'ppo@{alpha}, recipe', 0.0, 'time/rollout'),))
      for alpha in ALPHAS
    ),
  ),
  hours=95.0,
  device='one H200',
)  # fmt: skip
