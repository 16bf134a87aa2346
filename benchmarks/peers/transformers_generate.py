"""Measure transformers' generate: tokens per second of a Hugging Face model. Runs in the environment of `make reference`.

    python transformers_generate.py --model FOLDER --batch 16 --prompt 128 --new 128 --dtype bfloat16

Prompts are random and without padding. Exactly `new` tokens are sampled at temperature 1, without an end-of-sequence stop. The
peer gets its fastest configuration: scaled-dot-product attention, all cores, a warm-up call, the best of --repeats calls, and the
faster of the dynamic and the static cache at these sizes. --compile also tries the static cache with torch.compile.
"""

import argparse
import json
import os
import time

import torch
import transformers
from memory import peak_memory


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--model', required=True)
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--prompt', type=int, default=128)
  parser.add_argument('--new', type=int, default=128)
  parser.add_argument('--dtype', choices=['float32', 'bfloat16'], default='bfloat16')
  parser.add_argument('--repeats', type=int, default=2)
  parser.add_argument('--compile', action='store_true')
  args = parser.parse_args()

  torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
  torch.manual_seed(0)
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  dtype = getattr(torch, args.dtype)
  model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation='sdpa').eval()
  tokens = torch.randint(3, model.config.vocab_size, (args.batch, args.prompt))

  def generate(new, **options):
    config = transformers.GenerationConfig(
      max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, **options
    )
    start = time.perf_counter()
    with torch.inference_mode():
      output = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    seconds = time.perf_counter() - start
    assert output.shape == (args.batch, args.prompt + new), output.shape
    return seconds

  model.generation_config = transformers.GenerationConfig()  # no eos id: every row runs to its end
  caches = {'dynamic': {}, 'static': {'cache_implementation': 'static', 'disable_compile': True}}
  if args.compile:
    caches['static compiled'] = {'cache_implementation': 'static'}
  seconds = {}
  for name, options in caches.items():
    generate(args.new if 'compiled' in name else min(args.new, 8), **options)
    seconds[name] = generate(args.new, **options)
  cache = min(seconds, key=seconds.get)
  best = min([seconds[cache], *(generate(args.new, **caches[cache]) for _ in range(args.repeats - 1))])
  result = {
    'tokens_per_second': args.batch * args.new / best,
    'seconds': best,
    'cache': cache,
    'tokens_per_second_by_cache': {name: args.batch * args.new / each for name, each in seconds.items()},
    'peak_rss_bytes': peak_memory(),
    'threads': torch.get_num_threads(),
    'versions': {'torch': torch.__version__, 'transformers': transformers.__version__},
  }
  print(json.dumps(result))


if __name__ == '__main__':
  main()
