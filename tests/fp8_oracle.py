"""Block-wise FP8 in NumPy, float64, one block at a time (docs/methods/fp8.md, eq. 2 and 3)."""

import ml_dtypes
import numpy as np


def rounded(x, rows, columns, pow2=False):
  """Return code times scale of each number of x [N, M], which shares its scale with a block of rows x columns."""
  x = np.asarray(x, np.float32)
  out = np.zeros(x.shape)
  for i in range(0, x.shape[0], rows):
    for j in range(0, x.shape[1], columns):
      block = x[i : i + rows, j : j + columns]
      scale = max(np.abs(block).max(), np.float32(1e-10)) / np.float32(448)
      scale = np.float32(2.0 ** np.ceil(np.log2(scale))) if pow2 else scale
      codes = np.clip(block / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
      out[i : i + rows, j : j + columns] = codes.astype(np.float64) * scale
  return out


def weight(w, format='float32'):
  """Return a weight [N, M] as products multiply it."""
  rows, columns = (1, 32) if format == 'mxfp8' else (128, 128)
  return rounded(np.asarray(w).astype(ml_dtypes.bfloat16), rows, columns, format != 'float32')


def activations(x, format='float32'):
  """Return activations [T, M] as products multiply them."""
  return rounded(x, 1, 32 if format == 'mxfp8' else 128, format != 'float32')
