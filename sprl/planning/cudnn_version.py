"""The version of cuDNN for which JAX lowers its own attention, on machines without cuDNN.

sprl has its own kernels of attention. Benchmarks and tests compile that of the library to compare them.

Before JAX lowers attention to cuDNN, it asks the installed cuDNN for its version, and raises RuntimeError if there is none. JAX
has no public option for the version. So this file replaces JAX's private function: nothing else of `sprl/` patches JAX.
Checked with jax 0.11.2 and 0.12.0.1.
"""

from contextlib import AbstractContextManager
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo


def cudnn_version(version: int) -> AbstractContextManager:
  """Return a context in which JAX finds cuDNN of this version, as cuDNN numbers its versions: 90800 is 9.8.0."""
  return mock.patch.object(fused_attention_stablehlo, 'check_cudnn_version', return_value=version)
