"""The policy a run trains: folder, network, tokenizer, place on the devices; opened and checked before a weight is read."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from sprl import settings
from sprl.cache.plan import CachePlan
from sprl.cache.scales import Scales
from sprl.io import huggingface
from sprl.io.pretrained import locate
from sprl.io.tokenizer import Tokenizer
from sprl.kernels.platform import check_device, compute_dtype
from sprl.learner.packing import TrainBatch
from sprl.learner.state import TrainState
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.lora import Base, abstract_adapters, adapter_axes, fingerprint, init_adapters
from sprl.models.moe import check_split
from sprl.models.transformer import Params
from sprl.parallel.mesh import check_dealt, divide, make_mesh, replicated, sizes
from sprl.parallel.rules import row_shards, shardings
from sprl.parallel.transfer import place
from sprl.sampler.cache_plan import cache_plan
from sprl.sampler.engine import Engine, prompt_buckets
from sprl.sampler.served import Served, check_linears, linear_kernels, serve
from sprl.settings import UNQUANTISED, Cache, Quant, Run, Sampling

HOST = 'pinned_host'  # JAX's name of the memory beside a device that it reads and writes by itself


@dataclass(frozen=True)
class Policy:
  """A model folder, understood: what is needed to load it, sample from it and train it."""

  folder: Path
  config: ModelConfig
  tokenizer: Tokenizer
  graphdef: nnx.GraphDef
  mesh: Mesh  # the learner's
  serving: Mesh  # of the weights as served: the same devices, in the layout of rollouts where those are here too
  engine_meshes: tuple[Mesh, ...]  # one an engine
  shares_devices: bool  # rollouts and updates take turns on the same ones
  dtype: Any  # compute
  param_dtype: Any  # of what is trained: master weights, or adapters
  lora: settings.Lora
  kernels: settings.Kernels

  @classmethod
  def open(cls, run: Run) -> 'Policy':
    """Reads and checks the folder's files, headers only.

    Raises PretrainedError, ConfigError, WeightsError, TokenizerError or SettingsError, each naming file or setting.
    """
    folder = locate(run.model.path)
    config = ModelConfig.read(folder)
    check_linears(run.quant, config.num_layers)
    check_experts(run, config)
    check_stops(run, config)
    check_device(run.model.kernels)
    huggingface.check_weights(folder, config)
    if run.lora.rank:
      abstract_adapters(config, run.lora)  # whose targets the model may not have
    tokenizer = Tokenizer.load(folder)
    tokenizer.check_against(config)
    memories = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if run.optimizer.offload and HOST not in memories:
      raise settings.SettingsError(
        f'config.optimizer.offload = True: expected False on devices that reach {", ".join(memories)} and no {HOST} memory'
      )
    learner, engines = divide(run.devices, jax.devices())
    if jax.process_count() > 1:
      check_dealt(run.devices, learner, learner if engines is None else engines[0], jax.process_count())
    heads = config.num_heads, config.num_kv_heads
    mesh = make_mesh(run.mesh.learner, learner, heads)
    apart = [make_mesh(run.mesh.rollout, devices, heads, 'rollout') for devices in engines or [learner]]
    for each, name, quant in ((mesh, 'learner', UNQUANTISED), (apart[0], 'rollout', run.quant)):
      check_split(config, sizes(each)['expert'], sizes(each)['tensor'], f'config.mesh.{name}', quant)
    policy = cls(
      folder=folder,
      config=config,
      tokenizer=tokenizer,
      graphdef=transformer.graph(config),
      mesh=mesh,
      serving=mesh if engines else apart[0],
      engine_meshes=tuple(apart),
      shares_devices=engines is None or not {d for each in engines for d in each}.isdisjoint(learner),
      dtype=compute_dtype(run.model.dtype),
      param_dtype=jnp.dtype(run.model.param_dtype),
      lora=run.lora,
      kernels=run.model.kernels,
    )
    policy.linears(run.quant)  # which the meshes may not be for
    return policy

  @property
  def shardings(self) -> Params:
    """Where the master weights lie."""
    return shardings(self.mesh, transformer.logical_axes(self.config), transformer.abstract_params(self.config))

  @property
  def replicated(self) -> NamedSharding:
    """The same on each of the learner's devices."""
    return replicated(self.mesh)

  def put(self, batch: TrainBatch) -> Any:
    """The batch on the learner's devices, its rows split over them."""
    return place(batch, shardings(self.mesh, batch.axes, batch))

  def load(self, dtype=None) -> Params:
    """The pretrained weights on the devices, in the master weights' dtype unless told otherwise."""
    return huggingface.load_params(self.folder, self.config, self.shardings, dtype or self.param_dtype)

  def base(self, dtype=None) -> Base | None:
    """The frozen weights, in the compute dtype unless told otherwise; None where all weights are trained."""
    if not self.lora.rank:
      return None
    params = self.load(dtype or self.dtype)
    return Base(params, self.lora.alpha / self.lora.rank, fingerprint(params))

  def first(self, seed: int) -> Params:
    """What a run trains, as it begins: the pretrained weights, or adapters that change nothing yet."""
    if not self.lora.rank:
      return self.load()
    init = partial(init_adapters, self.config, self.lora, dtype=self.param_dtype)
    places = jax.tree.map(lambda a: a.sharding, abstract_params(self))
    return jax.jit(init, out_shardings=places)(jax.random.key(seed))

  def engine(self, sampling: Sampling, plan: CachePlan, rows: int, prefill: int, seed: int) -> Engine:
    """The engine that samples from this policy; so many rows and prompts, or as many more as make the devices' shares equal."""
    meshes = self.serving, self.engine_meshes[0]  # of evaluations, and of rollouts
    rows = whole(rows, math.lcm(*(mesh.size for mesh in meshes)))
    prefill = whole(prefill, math.lcm(*map(row_shards, meshes)))
    text = partial(self.tokenizer.decode, skip_special=False)
    stop_ids = tuple(sorted({*self.tokenizer.eos_ids, *self.config.eos_token_ids, *sampling.stop_ids}))
    return Engine(self.config, sampling, plan, rows, prefill, seed, stop_ids, text)

  def serve(self, params: Params, quant: Quant, scales: Scales | None = None) -> Served:
    """The weights as the sampler multiplies them, with the scales of its cache; on the learner's devices."""
    with jax.set_mesh(self.serving):
      return serve(params, self.dtype, quant, self.config, self.mesh, self.linears(quant))._replace(scales=scales)

  def linears(self, quant: Quant) -> settings.Kernels:
    """What multiplies FP8 linears."""
    return linear_kernels(self.config, quant, self.kernels, (self.serving, *self.engine_meshes))

  def plan(self, sampling: Sampling, cache: Cache, quant: Quant, record: bool = False, routes: bool = False) -> CachePlan:
    """The sampler's memory under these settings; what it writes down of evictions and of the experts that tokens went through."""
    prompt, completion = prompt_buckets(sampling)[-1], sampling.max_tokens
    return cache_plan(self.config, cache, quant, prompt, completion, self.dtype, record, self.kernels, routes)


def check_experts(run: Run, config: ModelConfig) -> None:
  """Raises SettingsError where settings are of a mixture of experts, and the model is none."""
  replay, balance = run.model.router_replay, run.loss.balance_coef
  for key, value, off in (('model.router_replay', replay, 'none'), ('loss.balance_coef', balance, 0.0)):
    if config.experts is None and value != off:
      raise settings.SettingsError(
        f'config.{key} = {value!r}: expected {off!r} with a model of family {config.family}, without experts'
      )


def check_stops(run: Run, config: ModelConfig) -> None:
  """Raises SettingsError where a token that is to end completions is none of the model's."""
  for stop in run.sampling.stop_ids:
    if not 0 <= stop < config.vocab_size:
      raise settings.SettingsError(
        f'config.sampling.stop_ids has {stop}: expected ids of tokens, 0 to {config.vocab_size - 1} with this model'
      )


def whole(n: int, share: int) -> int:
  """n, or the next multiple of `share`."""
  return -(-n // share) * share


def abstract_params(policy: Policy) -> Params:
  """Shapes and shardings of the weights that are trained: the network's, or its adapters'."""
  shapes, places = transformer.abstract_params(policy.config, policy.param_dtype), policy.shardings
  if policy.lora.rank:
    shapes = abstract_adapters(policy.config, policy.lora, policy.param_dtype)
    places = shardings(policy.mesh, adapter_axes(policy.config, policy.lora), shapes)
  return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, places)


def abstract_state(policy: Policy, optimizer: optax.GradientTransformation, offload: bool = False) -> TrainState:
  """Shapes and shardings of the train state; the optimiser's moments lie where their weights do, or with `offload` on the
  host beside it."""
  params = abstract_params(policy)
  state = jax.eval_shape(partial(TrainState.create, optimizer=optimizer), params)

  def moment(leaf, p):
    if leaf.shape != p.shape:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=policy.replicated)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=p.sharding.with_memory_kind(HOST) if offload else p.sharding)

  opt_state = optax.tree_map_params(
    optimizer,
    moment,
    state.opt_state,
    params,
    transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=policy.replicated),
  )
  scalar: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=policy.replicated)
  return TrainState(params, opt_state, scalar, scalar, scalar)
