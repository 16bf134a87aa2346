"""How much memory does an update of Qwen2.5-7B need on one H200? Compiled for full training and adapters, by optimiser.

    python benchmarks/learner_memory.py --save learner_memory    # 4 minutes; sprl/planning/aot.py lists the requirements

No GPU is needed. A row of the table is an update on one row of 2,048 tokens, with layers recomputed in the backward pass. `held`
is permanent memory (frozen weights, trained weights, moments); `on top` is temporary memory (gradients, activations).
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from common import report

from sprl.config import Correction, Lora, Loss, Optimizer
from sprl.learner.batch import Shape, empty
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.models.config import ModelConfig, tiny
from sprl.models.lora import Base, abstract_adapters
from sprl.planning.aot import compile_for_h200, missing
from sprl.types import LogProbs

GIB, H200 = 2**30, 141e9  # bytes
TOKENS, SEQUENCES, COMPLETION = 2048, 2, 1024
CASES = {
  'adamw': (Optimizer(), None),
  'adamw, moments in bfloat16': (Optimizer(moment_dtype='bfloat16'), None),
  'adafactor': (Optimizer(name='adafactor'), None),
  'adapters of rank 32, adamw': (Optimizer(), Lora(rank=32)),
}


def qwen(layers: int) -> ModelConfig:
  """Return the config of Qwen2.5-7B with this number of layers."""
  return tiny(
    'qwen2',
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=layers,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    tie_word_embeddings=False,
  )


def batch() -> Any:
  """Return the shapes of a microbatch of one row."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty(Shape(1, 1, TOKENS, SEQUENCES, COMPLETION)))


def program(name: str, config: ModelConfig) -> tuple[Callable, TrainState, Any, Base | None]:
  """Return the update of a case, and the shapes of its state, batch and frozen weights."""
  settings, lora = CASES[name]
  optimizer = make_optimizer(settings, 100)
  trained, base = transformer.abstract_params(config), None
  if lora is not None:
    frozen = transformer.abstract_params(config, jnp.bfloat16)
    trained, base = abstract_adapters(config, lora), Base(frozen, lora.alpha / lora.rank)
  state = jax.eval_shape(partial(TrainState.create, optimizer=optimizer), trained)
  computation = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, jnp.dtype('bfloat16'), chunk=256), remat='layer')
  update = make_update(transformer.graph(config), optimizer, computation)

  def step(state, batch, base):
    return update(state, batch, LogProbs(sampler=batch.sampler_logp), base)

  return step, state, batch(), base


def row(name: str, config: ModelConfig) -> dict[str, Any]:
  """Compile a case; return its memory as a row of the table."""
  step, state, *given = program(name, config)
  start = time.perf_counter()
  compiled = compile_for_h200(step, state, *given, donate=(0,))
  total = compiled.arguments + compiled.temporary
  return {
    'trained': name,
    'trained weights': sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    'held GiB': compiled.arguments / GIB,
    'on top GiB': compiled.temporary / GIB,
    'sum GiB': total / GIB,
    'of an H200': total / H200,
    'compiled in s': round(time.perf_counter() - start),
  }


def main() -> None:
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--layers', type=int, default=28, help='layers of the model; Qwen2.5-7B has 28')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  if reason := missing():
    raise SystemExit(reason)
  config = qwen(args.layers)
  rows = [row(name, config) for name in CASES]
  weights = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(config)))
  report(args.save or 'learner_memory', rows, {'weights': weights, 'layers': args.layers}, bool(args.save))


if __name__ == '__main__':
  main()
