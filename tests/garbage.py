"""Whether objects are freed at once, without a garbage collection.

A reference cycle waits for a collection, and Python starts collections by the number of objects, not by the size of their arrays.
"""

import gc
from contextlib import contextmanager


@contextmanager
def no_collections():
  """Collect now, and not again inside of the block."""
  gc.collect()
  gc.disable()
  try:
    yield
  finally:
    gc.enable()


class Held:
  """Stands for an array. It can be referred to weakly."""
