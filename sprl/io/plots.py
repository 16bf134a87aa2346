"""Plots of a run: `curves.png` from its metrics and `timeline.png` from its trace.

A panel is one function `draw_*(axes, records)`; `run_figure` stacks the main panels. Figures are matplotlib objects without
pyplot, so drawing needs no display and leaves no global state.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sprl.io.metrics import bounds, held_out_sets, read_metrics, series

Records = Sequence[Mapping[str, Any]]

_BLUE, _ORANGE, _GREEN, _PURPLE, _SAND, _RED, _GREY = '#2a6f97', '#e07a1f', '#4c956c', '#7b5ea7', '#c9a27e', '#c1121f', '#5c6470'
_PINK = '#c77da0'
_PARTS = {'rollout': _BLUE, 'ledger': _PURPLE, 'learn': _ORANGE, 'sync': _GREEN, 'log': _GREY}  # of a step's seconds
_LEDGER = {  # entry of the ledger -> colour
  'gap': '#222222', 'routing': _BLUE, 'staleness': _SAND, 'learner_fp8': _PINK, 'numerics': _GREY, 'weights': _PURPLE,
  'kv': _GREEN, 'eviction': _ORANGE, 'reproduction': _RED, 'interaction': '#b0b7bf', 'unreplayed': '#222222',
}  # fmt: skip
_NO_CAUSE = ('reproduction', 'interaction', 'unreplayed')  # entries of the ledger that are drawn dashed
_NOT_SECONDS = (  # entries of `time`
  'tokens_per_second', 'queue', 'batch_wait', 'learner_idle', 'rollout_idle', 'engine_host_share', 'mfu_update', 'mfu_step',
  'device_memory', 'device_memory_peak', 'host_memory',
)  # fmt: skip


def plot_run(workdir: str | os.PathLike) -> Path:
  """Draw the metrics of the run in `workdir` into `curves.png` there. Return the path of the picture."""
  path = Path(workdir) / 'curves.png'
  run_figure(read_metrics(workdir), title=f'Run {Path(workdir).absolute().name}').savefig(path, dpi=130)
  return path


def run_figure(records: Records, title: str = '') -> Figure:
  """Return reward, length and entropy, mismatch, and seconds of the steps, as panels with one axis of steps."""
  figure = Figure(figsize=(10.0, 10.5), layout='constrained')
  panels = figure.subplots(4, 1, sharex=True, height_ratios=[1.3, 1, 1, 1])
  for draw, axes in zip((draw_reward, draw_length, draw_mismatch, draw_step_times), panels):
    draw(axes, records)
    axes.label_outer()
  figure.align_ylabels()
  figure.suptitle(title, x=0.02, ha='left', fontsize=13, fontweight='bold', color='#222222')
  return figure


def panel_figure(draw: Callable[[Axes, Records], None], records: Records) -> Figure:
  """Return a figure with one panel, such as `panel_figure(draw_reward, records)`."""
  figure = Figure(figsize=(9.0, 3.4), layout='constrained')
  draw(figure.subplots(), records)
  return figure


def running_mean(values: Float[np.ndarray, ' N'], window: int) -> Float[np.ndarray, ' N']:
  """Return the mean of each value and the window - 1 values before it. The first values have fewer before them."""
  return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)], float)


# --- panels ----------------------------------------------------------------------------------------------------------


def draw_reward(axes: Axes, records: Records) -> None:
  """Draw the mean reward of each step, its mean over 5 steps, and held-out evaluations with their 95 % intervals."""
  _prepare(axes, 'Reward', 'mean reward')
  steps, reward = series(records, 'reward/mean')
  _curve(axes, steps, reward, color=_BLUE, alpha=0.35, linewidth=1.0, label='sampled, one step')
  _curve(axes, steps, running_mean(reward, 5), color=_BLUE, linewidth=2.2, label='sampled, mean over 5 steps')
  for color, (name, label) in zip(itertools.cycle((_ORANGE, _GREEN, _PURPLE, _PINK)), held_out_sets(records).items()):
    _draw_scores(axes, records, name, label, color)
  if axes.dataLim.ymin >= 0.0:
    axes.set_ylim(bottom=0.0)
  _legend(axes)


def _draw_scores(axes: Axes, records: Records, name: str, label: str, color: str) -> None:
  """Draw the scores of a held-out set as diamonds with their 95 % intervals. The first and the last carry their number."""
  steps, score = series(records, name)
  low, high = bounds(records, name)
  errors = np.stack([score - low, high - score]).clip(0.0) if np.isfinite(low + high).any() else None
  label += ', 95 % interval' if errors is not None else ''
  axes.errorbar(steps, score, errors, color=color, fmt='D', markersize=6, capsize=4, linewidth=1.6, zorder=3, label=label)
  for i in {0, len(steps) - 1}:
    beside = {'xytext': (8 if i == 0 else -8, 6), 'ha': 'left' if i == 0 else 'right'}
    axes.annotate(f'{score[i]:.2f}', (steps[i], score[i]), textcoords='offset points', color=color, fontweight='bold', **beside)


def draw_length(axes: Axes, records: Records) -> None:
  """Draw the mean completion length and the policy's entropy. A fall of either is the usual early warning."""
  _prepare(axes, 'Completion length and entropy', 'tokens per completion')
  _curve(axes, *series(records, 'completion/length_mean'), color=_GREEN, label='mean length (left)')
  right = _right_axis(axes, 'nats per token')
  _curve(right, *series(records, 'policy/entropy'), color=_PURPLE, label='entropy (right)')
  for each, color in ((axes, _GREEN), (right, _PURPLE)):
    each.set_ylim(0.0, 1.08 * each.dataLim.ymax if each.lines else None)
    each.yaxis.label.set_color(color)
  _legend(axes, right)


def draw_mismatch(axes: Axes, records: Records) -> None:
  """Draw the distance between the log-probs of sampler and learner (log scale), and the effective sample size.

  Equal policies differ by rounding, below 1e-4 in float32, and have an effective sample size of 1, the whole batch.
  """
  _prepare(axes, 'Mismatch between sampler and learner', 'nats per token')
  axes.set_yscale('log')
  curves = {'abs_dlogp_max': 'largest |Δ log p| (left)', 'abs_dlogp_mean': 'mean |Δ log p| (left)', 'k3_kl': 'KL, k3 (left)'}
  for (name, label), color in zip(curves.items(), (_SAND, _ORANGE, _BLUE)):
    steps, values = series(records, f'rollout_corr/{name}')
    _curve(axes, steps, np.where(values > 0.0, values, np.nan), color=color, label=label)  # a log scale has no place for 0
  right = _right_axis(axes, 'share of the batch')
  name = 'rollout_corr/rollout_is_eff_sample_size'
  _curve(right, *series(records, name), color=_GREY, linestyle=(0, (4, 2)), label='effective sample size (right)')
  right.set_ylim(0.0, 1.05)
  _legend(axes, right)


def draw_step_times(axes: Axes, records: Records) -> None:
  """Draw the seconds of each step as a stack of its parts. Bars that are much taller than the others are cut off and named."""
  _prepare(axes, 'Time of a step', 'seconds')
  steps, parts = seconds_of_parts(records, tuple(_PARTS))
  bottom = np.zeros(len(steps))
  for part, values in parts.items():
    axes.bar(steps, values, 0.85, bottom, color=_PARTS[part], label=part)
    bottom = bottom + values
  if (cut := cut_bars(steps, parts)) is not None:
    limit, note = cut
    axes.set_ylim(0.0, limit)
    axes.set_title(note, loc='right', fontsize=9, color=_RED)
  _legend(axes)


def seconds_of_parts(records: Records, parts: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Return the steps [N], and the seconds [N] of each part of a step that is not always 0."""
  steps, _ = series(records, 'time/learn')
  found = {part: dict(zip(*series(records, f'time/{part}'))) for part in parts}
  seconds = {part: np.array([of.get(step, 0.0) for step in steps]) for part, of in found.items()}
  return steps, {part: values for part, values in seconds.items() if np.any(values > 0.0)}


_MOST_NAMED = 3  # bars that are cut off


def cut_bars(steps: np.ndarray, parts: Mapping[str, np.ndarray]) -> tuple[float, str] | None:
  """Return where to cut tall bars off so that the others can be read, and a note that names them; None if no bar is tall.

  The first step compiles, and so does the first step with a part that the steps before it lack, such as the ledger.
  """
  total = np.sum(list(parts.values()), axis=0) if parts else np.zeros(0)
  usual = float(np.quantile(total, 0.5, method='lower')) if len(total) else 0.0
  limit = 1.2 * float(total[total <= 3.0 * usual].max(initial=0.0))
  if limit == 0.0 or total.max() <= 1.5 * limit:
    return None
  begun = {int(np.argmax(values > 0.05 * values.max())) for values in parts.values()}  # index of the first step with each part
  tall = np.flatnonzero(total > limit)
  named = [f'step {steps[i]}, {total[i]:.0f} s{" (compiles)" if i in begun | {0} else ""}' for i in tall[:_MOST_NAMED]]
  return limit, f'cut off: {"; ".join(named)}' + ('; ...' if len(tall) > _MOST_NAMED else '')


def draw_ledger(axes: Axes, records: Records) -> None:
  """Draw the mean absolute mismatch of a token and of its parts; dashed: interaction, reproduction error, and no replay."""
  _prepare(axes, 'Mismatch by cause', 'mean |Δ log p|, nats per token')
  for name, color in _LEDGER.items():
    steps, values = series(records, f'ledger/{name}_abs')
    if np.any(values > 0.0):
      _curve(axes, steps, values, color=color, label=name, linestyle='--' if name in _NO_CAUSE else '-')
  axes.set_ylim(bottom=0.0)
  _legend(axes)


def draw_ledger_histogram(axes: Axes, records: Records) -> None:
  """Draw a histogram over tokens for the mismatch in the latest ledger and each of its parts that are not all near 0.

  Rejection and truncation act on the tails.
  """
  _prepare(axes, 'Tokens by mismatch, latest ledger', 'tokens')
  ledgers = [record for record in records if record.get('kind') == 'ledger']
  if ledgers:
    counts = {name: c for name, c in ledgers[-1]['histograms'].items() if name in _LEDGER and sum(c) > c[len(c) // 2]}
    width = 0.8 / max(len(counts), 1)
    for i, (name, values) in enumerate(counts.items()):
      places = np.arange(len(values)) + (i - len(counts) / 2) * width
      axes.bar(places, values, width, align='edge', color=_LEDGER[name], label=name)
    edges = ledgers[-1]['edges']
    axes.set_xticks(np.arange(len(edges)) + 0.5, [f'{edge:g}' for edge in edges], rotation=60)
    axes.set_xlabel('Δ log p of a token (learner - sampler), nats')
    axes.set_yscale('symlog', linthresh=1)
  _legend(axes)


def draw_times(axes: Axes, records: Records) -> None:
  """Draw the median seconds of each part of a step. The first step compiles, so a mean would mislead.

  `pack`, `score` and `update` are drawn in place of `learn`, which is their sum.
  """
  parts = {part for record in records for part in record.get('time', {}) if part not in _NOT_SECONDS}
  parts -= {'learn'} if 'update' in parts else set()
  seconds = {part: float(np.median(series(records, f'time/{part}')[1])) for part in parts}
  parts = sorted(seconds, key=lambda part: seconds[part])
  _quiet(axes)
  axes.set_title('Median time of a step, by part', loc='left', fontsize=10.5, fontweight='bold')
  bars = axes.barh(parts, [seconds[part] for part in parts], color=_BLUE, alpha=0.75, height=0.6)
  axes.bar_label(bars, fmt='%.2f s', padding=4, color=_GREY, fontsize=9)
  axes.set_xlabel('seconds')
  axes.margins(x=0.12)


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, linewidth: float = 1.7, **style) -> None:
  """Draw a line through the finite values, with dots if they are so few that a line would hardly show."""
  finite = np.isfinite(values)
  if finite.any():
    marker = 'o' if finite.sum() < 8 else ''
    axes.plot(steps[finite], values[finite], linewidth=linewidth, marker=marker, markersize=3.5, **style)


# --- the timeline ----------------------------------------------------------------------------------------------------

# Kind of span -> colour and meaning. The kind is the span's name without its number.
_SPANS = {
  'chunk': (_BLUE, 'engine: decode a chunk'),
  'update': (_ORANGE, 'learner: update'),
  'sync': (_PURPLE, 'new weights to the engines'),
  'evaluate': (_SAND, 'held-out evaluation'),
  'group': (_GREEN, 'group: first request to last grade'),
  'failure': (_RED, 'failure'),
}
_MAX_STEPS_NAMED = 20


def plot_timeline(workdir: str | os.PathLike, seconds: tuple[float, float] | None = None) -> Path:
  """Draw the trace of the run in `workdir` into `timeline.png` there. Return the path of the picture.

  `seconds` is the interval to draw, from the start of the trace; None draws all of it.
  """
  path = Path(workdir) / 'timeline.png'
  events = json.loads((Path(workdir) / 'trace.json').read_text(encoding='utf-8'))['traceEvents']
  timeline_figure(events, seconds, title=f'Timeline of run {Path(workdir).absolute().name}').savefig(path, dpi=130)
  return path


def timeline_figure(
  events: Sequence[Mapping[str, Any]], seconds: tuple[float, float] | None = None, title: str = 'Timeline'
) -> Figure:
  """Return a figure with a row for each track of a trace in Chrome's format, and a thin bar for each group.

  The end of an update is marked with its step. The first span of a kind is marked if compilation makes it much longer than the
  later ones.
  """
  names = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
  spans = [_Span(names[e['tid']], e['name'], e['ts'] / 1e6, e['dur'] / 1e6) for e in events if e['ph'] == 'X']
  begin = min((span.start for span in spans), default=0.0)
  everything = [span._replace(start=span.start - begin) for span in spans]
  low, high = seconds or (0.0, max((span.end for span in everything), default=1.0))
  spans = [span for span in everything if span.start < high and span.end > low]
  groups = [span for span in spans if span.track.startswith('groups')]
  others = [span for span in spans if not span.track.startswith('groups')]
  rows = [track for track in dict.fromkeys(names.values()) if not track.startswith('groups')]

  figure = Figure(figsize=(10.0, 1.6 + 0.45 * len(rows) + (1.6 if groups else 0.0)), layout='constrained')
  axes = figure.subplots()
  _bars(axes, others, [(rows.index(span.track) - 0.35, 0.7) for span in others], linewidth=0.4)
  thickness = 3.0 / max(1, len(groups))
  _bars(axes, groups, [(len(rows) - 0.4 + i * thickness, 0.8 * thickness) for i in range(len(groups))], linewidth=0.0)
  axes.set_xlim(low, high)
  _mark_steps(axes, others, low, high)
  _mark_compilation(axes, everything, rows)
  axes.set_yticks([*range(len(rows)), *([len(rows) + 1.1] if groups else [])], [*rows, *(['groups'] if groups else [])])
  axes.set_ylim(len(rows) + (2.8 if groups else -0.4), -0.6)
  axes.set_xlabel('seconds since the start of the trace')
  _quiet(axes)
  figure.suptitle(title, x=0.02, ha='left', fontsize=12, fontweight='bold', color='#222222')
  if looks := dict.fromkeys(_look(span) for span in spans):
    keys = [Patch(color=color, label=meaning) for color, meaning in looks]
    figure.legend(handles=keys, loc='outside lower center', ncols=min(3, len(keys)), frameon=False, fontsize=9)
  return figure


class _Span(NamedTuple):
  """A bar of the timeline, in seconds since the start of the trace."""

  track: str
  name: str
  start: float
  length: float

  @property
  def end(self) -> float:
    return self.start + self.length

  @property
  def kind(self) -> str:
    return 'failure' if self.track.startswith('failures') else re.sub(r' \d+$', '', self.name)


def _look(span: _Span) -> tuple[str, str]:
  """Return the colour and the meaning of a span."""
  return _SPANS.get(span.kind, (_GREY, span.kind))


def _bars(axes: Axes, spans: Sequence[_Span], places: Sequence[tuple[float, float]], linewidth: float) -> None:
  """Draw spans as one collection, because a trace may have 100,000; `places` are bottom and height of each."""
  corners = [
    [(span.start, bottom), (span.end, bottom), (span.end, bottom + height), (span.start, bottom + height)]
    for span, (bottom, height) in zip(spans, places)
  ]
  colors = [_look(span)[0] for span in spans]
  edges = [color if span.length == 0 else 'white' for color, span in zip(colors, spans)]  # a moment is only an edge
  axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors=edges, linewidths=linewidth))


def _mark_steps(axes: Axes, spans: Sequence[_Span], low: float, high: float) -> None:
  """Draw a line where the update of each step ends, with its number where there is room."""
  shown = [(span.name.removeprefix('update '), span.end) for span in spans if span.kind == 'update' and low <= span.end <= high]
  free = -math.inf  # where the last label ends
  for number, end in shown:
    axes.axvline(end, color='#9aa0a6', linewidth=0.8, linestyle=':', zorder=0)
    if end >= free:
      axes.annotate(f'step {number}', (end, 1.0), xycoords=('data', 'axes fraction'), xytext=(0, 3), textcoords='offset points',
                    ha='center', fontsize=8, color=_GREY)  # fmt: skip
      free = end + (high - low) / _MAX_STEPS_NAMED


def _mark_compilation(axes: Axes, spans: Sequence[_Span], rows: Sequence[str]) -> None:
  """Write 'compiles' into the first span of a kind if it takes three times as long as the median of the later ones.

  Only where the text fits into the bar.
  """
  kinds: dict[tuple[str, str], list[_Span]] = {}
  for span in spans:
    kinds.setdefault((span.track, span.kind), []).append(span)
  for (track, _), (first, *later) in kinds.items():
    fits = first.length > (axes.get_xlim()[1] - axes.get_xlim()[0]) / _MAX_STEPS_NAMED
    if track in rows and fits and len(later) > 1 and first.length > 3 * float(np.median([span.length for span in later])):
      style = {'ha': 'center', 'va': 'center', 'color': 'white', 'fontsize': 8, 'clip_on': True}
      axes.text(first.start + first.length / 2, rows.index(track), 'compiles', **style)


# --- looks -----------------------------------------------------------------------------------------------------------


def _prepare(axes: Axes, title: str, label: str) -> None:
  axes.set_title(title, loc='left', fontsize=10.5, fontweight='bold', color='#222222')
  axes.set_xlabel('step')
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
  """Make frame and ticks less prominent than the data."""
  for spine in axes.spines.values():
    spine.set_visible(False)
  axes.spines['bottom'].set(visible=True, color='#9aa0a6')
  axes.tick_params(which='both', colors=_GREY, labelsize=9, length=0)
  for label in (axes.xaxis.label, axes.yaxis.label):
    label.set(color='#333333', fontsize=9.5)


def _legend(axes: Axes, right: Axes | None = None) -> None:
  """Draw one legend beside the panel, or a note if the panel is empty."""
  curves = [curve for each in (axes, right) if each for curve in zip(*each.get_legend_handles_labels())]
  if not curves:
    axes.text(0.5, 0.5, 'nothing logged', transform=axes.transAxes, ha='center', va='center', color=_GREY)
    return
  handles, labels = zip(*curves)
  beside = 1.08 if right else 1.01  # outside the tick labels of a right axis
  axes.legend(handles, labels, loc='upper left', bbox_to_anchor=(beside, 1.0), frameon=False, fontsize=9, handlelength=1.6)
