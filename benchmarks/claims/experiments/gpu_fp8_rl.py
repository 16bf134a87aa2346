"""FP8-RL (arXiv 2601.18150) with models of 1.5 B parameters on GSM8K. It needs a GPU, and has not run.

Time: as in gpu_sparse_rl, half an hour a run.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.gpu_tasks import GSM8K, MARGIN

FORMATS = {'w8a8': 'w8a8', 'kv8': 'kv8', 'both': 'w8a8_kv8'}
CORRECTED = {'alone': 'disabled', 'tis': 'token_is', 'mis': 'token_mis'}
MISMATCH, ROLLOUT = 'rollout_corr/k3_kl', 'time/rollout'
LEARNS = Comparison('bfloat16', BEFORE, 3 * MARGIN)


def _arm(correction, numbers):
  return {'preset': CORRECTED[correction], 'quant.sampler': FORMATS[numbers], 'cache.budget': None}


EXPERIMENT = Experiment(
  name='gpu_fp8_rl',
  question='Do FP8 rollouts of 1.5 B parameters train as well as bfloat16, and are they faster?',
  task=GSM8K,
  arms={'bfloat16': {'preset': 'disabled', 'cache.budget': None}}
  | {f'{correction}@{numbers}': _arm(correction, numbers) for numbers in FORMATS for correction in CORRECTED}
  | {f'frozen@{numbers}': _arm('tis', numbers) | {'quant.kv_scale': 'frozen'} for numbers in ('kv8', 'both')}
  | {f'end_to_end@{numbers}': _arm('tis', numbers) | {'quant.learner': 'w8a8'} for numbers in ('w8a8', 'both')},
  steps=100,
  series=(MISMATCH, ROLLOUT, 'fp8/kv_saturation'),
  shown=(REWARD, MISMATCH, ROLLOUT),
  claims=(
    Claim('Training in bfloat16 improves 1.5 B parameters.', 'all three papers', 'the reward rises',
          (LEARNS,)),
    Claim('FP8 rollouts of 1.5 B parameters without a correction lower the accuracy by more than 0.05.', 'FP8-RL',
          'a drop without a correction', (Comparison('bfloat16', 'alone@both', 0.05),)),
    Claim('With token-level TIS, FP8 rollouts of 1.5 B parameters train as well as bfloat16.', 'FP8-RL', 'on par',
          tuple(Comparison(f'tis@{numbers}', 'bfloat16', -MARGIN) for numbers in FORMATS), given=LEARNS),
    Claim('With token-level MIS, FP8 rollouts of 1.5 B parameters train as well as bfloat16.', 'FP8-RL', 'on par',
          tuple(Comparison(f'mis@{numbers}', 'bfloat16', -MARGIN) for numbers in FORMATS), given=LEARNS),
    Claim('An FP8 cache adds more mismatch than FP8 linears, and both together add most (1.5 B).', 'FP8-RL, second-hand',
          'W8A8 < KV8 < both',
          (Comparison('tis@kv8', 'tis@w8a8', 0.0, MISMATCH), Comparison('tis@both', 'tis@kv8', 0.0, MISMATCH))),
    Claim('Without recalibration of the cache scales after each update, 1.5 B parameters lose more than 0.05.', 'FP8-RL',
          'recalibration after every update', (Comparison('tis@both', 'frozen@both', 0.05),)),
    Claim('A learner that multiplies in FP8 too has less mismatch (1.5 B).', 'FP8-RL, second-hand',
          'end-to-end FP8 has less mismatch', (Comparison('tis@w8a8', 'end_to_end@w8a8', 0.0, MISMATCH),)),
    Claim('Training that multiplies in FP8 end to end loses at most 0.03 against bfloat16 (1.5 B).', 'FP8-RL', 'on par',
          tuple(Comparison(f'end_to_end@{numbers}', 'bfloat16', -MARGIN) for numbers in ('w8a8', 'both')), given=LEARNS),
    Claim('FP8 rollouts take less time.', 'FP8-RL', 'up to 44 % more throughput',
          (Comparison('bfloat16', 'tis@both', 0.0, ROLLOUT),)),
  ),
  hours=56.0,
  device='one H200',
)  # fmt: skip
