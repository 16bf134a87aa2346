"""How a model lies on a mesh that need not be there: what one device holds of each weight, row and head."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from sprl.models import transformer
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params
from sprl.parallel.mesh import AXES, TENSOR, tensor_axes
from sprl.parallel.rules import KEPT, spec
from sprl.settings import SettingsError

NAMES = ('data', 'fsdp', 'expert', 'tensor')  # from far to near: the devices of the last are neighbours


@dataclass(frozen=True)
class Axes:
  """Sizes of a mesh's axes."""

  data: int = 1
  fsdp: int = 1
  expert: int = 1
  tensor: int = 1

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
    return Axes(self.data * self.fsdp, 1, self.expert, self.tensor)

  def mesh(self, config: ModelConfig) -> AbstractMesh:
    """The mesh, without devices."""
    sizes = {name: getattr(self, name) for name in NAMES}
    sizes |= dict(zip(TENSOR, tensor_axes(self.tensor, (config.num_heads, config.num_kv_heads))))
    return AbstractMesh(tuple(sizes[name] for name in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))

  def __str__(self) -> str:
    return ' '.join(f'{name}={size}' for name, size in zip(NAMES, self.sizes) if size > 1) or 'one device'


def ceil(n: int, parts: int) -> int:
  """The most that one of `parts` has of n, shared out as evenly as can be."""
  return -(-n // parts)


def heads(config: ModelConfig, tensor: int) -> tuple[int, int]:
  """Query and kv heads on one device."""
  H, K = config.num_heads, config.num_kv_heads
  kv, group, _ = tensor_axes(tensor, (H, K))
  return H // (kv * group), K // kv


def shards(config: ModelConfig, axes: Axes, dtype) -> Params:
  """What one device holds of each weight, by the rules that a run lays weights out with: a tree of ShapeDtypeStruct."""
  whole = transformer.abstract_params(config, dtype)
  mesh = axes.mesh(config)

  def shard(w, names):
    place = NamedSharding(mesh, spec(mesh, names, w.shape, KEPT))
    return jax.ShapeDtypeStruct(place.shard_shape(w.shape), w.dtype)

  return jax.tree.map(shard, whole, transformer.logical_axes(config))


def size(tree: Any) -> int:
  """How many numbers the arrays of a tree hold."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nbytes(tree: Any) -> int:
  """The bytes that they take."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
