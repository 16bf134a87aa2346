"""FP8-RL (arXiv 2601.18150): does training on FP8 rollouts need a correction, and then match rollouts in full precision?

All rollouts have a dense cache. The sampler's linears are FP8 (w8a8), or its cache is (kv8), or both. `frozen` keeps the scales
of the cache as they were before the first update. In `end_to_end` the learner multiplies in FP8 too. Arms at `both, 4 x` have
four times the learning rate, for the case that a small model shows no harm at the usual one.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.tasks import TOTALS

FORMATS = {'w8a8': 'w8a8', 'kv8': 'kv8', 'both': 'w8a8_kv8'}
CORRECTED = {'alone': 'disabled', 'tis': 'token_is', 'mis': 'token_mis'}
FAST = {'optimizer.learning_rate': 2e-4}
FROZEN, IN_LEARNER = {'quant.kv_scale': 'frozen'}, {'quant.learner': 'w8a8'}
MISMATCH = 'rollout_corr/k3_kl'


def _arm(correction, numbers, **more):
  return {'preset': CORRECTED[correction], 'quant.sampler': FORMATS[numbers], **more}


EXPERIMENT = Experiment(
  name='fp8_rl',
  question='Does training on FP8 rollouts need a correction, and does it then match full precision?',
  task=TOTALS,
  arms={'full': {'preset': 'disabled'}}
  | {f'{correction}@{numbers}': _arm(correction, numbers) for numbers in FORMATS for correction in CORRECTED}
  | {f'frozen@{numbers}': _arm('tis', numbers, **FROZEN) for numbers in ('kv8', 'both')}
  | {f'end_to_end@{numbers}': _arm('tis', numbers, **IN_LEARNER) for numbers in ('w8a8', 'both')}
  | {'full@both, 4 x': {'preset': 'disabled'} | FAST}
  | {f'{correction}@both, 4 x': _arm(correction, 'both', **FAST) for correction in CORRECTED}
  | {'frozen@both, 4 x': _arm('tis', 'both', **FROZEN, **FAST)},
  steps=200,
  settings={'eval.every': 50},
  series=(MISMATCH, 'fp8/kv_saturation'),
  shown=(REWARD, MISMATCH),
  claims=(
    Claim(
      'Training in full precision improves the policy.', 'all three papers', 'the reward rises',
      (Comparison('full', BEFORE, 0.1),),
    ),
    Claim(
      'FP8 rollouts without a correction lower the accuracy.', 'FP8-RL', 'a drop without a correction',
      (Comparison('full', 'alone@both', 0.02),),
    ),
    Claim(
      'The same with four times the learning rate.', 'FP8-RL', 'a drop without a correction',
      (Comparison('full@both, 4 x', 'alone@both, 4 x', 0.02),),
    ),
    Claim(
      'With token-level TIS, FP8 rollouts train as well as full precision.', 'FP8-RL', 'on par',
      (Comparison('tis@w8a8', 'full', -0.03), Comparison('tis@kv8', 'full', -0.03), Comparison('tis@both', 'full', -0.03)),
    ),
    Claim(
      'With token-level MIS, FP8 rollouts train as well as full precision.', 'FP8-RL', 'on par',
      (Comparison('mis@w8a8', 'full', -0.03), Comparison('mis@kv8', 'full', -0.03), Comparison('mis@both', 'full', -0.03)),
    ),
    Claim(
      'An FP8 cache adds more mismatch than FP8 linears, and both together add most.', 'FP8-RL', 'W8A8 < KV8 < both',
      (
        Comparison('tis@kv8', 'tis@w8a8', 0.0, measure=MISMATCH),
        Comparison('tis@both', 'tis@kv8', 0.0, measure=MISMATCH),
      ),
    ),
    Claim(
      'Scales that stay as they were before the first update lower the accuracy.', 'FP8-RL', 'recalibration after every update',
      (Comparison('tis@both', 'frozen@both', 0.02), Comparison('tis@both, 4 x', 'frozen@both, 4 x', 0.02)),
    ),
    Claim(
      'A learner that multiplies in FP8 too has less mismatch.', 'FP8-RL', 'end-to-end FP8 has less mismatch',
      (Comparison('tis@w8a8', 'end_to_end@w8a8', 0.0, measure=MISMATCH),),
    ),
  ),
  hours=7.0,
)  # fmt: skip
