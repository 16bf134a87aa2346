"""How much precision do key biases cost in an FP8 cache? Attention over synthetic keys, on any machine.

    python benchmarks/key_biases.py --save key_biases    # a minute

A key is R_p (W x + b), rounded to bfloat16, with W x ~ N(0, 1), 128 wide, at 4,096 positions, theta = 10^6. The biases are
assumptions, not read from a model. Over four heads, their norm is 921 in the last layer and about 22 in the middle ones. A single
head has half of it: 460 and 11 below. A plane is the pair of coordinates i and i + D/2 that RoPE rotates together. An error is
that of the output of attention, relative to the output with unrounded keys. Queries are random. If the RMS norm of R_p b less its
mean exceeds 5 in a plane, the queries are scaled by 5 / norm there, which limits the plane's part of the scores.

    subtracted   R_p b is subtracted before rounding and added back in float32; this needs the rotation of every slot
    plain        keys are rounded with their bias
    mean         the mean of R_p b over the positions is subtracted
    stored       as `sprl/cache/key_bias.py` stores keys: the mean is subtracted, and 8 planes have second codes
    bfloat16     keys are not rounded to FP8
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import report
from jaxtyping import Array, Float

from sprl.cache.key_bias import KeyBias
from sprl.cache.layout import CacheLayout
from sprl.config import Cache
from sprl.kernels.rope import Rope, rotate, turns
from sprl.quant import fp8

D, S, QUERIES, SEEDS = 128, 4096, 64, 8
PLANES = D // 2
LAYOUT = CacheLayout(
  settings=Cache(), layers=1, kv_heads=1, heads=1, head_dim=D, rope=Rope(theta=1e6), prompt=S, positions=S,
  dtype=jnp.dtype('bfloat16'), storage=jnp.dtype('float8_e4m3fn'), key_bias=True,
)  # fmt: skip


def large(rng: np.random.Generator, planes: np.ndarray, count: int) -> np.ndarray:
  """Return a bias with magnitudes of 30 to 200 on `count` of these planes, drawn at random, and 0.5 N(0, 1) elsewhere."""
  bias, plane = 0.5 * rng.normal(size=D), rng.choice(planes, count, replace=False)
  bias[np.concatenate([plane, plane + PLANES])] = rng.uniform(30, 200, 2 * count) * rng.choice([-1, 1], 2 * count)
  return bias


def heavy(rng: np.random.Generator, freedom: float, norm: float) -> np.ndarray:
  """Return a bias of this norm from Student's distribution."""
  bias = rng.standard_t(freedom, size=D)
  return bias * norm / np.linalg.norm(bias)


SHAPES = {
  'none': lambda rng: np.zeros(D),
  'middle layer: norm 11, heavy tails': partial(heavy, freedom=2, norm=11),
  '30 to 200 on 4 planes': partial(large, planes=np.arange(PLANES), count=4),
  '30 to 200 on 8 planes': partial(large, planes=np.arange(PLANES), count=8),
  '30 to 200 on 12 planes': partial(large, planes=np.arange(PLANES), count=12),
  '30 to 200 on 16 of the 24 slowest planes': partial(large, planes=np.arange(40, PLANES), count=16),
  '30 to 200 on 12 of the 24 fastest planes': partial(large, planes=np.arange(24), count=12),
  'last layer: norm 460, heavy tails': partial(heavy, freedom=1.5, norm=460),
  '10 on all planes': lambda rng: 10.0 * rng.choice([-1, 1], D),
}


def coded(k: Float[Array, 'S D'], bias: KeyBias | None = None) -> Float[Array, 'S D']:
  """Return keys as an FP8 cache returns them, with 5 % of room above the largest. With `bias`, some planes have second codes."""
  scale = 1.05 * jnp.max(jnp.abs(k)) / fp8.MAX
  first = fp8.cast(k, scale)
  if bias is None:
    return fp8.decast(first, scale)
  second = fp8.to_bytes(bias.second(0, k[:, None], first[:, None], scale))[:, 0]
  return bias.keys(0, first[None], second[None], scale)[0]


@jax.jit
def errors(b: Float[Array, ' D'], seed: Float[Array, '']) -> dict[str, Float[Array, '']]:
  """Return the relative error of attention for each way to store keys."""
  draw = [jax.random.normal(key, (n, D)) for key, n in zip(jax.random.split(jax.random.key(seed), 3), (S, S, QUERIES))]
  bias, angles = KeyBias.of(LAYOUT, (b,)), turns(jnp.arange(S)[None], D, LAYOUT.rope)
  token, rotated = (rotate(x[None, :, None], angles)[0, :, 0] for x in (draw[0], jnp.broadcast_to(b, (S, D))))
  mean = bias.mean[0]
  assert mean is not None
  # RMS norm of R_p b less its mean, by plane
  left = jnp.sqrt(jnp.mean(jnp.square(rotated - mean), axis=0).reshape(2, -1).sum(axis=0))
  q = draw[2] * jnp.tile(jnp.minimum(1, 5 / jnp.maximum(left, 1e-6)), 2)
  exact, given = token + rotated, (token + rotated).astype(jnp.bfloat16).astype(jnp.float32)

  def output(k):
    scores = jnp.einsum('qd,sd->qs', q, k - mean, precision='highest') * D**-0.5  # the mean shifts all scores of a query alike
    return jax.nn.softmax(scores) @ draw[1]

  stored = {
    'subtracted': coded(given - rotated) + rotated,
    'plain': coded(given),
    'mean': coded(given - mean) + mean,
    'stored': coded(given - mean, bias) + mean,
    'bfloat16': given,
  }
  found, reference = {name: output(k) for name, k in stored.items()}, output(exact)
  return {name: jnp.linalg.norm(out - reference) / jnp.linalg.norm(reference) for name, out in found.items()}


def row(name: str) -> dict[str, Any]:
  """Return the mean errors of a shape of bias over the seeds."""
  found = [errors(jnp.asarray(SHAPES[name](np.random.default_rng(seed)), jnp.float32), seed) for seed in range(SEEDS)]
  return {'bias': name} | {way: float(np.mean([each[way] for each in found])) for way in found[0]}


def main() -> None:
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()
  rows = [row(name) for name in SHAPES]
  worst = max(line['stored'] / line['subtracted'] for line in rows)
  report(args.save or 'key_biases', rows, {'worst error / subtracted': worst}, bool(args.save))


if __name__ == '__main__':
  main()
