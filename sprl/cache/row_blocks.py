"""Change some rows of arrays in place, one block of rows at a time. Work grows with the number of changed rows, not of all rows.

Only the device knows the number of changed rows, so the blocks run in a loop. All blocks have the same size. Row numbers out of
bounds fill up the last block: reads clip them (`take_rows`), writes drop them (`put_rows`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sprl.kernels.platform import on_gpu

# Rows per block of `replace_rows` on GPUs, where each block launches one program per array. XLA's CPU backend copies one row
# faster than it scatters several.
GPU_ROWS = 8


def for_row_blocks[C](chosen: Bool[Array, ' B'], size: int, change: Callable[[Int[Array, ' size'], C], C], carry: C) -> C:
  """Call `carry = change(rows, carry)` for the chosen rows in ascending order, `size` rows at a time; return the last carry.

  Row number B fills up the last block.
  """
  B = chosen.shape[0]
  count = jnp.sum(chosen)
  order = jnp.where(jnp.arange(B) < count, jnp.argsort(~chosen, stable=True), B)
  order = jnp.pad(order, (0, -B % size), constant_values=B)

  def block(i, carry):
    return change(jax.lax.dynamic_slice_in_dim(order, i * size, size), carry)

  return jax.lax.fori_loop(0, (count + size - 1) // size, block, carry)


def first_rows(chosen: Bool[Array, ' B'], size: int) -> Int[Array, ' size']:
  """Return the first `size` chosen rows in ascending order. Row number B fills up the block."""
  return jnp.nonzero(chosen, size=size, fill_value=chosen.shape[0])[0].astype(jnp.int32)


def take_rows[T](arrays: T, rows: Int[Array, ' R']) -> T:
  """Return these rows of each array of a tree. A row out of bounds becomes the last row."""
  return jax.tree.map(lambda x: x[jnp.minimum(rows, len(x) - 1)], arrays)


def put_rows[T](arrays: T, rows: Int[Array, ' R'], new: T) -> T:
  """Return the arrays with row rows[i] replaced by row i of `new`. A row out of bounds is dropped."""
  return jax.tree.map(lambda x, y: x.at[rows].set(y, mode='drop'), arrays, new)


def replace_rows[T](mine: T, theirs: T, parent: Int[Array, ' B'], take: Bool[Array, ' B'], empty: Callable[[str], float]) -> T:
  """Return `mine` with row b replaced by row parent[b] of `theirs` where take[b]. Other rows are not touched.

  An array of `theirs` may be smaller along any axis but the first. `empty(field name)` fills the rest of the row.
  """
  B = take.shape[0]

  def change(rows, mine):
    source = parent[jnp.minimum(rows, B - 1)]

    def replaced(path, x, new):
      pad = [(0, 0), *((0, m - t) for m, t in zip(x.shape[1:], new.shape[1:]))]
      value = empty(getattr(path[-1], 'name', '') if path else '')
      return x.at[rows].set(jnp.pad(new[source], pad, constant_values=value), mode='drop')

    return jax.tree_util.tree_map_with_path(replaced, mine, theirs)

  return for_row_blocks(take, min(B, GPU_ROWS if on_gpu() else 1), change, mine)
