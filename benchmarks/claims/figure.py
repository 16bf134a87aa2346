"""The picture of an experiment: held-out accuracy of every arm, and curves over the steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from claims.experiment import ACCURACY, Experiment, Records
from claims.worker import EVERY
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pictures import BLACK, BLUE, GREEN, GREY, OLIVE, ORANGE, PURPLE, RED, TEAL, draw_band, draw_seeds, new_figure, save, style

COLOURS = (ORANGE, BLUE, TEAL, PURPLE, GREEN, RED, OLIVE)
MOST = 5  # panels in a row
ENDS, LEGEND, ROW = 2.4, 0.8, 1.7  # inches
SMALL_KL = 1e-3  # nats; the axis of a divergence is linear below, and logarithmic above
STYLES = ('-', '--', ':', '-.', (0, (8, 2, 1, 2, 1, 2)))  # of the arms of a method


def draw(experiment: Experiment, records: Records) -> None:
  """Draw results/claims/NAME.png.

  Arms METHOD@PLACE with the same place stand together, and share panels of curves: the held-out accuracy, and below it each of
  the experiment's `shown` series. An arm without a place is in all panels, except where its method has an arm of the place.
  """
  arms = [arm for arm in experiment.arms if records.get(arm)]
  methods = list(dict.fromkeys(arm.partition('@')[0] for arm in arms))
  colours = dict(zip(methods, (BLACK, *(COLOURS[i % len(COLOURS)] for i in range(len(methods))))))  # the first is the reference
  places = list(dict.fromkeys(arm.partition('@')[2] for arm in arms))  # '' for arms without a place
  shared = [place for place in places if place] or ['']
  rows = [(name, shared[i : i + MOST]) for name in (ACCURACY, *experiment.shown) for i in range(0, len(shared), MOST)]
  seeds = max(map(len, records.values()))
  setting = f'{experiment.task.sentence}; {experiment.steps} steps, {seeds} seed{"s" * (seeds != 1)}'
  heights = [ENDS, LEGEND, *[ROW] * len(rows), *[ENDS] * bool(experiment.asked)]
  figure = new_figure(f'{experiment.name}: held-out accuracy by arm, dense sampling', setting, 0.5 + sum(heights))
  subfigures: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
  ends, legend, *parts = subfigures
  draw_ends(ends.subplots(), arms, methods, places, colours, records, experiment.task.chance)
  lines = [Line2D([], [], color=colours[method], label=method) for method in methods]
  about = 'Below: over the steps, mean and range of the seeds'
  legend.legend(handles=lines, title=about, loc='center', ncols=4, frameon=False, fontsize=8.5, title_fontsize=8.5)
  if experiment.asked:
    draw_asked(parts.pop().subplots(), experiment, colours, records)
  for part, (name, several) in zip(parts, rows):
    panels = part.subplots(1, min(len(shared), MOST), squeeze=False, sharey=True)[0]
    panels[0].set_ylabel(name, fontsize=8.5)
    for axes in panels[len(several) :]:
      axes.set_visible(False)
    for axes, place in zip(panels, several):
      of_place = arms_at(place, arms)
      style(axes, '', 'step' if (name, several) == rows[-1] else '', axes.get_ylabel())
      axes.set_title(place, fontsize=9)
      draw_curves(axes, of_place, colours, [[curve(found, name) for found in records[arm].values()] for arm in of_place])
      if name == ACCURACY:
        axes.set_ylim(-0.02, 1.02)
      elif name.endswith('_kl'):
        axes.set_yscale('symlog', linthresh=min(SMALL_KL, max(axes.dataLim.ymax / 10, 1e-12)))
  save(figure, f'claims/{experiment.name}')


def arms_at(place: str, arms: Sequence[str]) -> list[str]:
  """Return the arms of a panel: those of its place, and those without a place whose method has no arm there."""
  return [arm for arm in arms if arm.partition('@')[2] == place or ('@' not in arm and f'{arm}@{place}' not in arms)]


def draw_ends(axes: Axes, arms, methods, places, colours, records: Records, chance: float) -> None:
  """Draw the accuracy of the newest weights of each run, and lines at the accuracies before training and of a guess."""
  style(axes, 'After training: a dot for each seed, a bar for the mean', ylabel='accuracy')
  at = {}
  for arm in arms:
    method, _, number = arm.partition('@')
    several = [each for each in methods if f'{each}@{number}' in arms or (not number and each in arms)]
    at[arm] = places.index(number) + 0.8 * ((several.index(method) + 0.5) / len(several) - 0.5)
    draw_seeds(axes, at[arm], [float(np.mean(found['scores'])) for found in records[arm].values()], colours[method], bar=9)
  before = float(np.mean([found['before'] for of in records.values() for found in of.values()]))
  for accuracy, text in ((before, 'before'), *([(chance, 'a guess')] if chance else [])):
    axes.axhline(accuracy, color=GREY, linewidth=1, linestyle='--')
    axes.text(1.005, accuracy, text, transform=axes.get_yaxis_transform(), fontsize=8, color=GREY, va='center')
  ticks = at if places == [''] else {place or 'reference': i for i, place in enumerate(places)}
  axes.set(xticks=[*ticks.values()], xticklabels=[*ticks], ylim=(-0.02, 1.02))


def draw_asked(axes: Axes, experiment: Experiment, colours: Mapping[str, str], records: Records) -> None:
  """Draw the accuracy of the newest weights under each sampler of `inference`, and under the dense one."""
  style(axes, 'Accuracy of trained policies, by the sampler that answers: means of the seeds', ylabel='accuracy')
  names = [*experiment.inference, 'dense']
  places = list(dict.fromkeys(arm.partition('@')[2] for arm in experiment.asked if '@' in arm))
  for arm in experiment.asked:
    runs = [{**found['under'], 'dense': found['scores']} for found in records.get(arm, {}).values()]
    if runs:
      method, _, place = arm.partition('@')
      points = np.array([[float(np.mean(under[name])) for name in names] for under in runs]).mean(axis=0)
      line = STYLES[places.index(place) % len(STYLES)] if place else '-'
      axes.plot(names, points, linestyle=line, color=colours[method], label=f'trained with {arm}', linewidth=1.8)
  axes.set(ylim=(-0.02, 1.02))
  axes.legend(frameon=False, fontsize=7.5, loc='upper left', ncols=2)


def curve(found: Mapping[str, Any], name: str) -> tuple[list[int], list[float]]:
  """Return the steps and values of a run's curve."""
  if name == ACCURACY:
    return found['accuracy']['steps'], found['accuracy']['mean']
  values = enumerate(found['curves'].get(name, []), 1)
  measured = [(EVERY * i, value) for i, value in values if value is not None]
  return [step for step, _ in measured], [value for _, value in measured]


def draw_curves(axes: Axes, arms, colours, curves: list[list[tuple[list[int], list[float]]]]) -> None:
  """Draw the curves of each arm's seeds as a band. A run that ended early has no values at later steps."""
  for arm, of_seeds in zip(arms, curves):
    steps = max((steps for steps, _ in of_seeds), key=len)
    points = np.array([values + [np.nan] * (len(steps) - len(values)) for _, values in of_seeds])
    if steps:
      draw_band(axes, np.array(steps), points, colours[arm.partition('@')[0]], arm)
