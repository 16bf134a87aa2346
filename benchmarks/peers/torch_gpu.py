"""PyTorch's attention and transformers' generate on a GPU, measured for benchmarks/gpu_check.py.

    python torch_gpu.py '{"device": "cuda", "decode": [[256, 28, 4, 640, 128]], "rows": [], "generate": null}'

    decode     shapes [B, H, K, S, D]: one new token per row against a cache; microseconds, by shape
    rows       shapes [B, T, H, K, D]: causal rows, forward and backward pass; microseconds, by shape
    generate   [folder with config.json, rows, prompt tokens, new tokens]: a model with random weights; tokens per second

The last line of the output is JSON. Exits with a message if CUDA is requested and torch does not have it.
"""

import gc
import json
import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as attend


def microseconds(call, inputs, device, runs=5, launches=20):
  """Return the median microseconds of a call; a run launches it many times over rotating inputs."""

  def wait():
    if device == 'cuda':
      torch.cuda.synchronize()

  times = []
  for run in range(runs + 1):
    wait()
    start = time.perf_counter()
    for i in range(launches):
      call(*inputs[i % len(inputs)])
    wait()
    if run:
      times.append((time.perf_counter() - start) / launches)
  return 1e6 * statistics.median(times)


def arrays(device, dtype, *shapes, gradients=False):
  """Return two sets of random inputs."""
  return [[torch.randn(shape, device=device, dtype=dtype, requires_grad=gradients) for shape in shapes] for _ in range(2)]


def decode(device, B, H, K, S, D):
  """Time one token per row. The queries of a group are positions, so that the library reads a kv head once."""
  inputs = arrays(device, torch.bfloat16, (B, K, H // K, D), (B, K, S, D), (B, K, S, D))
  with torch.inference_mode():
    return microseconds(attend, inputs, device)


def rows(device, B, T, H, K, D):
  """Time attention of causal rows and its gradients."""

  def both(q, k, v):
    torch.autograd.grad(attend(q, k, v, is_causal=True, enable_gqa=True), (q, k, v), torch.ones_like(q))

  inputs = arrays(device, torch.bfloat16, (B, H, T, D), (B, K, T, D), (B, K, T, D), gradients=True)
  return microseconds(both, inputs, device, launches=8)


def generate(device, folder, B, prompt, new):
  """Return tokens per second over all rows. The time of the first quarter is subtracted, which excludes the prompt."""
  import transformers

  transformers.logging.set_verbosity_error()
  config = transformers.AutoConfig.from_pretrained(folder)
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation='sdpa').eval()
    tokens = torch.randint(3, config.vocab_size, (B, prompt))
  model.generation_config = transformers.GenerationConfig()  # no eos id: every row runs to its end

  def seconds(count):
    asked = transformers.GenerationConfig(
      max_new_tokens=count, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    start = time.perf_counter()
    with torch.inference_mode():
      model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=asked)
    return time.perf_counter() - start

  seconds(new // 4)
  return B * (new - new // 4) / (seconds(new) - seconds(new // 4))


def main():
  """Read the request as JSON from the command line; print the result as JSON."""
  asked = json.loads(sys.argv[1])
  device = asked['device']
  if device == 'cuda' and not torch.cuda.is_available():
    raise SystemExit('this torch has no CUDA')
  found = {'versions': {'torch': torch.__version__}}
  for name, measure in (('decode', decode), ('rows', rows)):
    found[name] = {}
    for shape in asked[name]:
      try:
        found[name][json.dumps(shape)] = measure(device, *shape)
      except torch.OutOfMemoryError as error:
        print(f'{name} {shape}: {error}', file=sys.stderr)
      gc.collect()
      if device == 'cuda':
        torch.cuda.empty_cache()
  if asked['generate']:
    try:
      found['generate'] = generate(device, *asked['generate'])
    except Exception as error:  # transformers is missing, or memory is too small: report it and keep the other results
      print(f'generate: {type(error).__name__}: {error}', file=sys.stderr)
  print(json.dumps(found))


if __name__ == '__main__':
  main()
