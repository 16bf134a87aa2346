"""How a model lies on a mesh that need not be there: what one device holds of each weight, row and head."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params
from sprl.parallel.mesh import param_shardings
from sprl.settings import SettingsError

NAMES = ('data', 'fsdp', 'tensor', 'expert')


@dataclass(frozen=True)
class Axes:
  """Sizes of a mesh's axes."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  expert: int = 1

  @classmethod
  def parse(cls, text: str, flag: str = '--mesh') -> 'Axes':
    """Axes from 'data=2,fsdp=8'; those not named are 1. Raises SettingsError."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(',')):
      name, _, size = part.partition('=')
      if name not in NAMES or name in sizes or not size.isdecimal() or int(size) < 1:
        accepted = ', '.join(f'{each}=N' for each in NAMES)
        raise SettingsError(f'{flag}={text}: {part!r} cannot be; expected any of {accepted}, each once')
      sizes[name] = int(size)
    return cls(**sizes)

  @property
  def sizes(self) -> tuple[int, ...]:
    """In the order of NAMES."""
    return tuple(getattr(self, name) for name in NAMES)

  @property
  def devices(self) -> int:
    """How many there are."""
    return math.prod(self.sizes)

  @property
  def rows(self) -> int:
    """Into how many parts a batch's rows are split."""
    return self.data * self.fsdp * self.expert

  def gathered(self) -> 'Axes':
    """The same devices with weights whole on each, or split over tensor and expert: what rollouts want of them."""
    return Axes(self.data * self.fsdp, 1, self.tensor, self.expert)

  @property
  def mesh(self) -> AbstractMesh:
    """The mesh, without devices."""
    return AbstractMesh(self.sizes, NAMES, axis_types=(AxisType.Auto,) * len(NAMES))

  def __str__(self) -> str:
    return ' '.join(f'{name}={size}' for name, size in zip(NAMES, self.sizes) if size > 1) or 'one device'


def ceil(n: int, parts: int) -> int:
  """The most that one of `parts` has of n, shared out as evenly as can be."""
  return -(-n // parts)


def heads(config: ModelConfig, tensor: int) -> tuple[int, int]:
  """Query and kv heads on one device: kv heads are cut between them as far as that goes, then the queries of each."""
  H, K = config.num_heads, config.num_kv_heads
  kv = math.gcd(tensor, K)
  group = math.gcd(tensor // kv, H // K) if kv == K else 1
  return H // (kv * group), K // kv


def shards(config: ModelConfig, axes: Axes, dtype) -> Params:
  """What one device holds of each weight, by the rules that a run lays weights out with: a tree of ShapeDtypeStruct."""
  whole = transformer.abstract_params(config, dtype)
  places = param_shardings(axes.mesh, transformer.logical_axes(config), whole)
  return jax.tree.map(lambda w, place: jax.ShapeDtypeStruct(place.shard_shape(w.shape), w.dtype), whole, places)


def size(tree: Any) -> int:
  """How many numbers the arrays of a tree hold."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nbytes(tree: Any) -> int:
  """The bytes that they take."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
