"""How long does a mixture of experts take? Blocks, beside `jax.lax.ragged_dot` and a dense MLP of as many products.

    python benchmarks/mixture.py --dtype bfloat16 --tokens 64,512,4096 --save mixture_bfloat16

Tokens and router are random. Weights are float32, as in the learner. ragged_dot receives the tokens sorted by expert; its time
includes the sort.
"""

import argparse

import jax
import jax.numpy as jnp
from common import best_of, report, several

from sprl.models.moe import gated, gates, mixture, probabilities
from sprl.quant.dot import dot


def main():
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--tokens', type=several, default='64,512,4096', help='several numbers separated by commas')
  parser.add_argument('--width', type=int, default=512, help='hidden size, E')
  parser.add_argument('--expert', type=int, default=192, help='width of an expert, F')
  parser.add_argument('--experts', type=int, default=32, help='number of experts, X')
  parser.add_argument('--chosen', type=int, default=4, help='experts per token')
  parser.add_argument('--dtype', default='bfloat16', choices=['float32', 'bfloat16'])
  parser.add_argument('--ragged', type=int, default=512, help='skip ragged_dot, which takes minutes, above this number of tokens')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()

  E, F, X, k = args.width, args.expert, args.experts, args.chosen
  keys = jax.random.split(jax.random.key(0), 6)
  shapes = {'gate': (X, F, E), 'up': (X, F, E), 'down': (X, E, F)}
  experts = {name: 0.05 * jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys)}
  wide = {'gate': (k * F, E), 'up': (k * F, E), 'down': (E, k * F)}
  whole = {name: 0.05 * jax.random.normal(key, shape) for (name, shape), key in zip(wide.items(), keys)}
  router = 0.1 * jax.random.normal(keys[4], (X, E))
  rows = []
  for tokens in args.tokens:
    x = jax.random.normal(keys[5], (tokens, E), args.dtype)

    def routed(x):
      distribution = probabilities(x, router)
      chosen = jax.lax.top_k(distribution, k)[1]
      return chosen, gates(distribution, chosen, True)

    def blocks(weights, x):
      return mixture(weights, x, *routed(x))

    def ragged(weights, x):
      chosen, gate = routed(x)
      order = jnp.argsort(chosen.reshape(-1))
      sizes = jnp.bincount(chosen.reshape(-1), length=X)

      def product(x, w):
        return jax.lax.ragged_dot(x, jnp.swapaxes(w.astype(x.dtype), 1, 2), sizes)

      rows = x[order // k]
      out = product(gated(product(rows, weights['gate']), product(rows, weights['up'])), weights['down'])
      out = jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)
      return jnp.sum(out.astype(jnp.float32) * gate[..., None], 1).astype(x.dtype)

    def dense(weights, x):
      return dot(gated(dot(x, weights['gate']), dot(x, weights['up'])), weights['down'])

    for name, function, weights in (('blocks', blocks, experts), ('ragged_dot', ragged, experts), ('dense', dense, whole)):
      if name == 'ragged_dot' and tokens > args.ragged:
        continue
      rows.append({'tokens': tokens, 'how': name, 'forward ms': timed(function, weights, x)})
      rows[-1]['with gradient ms'] = timed(lambda w, x, f=function: jax.vjp(f, w, x)[1](x), weights, x)
  report(args.save or 'mixture', rows, {'arguments': vars(args), 'rows': rows}, save=bool(args.save))


def timed(function, *arguments) -> float:
  """Return the milliseconds of a compiled call, the best of 5."""
  compiled = jax.jit(function).lower(*arguments).compile()
  jax.block_until_ready(compiled(*arguments))
  return 1e3 * best_of(5, lambda: jax.block_until_ready(compiled(*arguments)))


if __name__ == '__main__':
  main()
