"""Figures of the notebook interface: the ledger of some rollouts, and what a cache keeps of a sequence."""

import html
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from sprl.api.rollouts import Sample

NOT_RECORDED = (
  'no evictions are recorded; expected samples of generate(..., evictions=True) and a sampler with cache.budget: a dense cache '
  'evicts nothing'
)

MEANINGS = {  # entry of the ledger -> what it is, for a reader of the figure
  'gap': 'whole mismatch',
  'routing': 'choice of experts',
  'staleness': 'older weights',
  'learner_fp8': 'FP8 in the learner',
  'numerics': 'order of computation',
  'weights': 'FP8 linears',
  'kv': 'FP8 cache',
  'eviction': 'eviction',
  'reproduction': 'not reproduced',
}


def ledger_figure(entries: Mapping[str, Float[np.ndarray, ' N']], causes: Mapping[str, float]) -> Figure:
  """Return a bar for each of the causes (name -> mean |nats|), and the distribution of the gap over the tokens."""
  figure = Figure(figsize=(10.0, 0.6 + 0.42 * max(len(causes), 4)), layout='constrained')
  left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
  names = list(causes)[::-1]
  colors = ['#222222' if name == 'gap' else '#c1121f' if name == 'reproduction' else '#2a6f97' for name in names]
  bars = left.barh([MEANINGS.get(name, name) for name in names], [causes[name] for name in names], color=colors, height=0.65)
  left.bar_label(bars, fmt='%.4f', padding=4, fontsize=9)
  left.set_xlabel('mean |Δ log p| of a token, nats')
  left.set_title('Mismatch by cause', loc='left', fontsize=10.5, fontweight='bold')
  left.margins(x=0.18)
  gap = entries['gap']
  right.hist(gap, bins=40, color='#2a6f97')
  right.set_yscale('symlog', linthresh=1)
  right.set_xlabel('log p learner - log p sampler, nats')
  right.set_ylabel('tokens')
  right.set_title(f'Mismatch of {len(gap)} tokens', loc='left', fontsize=10.5, fontweight='bold')
  for axes in (left, right):
    axes.spines[['top', 'right']].set_visible(False)
  return figure


def visibility_figure(samples: Mapping[str, Sample], width: int = 110) -> Figure:
  """Return a heat map for each sample: which tokens (columns) the cache still held when a token (row) was drawn.

  `samples` are by title, from `generate(..., evictions=True)` of a sampler with cache.budget. At most `width` tokens are shown.
  Raises ValueError for a sample without recorded evictions.
  """
  seen = {title: sample.visible for title, sample in samples.items()}
  if missing := [title for title, share in seen.items() if share is None]:
    raise ValueError(f'{missing[0]}: {NOT_RECORDED}')
  longest = min(max(len(sample.pieces) for sample in samples.values()), width)
  figure = Figure(figsize=(min(max(0.115 * longest, 5.5) + 2.0, 13.0), 2.3 * len(samples) + 0.7), layout='constrained')
  panels = np.atleast_1d(figure.subplots(len(samples), 1, sharex=True))
  image = None
  for axes, (title, share) in zip(panels, seen.items()):
    assert share is not None
    prompt = samples[title].trajectory.prompt_length
    shown = np.ma.masked_where(np.arange(share.shape[1]) >= prompt + np.arange(len(share))[:, None], share)[:, :width]
    bottom = prompt + len(share) - 0.5
    image = axes.imshow(shown, aspect='auto', cmap='Blues', vmin=0, vmax=1, interpolation='nearest',
                        extent=(-0.5, shown.shape[1] - 0.5, bottom, prompt - 0.5))  # fmt: skip
    axes.axvline(prompt - 0.5, color='#e07a1f', linewidth=1.0)
    axes.set_title(title, loc='left', fontsize=10.5, fontweight='bold')
    axes.set_ylabel('token drawn')
    axes.spines[['top', 'right']].set_visible(False)
  panels[-1].set_xlim(-0.5, longest - 0.5)  # each picture has set the common limits to its own
  panels[-1].set_xlabel('token of the sequence, by position; the orange line is the end of the prompt')
  if image is not None:
    figure.colorbar(image, ax=list(panels), label='share of heads that see it', shrink=0.8)
  return figure


def kept_html(samples: Mapping[str, Sample]) -> str:
  """Return the text of each sample as HTML; the darker a token, the more heads still see it at the end."""
  return '\n'.join(f'<p><b>{html.escape(title)}</b></p>{_shaded(sample)}' for title, sample in samples.items())


def _shaded(sample: Sample) -> str:
  if sample.visible is None:
    raise ValueError(NOT_RECORDED)
  last: Sequence[float] = sample.visible[-1].tolist()
  spans = [
    f'<span style="background: rgba(42, 111, 151, {0.75 * share:.2f})" title="{share:.0%} of heads">'
    f'{html.escape(piece).replace(chr(10), "⏎<br>")}</span>'
    for piece, share in zip(sample.pieces, last)
  ]
  return f'<div style="line-height: 1.7; font-family: monospace; white-space: pre-wrap">{"".join(spans)}</div>'
