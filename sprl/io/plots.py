"""Pictures of a run, drawn from its metrics: one function a panel, and `plot_run` that stacks them into a PNG.

Figures are matplotlib objects without pyplot, so drawing leaves no global state and needs no display.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sprl.io.metrics import read_metrics, series

Records = Sequence[Mapping[str, Any]]

_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = '#2a6f97', '#e07a1f', '#4c956c', '#7b5ea7', '#5c6470'


def plot_run(workdir: str | os.PathLike) -> Path:
  """Draws reward, length and entropy, and mismatch of the run in `workdir` into `curves.png` there; returns its path."""
  path = Path(workdir) / 'curves.png'
  run_figure(read_metrics(workdir), title=Path(workdir).absolute().name).savefig(path, dpi=150)
  return path


def run_figure(records: Records, title: str = '') -> Figure:
  """The three panels, one below the other on one axis of steps."""
  figure = Figure(figsize=(8.0, 8.6), layout='constrained')
  panels = figure.subplots(3, 1, sharex=True, height_ratios=[1.35, 1, 1])
  for draw, axes in zip((draw_reward, draw_length, draw_mismatch), panels):
    draw(axes, records)
    axes.label_outer()
  figure.align_ylabels()
  figure.suptitle(title, x=0.02, ha='left', fontsize=12, fontweight='bold', color='#222222')
  return figure


def panel_figure(draw: Callable[[Axes, Records], None], records: Records) -> Figure:
  """One panel on its own, such as `panel_figure(draw_reward, records)`."""
  figure = Figure(figsize=(8.0, 3.4), layout='constrained')
  draw(figure.subplots(), records)
  return figure


def running_mean(values: Float[np.ndarray, ' N'], window: int) -> Float[np.ndarray, ' N']:
  """Mean of each value and the window - 1 before it (fewer at the start)."""
  return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)], float)


# --- panels ----------------------------------------------------------------------------------------------------------


def draw_reward(axes: Axes, records: Records) -> None:
  """Mean reward of each step, its mean over 5 steps, and held-out evaluations with their 95 % intervals."""
  _prepare(axes, 'Reward')
  steps, reward = series(records, 'reward/mean')
  _curve(axes, steps, reward, color=_BLUE, alpha=0.35, linewidth=1.0, label='sampled, each step')
  _curve(axes, steps, running_mean(reward, 5), color=_BLUE, linewidth=2.2, label='sampled, mean over 5 steps')
  name = next((name for name in ('eval/avg@k', 'eval/pass@1') if len(series(records, name)[0])), None)
  if name:
    steps, score = series(records, name)
    low, high = (series(records, f'eval/{bound}')[1] for bound in ('low', 'high'))
    errors = np.stack([score - low, high - score]).clip(0.0) if len(low) == len(high) == len(score) else None
    label = f'held out, {name.removeprefix("eval/")}' + (' (95 % interval)' if errors is not None else '')
    axes.errorbar(steps, score, errors, color=_ORANGE, fmt='o', markersize=5.5, capsize=3, linewidth=1.4, zorder=3, label=label)
  if axes.dataLim.ymin >= 0.0:
    axes.set_ylim(bottom=0.0)
  _legend(axes)


def draw_length(axes: Axes, records: Records) -> None:
  """Mean completion length, and on the right the policy's entropy: falling lengths or entropy are the usual early warnings."""
  _prepare(axes, 'Tokens a completion')
  _curve(axes, *series(records, 'completion/length_mean'), color=_GREEN, label='completion length')
  right = _right_axis(axes, 'Entropy (nats a token)')
  _curve(right, *series(records, 'policy/entropy'), color=_PURPLE, label='entropy')
  for each, color in ((axes, _GREEN), (right, _PURPLE)):
    each.set_ylim(bottom=0.0)
    each.yaxis.label.set_color(color)
  _legend(axes, right)


def draw_mismatch(axes: Axes, records: Records) -> None:
  """How far the sampler's log-probs are from the learner's (log scale), and how much of the batch is left after weighting.

  Equal policies give rounding on the left, below 1e-4 in float32, and an effective sample size of 1 on the right.
  """
  _prepare(axes, 'Sampler vs learner')
  axes.set_yscale('log')
  curves = {'abs_dlogp_max': 'largest |Δ log p|', 'abs_dlogp_mean': 'mean |Δ log p|', 'k3_kl': 'KL (k3)'}
  for (name, label), color in zip(curves.items(), ('#c9a27e', _ORANGE, _BLUE)):
    steps, values = series(records, f'rollout_corr/{name}')
    _curve(axes, steps, np.where(values > 0.0, values, np.nan), color=color, label=label)  # a log scale has no place for 0
  right = _right_axis(axes, 'Effective sample size')
  name = 'rollout_corr/rollout_is_eff_sample_size'
  _curve(right, *series(records, name), color=_GREY, linestyle=(0, (4, 2)), label='effective sample size')
  right.set_ylim(0.0, 1.05)
  _legend(axes, right)


def draw_ledger(axes: Axes, records: Records) -> None:
  """Mean |gap| between sampler and learner, and of its parts by cause: how much each moves a token's log-prob."""
  _prepare(axes, 'Mean |Δ log p| by cause')
  causes = ('gap', 'staleness', 'numerics', 'weights', 'kv', 'eviction', 'routing', 'residual', 'unreplayed')
  colors = ('#222222', '#c9a27e', _GREY, _PURPLE, _GREEN, _ORANGE, _BLUE, '#b0b7bf', '#222222')
  for cause, color in zip(causes, colors):
    steps, values = series(records, f'ledger/{cause}_abs')
    if np.any(values > 0.0):
      _curve(axes, steps, values, color=color, label=cause, linestyle='--' if cause in ('residual', 'unreplayed') else '-')
  axes.set_ylim(bottom=0.0)
  _legend(axes)


def draw_ledger_histogram(axes: Axes, records: Records) -> None:
  """The latest ledger's tokens by how far each cause moves them: the tails are what rejection and truncation are for."""
  _prepare(axes, 'Tokens')
  ledgers = [record for record in records if record.get('kind') == 'ledger']
  if ledgers:
    counts = {name: c for name, c in ledgers[-1]['histograms'].items() if sum(c) > c[len(c) // 2]}
    width = 0.8 / max(len(counts), 1)
    colors = ('#222222', _PURPLE, _GREEN, _ORANGE, _GREY, '#c9a27e', '#b0b7bf', _BLUE, '#e0a0a0')
    for i, ((name, values), color) in enumerate(zip(counts.items(), colors)):
      axes.bar(np.arange(len(values)) + (i - len(counts) / 2) * width, values, width, align='edge', color=color, label=name)
    edges = ledgers[-1]['edges']
    axes.set_xticks(np.arange(len(edges)) + 0.5, [f'{edge:g}' for edge in edges], rotation=60)
    axes.set_xlabel('Δ log p (learner - sampler) of a token')
    axes.set_yscale('symlog', linthresh=1)
  _legend(axes)


def draw_times(axes: Axes, records: Records) -> None:
  """Median seconds that each part of a step takes (the first step compiles, so a mean would mislead)."""
  parts = {part for record in records for part in record.get('time', {}) if part not in ('total', 'tokens_per_second')}
  seconds = {part: float(np.median(series(records, f'time/{part}')[1])) for part in parts}
  parts = sorted(seconds, key=lambda part: seconds[part])
  _quiet(axes)
  bars = axes.barh(parts, [seconds[part] for part in parts], color=_BLUE, alpha=0.75, height=0.6)
  axes.bar_label(bars, fmt='%.2f s', padding=4, color=_GREY, fontsize=9)
  axes.set_xlabel('Seconds (median)')
  axes.margins(x=0.12)


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, linewidth: float = 1.7, **style) -> None:
  """A line through the finite values, dotted where they are so few that a line would not show; nothing where there are none."""
  finite = np.isfinite(values)
  if finite.any():
    marker = 'o' if finite.sum() < 8 else ''
    axes.plot(steps[finite], values[finite], linewidth=linewidth, marker=marker, markersize=3.5, **style)


# --- looks -----------------------------------------------------------------------------------------------------------


def _prepare(axes: Axes, label: str) -> None:
  axes.set_xlabel('Step')
  axes.set_ylabel(label)
  axes.grid(True, axis='y', color='#e6e8eb', linewidth=0.8)
  axes.set_axisbelow(True)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  _quiet(axes)


def _right_axis(axes: Axes, label: str) -> Axes:
  right = axes.twinx()
  right.set_ylabel(label)
  _quiet(right)
  return right


def _quiet(axes: Axes) -> None:
  """Frame and ticks recede; the data stays."""
  for spine in axes.spines.values():
    spine.set_visible(False)
  axes.spines['bottom'].set(visible=True, color='#9aa0a6')
  axes.tick_params(which='both', colors=_GREY, labelsize=9, length=0)
  for label in (axes.xaxis.label, axes.yaxis.label):
    label.set(color='#333333', fontsize=10)


def _legend(*axes: Axes) -> None:
  """One legend above the panel, or a note that it is empty."""
  curves = [curve for each in axes for curve in zip(*each.get_legend_handles_labels())]
  if not curves:
    axes[0].text(0.5, 0.5, 'nothing logged', transform=axes[0].transAxes, ha='center', va='center', color=_GREY)
    return
  handles, labels = zip(*curves)
  axes[0].legend(
    handles,
    labels,
    loc='lower left',
    bbox_to_anchor=(0.0, 1.0),
    ncols=len(curves),
    frameon=False,
    fontsize=9,
    borderaxespad=0.2,
    handlelength=1.6,
    columnspacing=1.4,
  )


# --- who was busy when -----------------------------------------------------------------------------------------------

_TRACKS = {'engine': _BLUE, 'learner': _ORANGE, 'controller': _PURPLE, 'groups': _GREEN, 'failures': '#c1121f'}


def plot_timeline(workdir: str | os.PathLike, seconds: tuple[float, float] | None = None) -> Path:
  """Draws the run's trace (trace.json) into `timeline.png` there, whole or between two moments; returns its path."""
  path = Path(workdir) / 'timeline.png'
  events = json.loads((Path(workdir) / 'trace.json').read_text(encoding='utf-8'))['traceEvents']
  timeline_figure(events, seconds).savefig(path, dpi=130)
  return path


def timeline_figure(events: Sequence[Mapping[str, Any]], seconds: tuple[float, float] | None = None) -> Figure:
  """A line a track of a trace in Chrome's form: bars where it was busy, groups from their start to their completion."""
  names = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
  spans = [(names[e['tid']], e['ts'] / 1e6, e['dur'] / 1e6) for e in events if e['ph'] == 'X']
  begin = min((start for _, start, _ in spans), default=0.0)
  low, high = seconds or (0.0, max((start + length - begin for _, start, length in spans), default=1.0))
  bars = [t for t in names.values() if not t.startswith('groups')]
  groups = [(start - begin, length) for track, start, length in spans if track.startswith('groups')]
  groups = [(start, length) for start, length in groups if start < high and start + length > low]
  figure = Figure(figsize=(9.0, 1.2 + 0.4 * len(bars) + (1.6 if groups else 0.0)), layout='constrained')
  axes = figure.subplots()
  for row, track in enumerate(bars):
    here = [(start - begin, length) for name, start, length in spans if name == track]
    colour = _TRACKS.get(track.split()[0], _GREY)
    axes.broken_barh(here, (row - 0.35, 0.7), color=colour, edgecolor='white', linewidth=0.4)
  for i, bar in enumerate(groups):
    height = 3.0 / max(len(groups), 1)
    axes.broken_barh([bar], (len(bars) - 0.4 + i * height, 0.8 * height), color=_TRACKS['groups'], linewidth=0)
  axes.set_yticks(
    [*range(len(bars)), *([len(bars) + 1.1] if groups else [])], [*bars, *(['groups'] if groups else [])], fontsize=9
  )
  axes.set_xlim(low, high)
  axes.invert_yaxis()
  axes.set_xlabel('seconds')
  axes.spines[['top', 'right']].set_visible(False)
  return figure
