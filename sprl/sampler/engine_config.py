"""The parts of an engine that do not change during a run, and its rows before the first request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from sprl.cache.layout import CacheLayout
from sprl.config import Sampling, SettingsError
from sprl.kernels.support import RecordFormat, record_format
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.sampler import decode
from sprl.sampler.buckets import SMALLEST, doubling, prompt_buckets
from sprl.sampler.weights import SamplerWeights
from sprl.sharding.rules import row_shards
from sprl.sharding.transfer import home
from sprl.types import Request


@dataclass(frozen=True)
class EngineConfig:
  """The parts of an engine that do not change during a run."""

  model: ModelConfig
  sampling: Sampling
  layout: CacheLayout
  rows: int  # sequences that decode side by side
  prefill: int  # distinct prompts of a prefill; a prefill of one prompt is compiled too
  seed: int
  stop_ids: tuple[int, ...]
  text: Callable[[Sequence[int]], str]  # decodes token ids, to find stop strings (`StopStrings`)
  mesh: Mesh | None = None  # of the weights; None: one device
  record_support: bool = False  # record the tokens that top-k, top-p and min-p keep; training under such filters needs it
  fixed_chunks: bool = False  # all chunks have the same number of steps (`decode.decode`); for GPUs

  @cached_property
  def graphdef(self):
    """The network without weights."""
    return transformer.graph(self.model)

  @cached_property
  def support(self) -> RecordFormat | None:
    """The form of the recorded supports; None if none are recorded. Raises SettingsError if a record would be too large."""
    return record_format(self.sampling, self.model.vocab_size) if self.record_support else None

  @property
  def in_flight(self) -> int:
    """How many chunks may be in the devices' queue.

    One if the engine fetches evictions or experts from the state, because that waits for all chunks in the queue.
    """
    return 2 if self.fixed_chunks and not (self.layout.record or self.layout.routes) else 1

  @cached_property
  def buckets(self) -> tuple[int, ...]:
    """The padded lengths that prefill is compiled for.

    A dense cache reads given tokens together with the prompt, so it needs buckets beyond the longest prompt.
    """
    prompts = prompt_buckets(self.sampling)
    return prompts if self.layout.sparse else (*prompts, *doubling(2 * prompts[-1], self.layout.positions))

  @cached_property
  def reply_buckets(self) -> tuple[int, ...]:
    """The padded numbers of tokens that are read behind a kept cache."""
    return doubling(SMALLEST, self.sampling.max_tokens)

  @cached_property
  def kept_caches(self) -> int:
    """The most caches that are kept for later requests, a whole number for each part of the rows on the mesh."""
    asked = self.rows if self.sampling.kept_caches is None else self.sampling.kept_caches
    return asked + -asked % (1 if self.mesh is None else row_shards(self.mesh))

  def check(self, request: Request) -> None:
    """Raise SettingsError if the prompt is empty or longer than the last bucket, or if the completion may be too long."""
    longest, most = prompt_buckets(self.sampling)[-1], self.sampling.max_tokens
    if not 0 < len(request.prompt) <= longest:
      raise SettingsError(
        f'config.sampling.max_prompt = {longest}: request {request.uid} has a prompt of {len(request.prompt)} tokens; '
        f'expected 1 to {longest}. Raise the setting or leave out such problems'
      )
    if len(request.given) + request.max_tokens > most:
      behind = f' after {len(request.given)} given tokens' if len(request.given) else ''
      raise SettingsError(
        f'config.sampling.max_tokens = {most}: request {request.uid} asks for {request.max_tokens} tokens{behind}; '
        f'expected at most {most} together. Raise the setting or ask for fewer'
      )


def empty_rows(config: EngineConfig, weights: SamplerWeights) -> decode.DecodeState:
  """Return the state of an engine's rows before the first request, on the devices of the weights."""
  with jax.default_device(home(sharding_of(weights))):
    empty = decode.empty_state.on(config.mesh)(*arguments_of_empty_rows(config, weights))
  place = sharding_of_rows(config, weights)
  return empty if place is None else jax.device_put(empty, place)


def arguments_of_empty_rows(config: EngineConfig, weights: SamplerWeights) -> tuple[Any, ...]:
  """Return the arguments of `decode.empty_state`."""
  form, sampling = config.support, config.sampling
  recorded = () if form is None else (form, sampling.chunk)
  return config.layout, weights, config.rows, sampling.max_tokens, jax.random.key(config.seed), *recorded


def sharding_of(weights: SamplerWeights) -> Sharding:
  """Return the sharding of one array of the weights; all are on the same devices."""
  return jax.tree.leaves(weights.params)[0].sharding


def sharding_of_rows(config: EngineConfig, weights: SamplerWeights) -> Sharding | None:
  """Return the sharding of the state's arrays on one device; None: `decode.empty_state` has split them over the mesh.

  A program compiles again for another form of sharding, and all later states have the form of the weights.
  """
  if config.mesh is not None and config.mesh.size > 1:
    return None
  theirs = sharding_of(weights)
  return NamedSharding(theirs.mesh, PartitionSpec()) if isinstance(theirs, NamedSharding) else theirs
