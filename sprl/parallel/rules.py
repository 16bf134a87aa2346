"""The rules that lay arrays over the mesh by the names of their axes: the one place that knows both.

Model, cache and learner name axes, here they become mesh axes. Where no mesh of several devices is in use (`OnMesh`), names mean
nothing and cost nothing.

    shard(x, 'rows', None, 'mlp')     x is laid out so, from here on
    local(f, names, names)(...)       f runs on each device's part, of which it needs no other
    OnMesh(jitted)                    names inside it mean the mesh that its arguments lie on
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from sprl.parallel.mesh import TENSOR

Names = tuple[str | None, ...]  # an array's axes; None: whole on every device

ROWS = ('data', 'expert', 'fsdp')

# Logical axis -> mesh axes, the first of them the outermost. Of these an array's axis takes those that divide what is left of it.
IN_USE: dict[str, tuple[str, ...]] = {
  'rows': ROWS,  # sequences: of a rollout, or packed ones of the learner
  'gathered_rows': ('data', 'expert'),  # as they meet the vocabulary, which fsdp splits
  'drawn_rows': (*ROWS, *TENSOR),  # as they meet nothing but their own logits
  'copies': ('data',),  # of the weights
  'heads': ('tensor_kv', 'tensor_group'),
  'kv_heads': ('tensor_kv',),
  'mlp': TENSOR,
  'vocab': (*TENSOR, 'fsdp'),
  'expert': ('expert',),
}
KEPT = IN_USE | {'embed': ('fsdp',)}  # weights, gradients and moments; gathered over fsdp when they are used
# Weights on their way to another mesh: one axis is split over all devices, which each step there or away does by one collective.
MOVING = IN_USE | dict.fromkeys(('heads', 'kv_heads', 'mlp', 'vocab'), (*TENSOR, 'fsdp', 'data', 'expert'))
MOVING |= {'expert': ('expert', *TENSOR, 'fsdp', 'data')}
TURNING = KEPT | {'expert': ('expert', *TENSOR)}  # on the way between the two: of one axis after the other


def spec(mesh, names: Names, shape: tuple[int, ...], rules: Mapping[str, tuple[str, ...]] = IN_USE) -> P:
  """The mesh axes of each axis of an array. A mesh axis is taken once, by the first that can have it.

  It ends with the last axis that is split, as those of a program's results do: what it says of an array that goes in is then
  what JAX says of one that came out, and the program is compiled once for both.
  """
  taken: set[str] = set()
  parts = []
  for name, size in zip(names, shape, strict=True):
    axes = _splits(mesh, rules.get(name or '', ()), size, taken)
    taken.update(axes)
    parts.append(axes or None)
  while parts and parts[-1] is None:
    parts.pop()
  return P(*parts)


def _splits(mesh, axes: tuple[str, ...], size: int, taken: set[str]) -> tuple[str, ...]:
  """Those of the axes that split `size` evenly, one after the other."""
  found = []
  for axis in axes:
    n = mesh.shape.get(axis, 1)
    if n > 1 and axis not in taken and size % n == 0:
      found.append(axis)
      size //= n
  return tuple(found)


def row_shards(mesh) -> int:
  """Into how many parts rows are split, where there are enough."""
  return math.prod(mesh.shape.get(axis, 1) for axis in ROWS)


# --- arrays that are there ---------------------------------------------------------------------------------------------


def shardings(mesh: Mesh | AbstractMesh, axes, shapes, rules: Mapping[str, tuple[str, ...]] = KEPT):
  """A NamedSharding for each array: `shapes` is a tree of arrays or their shapes, `axes` the tree of their axes' names."""
  return jax.tree.map(lambda x, names: NamedSharding(mesh, spec(mesh, names, x.shape, rules)), shapes, axes)


# --- inside jitted functions -------------------------------------------------------------------------------------------


class OnMesh[**A, R]:
  """A jitted function in which names mean the mesh that its arguments lie on; where one device has them all, nothing."""

  def __init__(self, jitted: Callable[A, R]):
    self.jitted: Any = jitted
    functools.update_wrapper(self, jitted)

  def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
    """What the function returns."""
    with _mesh_of((args, kwargs)):
      return self.jitted(*args, **kwargs)

  def lower(self, *args: A.args, **kwargs: A.kwargs):
    """The function before it is compiled, for these arguments or their shapes and shardings."""
    with _mesh_of((args, kwargs)):
      return self.jitted.lower(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.jitted, name)


@contextlib.contextmanager
def _mesh_of(tree) -> Iterator[None]:
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
  if not any(isinstance(x, Tracer) for x in arrays):  # within another trace, its mesh holds
    for x in arrays:
      mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
      if isinstance(mesh, Mesh) and mesh.size > 1:
        with jax.set_mesh(mesh):
          yield
        return
  yield


def _mesh():
  """The mesh in use; None where there is none, where it is one device, and within `local`, where it is divided already."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def shard[T: jax.Array](x: T, *names: str | None) -> T:
  """x, laid out by its axes' names. Its cotangent is laid out so too."""
  return x if (mesh := _mesh()) is None else jax.lax.with_sharding_constraint(x, spec(mesh, names, x.shape))


def kept[T: jax.Array](x: T, *names: str | None) -> T:
  """A weight, laid out as it is kept between its uses; or what becomes one, as a gradient."""
  return x if (mesh := _mesh()) is None else jax.lax.with_sharding_constraint(x, spec(mesh, names, x.shape, KEPT))


def from_mesh[T: jax.Array](x: T, held: Mesh | None, *names: str | None) -> T:
  """A weight that another mesh of the same devices keeps, laid out as the mesh in use keeps it; no device has more than its part.

  [heads/2, embed/4] -> all to all -> [heads/8, embed] -> permute -> [heads/8, embed] -> all-gather -> [heads/4, embed]
  [expert/2, mlp/2, embed/2] -> all to all -> [expert/4, mlp, embed/2] -> all to all -> [expert/8, mlp, embed] -> permute ...
  """
  mesh = _mesh()
  if mesh is None or held is None:
    return kept(x, *names)
  away, back = (KEPT, TURNING, MOVING), (MOVING, TURNING, KEPT)
  for there, rules in (*((held, rules) for rules in away), *((mesh, rules) for rules in back)):
    layout = spec(there, names, x.shape, rules)
    x = jax.lax.with_sharding_constraint(x, NamedSharding(there, layout) if there is held else layout)
  return x


def anew[T](weights: T, i: Any) -> T:
  """The weights in iteration i of a loop. XLA would gather what fsdp splits before the loop, all of it, and keep it."""
  mesh = _mesh()
  return weights if mesh is None or 'fsdp' not in mesh.shape else jax.lax.optimization_barrier((weights, i))[0]


def in_turn[X, W](x: X, weights: W) -> tuple[X, W]:
  """What the layer at hand takes, and the weights of the layer after it, each there only where both are.

  So weights that devices share out are gathered one layer ahead, and no further. Backwards it is the gradients: the layer below
  is not gone through before those of the layer above are made and summed over devices, which has the time of one layer for it.
  XLA would let them wait while it finds memory free: twice of what is needed, for small models. The price is that copies of the
  weights add up their gradients every microbatch, beside a layer's products, where XLA might do it once and after the last one.
  """
  return (x, weights) if _mesh() is None else jax.lax.optimization_barrier((x, weights))


def parts(name: str, size: int) -> int:
  """Into how many parts an axis of this size is split by its name."""
  return 1 if (mesh := _mesh()) is None else math.prod(mesh.shape[axis] for axis in _splits(mesh, IN_USE[name], size, set()))


def apart(name: str, size: int, by: str) -> bool:
  """Whether an axis of this size is split by its name over devices that an axis named `by` is split over too."""
  return (mesh := _mesh()) is not None and not set(IN_USE[by]).isdisjoint(_splits(mesh, IN_USE[name], size, set()))


def shared() -> bool:
  """Whether the devices of a mesh compute together what follows, and XLA is to divide it: not so within `local`."""
  return _mesh() is not None


def shares(name: str | None, mesh: Mesh | AbstractMesh | None = None) -> int:
  """Into how many parts the mesh, or else the one in use, splits an axis of this name that all its mesh axes divide."""
  over = _mesh() if mesh is None else mesh
  return 1 if over is None else math.prod(over.shape.get(axis, 1) for axis in IN_USE.get(name or '', ()))


def local(f: Callable, ins: tuple, outs, rules: Mapping[str, tuple[str, ...]] = IN_USE) -> Callable:
  """f, run by each device on its own part of every argument; `ins` and `outs` are trees of names like f's arguments and result.

  An axis name is split by the mesh axes that divide all axes of that name, so that parts fit together; f sees only the part.
  Within it `total` sums over the parts of an axis, `summed` leaves each device its part of the sum, `joined` puts parts together
  and `number` tells them apart.
  """

  def run(*args):
    mesh = _mesh()
    if mesh is None:
      return f(*args)
    sizes: dict[str, int] = {}
    for names, x in zip(jax.tree.leaves(ins, is_leaf=is_names), jax.tree.leaves(args), strict=True):
      for name, size in zip(names, x.shape, strict=True):
        if name is not None:
          sizes[name] = math.gcd(size, sizes.get(name, 0))
    split = {name: _splits(mesh, rules[name], size, set()) for name, size in sizes.items()}
    for name in split.keys() - {'rows', 'embed'}:  # which may stay whole; others' parts must fit together, and `total` know all
      if len(split[name]) < len([axis for axis in rules[name] if axis in mesh.shape]):
        raise ValueError(f'{sizes[name]} {name} on {dict(mesh.shape)}: the mesh is one for another model (make_mesh)')

    def specs(tree):
      return jax.tree.map(lambda names: P(*[split.get(name or '') or None for name in names]), tree, is_leaf=is_names)

    return jax.shard_map(f, in_specs=specs(ins), out_specs=specs(outs), check_vma=False)(*args)

  return run


def total[T: jax.Array](x: T, name: str) -> T:
  """Within `local`: the sum over all parts of the axis `name`, which is split; elsewhere x itself."""
  return jax.lax.psum(x, axes) if (axes := _divided(name)) else x


def summed[T: jax.Array](x: T, name: str, axis: int) -> T:
  """Within `local`: the same sum, of which each device keeps its part along an axis."""
  return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if (axes := _divided(name)) else x


def joined[T: jax.Array](x: T, name: str, axis: int) -> T:
  """Within `local`: the parts of the axis `name` put together, along an axis of the array."""
  return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if (axes := _divided(name)) else x


def number(name: str) -> Int[Array, ''] | int:
  """Within `local`: which part of the axis `name` this device has; elsewhere 0."""
  return jax.lax.axis_index(axes) if (axes := _divided(name)) else 0


def _divided(name: str) -> tuple[str, ...]:
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return tuple(axis for axis in KEPT[name] if axis in manual)


def is_names(x: Any) -> bool:
  """Whether this is a leaf of a tree of names."""
  return isinstance(x, tuple) and all(isinstance(name, str | None) for name in x)
