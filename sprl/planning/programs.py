"""A run's two large programs, the update and a chunk of decode steps, with the shapes and shardings of their arguments.

The programs follow from the model's config, the settings and a mesh. Nothing is read from files or placed on devices. With an
AbstractMesh the arguments can be counted (`memory`); with a mesh of compile-only devices the programs can be compiled (`aot`).
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sprl.cache.layout import CacheLayout
from sprl.cache.scales import Scales
from sprl.config import Quant, Run
from sprl.kernels.support import record_format
from sprl.learner.batch import Shape, empty
from sprl.learner.copies import cast_matrices
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState, abstract_state
from sprl.learner.update import UpdateConfig, abstract_logprobs, make_update
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params
from sprl.quant.block import BlockScaled, Emulated
from sprl.sampler import decode
from sprl.sampler.weights import SamplerWeights, linear_kernels, sampler_weight_axes, sampler_weights
from sprl.sharding.mesh import replicated
from sprl.sharding.rules import shardings

AnyMesh = Mesh | AbstractMesh


class Program(NamedTuple):
  """A jitted function and its arguments."""

  jitted: Any
  arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct with shardings
  static: Mapping[str, Any] = {}


def accelerator_dtype(run: Run) -> Any:
  """The dtype of products on an accelerator: `auto` is bfloat16."""
  return jnp.dtype('bfloat16' if run.model.dtype == 'auto' else run.model.dtype)


def sharded[T](tree: T, axes: Any, mesh: AnyMesh) -> T:
  """Return the arrays of a tree as ShapeDtypeStruct, each with the sharding of its axes' names."""
  places = shardings(mesh, axes, tree)
  return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=place), tree, places)


def abstract_weights(config: ModelConfig, dtype: Any, mesh: AnyMesh) -> Params:
  """Shapes and shardings of the network's weights in `dtype`."""
  return sharded(transformer.abstract_params(config, dtype), transformer.logical_axes(config), mesh)


def train_state(config: ModelConfig, run: Run, mesh: AnyMesh) -> TrainState:
  """Shapes and shardings of the train state."""
  params = abstract_weights(config, jnp.dtype(run.model.param_dtype), mesh)
  return abstract_state(params, make_optimizer(run.optimizer, 1), run.optimizer.offload)


def abstract_sampler_weights(config: ModelConfig, run: Run, quant: Quant, mesh: AnyMesh) -> SamplerWeights:
  """Shapes and shardings of the sampler weights, without the scales of the cache."""
  params = transformer.abstract_params(config, run.model.param_dtype)
  cut = linear_kernels(config, quant, 'auto', (mesh,)) == 'reference'  # within blocks, on this mesh
  kernels = 'reference' if cut else run.model.kernels
  make = partial(sampler_weights, dtype=accelerator_dtype(run), quant=quant, kernels=kernels, used_on=(mesh,))
  weights = jax.eval_shape(make, params)
  return sharded(weights, sampler_weight_axes(weights, config), mesh)


def abstract_copies(config: ModelConfig, run: Run, mesh: AnyMesh, micros: int) -> list[Any]:
  """Shapes and shardings of the copies of weights that the learner multiplies (sprl/learner/copies.py).

  They are in FP8 with `quant.learner`, and in the compute dtype if a batch has room for more than one microbatch.
  """
  params, dtype = transformer.abstract_params(config, run.model.param_dtype), accelerator_dtype(run)
  narrow = cast_matrices(params, run.quant.in_learner, dtype) if micros > 1 else set()
  leaves = jax.tree_util.tree_flatten_with_path(abstract_weights(config, dtype, mesh))[0]
  cast = [w for path, w in leaves if jax.tree_util.keystr(path) in narrow]
  if run.quant.learner == 'none':
    return cast
  weights = jax.tree.leaves(
    abstract_sampler_weights(config, run, run.quant.in_learner, mesh).params,
    is_leaf=lambda w: isinstance(w, BlockScaled | Emulated),
  )
  return cast + [w for w in weights if isinstance(w, BlockScaled | Emulated)]


def update(config: ModelConfig, run: Run, shape: Shape, mesh: Mesh) -> Program:
  """The update of one minibatch of this shape."""
  batch = empty(shape, record_format(run.sampling, config.vocab_size))
  batch = sharded(batch, batch.axes, mesh)
  settings = UpdateConfig.of(run, accelerator_dtype(run))
  jitted = make_update(transformer.graph(config), make_optimizer(run.optimizer, 1), settings, mesh)
  return Program(jitted, (train_state(config, run, mesh), batch, abstract_logprobs(batch, run)))


def decoding(config: ModelConfig, run: Run, layout: CacheLayout, quant: Quant, rows: int, mesh: Mesh) -> Program:
  """A chunk of decode steps of `rows` sequences, on all devices of the mesh together."""
  layout = dataclasses.replace(layout, kernels=run.model.kernels)
  weights = abstract_sampler_weights(config, run, quant, mesh)._replace(probe=None)
  if layout.fp8:
    scale: Any = jax.ShapeDtypeStruct((config.num_layers,), jnp.float32, sharding=replicated(mesh))
    weights = weights._replace(scales=Scales(scale, scale, scale))
  seed, sampling = jax.eval_shape(lambda: jax.random.key(0)), run.sampling
  recorded = {'support': record_format(sampling, config.vocab_size), 'chunk': sampling.chunk}
  state = jax.eval_shape(
    partial(decode.empty_state.jitted, layout, rows=rows, max_tokens=sampling.max_tokens, **recorded), weights, seed=seed
  )
  stops = tuple(sorted({*config.eos_token_ids, *sampling.stop_ids}))
  fixed = mesh.devices.flat[0].platform == 'gpu'
  static = {'sampling': sampling, 'stop_ids': stops, 'steps': sampling.chunk, 'fixed': fixed}
  return Program(decode.decode.on(mesh), (transformer.graph(config), weights, sharded(state, state.axes, mesh)), static)
