"""Rows that are changed in place, against numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.cache import row_blocks
from sprl.cache.row_blocks import first_rows, for_row_blocks, put_rows, replace_rows, take_rows

B = 6
rows = st.lists(st.booleans(), min_size=B, max_size=B).map(np.array)


# Traced once for each device, under the patch of the test.
REPLACE = {gpu: jax.jit(lambda *arrays: replace_rows(*arrays, empty=lambda _: 7)) for gpu in (False, True)}


@partial(jax.jit, static_argnums=1)
def visited(chosen, size):
  """Return, for each row, how many blocks had it, and the numbers in all blocks."""

  def change(rows, carry):
    times, numbers = carry
    return times.at[rows].add(1, mode='drop'), numbers + size

  return for_row_blocks(chosen, size, change, (jnp.zeros(B, jnp.int32), 0))


@settings(max_examples=30)
@given(chosen=rows, size=st.sampled_from([1, 4, 6]))
def test_each_chosen_row_is_in_one_block(chosen, size):
  times, numbers = visited(chosen, size)
  np.testing.assert_array_equal(times, chosen)
  assert numbers == -(-chosen.sum() // size) * size  # no block has other rows only


@pytest.mark.parametrize('gpu', [False, True])
@settings(max_examples=30)
@given(take=rows, parent=st.lists(st.integers(0, 2), min_size=B, max_size=B).map(np.array))
def test_rows_are_replaced_by_rows_of_smaller_arrays(gpu, take, parent):
  """One row at a time, and in blocks of four as on GPUs."""
  mine, theirs = np.arange(B * 20.0).reshape(B, 4, 5), -np.arange(3 * 6.0).reshape(3, 2, 3)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(row_blocks, 'on_gpu', lambda: gpu)
    patch.setattr(row_blocks, 'GPU_ROWS', 4)
    replaced = REPLACE[gpu](jnp.array(mine), jnp.array(theirs), parent, take)
  expected = mine.copy()
  for b in np.flatnonzero(take):
    expected[b] = 7
    expected[b, :2, :3] = theirs[parent[b]]
  np.testing.assert_array_equal(replaced, expected)


def test_the_first_chosen_rows_are_taken_and_put_back():
  chosen = jnp.array([False, True, False, True, True, False])
  assert first_rows(chosen, 2).tolist() == [1, 3]
  block = first_rows(chosen, 4)
  assert block.tolist() == [1, 3, 4, B]  # B fills up the block
  tree = {'a': jnp.arange(B), 'b': jnp.arange(2 * B).reshape(B, 2)}
  part = take_rows(tree, block)
  assert part['a'].tolist() == [1, 3, 4, 5]
  assert part['b'].tolist() == [[2, 3], [6, 7], [8, 9], [10, 11]]
  back = put_rows(tree, block, {name: -x for name, x in part.items()})
  assert back['a'].tolist() == [0, -1, 2, -3, -4, 5]  # nothing is written for the filler
