"""A run's two large programs, an update and a chunk of decode steps, with the shapes and places of what they are given.

Enough to compile them for devices that need not be there (sprl/parallel/aot.py), and nothing that is loaded or run.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sprl.cache.plan import CachePlan
from sprl.cache.scales import Scales
from sprl.io.tokenizer import Tokenizer
from sprl.learner.packing import Shape, empty
from sprl.learner.state import make_optimizer
from sprl.learner.update import Computation, make_update, scores_old
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.parallel.rules import shardings
from sprl.planning.memory import compute_dtype
from sprl.policy import Policy, abstract_params, abstract_state
from sprl.sampler import decode
from sprl.sampler.served import serve, served_axes
from sprl.settings import Quant, Run


class Program(NamedTuple):
  """A jitted function and what it is called with."""

  jitted: Any
  arguments: tuple[Any, ...]  # trees of ShapeDtypeStruct, each with its sharding
  static: Mapping[str, Any] = {}


def update(config: ModelConfig, run: Run, shape: Shape, mesh: Mesh) -> Program:
  """The update of a batch packed to `shape`."""
  optimizer, policy = make_optimizer(run.optimizer, 1), _policy(config, run, mesh)
  batch = empty(shape)
  batch = _placed(batch, shardings(mesh, batch.axes, batch))
  old = batch.sampler_logp if scores_old(run.correction, run.optimizer.updates) else None
  ref = batch.sampler_logp if run.loss.kl_coef > 0 else None
  jitted = make_update(policy.graphdef, optimizer, Computation.of(run, policy.dtype))
  return Program(jitted, (abstract_state(policy, optimizer, run.optimizer.offload), batch, old, ref))


def decoding(config: ModelConfig, run: Run, plan: CachePlan, quant: Quant, rows: int, mesh: Mesh) -> Program:
  """A chunk of decode steps of so many rows, on all devices of the mesh together."""
  policy = _policy(config, run, mesh)
  plan = dataclasses.replace(plan, kernels=policy.kernels)
  serves = partial(serve, dtype=policy.dtype, quant=quant, kernels=policy.linears(quant))
  served = jax.eval_shape(serves, abstract_params(policy))._replace(probe=None)
  if plan.fp8:
    scale: Any = jax.ShapeDtypeStruct((config.num_layers,), jnp.float32)
    served = served._replace(scales=Scales(scale, scale, scale))
  served = _placed(served, shardings(mesh, served_axes(served, config), served))
  seed = jax.eval_shape(lambda: jax.random.key(0))
  made = partial(decode.empty_rows.jitted, plan, rows=rows, max_tokens=run.sampling.max_tokens)
  state = jax.eval_shape(made, served, seed=seed)
  state = _placed(state, shardings(mesh, state.axes, state))
  stops = tuple(sorted({*config.eos_token_ids, *run.sampling.stop_ids}))
  static = {'sampling': run.sampling, 'stop_ids': stops, 'steps': run.sampling.chunk}
  return Program(decode.decode, (policy.graphdef, served, state), static)


def _policy(config: ModelConfig, run: Run, mesh: Mesh) -> Policy:
  """A policy without files: no program asks for its tokenizer."""
  return Policy(
    folder=Path(run.model.path),
    config=config,
    tokenizer=object.__new__(Tokenizer),
    graphdef=transformer.graph(config),
    mesh=mesh,
    serving=mesh,
    engine_meshes=(mesh,),
    shares_devices=True,
    dtype=compute_dtype(run),
    param_dtype=jnp.dtype(run.model.param_dtype),
    lora=run.lora,
    kernels=run.model.kernels,
  )


def _placed(tree, places):
  return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=place), tree, places)
