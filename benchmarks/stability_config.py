"""Config of a run of benchmarks/stability.py: arithmetic progressions with a small model or with SmolLM2.

    --config=benchmarks/stability_config.py:FOLDER

benchmarks/progressions.py writes FOLDER. The run starts from the model in FOLDER/warm.
"""

from pathlib import Path

from sprl.config import default_config


def get_config(folder):
  config = default_config()
  config.steps = 100
  config.model.path = str(Path(folder) / 'warm')
  config.model.remat = 'none'
  config.task.kind, config.task.chat = 'jsonl', False
  config.task.path = folder
  config.task.grader = str(Path(folder) / 'grader.py') + ':grade'
  config.rollout.prompts, config.rollout.group = 16, 8
  config.rollout.stop_when_capped = False  # a collapse is a result of this benchmark
  config.sampling.max_prompt, config.sampling.max_tokens = 16, 112
  config.sampling.prompt_buckets, config.sampling.chunk = (16,), 16
  config.cache.method, config.cache.budget, config.cache.interval, config.cache.window = 'rkv', 48, 16, 8
  config.packing.row_tokens, config.packing.rows, config.packing.score_chunk = 128, 32, 2048
  config.packing.share_prefix = False
  config.loss.kl_coef = 1e-4
  config.optimizer.learning_rate, config.optimizer.weight_decay, config.optimizer.minibatches = 5e-5, 0.0, 2
  config.eval.every, config.eval.problems = None, 200
  config.checkpoint.every, config.log.samples_every = None, None
  config.log.trackers = ()
  return config
