"""The two pictures of cluster_simulation.py, from the saved rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import cluster
import numpy as np
from matplotlib.axes import Axes
from pictures import BLACK, BLUE, GREY, ORANGE, PURPLE, TEAL, load, new_figure, save, style

type Rows = Sequence[Mapping[str, Any]]
type Look = tuple[str, str, str]  # colour, line style, meaning

GAINS: dict[tuple[str, str], Look] = {  # (speed, arm) of `rlvr` -> look
  ('batch', 'spare'): (BLACK, '-', f'synchronous, {cluster.SPARE_PROMPTS} spare prompts'),
  ('batch', 'alpha = 1, best'): (PURPLE, '-', 'alpha = 1'),
  ('batch', 'alpha = 2, best'): (ORANGE, '-', 'alpha = 2'),
  ('fixed', 'alpha = 2, best'): (ORANGE, '--', 'alpha = 2, if the speed did not depend on the batch'),
}
BOUNDS: dict[tuple[str, str], Look] = {
  ('fixed', 'continuous'): (BLACK, '-', 'synchronous'),
  ('fixed', 'alpha = 1, beta*'): (PURPLE, '-', 'alpha = 1'),
  ('fixed', 'alpha = 2, beta*'): (TEAL, '-', 'alpha = 2'),
  ('fixed', 'alpha = 1, beta*, least possible'): (PURPLE, ':', 'alpha = 1, least time possible'),
}
ORDERS: dict[str, Look] = {'start': (BLUE, '-', 'order start'), 'deadline': (ORANGE, '-', 'order deadline')}
CHANGES = {  # experiment and panel -> its title; arms of its bars -> their labels
  'turns': (
    'Rollouts: no barrier after each turn, by the turns of an episode',
    {f'environment-level, {n} turns': f'{n} turns' for n in cluster.TURNS_TRIED},
  ),
  'spare': (
    'Rollouts: spare episodes, the first 32 x 8 count (N(10, 5) s; gain over 32 x 8)',
    {'36 x 8': '4 more groups', '32 x 9': '1 more member each', '36 x 9': 'both'},
  ),
  'agentic': (
    f'Rollouts and training, {cluster.TURNS} turns; each bar adds a change',
    {'environment-level': 'no barrier after a turn', 'alpha = 1': '+ alpha = 1', 'alpha = 1, redundant': '+ spare episodes'},
  ),
}


def draw() -> None:
  """Draw results/cluster_simulation.png (single answers) and results/cluster_simulation_environments.png."""
  saved = load('cluster_simulation')
  rows, draws = saved['rows'], f'{saved["result"]["draws"]["judged"]} draws, bars: 95 % intervals'
  figure = new_figure(
    'Simulated, not measured: gains over continuous batching without running ahead',
    f"sprl's scheduler on a virtual clock; {cluster.PROMPTS} x {cluster.GROUP} responses per update; modelled H200s; {draws}",
    6.8,
  )
  panels = figure.subplot_mosaic([['gains', 'gains'], ['bounds', 'generation']], height_ratios=[1.1, 1])
  single = [row for row in rows if row['experiment'] == 'rlvr']
  by_gpus(panels['gains'], [row for row in single if row['against'] == 'continuous'], GAINS)
  published = next(row['published'] for row in single if row['arm'] == 'alpha = 2, best' and row['published'])
  panels['gains'].axhline(published, color=GREY, linestyle=':', label=f'published: up to {published}')
  style(panels['gains'], 'Speed of rollouts and training, best split of GPUs', 'GPUs (log scale)', 'times as fast')
  by_gpus(panels['bounds'], [row for row in single if row['against'] == 'Proposition 2'], BOUNDS)
  panels['bounds'].axhline(1, color=GREY, linewidth=0.9)
  style(panels['bounds'], 'Proposition 2 at the fixed speed, beta* train', 'GPUs (log scale)', 'bound / time (below 1: exceeded)')
  draw_generation(panels['generation'], [row for row in rows if row['experiment'] == 'generation'])
  for axes in panels.values():
    axes.set_ylim(0, None)
    axes.legend(frameon=False, fontsize=8)
  save(figure, 'cluster_simulation')

  figure = new_figure(
    'Simulated, not measured: gains with environments over a barrier after each turn',
    f'{cluster.ENVIRONMENTS} x {cluster.MEMBERS} conversations on {cluster.AGENT_GPUS} modelled H200s; environment steps of '
    f'N({cluster.LATENCY:g}, {cluster.SPREAD:g}) s; {draws}',
    6.2,
  )
  for axes, part in zip(figure.subplots(3, 1, sharex=True, height_ratios=[1, 1.1, 1.1]), CHANGES):
    draw_changes(axes, *CHANGES[part], [row for row in rows if row['experiment'] in ('environments', 'agentic')])
  figure.axes[-1].set_xlabel('times as fast', fontsize=9)
  legend = {'loc': 'outside lower center', 'ncols': 3, 'frameon': False, 'fontsize': 8.5}
  figure.legend(*figure.axes[-1].get_legend_handles_labels(), **legend)
  save(figure, 'cluster_simulation_environments')


def spans(rows: Rows) -> np.ndarray:
  """Return the distances from the gains to the ends of their intervals, [2, row]."""
  return np.array([[row['gain'] - row['low'], row['high'] - row['gain']] for row in rows]).T


def by_gpus(axes: Axes, rows: Rows, looks: Mapping[tuple[str, str], Look]) -> None:
  """Draw the gain of each (speed, arm) in `looks` against the number of GPUs."""
  for arm, (colour, dashes, meaning) in looks.items():
    its = [row for row in rows if (row['speed'], row['arm']) == arm]
    at, gains = [row['GPUs'] for row in its], [row['gain'] for row in its]
    look = {'color': colour, 'linestyle': dashes, 'marker': 'o', 'markersize': 4.5, 'capsize': 2}
    axes.errorbar(at, gains, spans(its), label=meaning, **look)
  axes.set_xscale('log')
  ticks = sorted({row['GPUs'] for row in rows})
  axes.set_xticks(ticks, [str(tick) for tick in ticks])
  axes.minorticks_off()


def draw_generation(axes: Axes, rows: Rows) -> None:
  """Draw the bound of Prop 1 over the time of generation without training, against alpha, for each order."""
  title = f'Proposition 1 at the fixed speed, {rows[0]["GPUs"]} GPUs'
  style(axes, title, 'alpha: updates ahead', 'bound / time (below 1: exceeded)')
  for order, (colour, dashes, meaning) in ORDERS.items():
    its = [row for row in rows if row['arm'].endswith((order, '0, start'))]
    alphas = [int(row['arm'].split()[2].strip(',')) for row in its]
    look = {'color': colour, 'linestyle': dashes, 'marker': 'o', 'markersize': 4.5, 'capsize': 2}
    axes.errorbar(alphas, [row['gain'] for row in its], spans(its), label=meaning, **look)
    axes.set_xticks(alphas)
  axes.axhline(1, color=GREY, linewidth=0.9)


def draw_changes(axes: Axes, title: str, labels: Mapping[str, str], rows: Rows) -> None:
  """Draw a bar for the gain of each arm in `labels`, another with some slow environments, and the published gain."""
  style(axes, title, grid='x')
  slow = f', {cluster.SLOW:.0%} slow'
  found = {row['arm']: row for row in rows}
  looks = {
    '': (BLUE, 'latencies as stated above'),
    slow: (ORANGE, f'{100 * cluster.SLOW:.0f} % of the episodes {cluster.SLOWER:g} times as slow'),
  }
  suffixes = [suffix for suffix in looks if all(arm + suffix in found for arm in labels)]
  height = 0.7 / len(suffixes)
  for i, suffix in enumerate(suffixes):
    colour, meaning = looks[suffix]
    places = np.arange(len(labels)) + (i - (len(suffixes) - 1) / 2) * height
    its = [found[arm + suffix] for arm in labels]
    gains = [row['gain'] for row in its]
    axes.barh(places, gains, 0.9 * height, xerr=spans(its), color=colour, alpha=0.85, label=meaning, ecolor=BLACK, capsize=2)
    for place, gain in zip(places, gains):
      axes.text(0.07, place, f'{gain:.1f}', va='center', fontsize=8.5, fontweight='bold', color='white')
  known = [(found[arm]['published'], i) for i, arm in enumerate(labels) if found[arm]['published'] is not None]
  axes.plot(*zip(*known), 'D', color=BLACK, markersize=6, markeredgecolor='white', label='published (most figures second-hand)')
  axes.set_yticks(range(len(labels)), labels.values(), fontsize=9)
  axes.invert_yaxis()
