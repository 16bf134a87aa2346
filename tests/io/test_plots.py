"""Pictures: what the panels draw is what was logged, and a picture of anything is a picture."""

import warnings

import numpy as np
from matplotlib.figure import Figure

from sprl.io.metrics import RunLog
from sprl.io.plots import draw_length, draw_mismatch, draw_reward, panel_figure, plot_run, running_mean

RECORDS = [
  {'step': 0, 'kind': 'eval', 'eval/pass@1': 0.2, 'eval/low': 0.1, 'eval/high': 0.4},
  {'step': 1, 'kind': 'train', 'reward/mean': 0.0, 'policy/entropy': 1.0, 'rollout_corr/k3_kl': 1e-5},
  {'step': 2, 'kind': 'train', 'reward/mean': 0.5, 'policy/entropy': float('nan'), 'rollout_corr/k3_kl': 0.0},
  {'step': 3, 'kind': 'train', 'reward/mean': 1.0, 'policy/entropy': 0.5, 'rollout_corr/k3_kl': 1e-4},
]


def curves(figure: Figure) -> dict[str, list[tuple[float, float]]]:
  return {
    str(line.get_label()): [tuple(map(float, point)) for point in np.asarray(line.get_xydata())]
    for axes in figure.axes
    for line in axes.lines
  }


def test_running_mean_by_hand():
  np.testing.assert_allclose(running_mean(np.array([1.0, 2.0, 6.0, 7.0]), 3), [1.0, 1.5, 3.0, 5.0])
  assert running_mean(np.array([]), 5).shape == (0,)


def test_reward_panel_draws_steps_mean_and_evaluation():
  figure = panel_figure(draw_reward, RECORDS)
  drawn = curves(figure)
  assert drawn['sampled, each step'] == [(1, 0.0), (2, 0.5), (3, 1.0)]
  assert drawn['sampled, mean over 5 steps'] == [(1, 0.0), (2, 0.25), (3, 0.5)]
  (bars,) = figure.axes[0].containers
  np.testing.assert_allclose(bars[2][0].get_segments(), [[[0, 0.1], [0, 0.4]]])
  assert bars.get_label() == 'held out, pass@1 (95 % interval)'


def test_values_that_cannot_be_drawn_are_left_out():
  assert curves(panel_figure(draw_length, RECORDS)) == {'entropy': [(1, 1.0), (3, 0.5)]}
  assert curves(panel_figure(draw_mismatch, RECORDS)) == {'KL (k3)': [(1, 1e-5), (3, 1e-4)]}


def test_a_run_is_drawn_into_its_work_directory(tmp_path):
  log = RunLog(tmp_path, None, tensorboard=False)
  for record in RECORDS:
    log.write(record['step'], {name: value for name, value in record.items() if '/' in name}, {})
  log.close()
  path = plot_run(tmp_path)
  assert path == tmp_path / 'curves.png'
  assert path.read_bytes().startswith(b'\x89PNG')


def test_a_run_that_logged_nothing_is_an_empty_picture_without_warnings(tmp_path):
  RunLog(tmp_path, None, tensorboard=False).close()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert plot_run(tmp_path).stat().st_size > 0
