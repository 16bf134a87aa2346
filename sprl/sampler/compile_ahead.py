"""Compile an engine's programs before its weights exist: compilation takes memory too, and several programs compile at a time.

A later call of the same function with arrays of these shapes, dtypes and shardings finds the compiled program. It must pass the
same arguments by name.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sprl.sampler import decode
from sprl.sampler.buckets import bucket
from sprl.sampler.engine_config import EngineConfig, arguments_of_empty_rows, sharding_of, sharding_of_rows
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.transfer import home


def compile_engine(config: EngineConfig, weights: SamplerWeights, asked: Sequence[int] = ()) -> None:
  """Compile prefill, insert, decode and news_since of an engine.

  Args:
    config: the engine.
    weights: shapes, dtypes and shardings of its weights, as ShapeDtypeStruct.
    asked: lengths of the prompts in the order in which they will be requested, if known. Prefill is compiled for the bucket of
      the first batch, or for the shortest bucket: which other buckets are needed is not known.
  """
  sampling, mesh = config.sampling, config.mesh
  lengths = np.zeros(config.prefill, np.int32)
  width = bucket(config.buckets, max(asked[: config.prefill], default=1))
  tokens = np.zeros((config.prefill, width), np.int32)
  prompts = outputs(decode.prefill.on(mesh), config.graphdef, config.layout, weights, tokens, lengths)
  none = np.zeros(config.rows, np.int32)
  new, state = decode.NewRows(*[none] * 4), _empty_rows(config, weights)
  state = outputs(decode.insert.on(mesh), weights, state, prompts, new, sampling, config.stop_ids)
  state = outputs(
    decode.decode.on(mesh), config.graphdef, weights, state, sampling, config.stop_ids,
    steps=sampling.chunk, fixed=config.fixed_chunks,
  )  # fmt: skip
  outputs(decode.news_since.on(mesh), state, none, none, sampling.chunk + 1)


def _empty_rows(config, weights):
  """Shapes, dtypes and shardings of `engine_config.empty_rows`."""
  with jax.default_device(home(sharding_of(weights))):
    empty = outputs(decode.empty_state.on(config.mesh), *arguments_of_empty_rows(config, weights))
  place = sharding_of_rows(config, weights)
  return empty if place is None else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), empty)


def outputs(jitted: Any, *arguments: Any, **named: Any) -> Any:
  """Compile a function for these arguments and return the shapes, dtypes and shardings of its outputs."""
  lowered = jitted.lower(*arguments, **named)
  places = lowered.compile().output_shardings
  return jax.tree.map(lambda out, place: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=place), lowered.out_info, places)
