"""Export of adapters as a folder that Hugging Face's PEFT loads: adapter_config.json and adapter_model.safetensors."""

import os
from pathlib import Path

import numpy as np

from sprl.config import Lora
from sprl.io.huggingface import Params, Tensor, check_apart, get, tensors, whole_folder, write_card, write_json, write_safetensors
from sprl.models.config import ModelConfig
from sprl.sharding.transfer import fetch

_NAMES = {'a': 'lora_A', 'b': 'lora_B'}


def export_adapters(
  folder: str | os.PathLike,
  adapters: Params,
  config: ModelConfig,
  lora: Lora,
  base: str,
  card: str | None = None,
  leads: bool = True,
) -> None:
  """Write adapters (models/lora.py) in float32. `base` is the model that they belong to: a hub name or a folder.

  `card` is the text of README.md; None writes none. Over several processes, all call this, and process 0, which `leads`, writes.
  The folder appears complete or not at all. An earlier export at `folder` is replaced. Raises WeightsError if `folder` is
  anything else, or is `base`.
  """
  weights, modules = [], set()
  for path, tensor in tensors(config).items():
    *parents, last = path
    if last != 'kernel' or parents[0] != 'layers' or parents[-1] not in lora.targets:
      continue
    module = tensor.name.removesuffix('.weight')
    modules.add(module.rpartition('.')[2])
    for name, matrix in get(adapters, tuple(parents)).items():
      array = np.asarray(fetch(matrix), np.float32)
      weights.append((Tensor(f'base_model.model.{module}.{_NAMES[name]}.weight', array.shape), lambda array=array: array))
  if not leads:
    return
  settings = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': lora.rank,
    'lora_alpha': lora.alpha,
    'target_modules': sorted(modules),
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'use_rslora': False,
    'inference_mode': True,
  }
  check_apart(Path(folder), base)
  with whole_folder(Path(folder)) as draft:
    write_safetensors(draft / 'adapter_model.safetensors', weights, 'float32')
    write_json(draft / 'adapter_config.json', settings)
    write_card(draft, card)
