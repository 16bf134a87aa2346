"""The tasks of the experiments that need a GPU: GSM8K with the settings of configs/qwen_gsm8k.py and two 1.5 B models."""

import runpy
from typing import Any

from claims.experiment import Task
from common import ROOT
from ml_collections import ConfigDict

from sprl.config import default_config

VARIANTS = ('qwen2.5-1.5b', 'qwen2.5-1.5b-instruct')  # seeds begin from both in turn
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


def _recipe(variant: str) -> Any:
  return runpy.run_path(str(ROOT / 'configs' / 'qwen_gsm8k.py'))['get_config'](variant)


def _gsm8k() -> Task:
  settings = _changed(_recipe(VARIANTS[0]), default_config())
  own = {key: settings.pop(key, None) for key in ('arm', 'steps', 'export', 'model.path')}
  assert own['arm'] == 'sparse_rl'
  return Task(
    name='gsm8k',
    sentence='Qwen2.5-1.5B and its instruct model on GSM8K',
    write=lambda folder: folder.mkdir(parents=True),
    warm=tuple(_recipe(variant).model.path for variant in VARIANTS),
    settings=settings
    | {
      'sampling.max_tokens': ANSWER,
      'rollout.stop_when_capped': False,
      'eval.temperature': 1.0,
      'eval.top_p': 1.0,
      'log.trackers': (),
    },
  )


GSM8K = _gsm8k()
