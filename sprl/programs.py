"""A run's two large programs, an update and a chunk of decode steps, with the shapes and places of what they are given.

Enough to compile them for devices that need not be there (sprl/parallel/aot.py), and nothing that is loaded or run.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sprl.cache.plan import CachePlan
from sprl.cache.scales import Scales
from sprl.io.tokenizer import Tokenizer
from sprl.kernels.platform import kernels_on
from sprl.learner.packing import Shape, pack
from sprl.learner.state import make_optimizer
from sprl.learner.update import Computation, make_update, scores_old
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.parallel.mesh import divides, param_shardings, replicated
from sprl.planning.memory import compute_dtype
from sprl.policy import Policy, abstract_params, abstract_state
from sprl.sampler import decode
from sprl.sampler.served import Served, serve
from sprl.settings import Quant, Run

Program = tuple[Callable, tuple[Any, ...]]  # a jitted function, and its arguments as ShapeDtypeStruct


def update(config: ModelConfig, run: Run, shape: Shape, mesh: Mesh) -> Program:
  """The update of a batch packed to `shape`."""
  optimizer, place = make_optimizer(run.optimizer, 1), _policy(config, run, mesh)
  updates = run.optimizer.minibatches * run.optimizer.epochs
  computation = Computation(
    run.correction, run.loss, run.sampling.temperature, compute_dtype(run), run.packing.score_chunk, run.model.remat
  )
  batch, _ = pack((), np.zeros(shape.sequences), shape, run.packing.share_prefix)
  batch = _placed(dataclasses.replace(batch, reward=np.zeros(shape.sequences, np.float32)), place.replicated)
  logp = batch.sampler_logp
  old, ref = logp if scores_old(run.correction, updates) else None, logp if run.loss.kl_coef > 0 else None
  jitted = make_update(transformer.graph(config), optimizer, computation)
  return jitted, (abstract_state(place, optimizer), batch, old, ref)


def decoding(config: ModelConfig, run: Run, plan: CachePlan, quant: Quant, rows: int, mesh: Mesh) -> Program:
  """A chunk of decode steps of so many rows, on all devices of the mesh together."""
  place = _policy(config, run, mesh)
  plan = dataclasses.replace(plan, kernels=kernels_on(mesh.size, run.model.kernels))
  served = _served(config, run, plan, quant, place)
  seed = jax.eval_shape(lambda: jax.random.key(0))
  state = jax.eval_shape(partial(decode.empty_rows, plan, rows=rows, max_tokens=run.sampling.max_tokens), served, seed=seed)

  def there(x):
    spec = ['data', 'tensor'] if x.ndim == 4 else ['data'] if x.ndim else []
    return NamedSharding(mesh, PartitionSpec(*[axis if divides(mesh, axis, n) else None for axis, n in zip(spec, x.shape)]))

  state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there(x)), state)
  jitted = partial(decode.decode, transformer.graph(config))
  stops = tuple(sorted({*config.eos_token_ids, *run.sampling.stop_ids}))
  step = jax.jit(
    lambda served, rows: jitted(served, rows, run.sampling, stops, run.sampling.chunk),
    donate_argnums=1,
    out_shardings=jax.tree.map(lambda x: x.sharding, state),
  )
  return step, (served, state)


def _policy(config: ModelConfig, run: Run, mesh: Mesh) -> Policy:
  """A policy without files: no program asks for its tokenizer."""
  return Policy(
    folder=Path(run.model.path),
    config=config,
    tokenizer=object.__new__(Tokenizer),
    graphdef=transformer.graph(config),
    shardings=param_shardings(mesh, transformer.logical_axes(config), transformer.abstract_params(config)),
    replicated=replicated(mesh),
    engine_meshes=(None,),
    shares_devices=True,
    dtype=compute_dtype(run),
    param_dtype=jnp.dtype(run.model.param_dtype),
    lora=run.lora,
    kernels=kernels_on(mesh.size, run.model.kernels),
  )


def _served(config: ModelConfig, run: Run, plan: CachePlan, quant: Quant, place: Policy) -> Served:
  """The weights as served, each where its master is."""
  served = jax.eval_shape(partial(serve, dtype=compute_dtype(run), quant=quant), abstract_params(place))
  shardings = place.shardings

  def put(sharding, form):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if _fits(sharding, x.shape) else place.replicated), form
    )

  params = jax.tree.map(put, shardings, served.params)
  scale: Any = jax.ShapeDtypeStruct((config.num_layers,), jnp.float32, sharding=place.replicated)
  return Served(params, Scales(scale, scale, scale) if plan.fp8 else None)


def _fits(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
  """Whether the sharding divides the shape: scales of blocks may be too few."""
  return all(n % np.prod([sharding.mesh.shape[a] for a in _axes(part)], dtype=int) == 0 for part, n in zip(sharding.spec, shape))


def _axes(part) -> tuple[str, ...]:
  return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _placed(tree, sharding):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), tree)
