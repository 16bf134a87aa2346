"""The tasks of experiments that need GPUs: GSM8K with the settings of configs/qwen_gsm8k.py, for 1.5 B models and mixtures."""

import runpy
from typing import Any

from claims.experiment import Task
from common import ROOT
from ml_collections import ConfigDict

from sprl.config import default_config

# Seeds begin from both models in turn.
SMALL = 'Qwen/Qwen2.5-1.5B', 'Qwen/Qwen2.5-1.5B-Instruct'
MIXTURES = 'Qwen/Qwen1.5-MoE-A2.7B', 'Qwen/Qwen1.5-MoE-A2.7B-Chat'  # 14.3 B parameters, of which a token uses 2.7 B
MARGIN = 0.03  # of the accuracy that counts as on par
ANSWER = 1024  # longest answer, in tokens: GSM8K's solutions by these models have about 300


def _changed(config: ConfigDict, default: Any, prefix: str = '') -> dict:
  """Return the settings of a config that differ from the default, by key."""
  found = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict) and value:
      found |= _changed(value, default.get(name, ConfigDict()), f'{prefix}{name}.')
    elif value != default.get(name):
      found[prefix + name] = value
  return found


def _gsm8k(name: str, sentence: str, models: tuple[str, ...], more: dict) -> Task:
  recipe = runpy.run_path(str(ROOT / 'configs' / 'qwen_gsm8k.py'))['get_config']()
  settings = _changed(recipe, default_config())
  own = {key: settings.pop(key, None) for key in ('arm', 'steps', 'export', 'model.path')}
  assert own['arm'] == 'sparse_rl'
  return Task(
    name=name,
    sentence=sentence,
    write=lambda folder: folder.mkdir(parents=True),
    warm=models,
    settings=settings
    | {
      'sampling.max_tokens': ANSWER,
      'rollout.stop_when_capped': False,
      'eval.temperature': 1.0,
      'eval.top_p': 1.0,
      'log.trackers': (),
    }
    | more,
  )


GSM8K = _gsm8k('gsm8k', 'Qwen2.5-1.5B and its instruct model on GSM8K', SMALL, {})
MIXTURE = _gsm8k(
  'gsm8k_mixture',
  'Qwen1.5-MoE-A2.7B and its chat model on GSM8K',
  MIXTURES,
  {'mesh.learner.expert': 4, 'mesh.rollout.expert': 4, 'sampling.rows': 384},
)
