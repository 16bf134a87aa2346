"""Would several small models in one program train faster than one after the other? The models and batches of the claims.

    python benchmarks/packed_models.py --save

An experiment of benchmarks/claims runs one model on each core. With `jax.vmap`, one program could train several models, and would
start fewer operations. This benchmark compares both on one core: a decode step of 16 rows, and an update on 16 sequences. Times
are of the CPU and for one model, the best of REPEATS; both ways take turns. `GFLOP/s` counts the products of weights and
activations. Its ceiling is a large matrix product on the same core. For Linux, which can bind a process to a core.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from claims.tasks import MODELS, SETTINGS
from claims.totals import LONGEST_PROMPT, LONGEST_SOLUTION
from common import matmul_rate, report
from gpu_check_update import trajectory

from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Correction, Loss, Optimizer, Sampling
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, update
from sprl.models import transformer
from sprl.sampler import decode
from sprl.sampler.weights import sampler_weights
from sprl.types import LogProbs

CONFIG = MODELS['totals']
SEQUENCES, STEPS, REPEATS = 16, 16, 5  # sequences of a batch; decode steps of a chunk
ROW, MODELS_AT_ONCE = SETTINGS['packing.row_tokens'], (2, 4)
F32 = jnp.dtype('float32')


def main() -> None:
  """Print a table; write benchmarks/results/packed_models.json with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/packed_models.json')
  args = parser.parse_args()
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX starts its threads
  matrices = sum(x.size for x in jax.tree.leaves(parameters(0)) if x.ndim > 1)
  work = {'decode step': 2 * matrices * SEQUENCES, 'update': 6 * matrices * SEQUENCES * ROW}
  ceiling = matmul_rate(F32, 1024)
  rows = []
  for what, case in (('decode step', decoding), ('update', updating)):
    for several in MODELS_AT_ONCE:
      alone, together = (seconds / models for models, seconds in zip((1, several), timed(case(1), case(several))))
      steps = STEPS if what == 'decode step' else 1
      rows.append(
        {
          'what': what,
          'models at once': several,
          'ms a model, alone': 1e3 * alone / steps,
          'ms a model, together': 1e3 * together / steps,
          'times as fast together': alone / together,
          'GFLOP/s alone': 1e-9 * work[what] * steps / alone,
          'share of the ceiling': work[what] * steps / alone / ceiling,
        }
      )
  report('packed_models', rows, {'ceiling GFLOP/s': 1e-9 * ceiling, 'sequences': SEQUENCES, 'row': ROW}, args.save)


def parameters(seed: int) -> Any:
  """Return the weights of a model."""
  return transformer.init_params(CONFIG, jax.random.key(seed), scale=0.1)


def stacked(make: Callable[[int], Any], models: int) -> Any:
  """Return the trees of several models as one tree, whose arrays have a leading axis of models."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(make, range(models)))


def decoding(models: int) -> Callable[[], Any]:
  """Return a function that decodes a chunk with one model, or with several in one program."""
  graphdef = transformer.graph(CONFIG)
  layout = cache_layout(CONFIG, DENSE, UNQUANTISED, LONGEST_PROMPT, LONGEST_SOLUTION, F32)
  sampling = Sampling(max_prompt=LONGEST_PROMPT, max_tokens=LONGEST_SOLUTION)
  full = np.full(SEQUENCES, LONGEST_SOLUTION)

  def start(seed):
    weights = sampler_weights(parameters(seed), F32)
    tokens = jax.random.randint(jax.random.key(seed), (SEQUENCES, LONGEST_PROMPT), 3, CONFIG.vocab_size)
    prompts = decode.prefill(graphdef, layout, weights, tokens, jnp.full(SEQUENCES, LONGEST_PROMPT))
    rows = np.arange(SEQUENCES)
    state = decode.empty_state(layout, weights, SEQUENCES, LONGEST_SOLUTION, jax.random.key(seed))
    return weights, decode.insert(weights, state, prompts, decode.NewRows(rows, rows, 0 * rows, full), sampling, ())

  chunk = partial(decode.decode, graphdef, sampling=sampling, stop_ids=(), steps=STEPS)
  weights, state = start(0) if models == 1 else stacked(start, models)
  several = jax.jit(lambda w, s: chunk(w, s) if models == 1 else jax.vmap(chunk)(w, s))
  return lambda: several(weights, state)


def updating(models: int) -> Callable[[], Any]:
  """Return a function that does an update of one model, or of several in one program."""
  optimizer = make_optimizer(Optimizer(), 100)
  computation = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, F32, SETTINGS['packing.score_chunk']), 'none')
  one = partial(update, transformer.graph(CONFIG), optimizer, computation)
  shape = Shape(SEQUENCES, 1, ROW, SEQUENCES, LONGEST_SOLUTION)

  def start(seed):
    rng = np.random.default_rng(seed)
    sequences = [trajectory(rng, uid, LONGEST_PROMPT, LONGEST_SOLUTION, CONFIG.vocab_size) for uid in range(SEQUENCES)]
    batch, _ = pack(sequences, rng.normal(size=SEQUENCES).astype(np.float32), shape, False)
    batch = jax.tree.map(jnp.asarray, batch)
    return TrainState.create(parameters(seed), optimizer), batch, LogProbs(sampler=batch.sampler_logp)

  several = jax.jit(one if models == 1 else jax.vmap(one))
  given = start(0) if models == 1 else stacked(start, models)
  return lambda: several(*given)


def timed(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
  """Return the least seconds of the CPU of each call. The calls take turns."""
  best = [np.inf, np.inf]
  for repeat in range(REPEATS + 1):
    for i, call in enumerate((first, second)):
      start = time.process_time()
      jax.block_until_ready(call())
      if repeat:  # the first call compiles
        best[i] = min(best[i], time.process_time() - start)
  return best[0], best[1]


if __name__ == '__main__':
  main()
