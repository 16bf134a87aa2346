"""FP8-RL with a bfloat16 learner, as the paper has: does FP8 add mismatch, and does FP8 in the learner remove it?

fp8_rl compares with float32, in which sampler and learner agree to rounding. In bfloat16 they do not.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment
from claims.tasks import TOTALS

MISMATCH = 'rollout_corr/k3_kl'
BFLOAT16 = {'model.dtype': 'bfloat16'}

EXPERIMENT = Experiment(
  name='fp8_bfloat16',
  question='Does training on FP8 rollouts match training in bfloat16?',
  task=TOTALS,
  arms={
    'bfloat16': BFLOAT16 | {'preset': 'disabled'},
    'alone': BFLOAT16 | {'preset': 'disabled', 'quant.sampler': 'w8a8_kv8'},
    'tis': BFLOAT16 | {'preset': 'token_is', 'quant.sampler': 'w8a8_kv8'},
    'end_to_end': BFLOAT16 | {'preset': 'token_is', 'quant.sampler': 'w8a8_kv8', 'quant.learner': 'w8a8'},
  },
  steps=100,
  settings={'eval.every': 50},
  series=(MISMATCH,),
  shown=(REWARD, MISMATCH),
  claims=(
    Claim('Training in bfloat16 improves the policy.', 'all three papers', 'the reward rises',
          (Comparison('bfloat16', BEFORE, 0.1),)),
    Claim('FP8 linears and an FP8 cache add mismatch to that of bfloat16.', 'FP8-RL, second-hand', 'bfloat16 < FP8',
          (Comparison('alone', 'bfloat16', 0.0, MISMATCH),)),
    Claim('A learner that multiplies in FP8 too has less mismatch.', 'FP8-RL, second-hand', 'between FP8 rollouts and bfloat16',
          (Comparison('tis', 'end_to_end', 0.0, MISMATCH), Comparison('end_to_end', 'bfloat16', 0.0, MISMATCH))),
    Claim('FP8 rollouts without a correction lower the accuracy of bfloat16 training by more than 0.05.', 'FP8-RL',
          'a drop without a correction', (Comparison('bfloat16', 'alone', 0.05),),
          reason='The mismatch is small, as in fp8_rl: 0.0009 nats a token, in answers of about 150 tokens. The published drop '
          'is that of a model of 8 B parameters (verl documentation). No run tests this reason.'),
    Claim('With token-level TIS, FP8 rollouts train as well as bfloat16.', 'FP8-RL', 'on par',
          (Comparison('tis', 'bfloat16', -0.05),)),
    Claim('Training that multiplies in FP8 end to end loses at most 0.05 against bfloat16.', 'FP8-RL', 'on par',
          (Comparison('end_to_end', 'bfloat16', -0.05),)),
  ),
  hours=2.0,
)  # fmt: skip
