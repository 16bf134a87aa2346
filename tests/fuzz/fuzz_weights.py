"""Model folders: mutations of config.json, of the headers and bytes of safetensors files, and of the index of shards.

A folder loads, and then the params have the shapes of its config and the network can be traced; or it is refused by an error that
a command reports in one line.
"""

import contextlib
import json
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import small
import values

from sprl.command_line import _status
from sprl.io import huggingface
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import ModelConfig

SECONDS = 20.0
FAMILIES = ('llama', 'mistral', 'qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe', 'gemma3_text', 'olmo2')
SIZES = {'vocab_size': 16, 'hidden_size': 16, 'intermediate_size': 16, 'num_attention_heads': 2, 'num_key_value_heads': 1}


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  """Write a model of each family, in one file and in shards."""
  originals = {}
  for family in FAMILIES:
    experts = {'moe_intermediate_size': 8, 'num_experts': 2, 'num_experts_per_tok': 1} if family.endswith('moe') else {}
    config, params = small.model(family, **SIZES, **experts)
    for shard in (10**9, 4000):
      name = f'{family}-{shard}'
      huggingface.export_folder(folder / name, params, config, max_shard_bytes=shard, dtype=jnp.float32)
      originals[name] = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
  yield SimpleNamespace(originals=originals, scratch=folder / 'scratch')


def header_of(data: bytes) -> tuple[Any, bytes]:
  """Return the header of a safetensors file, and the bytes of its tensors."""
  (size,) = struct.unpack('<Q', data[:8])
  return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: Any, tensors: bytes) -> bytes:
  text = values.as_json(header)
  return struct.pack('<Q', len(text)) + text + tensors


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  """Return {'of': a folder, 'files': the files that differ from it; None for one that is missing}."""
  name = rng.choice(list(world.originals))
  original, changed = world.originals[name], {}
  weights = [file for file in original if file.endswith('.safetensors')]
  for _ in range(rng.choice((1, 1, 2))):
    match rng.choice(('config', 'config', 'config', 'header', 'header', 'header', 'bytes', 'index', 'any', 'gone')):
      case 'config':
        changed['config.json'] = values.as_json(values.changed_json(rng, json.loads(original['config.json'])))
      case 'header':
        file = rng.choice(weights)
        header, tensors = header_of(original[file])
        changed[file] = with_header(values.changed_json(rng, header), tensors)
      case 'bytes':
        file = rng.choice(weights)
        changed[file] = values.changed_bytes(rng, original[file])
      case 'index' if len(weights) > 1:
        file = 'model.safetensors.index.json'
        changed[file] = values.as_json(values.changed_json(rng, json.loads(original[file])))
      case 'any':
        file = rng.choice(list(original))
        changed[file] = values.changed_bytes(rng, original[file])
      case 'gone':
        changed[rng.choice(list(original))] = None
  return {'of': name, 'files': changed}


def check(world: Any, case: dict[str, Any]) -> str:
  folder = world.scratch
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  for file, data in {**world.originals[case['of']], **case['files']}.items():
    if data is not None:
      (folder / file).write_bytes(data)
  try:
    config = ModelConfig.read(folder)
    params = huggingface.load_params(folder, config)
  except Exception as error:
    if not isinstance(error, OSError) and _status(error) is None:
      raise
    return f'refused: {type(error).__name__}'
  for path, tensor in huggingface.tensors(config).items():
    if 'experts' not in path:
      assert huggingface.get(params, path).shape == tensor.shape, path
  jax.eval_shape(lambda params: logits(config, params), params)
  return 'loaded'


def logits(config: ModelConfig, params: Any) -> Any:
  tokens = jnp.zeros((1, 32), jnp.int32)
  memory = PackedAttention.of(jnp.ones_like(tokens))
  hidden = transformer.forward(transformer.graph(config), params, tokens, jnp.asarray(np.arange(32)[None]), memory).hidden
  return hidden @ transformer.head_weight(params).T
