"""Sparse-RL (arXiv 2601.10079): where does training on rollouts from a small cache break, and what does the correction rescue?

The sequences have 144 to 284 tokens (214 in the mean), with prompts of 41 to 81. The budgets are 41 to 67 % of the mean. The
released code never compresses a prompt: it needs a budget of 81 or more.

One seed of the arms `dense`, `naive` and `sparse_rl` was the pilot, with 100 problems. It chose the budgets and APART: at 80 and
88 nothing was rescued, at 112 and 144 nothing broke. Its mismatch (k3, R-KV, mean over 500 naive steps) was 0.17 nats a token at
88, 0.12 at 96, 0.036 at 112 and 0.007 at 144. The papers report up to about 0.03.

An earlier plan was changed after eleven runs of its first seed, which are not used. It evaluated fewer policies with a small
cache, on a quarter of the problems, and did not measure whether the mismatch grows. These runs decided no threshold.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment, arm_named, growth, under
from claims.tasks import TOTALS

BUDGETS = (88, 96, 104, 112, 144)
APART = 96  # the budget of the arms that take the correction apart
ALWAYS, PARTS = ('naive', 'sparse_rl'), ('veto_only', 'reweight_only', 'random_veto', 'learner_mask', 'sparse_rl_code')
SAVED_TOKENS, SAVED_BYTES, MISMATCH = 'sparse/accounting_saving', 'sparse/bytes_saving', 'rollout_corr/k3_kl'


def _cache(budget):
  return {'cache.method': 'rkv', 'cache.budget': budget, 'cache.interval': 16, 'cache.window': 8}


def _arm(name, budget):
  return f'{name}@{budget}', arm_named(name) | _cache(budget)


def _at_each(statement, paper, theirs, first, second, above, reasons):
  """Return a claim for each budget, which compares `first` with `second` there. `reasons`: of those that do not hold."""
  compared = {budget: Comparison(first.format(budget), second.format(budget), above) for budget in BUDGETS}
  return tuple(
    Claim(f'{statement} (budget {budget}).', paper, theirs, (each,), reasons.get(budget, '')) for budget, each in compared.items()
  )


NOT_COLLAPSED = {
  104: 'Naive training loses against dense (0.55 against 0.83), but not below the 0.43 before it. The mismatch is 0.07 and 0.24 '
  'nats a token (by warm start), against 0.12 and 0.33 at 88, where it collapses. More steps may change this.',
  112: 'It ends at 0.68, from 0.43: the mismatch is 0.04 and 0.14 nats a token. More steps may change this.',
  144: 'It ends at 0.81, and dense training at 0.83: the mismatch is 0.008 and 0.07 nats a token, for one warm start that of the '
  'papers. Their answers have up to 4,096 tokens, so that more tokens of a sequence can be near impossible. No run tests this.',
}
NOTHING_LOST = {
  144: 'Without a correction training ends 0.017 below dense training (-0.008 to 0.042), so there is little to rescue.'
}
TOO_SMALL = (
  'The budget is too small for this task: rollouts solve {} of the problems (a guess: 0.10; dense rollouts: 0.69 and 0.85, by '
  'warm start), and the veto rejects {} of the sequences. So there is little to learn from.'
)
NOT_AS_DENSE = {
  88: TOO_SMALL.format('0.12 and 0.14', '53 and 89 %'),
  96: TOO_SMALL.format('0.22 and 0.20', '43 and 79 %'),
  104: TOO_SMALL.format('0.32 and 0.28', '32 and 70 %'),
}
LIMITED = (
  'From these caches a policy answers badly whether it was trained on dense rollouts or on sparse ones: 0.19 to 0.23 with 96 '
  'tokens, 0.42 to 0.45 with 112. Trained on sparse rollouts of 88 or 96 tokens it answers a little worse, if anything. The '
  'cache is the limit, perhaps because it loses digits of the prompt (not tested).'
)


def _parts_against(arm, *others, above=0.03):
  return tuple(Comparison(f'{arm}@{APART}', f'{other}@{APART}', above) for other in others)


def _from_the_cache_of(*arms):
  """Return the comparisons with dense training, of answers from the cache with which an arm trained."""
  return tuple(Comparison(arm, 'dense', 0.03, measure=under(f'R-KV {arm.partition("@")[2]}')) for arm in arms)


EXPERIMENT = Experiment(
  name='sparse_rl_phases',
  question='Does training on rollouts from a small cache collapse, and does the correction of Sparse-RL prevent it?',
  task=TOTALS,
  arms={'dense': {'arm': 'dense'}}
  | dict(_arm(name, budget) for budget in BUDGETS for name in ALWAYS)
  | dict(_arm(name, APART) for name in PARTS),
  steps=500,
  settings={'eval.every': 100},
  series=(MISMATCH, SAVED_TOKENS, SAVED_BYTES, 'sparse/veto_fraction', 'sparse/agreement_p05'),
  shown=(REWARD, MISMATCH, 'sparse/veto_fraction'),
  inference={f'R-KV {budget}': {'arm': 'naive'} | _cache(budget) for budget in BUDGETS},
  asked=('dense', *(f'sparse_rl@{budget}' for budget in BUDGETS), 'naive@96', 'naive@112', 'learner_mask@96'),
  claims=(
    Claim(
      'Training on dense rollouts improves the policy.', 'all three papers', 'the reward rises',
      (Comparison('dense', BEFORE, 0.1),),
    ),
    *_at_each(
      'Without a correction, training on sparse rollouts collapses: it ends below the accuracy before training',
      'Sparse-RL, as summaries report it', 'collapse', BEFORE, 'naive@{}', 0.03, NOT_COLLAPSED,
    ),
    *_at_each(
      'With the correction, training on sparse rollouts ends higher than without it', 'Sparse-RL', 'no collapse',
      'sparse_rl@{}', 'naive@{}', 0.05, NOTHING_LOST,
    ),
    *_at_each(
      'With the correction, sparse rollouts train nearly as well as dense ones', 'Sparse-RL, as summaries report it',
      '96 to 97 % of dense', 'sparse_rl@{}', 'dense', -0.05, NOT_AS_DENSE,
    ),
    Claim(
      'Rejection and weights are both needed.', 'Sparse-RL', 'both are part of the method',
      _parts_against('sparse_rl', 'veto_only', 'reweight_only'),
    ),
    Claim(
      'It matters which sequences are rejected.', 'Sparse-RL', 'those that the dense policy finds near impossible',
      _parts_against('sparse_rl', 'random_veto'),
    ),
    Claim(
      'The formulas of the released code train as well as those of the paper.', 'Sparse-RL', 'one method',
      _parts_against('sparse_rl_code', 'sparse_rl', above=-0.05),
    ),
    Claim(
      'A learner that sees only the tokens that the sampler saw ends higher than without a correction.', 'not in the paper', '-',
      _parts_against('learner_mask', 'naive', above=0.05),
    ),
    Claim(
      'A budget of 112 trains nearly as well as dense, and saves a third of the attended tokens and half of the bytes.',
      'Sparse-RL, as summaries report it', '35 to 53 % of the tokens',
      (
        Comparison('sparse_rl@112', 'dense', -0.05),
        Comparison('sparse_rl@112', 'dense', 0.33, measure=SAVED_TOKENS),
        Comparison('sparse_rl@112', 'dense', 0.5, measure=SAVED_BYTES),
      ),
      'It saves 23 % of the attended tokens: a sequence of 214 tokens is shorter than the budget for half of its steps. In '
      'the papers answers have up to 4,096 tokens, and the budget is 512.',
    ),
    Claim(
      'A policy that was trained on sparse rollouts answers better from a sparse cache.', 'Sparse-RL', 'more robust than dense',
      _from_the_cache_of('sparse_rl@96', 'sparse_rl@112'), LIMITED,
    ),
    Claim(
      'A policy that was trained without a correction answers better from a sparse cache too.', 'not in the paper', '-',
      _from_the_cache_of('naive@96', 'naive@112'), LIMITED,
    ),
    Claim(
      'A policy whose learner saw only the tokens that the sampler saw answers better from a sparse cache too.',
      'not in the paper', '-',
      _from_the_cache_of('learner_mask@96'), LIMITED,
    ),
    Claim(
      f'The mismatch grows without a correction (budget {APART}).', 'Sparse-RL, as summaries report it',
      'it grows until training collapses',
      (growth(f'naive@{APART}', MISMATCH),),
    ),
  ),
  hours=34.0,
  unplanned={
    f'Training with the correction, against no training (budget {budget}).': Comparison(f'sparse_rl@{budget}', BEFORE, 0.0)
    for budget in BUDGETS
  }
  | {
    f'Answers from a cache of {budget} tokens: trained with it and the correction, against dense.': Comparison(
      f'sparse_rl@{budget}', 'dense', 0.0, measure=under(f'R-KV {budget}')
    )
    for budget in (88, 104, 144)
  },
  note='A sequence has 144 to 284 tokens, 214 on average, so the budgets are 41 to 67 % of the average. The papers have 512 of '
  'up to 4,096 tokens, and a mismatch (k3) of at most about 0.03 nats a token. Here only budgets of 112 and 144 come near it, '
  'with the first warm start. An earlier plan was changed after eleven runs of seed 1, because it evaluated too few policies '
  'with a small cache and not how the mismatch grows. These runs decided no threshold, and were repeated under the new plan.\n\n'
  '`sparse_rl_code` ends at 0.08 to 0.14 in the four seeds of one warm start, and at 0.69 to 0.80 in those of the other. It '
  'rejects 82 and 85 % of the sequences, and its mismatch (k3) is 0.3 and 0.5 nats a token.\n\n'
  'The correction does not always prevent a loss. With 88 tokens, one seed (8) fell from 0.39 to 0.19, and over all seeds it is '
  'open whether training with the correction ends above the start (second table below).\n\n'
  'The last picture has the accuracy by the cache that answers. Policies that trained with a small cache answer worse from a '
  'larger one too: with 144 tokens, `sparse_rl@88` solves 0.36 of the problems, `sparse_rl@96` 0.51 and `dense` 0.62.',
)  # fmt: skip
