"""The engine: what stays the same for a run's rollouts. Its rows at work are `Slots` (sprl/sampler/slots.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sprl.cache.plan import CachePlan
from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.settings import Sampling, SettingsError
from sprl.trajectory import Request

SMALLEST_BUCKET = 32


def prompt_buckets(sampling: Sampling) -> tuple[int, ...]:
  """The padded prompt lengths that prefill is compiled for, ascending; the last is the longest prompt allowed."""
  return sampling.prompt_buckets or _doubling(SMALLEST_BUCKET, sampling.max_prompt)


def _doubling(first: int, last: int) -> tuple[int, ...]:
  """first, twice that, and so on; `last` instead of what would exceed it."""
  sizes = [first]
  while sizes[-1] < last:
    sizes.append(sizes[-1] * 2)
  return (*sizes[:-1], last) if sizes[-1] > last else tuple(sizes)


@dataclass(frozen=True)
class Engine:
  """What stays the same for a run's rollouts.

  `rows` sequences decode side by side; `prefill` distinct prompts go through the network at a time, or one alone. The log-probs
  recorded are of the distribution after temperature and filters. `plan` is the memory: what is kept of each sequence, and how.
  `text` decodes ids, for stop strings.
  """

  config: ModelConfig
  sampling: Sampling
  plan: CachePlan
  rows: int
  prefill: int
  seed: int
  stop_ids: tuple[int, ...]
  text: Callable[[Sequence[int]], str]

  @cached_property
  def graphdef(self):
    """The network, without weights."""
    return transformer.graph(self.config)

  @cached_property
  def buckets(self) -> tuple[int, ...]:
    """The lengths that prefill is compiled for: of prompts, and beyond them of prompts with what is given behind them."""
    prompts = prompt_buckets(self.sampling)
    return prompts if self.plan.sparse else (*prompts, *_doubling(2 * prompts[-1], self.plan.positions))

  def check(self, request: Request) -> None:
    """Raises SettingsError where a prompt is longer than `sampling.max_prompt`, or more is asked for than there is room."""
    longest, most = prompt_buckets(self.sampling)[-1], self.sampling.max_tokens
    if not 0 < len(request.prompt) <= longest:
      raise SettingsError(
        f'config.sampling.max_prompt = {longest}: request {request.uid} has a prompt of {len(request.prompt)} tokens; '
        'raise the setting or leave such problems out'
      )
    if len(request.given) + request.max_tokens > most:
      behind = f' behind {len(request.given)} that are given' if len(request.given) else ''
      raise SettingsError(f'config.sampling.max_tokens = {most}: request {request.uid} asks for {request.max_tokens}{behind}')
