"""Read and check a model folder: config, tokenizer, meshes and dtypes, before any weight is read. A Model holds no weights."""

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from sprl import config as settings
from sprl.cache.layout import CacheLayout, cache_layout
from sprl.cache.scales import Scales
from sprl.config import Cache, Quant, Run, Sampling
from sprl.io import huggingface
from sprl.io.pretrained import locate
from sprl.io.random_model import is_random
from sprl.io.tokenizer import Tokenizer
from sprl.kernels.platform import check_device, compute_dtype, on_gpu
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.lora import Base, abstract_adapters, adapter_axes, fingerprint, init_adapters
from sprl.models.moe import check_split
from sprl.models.sequence import check_sequence
from sprl.models.transformer import Params
from sprl.sampler.buckets import prompt_buckets
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import SamplerWeights, check_learner_mesh, check_linears, linear_kernels, weights_function
from sprl.sharding.mesh import check_dealt, divide, make_mesh, replicated, sizes, without_sequence
from sprl.sharding.rules import row_shards, shardings
from sprl.sharding.transfer import HOST

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
  """All that is needed to load a model, sample from it and train it, except its weights."""

  folder: Path
  config: ModelConfig
  tokenizer: Tokenizer
  graphdef: nnx.GraphDef
  mesh: Mesh  # of the learner
  sampler_mesh: Mesh  # of the sampler weights after a sync: the learner's devices, in the rollouts' layout if rollouts share them
  engine_meshes: tuple[Mesh, ...]  # one for each engine
  shares_devices: bool  # rollouts and updates take turns on the same devices
  dtype: Any  # of computation
  param_dtype: Any  # of the trained weights: master weights, or adapters
  lora: settings.Lora
  kernels: settings.Kernels
  weights_seed: int | None = None  # of random weights; None: the weights are those of the folder

  @classmethod
  def open(cls, run: Run) -> 'Model':
    """Read and check the files of `run.model.path`. Reads only the headers of the weights.

    Raises PretrainedError, ConfigError, WeightsError, TokenizerError or SettingsError; each names the file or the setting.
    """
    folder = locate(run.model.path)
    config = ModelConfig.read(folder)
    check_linears(run.quant, config.num_layers)
    check_experts(run, config)
    check_stops(run, config)
    check_device(run.model.kernels)
    if not (random := is_random(run.model.path)):
      huggingface.check_weights(folder, config)
    if run.lora.rank:
      abstract_adapters(config, run.lora)  # raises if the model lacks a target
    tokenizer = Tokenizer.load(folder, run.task.template_args).within(config)
    memories = [memory.kind for memory in jax.local_devices()[0].addressable_memories()]
    if run.optimizer.offload and HOST not in memories:
      raise settings.SettingsError(
        f'config.optimizer.offload = True: expected False. These devices have {", ".join(memories)} and no {HOST} memory'
      )
    learner, engines = divide(run.devices, jax.devices())
    if jax.process_count() > 1:
      check_dealt(run.devices, learner, learner if engines is None else engines[0], jax.process_count())
    heads = config.num_heads, config.num_kv_heads
    mesh = make_mesh(run.mesh.learner, learner, heads)
    apart = [make_mesh(run.mesh.rollout, devices, heads, 'rollout') for devices in engines or [learner]]
    for each, name, quant in ((mesh, 'learner', run.quant.in_learner), (apart[0], 'rollout', run.quant)):
      check_split(config, sizes(each)['expert'], sizes(each)['tensor'], f'config.mesh.{name}', quant)
    check_learner_mesh(config, run.quant, run.model.kernels, mesh)
    check_sequence(config, mesh)
    model = cls(
      folder=folder,
      config=config,
      tokenizer=tokenizer,
      graphdef=transformer.graph(config),
      mesh=mesh,
      sampler_mesh=without_sequence(mesh, heads) if engines else apart[0],
      engine_meshes=tuple(apart),
      shares_devices=engines is None or not {d for each in engines for d in each}.isdisjoint(learner),
      dtype=compute_dtype(run.model.dtype),
      param_dtype=jnp.dtype(run.model.param_dtype),
      lora=run.lora,
      kernels=run.model.kernels,
      weights_seed=run.seed if random else None,
    )
    model.linears(run.quant)  # raises if a mesh cuts a weight inside its blocks
    return model

  def at(self, time: str) -> 'Model':
    """Return the model with a tokenizer whose chat template reads this time instead of the clock's."""
    return replace(self, tokenizer=replace(self.tokenizer, time=time))

  @property
  def shardings(self) -> Params:
    """Shardings of the master weights."""
    return shardings(self.mesh, transformer.logical_axes(self.config), transformer.abstract_params(self.config))

  @property
  def replicated(self) -> NamedSharding:
    """The sharding of an array that every learner device holds whole."""
    return replicated(self.mesh)

  def load(self, dtype=None) -> Params:
    """Load the pretrained weights onto the learner's devices, in `dtype`, by default that of the master weights.

    Random weights are made there: each device makes its part, and the host none.
    """
    if self.weights_seed is not None:
      init = partial(transformer.init_params, self.config, dtype=dtype or self.param_dtype)
      return jax.jit(init, out_shardings=self.shardings)(jax.random.key(self.weights_seed))
    return huggingface.load_params(self.folder, self.config, self.shardings, dtype or self.param_dtype)

  def base(self, dtype=None) -> Base | None:
    """Load the frozen weights under adapters, in `dtype`, by default the compute dtype. None if all weights are trained."""
    if not self.lora.rank:
      return None
    params = self.load(dtype or self.dtype)
    return Base(params, self.lora.alpha / self.lora.rank, fingerprint(params))

  def first(self, seed: int) -> Params:
    """Return the weights that a run trains, before its first update: the pretrained ones, or adapters that are still zero."""
    if not self.lora.rank:
      return self.load()
    init = partial(init_adapters, self.config, self.lora, dtype=self.param_dtype)
    places = jax.tree.map(lambda a: a.sharding, abstract_params(self))
    return jax.jit(init, out_shardings=places)(jax.random.key(seed))

  def engine_config(self, sampling: Sampling, layout: CacheLayout, rows: int, prefill: int, seed: int) -> EngineConfig:
    """Return the config of an engine on the mesh of the sampler weights.

    `rows` and `prefill` are rounded up so that every device has an equal share.
    """
    meshes = self.sampler_mesh, self.engine_meshes[0]  # evaluations use the first, rollouts the second
    rows = whole(rows, math.lcm(*(mesh.size for mesh in meshes)))
    prefill = whole(prefill, math.lcm(*map(row_shards, meshes)))
    text = partial(self.tokenizer.decode, skip_special=False)
    stop_ids = tuple(sorted({*self.tokenizer.eos_ids, *self.config.eos_token_ids, *sampling.stop_ids}))
    return EngineConfig(
      self.config, sampling, layout, rows, prefill, seed, stop_ids, text, mesh=self.sampler_mesh, fixed_chunks=on_gpu()
    )

  def sampler_weights(self, params: Params, quant: Quant, scales: Scales | None = None) -> SamplerWeights:
    """Return the sampler weights, with the scales of its FP8 cache, on the learner's devices."""
    return self.sampler_weights_function(quant)(params)._replace(scales=scales)

  def sampler_weights_function(self, quant: Quant) -> Any:
    """Return the jitted function from the network's weights to the sampler weights without scales."""
    linears, used_on = self.linears(quant), (self.sampler_mesh, *self.engine_meshes)
    return weights_function(jnp.dtype(self.dtype), quant, linears, self.config, self.sampler_mesh, self.mesh, used_on)

  def linears(self, quant: Quant) -> settings.Kernels:
    """Return which implementation multiplies FP8 linears on these meshes."""
    return linear_kernels(self.config, quant, self.kernels, (self.sampler_mesh, *self.engine_meshes))

  def cache_layout(
    self, sampling: Sampling, cache: Cache, quant: Quant, record: bool = False, routes: bool = False
  ) -> CacheLayout:
    """Return the cache layout of the sampler. `record` and `routes` say whether it records evictions and expert choices."""
    prompt, completion = prompt_buckets(sampling)[-1], sampling.max_tokens
    return cache_layout(self.config, cache, quant, prompt, completion, self.dtype, record, self.kernels, routes)


def open_here(run: Run, given: Collection[str] = ()) -> tuple[Run, Model]:
  """Open the model of a run that may have trained elsewhere.

  Return it with the run, whose mesh, devices and kernels are the defaults if its own do not fit this machine. `given` are the
  keys of the settings that the user has set. A setting of PLACES among them is not replaced.
  """
  try:
    return run, Model.open(run)
  except settings.SettingsError as error:
    fits = settings.on_all_devices(run)
    if fits == run or any(settings.in_sections(key, settings.PLACES) for key in given):
      raise
    model = Model.open(fits)
    log.warning('uses all devices of this machine: the settings of the run do not fit (%s)', error)
    return fits, model


def check_experts(run: Run, config: ModelConfig) -> None:
  """Raise SettingsError if a setting needs experts and the model has none."""
  replay, balance = run.model.router_replay, run.loss.balance_coef
  for key, value, off in (('model.router_replay', replay, 'none'), ('loss.balance_coef', balance, 0.0)):
    if config.experts is None and value != off:
      raise settings.SettingsError(
        f'config.{key} = {value!r}: expected {off!r}: a model of family {config.family} has no experts'
      )


def check_stops(run: Run, config: ModelConfig) -> None:
  """Raise SettingsError if a stop token is not in the vocabulary."""
  for stop in run.sampling.stop_ids:
    if not 0 <= stop < config.vocab_size:
      raise settings.SettingsError(f'config.sampling.stop_ids has {stop}: expected token ids from 0 to {config.vocab_size - 1}')


def whole(n: int, share: int) -> int:
  """Return `n` rounded up to a multiple of `share`."""
  return -(-n // share) * share


def abstract_params(model: Model) -> Params:
  """Return shapes and shardings of the trained weights: the network, or its adapters."""
  shapes, places = transformer.abstract_params(model.config, model.param_dtype), model.shardings
  if model.lora.rank:
    shapes = abstract_adapters(model.config, model.lora, model.param_dtype)
    places = shardings(model.mesh, adapter_axes(model.config, model.lora), shapes)
  return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, places)
