"""Models and runs for the tests of the planner."""

import dataclasses
from pathlib import Path

from sprl.config import Cache, ModelSettings, Packing, Rollout, Run, Sampling
from sprl.models.config import ModelConfig

ROOT = Path(__file__).parents[2]
MODELS = ROOT / 'benchmarks' / 'models'


def shallow(config: ModelConfig, layers: int) -> ModelConfig:
  """Return the config with the first `layers` layers only."""
  experts = config.experts and dataclasses.replace(config.experts, layers=tuple(range(layers)))
  return dataclasses.replace(config, num_layers=layers, experts=experts)


QWEN = ModelConfig.read(MODELS / 'Qwen2.5-7B')
PARAMETERS = 7_615_616_512  # of Qwen2.5-7B
E, H, K, D, F, V = 3584, 28, 4, 128, 18944, 152064  # of Qwen2.5-7B
LAYER = 2 * E * H * D + 2 * E * K * D + 3 * E * F  # weights of the linears of one of its layers
FEW = shallow(QWEN, 4)
MIXTURE = ModelConfig.read(MODELS / 'Qwen3-30B-A3B')
RUN = Run(
  model=ModelSettings(path='Qwen2.5-7B', remat='layer'),
  sampling=Sampling(max_prompt=512, max_tokens=1536, rows=64),
  rollout=Rollout(prompts=16, group=4),
  packing=Packing(row_tokens=2048, rows=1),
  cache=Cache(budget=512),
)
