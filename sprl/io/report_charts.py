"""The charts of a run's report: data from its metrics and its trace, as sprl/web/report.js draws them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sprl.io.metrics import bounds, held_out_sets, series
from sprl.io.metrics_reference import names
from sprl.io.plots import cut_bars, running_mean, seconds_of_parts

Records = Sequence[Mapping[str, Any]]
Chart = dict[str, Any]  # as report.js reads it: title, unit, series, and `log`, `stacked`, `categories` or `across`

MOST_POINTS = 600  # of a curve
MOST_SPANS = 20_000  # of the timeline
PARTS = ('rollout', 'ledger', 'learn', 'sync', 'log')  # of a step's seconds, in order
_CAUSES = ('routing', 'staleness', 'learner_fp8', 'numerics', 'weights', 'kv', 'eviction', 'reproduction')  # they sum to the gap


@dataclass(frozen=True)
class Panel:
  """A chart of some metrics over the steps. `series` maps their names to labels."""

  title: str
  unit: str
  series: Mapping[str, str]
  log: bool = False


CURVES = (
  Panel('Completion length', 'tokens', {'completion/length_mean': 'mean', 'completion/length_max': 'longest'}),
  Panel('Entropy', 'nats per token', {'policy/entropy': 'policy'}),
  Panel(
    'Signal', 'share',
    {'completion/truncated': 'completions cut at the limit', 'reward/groups_equal': 'groups with equal rewards',
     'policy/clip_fraction': 'tokens clipped'},
  ),
  Panel('KL', 'nats per token', {'policy/kl': 'update: old to new policy', 'policy/kl_ref': 'policy to reference'}),
  Panel('Gradient norm', 'before clipping', {'update/grad_norm': 'gradient'}),
  Panel('Learning rate', 'of the last update', {'optimizer/learning_rate': 'learning rate'}),
)  # fmt: skip
MISMATCH = (
  Panel(
    'Sampler against learner', 'nats per token',
    {'rollout_corr/abs_dlogp_max': 'largest |Δ log p|', 'rollout_corr/abs_dlogp_p99': '99th percentile',
     'rollout_corr/abs_dlogp_mean': 'mean |Δ log p|', 'rollout_corr/k3_kl': 'KL (k3)'}, log=True,
  ),
  Panel('Agreement', 'exp(-|Δ log p|)', {'sparse/agreement_mean': 'mean', 'sparse/agreement_p05': '5th percentile'}),
  Panel(
    'Effective sample size', 'share of the batch',
    {'rollout_corr/rollout_is_eff_sample_size': 'correction weights', 'sparse/ess': 'clipped ratios'},
  ),
  Panel(
    'Veto, rejection, caps', 'share',
    {'sparse/veto_fraction': 'sequences vetoed', 'rollout_corr/rollout_rs_masked_fraction': 'tokens rejected',
     'rollout_corr/rollout_is_ratio_fraction_high': 'weights above the cap'},
  ),
)  # fmt: skip
SPEED = (
  Panel('Throughput', 'tokens per second', {'time/tokens_per_second': 'rollout'}),
  Panel(
    'Idle', 'share of the step',
    {'time/learner_idle': 'learner', 'time/rollout_idle': 'engines', 'time/engine_host_share': 'devices wait for the host'},
  ),
  Panel(
    'Model FLOPs utilisation', "share of the devices' peak", {'time/mfu_update': 'update', 'time/mfu_step': 'whole step'}
  ),
  Panel('Tokens', 'since the run began', {'tokens/sampled': 'sampled', 'tokens/trained': 'trained'}),
  Panel('Age of the samples', 'steps', {'async/token_lag_mean': 'mean lag of a token', 'async/token_lag_max': 'largest lag'}),
)  # fmt: skip

# Kind of span -> meaning. The kind is the span's name without its number. The order gives the colours.
SPANS = {
  'chunk': 'engine: decode a chunk', 'update': 'learner: update', 'group': 'group: first request to last grade',
  'sync': 'new weights to the engines', 'evaluate': 'held-out evaluation', 'failure': 'failure',
}  # fmt: skip


def reward_chart(records: Records) -> Chart:
  """Return the chart of the sampled reward, its mean over 5 steps, and held-out scores with their 95 % intervals."""
  steps, reward = series(records, 'reward/mean')
  curves = [
    curve('one step', steps, reward, kind='faint', color=0),
    curve('mean over 5 steps', steps, running_mean(reward, 5), color=0),
  ]
  for color, (name, label) in enumerate(held_out_sets(records).items(), 1):
    at, score = series(records, name)
    low, high = bounds(records, name)
    known = {'low': low, 'high': high} if np.isfinite(low + high).any() else {}
    curves.append(curve(label, at, score, kind='points', color=color, **known))
  return {'title': 'Reward', 'unit': 'mean reward', 'series': [c for c in curves if c['x']], 'wide': True}


def charts(records: Records, panels: Sequence[Panel]) -> list[Chart]:
  """Return a chart for each panel that has a finite value."""
  made = []
  for panel in panels:
    curves = [curve(label, *series(records, name), color=i) for i, (name, label) in enumerate(panel.series.items())]
    if curves := [c for c in curves if c['x']]:
      made.append({'title': panel.title, 'unit': panel.unit, 'series': curves, 'log': panel.log})
  return made


def step_times(records: Records) -> list[Chart]:
  """Return the seconds of each step as a stack of its parts. Bars that are much taller are cut off, and named."""
  steps, parts = seconds_of_parts(records, PARTS)
  if not parts:
    return []
  curves = [curve(part, steps, values, color=i) for i, (part, values) in enumerate(parts.items())]
  limit, note = cut_bars(steps, parts) or (None, '')
  return [
    {'title': 'Time of a step', 'unit': 'seconds', 'stacked': True, 'wide': True, 'series': curves, 'limit': limit, 'cut': note}
  ]


MEMORY = {
  'sparse/cache_bytes': 'KV cache of the engines', 'time/device_memory': 'device', 'time/device_memory_peak': 'device, peak',
  'time/host_memory': 'host, process 0',
}  # fmt: skip


def memory(records: Records) -> list[Chart]:
  """Return the chart of the bytes of the KV cache, of the devices and of the host, in GiB or MiB."""
  found = {name: series(records, name) for name in MEMORY}
  most = max((float(values.max()) for _, values in found.values() if len(values)), default=0.0)
  unit, size = ('GiB', 2**30) if most >= 2**30 else ('MiB', 2**20)
  curves = [curve(MEMORY[name], steps, values / size, color=i) for i, (name, (steps, values)) in enumerate(found.items())]
  return [{'title': 'Memory', 'unit': unit, 'series': [c for c in curves if c['x']]}] if most else []


def curve(label: str, steps: np.ndarray, values: np.ndarray, color: int, kind: str = 'line', **bounds: np.ndarray) -> Chart:
  """Return a curve of at most MOST_POINTS finite values; the last is always there. `bounds` are `low` and `high`."""
  keep = np.flatnonzero(np.isfinite(values))
  stride = max(1, math.ceil(len(keep) / MOST_POINTS))
  keep = keep[::-1][::stride][::-1]
  others = {name: _numbers(np.asarray(x)[keep]) for name, x in bounds.items()}
  return {'label': label, 'x': steps[keep].tolist(), 'y': _numbers(values[keep]), 'color': color, 'kind': kind, **others}


def _numbers(values: np.ndarray) -> list[float | None]:
  """Return numbers with six digits, which a chart cannot show more of."""
  return [float(f'{x:.6g}') if math.isfinite(x) else None for x in values]


# --- mismatch by cause -----------------------------------------------------------------------------------------------


def ledger_charts(ledgers: Records) -> list[Chart]:
  """Return the mean size of the mismatch by cause, stacked, over the steps, and the tokens of the latest ledger by mismatch."""
  names_ = [*_CAUSES, *(name for name in ('interaction', 'unreplayed') if f'ledger/{name}_abs' in ledgers[-1])]
  color = {name: i for i, name in enumerate(['gap', *names_])}
  parts = [curve(name, *series(ledgers, f'ledger/{name}_abs'), color=color[name]) for name in _CAUSES]
  parts = [part for part in parts if any(part['y'])]
  whole = curve('whole mismatch', *series(ledgers, 'ledger/gap_abs'), color=0, kind='points')
  made: list[Chart] = [
    {
      'title': 'Mismatch by cause',
      'unit': 'mean |Δ log p|, nats per token',
      'stacked': True,
      'series': [*parts, whole],
      'wide': True,
    }
  ]
  last = ledgers[-1]
  if 'histograms' in last:
    edges = [f'{edge:g}' for edge in last['edges']]
    ranges = [f'below {edges[0]}', *(f'{a} to {b}' for a, b in pairwise(edges)), f'above {edges[-1]}']
    shown = {name: c for name, c in last['histograms'].items() if name in color and sum(c) > c[len(c) // 2]}
    curves = [
      {
        'label': 'whole mismatch' if name == 'gap' else name,
        'x': list(range(len(c))),
        'y': c,
        'color': color[name],
        'kind': 'steps',
      }
      for name, c in sorted(shown.items(), key=lambda item: color[item[0]])
    ]
    title = f'Tokens by Δ log p (learner - sampler), ledger of step {last["step"]}'
    made.append({'title': title, 'unit': 'tokens', 'series': curves, 'categories': ranges, 'log': True, 'wide': True})
  return made


# --- timeline --------------------------------------------------------------------------------------------------------


def timeline_data(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Return a trace in Chrome's format as report.js draws it, in milliseconds since its first span.

  spans     [row, kind, start, length, number or None] of each span, by start
  rows      name of each row
  kinds     meaning of each kind
  steps     [time, step] of the end of each update
  compiled  indices of the spans that compile: the first of their kind in a row, if three times as long as the median of the later
  dropped   earlier spans that are left out
  """
  rows = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
  spans = sorted((e for e in events if e['ph'] == 'X'), key=lambda e: e['ts'])
  dropped, spans = max(0, len(spans) - MOST_SPANS), spans[-MOST_SPANS:]
  begin = spans[0]['ts'] if spans else 0.0
  order, kinds, drawn, steps = list(rows), list(SPANS), [], []
  seen: dict[tuple[int, int], list[int]] = {}
  for i, e in enumerate(spans):
    kind, _, number = e['name'].rpartition(' ')
    kind, number = (kind, int(number)) if kind and number.isdecimal() else (e['name'], None)
    if rows[e['tid']].startswith('failures'):
      kind = 'failure'
    if kind not in kinds:
      kinds.append(kind)
    start, length = round((e['ts'] - begin) / 1e3, 2), round(e['dur'] / 1e3, 2)
    row, of = order.index(e['tid']), kinds.index(kind)
    drawn.append([row, of, start, length, number])
    seen.setdefault((row, of), []).append(i)
    if kind == 'update':
      steps.append([round(start + length, 2), number])
  compiled = [
    first
    for (row, _), (first, *later) in seen.items()
    if not rows[order[row]].startswith('groups') and len(later) > 1
    if drawn[first][3] > 3 * float(np.median([drawn[i][3] for i in later]))
  ]
  return {
    'rows': [rows[tid] for tid in order], 'kinds': [SPANS.get(kind, kind) for kind in kinds], 'spans': drawn, 'steps': steps,
    'compiled': compiled, 'dropped': dropped,
  }  # fmt: skip


def all_names(records: Records) -> list[str]:
  """Return the names of all metrics that are numbers, sorted."""
  found = set()
  for record in records:
    found |= {name for name in names(record) if not isinstance(record.get(name), list | dict)}
  return sorted(found)
