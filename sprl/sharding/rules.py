"""Rules from names of array axes to mesh axes. Model, cache and learner name the axes of their arrays; only this file maps them.

    shard(x, 'rows', None, 'mlp')     constrains x to the layout of these names
    local(f, names, names)(...)       runs f on each device's part of the arguments (shard_map)
    OnMesh(jitted).on(mesh)(...)      calls a jitted function in which the names mean axes of this mesh

Without a mesh, and on one device, the names have no effect and no cost.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from sprl.sharding.mesh import TENSOR

Names = tuple[str | None, ...]  # one name per axis of an array; None: the axis is not split

ROWS = ('data', 'expert', 'fsdp')

# Axis name -> mesh axes, the outermost first. Each mesh axis in turn splits the array's axis if its size divides what remains.
IN_USE: dict[str, tuple[str, ...]] = {  # activations and caches, and weights while a layer multiplies them
  'rows': ROWS,  # sequences of a rollout, or packed rows of the learner
  'gathered_rows': ('data', 'expert'),  # rows at the product with the vocabulary, which fsdp splits
  'tokens': ('sequence',),  # tokens of the learner's packed rows
  'scored_rows': ('sequence', *ROWS),  # shards of the positions that the learner scores
  'gathered_scored_rows': ('sequence', 'data', 'expert'),  # of these, at the product with the vocabulary
  'drawn_rows': (*ROWS, *TENSOR),  # rows while tokens are drawn: no weights are involved
  'copies': ('data',),  # copies of the weights
  'heads': ('tensor_kv', 'tensor_group'),
  'kv_heads': ('tensor_kv',),
  'attention_heads': ('tensor_kv', 'tensor_group', 'sequence'),  # heads while attention has whole rows
  'attention_kv_heads': ('tensor_kv', 'sequence'),
  'mlp': TENSOR,
  'vocab': (*TENSOR, 'fsdp'),
  'expert': ('expert',),
}
KEPT = IN_USE | {'embed': ('fsdp',)}  # stored weights, gradients and moments; a weight is gathered over fsdp for its use
# Weights on the way to another mesh: one axis is split over all devices. Each step to or from this layout is one collective.
MOVING = IN_USE | dict.fromkeys(('heads', 'kv_heads', 'mlp', 'vocab'), (*TENSOR, 'fsdp', 'data', 'expert'))
MOVING |= {'expert': ('expert', *TENSOR, 'fsdp', 'data')}
TURNING = KEPT | {'expert': ('expert', *TENSOR)}  # between KEPT and MOVING: one array axis changes at a time


def spec(mesh, names: Names, shape: tuple[int, ...], rules: Mapping[str, tuple[str, ...]] = IN_USE) -> P:
  """Return the partition spec of an array of this shape by the names of its axes.

  Each mesh axis is used once, by the first array axis that it can split. The spec ends with the last split axis, as JAX writes
  the specs of a program's results. Then inputs and results have equal specs, and a program is compiled once for both.
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
  """Return the mesh axes that split `size` evenly, one after the other, without those in `taken`."""
  found = []
  for axis in axes:
    n = mesh.shape.get(axis, 1)
    if n > 1 and axis not in taken and size % n == 0:
      found.append(axis)
      size //= n
  return tuple(found)


def row_shards(mesh: Mesh | AbstractMesh) -> int:
  """Return the number of parts into which the mesh splits rows, if their number is a multiple of it."""
  return shares('rows', mesh)


def token_shards(mesh: Mesh | AbstractMesh) -> int:
  """Return the number of parts into which the mesh splits the tokens of a packed row, if their number is a multiple of it."""
  return shares('tokens', mesh)


def activation(ndim: int, features: str | None) -> Names:
  """Return the names of the axes of activations [B, M], [B, T, M] or [B, T, ..., M]."""
  return ('rows', features) if ndim == 2 else ('rows', 'tokens', *[None] * (ndim - 3), features)


# --- outside jitted functions ------------------------------------------------------------------------------------------


def shardings(mesh: Mesh | AbstractMesh, axes, shapes, rules: Mapping[str, tuple[str, ...]] = KEPT):
  """Return a NamedSharding for each array of `shapes`, a tree of arrays or of their shapes. `axes` is a tree of axis names."""
  return jax.tree.map(lambda x, names: NamedSharding(mesh, spec(mesh, names, x.shape, rules)), shapes, axes)


# --- inside jitted functions -------------------------------------------------------------------------------------------


class OnMesh[**A, R]:
  """A jitted function whose axis names mean the axes of a mesh.

  `f.on(mesh)(...)` runs it on the mesh. `f(...)` is for one device, and for calls inside another jitted function, whose mesh then
  applies. Both raise ValueError if an argument is split or copied over other devices than those of the given mesh.
  """

  def __init__(self, jitted: Callable[A, R], mesh: Mesh | None = None):
    self.jitted: Any = jitted
    self.mesh = mesh if mesh is not None and mesh.size > 1 else None
    functools.update_wrapper(self, jitted)

  def on(self, mesh: Mesh | None) -> 'OnMesh[A, R]':
    """Return the function for arrays on this mesh; None, or a mesh of one device: for one device."""
    return OnMesh(self.jitted, mesh)

  def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
    """Call the jitted function."""
    with self._entered((args, kwargs)):
      return self.jitted(*args, **kwargs)

  def lower(self, *args: A.args, **kwargs: A.kwargs):
    """Lower the function for these arguments, or for their shapes and shardings."""
    with self._entered((args, kwargs)):
      return self.jitted.lower(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.jitted, name)

  def _entered(self, arguments: Any) -> contextlib.AbstractContextManager:
    """Return the context of a call with these arguments."""
    seen = {self.mesh}
    for x in jax.tree.leaves(arguments):
      if isinstance(x, Tracer):
        return contextlib.nullcontext()
      theirs = x.sharding.mesh if isinstance(getattr(x, 'sharding', None), NamedSharding) else None
      if isinstance(theirs, Mesh) and theirs.size > 1 and theirs not in seen:
        seen.add(theirs)
        if self.mesh is None or set(theirs.devices.flat) != set(self.mesh.devices.flat):
          expected = None if self.mesh is None else dict(self.mesh.shape)
          raise ValueError(
            f'{self.__name__}: found an argument on the {theirs.size} devices of mesh {dict(theirs.shape)}; expected the devices '
            f'of the given mesh {expected}'
          )
    return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def _mesh():
  """Return the mesh of the trace, or None: without a mesh, with one device, and inside `local`, where arrays are split."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def shard[T: jax.Array](x: T, *names: str | None) -> T:
  """Constrain x, and its cotangent, to the layout of its axes' names."""
  return x if (mesh := _mesh()) is None else jax.lax.with_sharding_constraint(x, spec(mesh, names, x.shape))


def kept[T: jax.Array](x: T, *names: str | None) -> T:
  """Constrain a weight or a gradient to the layout in which weights are stored between their uses."""
  return x if (mesh := _mesh()) is None else jax.lax.with_sharding_constraint(x, spec(mesh, names, x.shape, KEPT))


def between_meshes[T: jax.Array](x: T, names: Names, source: Mesh, target: Mesh) -> T:
  """Move a weight from the storage layout of mesh `source` to that of `target`, which has the same devices.

  No device ever holds more than its part. Worked examples, the number of parts after the slash:

  [heads/2, embed/4] -> all to all -> [heads/8, embed] -> permute -> [heads/8, embed] -> all-gather -> [heads/4, embed]
  [expert/2, mlp/2, embed/2] -> all to all -> [expert/4, mlp, embed/2] -> all to all -> [expert/8, mlp, embed] -> permute ...
  """
  away, back = (KEPT, TURNING, MOVING), (MOVING, TURNING, KEPT)
  steps = [(target, KEPT)] if source == target else [*((source, rules) for rules in away), *((target, rules) for rules in back)]
  for mesh, rules in steps:
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(mesh, names, x.shape, rules)))
  return x


def tie_to_iteration[T](weights: T, i: Any) -> T:
  """Tie the weights to iteration i of a loop. Otherwise XLA gathers all weights over fsdp before the loop, and keeps them."""
  mesh = _mesh()
  return weights if mesh is None or 'fsdp' not in mesh.shape else jax.lax.optimization_barrier((weights, i))[0]


def prefetch_barrier[X, W](x: X, weights: W) -> tuple[X, W]:
  """Barrier that limits FSDP prefetch to one layer ahead: x, a layer's input, and the next layer's weights wait for each other.

  In the backward pass it applies to gradients: a layer starts after the gradients of the layer above are computed and summed
  over devices; the sum overlaps with one layer. Without the barrier XLA delays these sums for as long as it finds free memory,
  up to twice the memory needed for small models. The price: copies of the weights sum their gradients in every microbatch,
  beside a layer's products. XLA might do so once, after the last microbatch.
  """
  return (x, weights) if _mesh() is None else jax.lax.optimization_barrier((x, weights))


def parts(name: str, size: int) -> int:
  """Return the number of parts into which an axis of this name and size is split."""
  return 1 if (mesh := _mesh()) is None else math.prod(mesh.shape[axis] for axis in _splits(mesh, IN_USE[name], size, set()))


def splits_over(name: str, size: int, by: str) -> bool:
  """Return whether an axis of this name and size is split over a mesh axis that may also split the axis named `by`."""
  return (mesh := _mesh()) is not None and not set(IN_USE[by]).isdisjoint(_splits(mesh, IN_USE[name], size, set()))


def shared() -> bool:
  """Return whether XLA splits the operations that follow over several devices. Inside `local` it does not."""
  return _mesh() is not None


def shares(name: str | None, mesh: Mesh | AbstractMesh | None = None) -> int:
  """Return the most parts into which `mesh` (default: the mesh in use) splits an axis of this name."""
  over = _mesh() if mesh is None else mesh
  return 1 if over is None else math.prod(over.shape.get(axis, 1) for axis in IN_USE.get(name or '', ()))


def local(f: Callable, ins: tuple, outs, rules: Mapping[str, tuple[str, ...]] = IN_USE) -> Callable:
  """Return a function that runs f on each device, on the device's part of every argument (`jax.shard_map`).

  `ins` and `outs` are trees of axis names like f's arguments and result. A name is split by the mesh axes that divide all array
  axes of that name, so parts of different arrays fit together. Inside f, `psum`, `psum_scatter` and `all_gather` combine the
  parts of an axis, and `axis_index` returns the index of a device's part.

  The returned function raises ValueError if the mesh's axes do not divide an axis other than `rows` and `embed`.
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
    # `rows` and `embed` may stay whole. Others must be split by all their mesh axes: `psum` sums over all of them.
    for name in split.keys() - {'rows', 'embed'}:
      if len(split[name]) < len([axis for axis in rules[name] if axis in mesh.shape]):
        raise ValueError(
          f'{name} = {sizes[name]} on mesh {dict(mesh.shape)}: expected a size that the mesh axes {rules[name]} divide; '
          'give make_mesh the heads of this model'
        )

    def specs(tree):
      return jax.tree.map(lambda names: P(*[split.get(name or '') or None for name in names]), tree, is_leaf=is_names)

    return jax.shard_map(f, in_specs=specs(ins), out_specs=specs(outs), check_vma=False)(*args)

  return run


def psum[T: jax.Array](x: T, name: str) -> T:
  """Return the sum of x over the parts of the axis `name` (psum). Outside `local`, return x."""
  return jax.lax.psum(x, axes) if (axes := _divided(name)) else x


def psum_scatter[T: jax.Array](x: T, name: str, axis: int) -> T:
  """Return this device's part, along array axis `axis`, of the sum of x over the parts of the axis `name` (psum_scatter).

  Outside `local`, return x.
  """
  return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if (axes := _divided(name)) else x


def all_gather[T: jax.Array](x: T, name: str, axis: int) -> T:
  """Return the parts of the axis `name` joined along array axis `axis` (all_gather). Outside `local`, return x."""
  return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if (axes := _divided(name)) else x


def axis_index(name: str) -> Int[Array, ''] | int:
  """Return the index of this device's part of the axis `name`. Outside `local`, return 0."""
  return jax.lax.axis_index(axes) if (axes := _divided(name)) else 0


def _divided(name: str) -> tuple[str, ...]:
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return tuple(axis for axis in KEPT[name] if axis in manual)


def is_names(x: Any) -> bool:
  """Return whether x is a leaf of a tree of axis names."""
  return isinstance(x, tuple) and all(isinstance(name, str | None) for name in x)
