"""The picture of an experiment: held-out accuracy of every arm, and over the steps."""

from typing import Any

import numpy as np
from claims.experiment import Experiment, Records
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pictures import BLACK, BLUE, GREEN, GREY, OLIVE, ORANGE, PURPLE, RED, TEAL, draw_band, draw_seeds, new_figure, save, style

COLOURS = (ORANGE, BLUE, TEAL, PURPLE, GREEN, RED, OLIVE)


def draw(experiment: Experiment, records: Records) -> None:
  """Draw results/claims/NAME.png.

  Arms METHOD@NUMBER with the same number stand together, and share a panel of curves. Arms without a number are in all panels.
  """
  arms = [arm for arm in experiment.arms if records.get(arm)]
  methods = list(dict.fromkeys(arm.partition('@')[0] for arm in arms))
  colours = {method: BLACK if method == 'dense' else COLOURS[i % len(COLOURS)] for i, method in enumerate(methods)}
  places = list(dict.fromkeys(arm.partition('@')[2] for arm in arms))  # '' for arms without a number
  numbers = [place for place in places if place] or ['']
  seeds = max(map(len, records.values()))
  setting = f'{experiment.task.sentence}; {experiment.steps} steps, {seeds} seeds'
  figure = new_figure(f'{experiment.name}: held-out accuracy by arm, dense sampling', setting, 6.4)
  layout: Any = [['ends'] * len(numbers), ['legend'] * len(numbers), numbers]
  panels = figure.subplot_mosaic(layout, height_ratios=(1.2, 0.25, 1))
  draw_ends(panels['ends'], arms, methods, places, colours, records)
  for number in numbers:
    draw_curves(panels[number], [arm for arm in arms if arm.partition('@')[2] in ('', number)], colours, records)
    panels[number].set_title(number, fontsize=9)
  panels['legend'].axis('off')
  lines = [Line2D([], [], color=colours[method], label=method) for method in methods]
  about = 'Below: accuracy over the steps, mean and range of the seeds'
  panels['legend'].legend(handles=lines, title=about, loc='center', ncols=4, frameon=False, fontsize=8.5, title_fontsize=8.5)
  save(figure, f'claims/{experiment.name}')


def draw_ends(axes: Axes, arms, methods, places, colours, records: Records) -> None:
  """Draw the accuracy of the newest weights, and before training."""
  style(axes, 'After training: a dot for each seed, a bar for the mean', ylabel='accuracy')
  for arm in arms:
    method, _, number = arm.partition('@')
    several = [each for each in methods if f'{each}@{number}' in arms or (not number and each in arms)]
    x = places.index(number) + 0.8 * ((several.index(method) + 0.5) / len(several) - 0.5)
    draw_seeds(axes, x, [float(np.mean(found['scores'])) for found in records[arm].values()], colours[method], bar=9)
  before = np.mean([found['before'] for of in records.values() for found in of.values() if found['stopped'] is None])
  axes.axhline(float(before), color=GREY, linewidth=1, linestyle='--')
  axes.text(0.995, float(before) + 0.01, 'before', transform=axes.get_yaxis_transform(), fontsize=8, color=GREY, ha='right')
  axes.set(xticks=range(len(places)), xticklabels=[place or 'no number' for place in places], ylim=(-0.02, 1.02))


def draw_curves(axes: Axes, arms, colours, records: Records) -> None:
  """Draw the accuracy at each evaluation."""
  style(axes, '', 'step')
  for arm in arms:
    lines = [found['accuracy'] for found in records[arm].values()]
    longest = max((line['steps'] for line in lines), key=len)
    points = np.array([line['mean'] + [np.nan] * (len(longest) - len(line['mean'])) for line in lines])
    draw_band(axes, np.array(longest), points, colours[arm.partition('@')[0]], arm)
  axes.set_ylim(-0.02, 1.02)
