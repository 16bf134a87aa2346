"""FP8-RL (arXiv 2601.18150) with mixtures of 14.3 B parameters on GSM8K. It needs four H200s, and has not run.

As mixture_replay, whose mixture is small and whose reference is float32. Here they are Qwen1.5-MoE-A2.7B and its chat model,
and the reference is bfloat16, in which sampler and learner choose different experts too. `end_to_end` multiplies in FP8 in the
learner as well, with R3. All arms have token-level TIS. The published collapse begins near step 700; these runs have 100 steps.

Time: for answers of 300 tokens and four H200s the planner's parts add up to 4.8 s for an update of 1,024 sequences (experts
divided over the GPUs; links and products in turn) and 3.8 s for their rollouts in bfloat16. Twice that, for 100 steps, is 29
minutes a run. Evaluations take a few more.
"""

from claims.experiment import BEFORE, REWARD, Claim, Comparison, Experiment, growth
from claims.gpu_tasks import MARGIN, MIXTURE

MISMATCH, ROLLOUT = 'rollout_corr/k3_kl', 'time/rollout'
LEARNS = Comparison('none@bfloat16', BEFORE, 3 * MARGIN)
FORMATS = {'bfloat16': 'none', 'w8a8': 'w8a8'}


def _arm(replay, numbers):
  return {'model.router_replay': replay, 'quant.sampler': FORMATS[numbers]}


EXPERIMENT = Experiment(
  name='gpu_mixture',
  question='Does router replay improve the training of a mixture of 14.3 B parameters, in bfloat16 and on FP8 rollouts?',
  task=MIXTURE,
  arms={f'{replay}@{numbers}': _arm(replay, numbers) for numbers in FORMATS for replay in ('none', 'R2', 'R3')}
  | {'end_to_end': _arm('R3', 'w8a8') | {'quant.learner': 'w8a8'}},
  steps=100,
  settings={'preset': 'token_is', 'cache.budget': None},
  series=(MISMATCH, ROLLOUT),
  shown=(REWARD, MISMATCH, ROLLOUT),
  claims=(
    Claim('Training in bfloat16 improves a mixture of 14.3 B parameters.', 'all three papers', 'the reward rises',
          (LEARNS,)),
    Claim('FP8 linears add mismatch (14.3 B).', 'FP8-RL', 'FP8 adds mismatch',
          (Comparison('none@w8a8', 'none@bfloat16', 0.0, MISMATCH),)),
    Claim('The mismatch of FP8 rollouts grows without replay (14.3 B).', 'FP8-RL, second-hand', 'it grows with experts',
          (growth('none@w8a8', MISMATCH),)),
    Claim('R3 reduces the mismatch, in bfloat16 and in FP8 (14.3 B).', 'paper on R3, second-hand',
          'from 1.5e-3 to 0.75e-3', tuple(Comparison(f'none@{numbers}', f'R3@{numbers}', 0.0, MISMATCH) for numbers in FORMATS)),
    Claim('FP8 rollouts of 14.3 B parameters with TIS, but without replay, lower the accuracy by more than 0.05.',
          'FP8-RL, second-hand', 'a drop without replay',
          (Comparison('none@bfloat16', 'none@w8a8', 0.05),)),
    Claim('With R2, and with R3, FP8 rollouts of 14.3 B parameters train as well as bfloat16.', 'FP8-RL', 'on par',
          tuple(Comparison(f'{replay}@w8a8', 'none@bfloat16', -MARGIN) for replay in ('R2', 'R3')), given=LEARNS),
    Claim('Replay costs no accuracy in bfloat16 (14.3 B).', 'FP8-RL', 'on par',
          tuple(Comparison(f'{replay}@bfloat16', 'none@bfloat16', -MARGIN) for replay in ('R2', 'R3')), given=LEARNS),
    Claim('FP8 end to end trains a mixture of 14.3 B parameters as well as bfloat16.', 'FP8-RL', 'on par (30 B parameters)',
          (Comparison('end_to_end', 'none@bfloat16', -MARGIN),), given=LEARNS),
    Claim('FP8 rollouts of a mixture take less time.', 'FP8-RL', 'more than 35 % more throughput (30 B parameters)',
          (Comparison('none@bfloat16', 'none@w8a8', 0.0, ROLLOUT),)),
  ),
  hours=30.0,
  device='four H200s',
)  # fmt: skip
