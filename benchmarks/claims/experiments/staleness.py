"""ROLL Flash (arXiv 2510.11345): do off-policy losses train as well on samples that older weights drew?

alpha is the staleness bound. Learner and engine take turns on one device, and the engine has rows for all groups of the window:
every sample is then exactly alpha updates old, so an arm's alpha is its staleness. Caches are recomputed at each update. Every
loss takes its ratio to the sampler's log-probs, except decoupled_ppo, whose third policy is the old one. With fresh samples and
one update a batch, all losses have the same gradient: `fresh` stands for all.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.tasks import TOTALS

TWO_POLICIES = {'correction.mode': 'bypass', 'correction.level': None}
LOSSES = {
  'ppo': {'loss.variant': 'ppo'} | TWO_POLICIES,
  'decoupled_ppo': {'loss.variant': 'ppo', 'correction.level': 'token', 'correction.cap': 5.0},
  'tis': {'loss.variant': 'tis'} | TWO_POLICIES,
  'topr': {'loss.variant': 'topr'} | TWO_POLICIES,
  'cispo': {'loss.variant': 'cispo'} | TWO_POLICIES,
}
ALPHAS = (2, 4, 8)
RATES = {'low': 2e-5, 'middle': 5e-5, 'high': 2e-4}
BATCH = 16  # sequences of an update


def _arm(loss, alpha, rate):
  window = {'rollout.async_ratio': float(alpha), 'sampling.rows': BATCH * (alpha + 1)}
  return LOSSES[loss] | window | {'optimizer.learning_rate': RATES[rate]}


def _on_par(statement, losses, alpha, rate, theirs):
  comparisons = tuple(Comparison(f'{loss}@{alpha}, {rate}', f'fresh@{rate}', -0.05) for loss in losses)
  return Claim(f'{statement} (staleness {alpha}, {rate} learning rate)', 'ROLL Flash', theirs, comparisons)


CORRECTED = tuple(loss for loss in LOSSES if loss != 'ppo')
USUAL = [(alpha, 'middle') for alpha in ALPHAS]
EXTREME = [(alpha, rate) for alpha in (2, 8) for rate in ('low', 'high')]

EXPERIMENT = Experiment(
  name='staleness',
  question='Do off-policy losses train as well on samples of older weights?',
  task=TOTALS,
  arms={f'fresh@{rate}': _arm('ppo', 0, rate) for rate in RATES}
  | {f'{loss}@{alpha}, {rate}': _arm(loss, alpha, rate) for alpha, rate in USUAL + EXTREME for loss in LOSSES},
  steps=100,
  settings={'eval.every': 50},
  series=('rollout_corr/k3_kl', 'async/age_mean'),
  shown=(REWARD,),
  claims=(
    *(
      Claim(f'Training on fresh samples improves the policy ({rate} learning rate).', 'all three papers', 'the reward rises',
            (Comparison(f'fresh@{rate}', BEFORE, 0.05),))
      for rate in RATES
    ),
    *(
      _on_par('Losses made for stale samples do as well as on fresh ones', CORRECTED, alpha, rate, 'on par at 2 to 8')
      for alpha, rate in USUAL + EXTREME
    ),
    *(
      _on_par('PPO, which is not made for stale samples, does as well too', ('ppo',), alpha, rate, 'on par')
      for alpha, rate in USUAL + EXTREME
    ),
  ),
  hours=7.5,
)  # fmt: skip
