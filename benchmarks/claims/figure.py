"""The picture of an experiment: held-out accuracy of every arm, and over the steps."""

import numpy as np
from claims.experiment import Experiment, Records
from matplotlib.axes import Axes
from pictures import BLACK, BLUE, GREEN, GREY, OLIVE, ORANGE, PURPLE, RED, TEAL, draw_band, draw_seeds, new_figure, save, style

COLOURS = (ORANGE, BLUE, TEAL, PURPLE, GREEN, RED, OLIVE)


def draw(experiment: Experiment, records: Records) -> None:
  """Draw results/claims/NAME.png.

  An arm METHOD@NUMBER is a point of a line: the method's accuracy against the number. Other arms are points of their own.
  """
  seeds = max(map(len, records.values()))
  figure = new_figure(experiment.question, f'{experiment.task.sentence}; {experiment.steps} steps, {seeds} seeds', 7.2)
  ends, curves = figure.subplots(2, 1, height_ratios=(1, 1))
  arms = [arm for arm in experiment.arms if records.get(arm)]
  methods = list(dict.fromkeys(arm.partition('@')[0] for arm in arms))
  colours = {method: BLACK if method == 'dense' else COLOURS[i % len(COLOURS)] for i, method in enumerate(methods)}
  before = np.mean([found['before'] for of in records.values() for found in of.values() if found['stopped'] is None])
  draw_ends(ends, arms, methods, colours, records, float(before))
  draw_curves(curves, arms, colours, records)
  save(figure, f'claims/{experiment.name}')


def draw_ends(axes: Axes, arms, methods, colours, records, before: float) -> None:
  """Draw the accuracy of the newest weights: a dot for each seed and a bar for their mean."""
  style(axes, 'Held-out accuracy after training, dense sampling: a dot for each seed, a bar for the mean', ylabel='accuracy')
  places = list(dict.fromkeys(arm.partition('@')[2] for arm in arms))  # '' for arms without a number
  for arm in arms:
    method, _, number = arm.partition('@')
    several = [each for each in methods if f'{each}@{number}' in arms or (not number and each in arms)]
    x = places.index(number) + 0.8 * ((several.index(method) + 0.5) / len(several) - 0.5)
    scores = [float(np.mean(found['scores'])) for found in records[arm].values()]
    draw_seeds(axes, x, scores, colours[method])
    axes.annotate(f'{np.mean(scores):.2f}', (x, 0.0), fontsize=7.5, ha='center', color=colours[method])
  axes.axhline(before, color=GREY, linewidth=1, linestyle='--')
  axes.annotate('before', (len(places) - 0.5, before), fontsize=8, color=GREY, ha='right', va='bottom')
  axes.set(xticks=range(len(places)), xticklabels=[place or 'no number' for place in places], ylim=(-0.02, 1.02))


def draw_curves(axes: Axes, arms, colours, records) -> None:
  """Draw the accuracy at each evaluation: the mean of the seeds and their range."""
  style(axes, 'Held-out accuracy over training: mean and range of the seeds', 'step', 'accuracy')
  dashes: dict[str, int] = {}
  for arm in arms:
    method = arm.partition('@')[0]
    lines = [found['accuracy'] for found in records[arm].values()]
    longest = max(lines, key=lambda line: len(line['steps']))['steps']
    points = np.array([line['mean'] + [np.nan] * (len(longest) - len(line['mean'])) for line in lines])
    order = dashes[method] = dashes.get(method, -1) + 1
    draw_band(axes, np.array(longest), points, colours[method], arm, linestyle=('-', '--', ':', '-.')[order % 4])
  axes.set_ylim(-0.02, 1.02)
  axes.legend(fontsize=7.5, ncols=4, frameon=False, loc='lower right')
