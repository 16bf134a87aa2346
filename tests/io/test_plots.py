"""Plots draw the logged values, also of an empty log and of values that are not finite."""

import json
import warnings

import numpy as np
import pytest
from matplotlib.figure import Figure

from sprl.io.metrics import RunLog
from sprl.io.plots import (
  cut_bars,
  draw_ledger,
  draw_ledger_histogram,
  draw_length,
  draw_mismatch,
  draw_reward,
  draw_step_times,
  draw_times,
  panel_figure,
  plot_run,
  plot_timeline,
  running_mean,
  timeline_figure,
)
from sprl.io.report_charts import reward_chart

RECORDS = [
  {'step': 0, 'kind': 'eval', 'eval/avg@k': 0.2, 'eval/low': 0.1, 'eval/high': 0.4},
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


def test_the_reward_panel_draws_steps_their_mean_and_evaluations():
  figure = panel_figure(draw_reward, RECORDS)
  drawn = curves(figure)
  assert drawn['sampled, one step'] == [(1, 0.0), (2, 0.5), (3, 1.0)]
  assert drawn['sampled, mean over 5 steps'] == [(1, 0.0), (2, 0.25), (3, 0.5)]
  (bars,) = figure.axes[0].containers
  np.testing.assert_allclose(bars[2][0].get_segments(), [[[0, 0.1], [0, 0.4]]])
  assert bars.get_label() == 'held out, 95 % interval'


def test_values_that_are_not_finite_are_left_out():
  assert curves(panel_figure(draw_length, RECORDS)) == {'entropy (right)': [(1, 1.0), (3, 0.5)]}
  assert curves(panel_figure(draw_mismatch, RECORDS)) == {'KL, k3 (left)': [(1, 1e-5), (3, 1e-4)]}


def test_a_run_is_drawn_into_its_work_directory(tmp_path):
  log = RunLog(tmp_path, None)
  for record in RECORDS:
    log.write(record['step'], {name: value for name, value in record.items() if '/' in name}, {})
  log.close()
  path = plot_run(tmp_path)
  assert path == tmp_path / 'curves.png'
  assert path.read_bytes().startswith(b'\x89PNG')


def test_an_empty_log_is_drawn_without_warnings(tmp_path):
  RunLog(tmp_path, None).close()
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert plot_run(tmp_path).stat().st_size > 0


def times(step, rollout, learn):
  others = {'tokens_per_second': 900.0, 'mfu_update': 0.4, 'mfu_step': 0.2, 'device_memory': 1e9, 'host_memory': 1e9}
  return {'step': step, 'kind': 'train', 'time': {'rollout': rollout, 'learn': learn, **others}}


def bars_of(axes):
  return [[round(bar.get_height(), 6) for bar in container] for container in axes.containers]


def test_seconds_of_a_step_are_stacked_and_compilation_is_named():
  [axes] = panel_figure(draw_step_times, [times(1, 30.0, 12.0), times(2, 2.0, 1.0), times(3, 1.0, 1.0)]).axes
  assert bars_of(axes) == [[30.0, 2.0, 1.0], [12.0, 1.0, 1.0]]
  assert axes.get_title(loc='right') == 'cut off: step 1, 42 s (compiles)'
  assert axes.get_ylim()[1] < 4
  [axes] = panel_figure(draw_step_times, [times(1, 2.0, 1.0), times(2, 2.0, 1.0)]).axes
  assert axes.get_title(loc='right') == ''


def test_a_later_step_that_compiles_is_cut_too():
  later = times(2, 2.0, 1.0)
  later['time']['ledger'] = 90.0
  first = times(1, 30.0, 12.0)
  first['time']['ledger'] = 1e-5  # no ledger is due, but its time is measured
  [axes] = panel_figure(draw_step_times, [first, later, *(times(step, 2.0, 1.0) for step in range(3, 7))]).axes
  assert axes.get_title(loc='right') == 'cut off: step 1, 42 s (compiles); step 2, 93 s (compiles)'
  assert axes.get_ylim()[1] < 4


@pytest.mark.parametrize(
  ('seconds', 'limit', 'note'),
  [
    ([40.0, 3.0], 3.6, 'cut off: step 1, 40 s (compiles)'),
    ([1.0, 1.0, 9.0], 1.2, 'cut off: step 3, 9 s'),
    ([9.0, 1.0, 9.0, 1.0, 8.0, 7.0, 1.0, 1.0, 1.0], 1.2, 'cut off: step 1, 9 s (compiles); step 3, 9 s; step 5, 8 s; ...'),
  ],
)
def test_tall_bars_are_cut_off_and_named(seconds, limit, note):
  found = cut_bars(np.arange(1, len(seconds) + 1), {'rollout': np.array(seconds)})
  assert found == (pytest.approx(limit), note)


@pytest.mark.parametrize('seconds', [[5.0, 3.0, 4.0], [40.0], []])
def test_bars_of_similar_height_are_not_cut(seconds):
  assert cut_bars(np.arange(len(seconds)), {'rollout': np.array(seconds)}) is None


def test_every_held_out_set_is_drawn():
  scores = {'eval/avg@k': 0.5, 'eval/sums/avg@k': 0.25, 'eval/sums/low': 0.0, 'eval/sums/high': 0.5}
  [axes] = panel_figure(draw_reward, [{'step': 3, 'kind': 'eval', **scores}]).axes
  assert [container.get_label() for container in axes.containers] == ['held out', 'held out sums, 95 % interval']


def test_an_evaluation_without_an_interval_leaves_those_of_the_others():
  records = [{'step': 0, 'kind': 'eval', 'eval/avg@k': -1.0}, RECORDS[0] | {'step': 3}]
  (bars,) = panel_figure(draw_reward, records).axes[0].containers
  np.testing.assert_allclose(bars[2][0].get_segments()[-1], [[3, 0.1], [3, 0.4]])
  *_, held_out = reward_chart(records)['series']
  assert held_out['low'] == [None, 0.1]


def test_parts_of_the_learner_are_drawn_in_place_of_their_sum_and_waits_are_no_parts():
  part = {'rollout': 1.0, 'learn': 3.0, 'update': 2.0, 'pack': 0.5, 'queue': 0.1, 'batch_wait': 1.0}
  [axes] = panel_figure(draw_times, [{'step': 1, 'kind': 'train', 'time': part}]).axes
  assert [label.get_text() for label in axes.get_yticklabels()] == ['pack', 'rollout', 'update']


def test_only_seconds_are_drawn_as_times():
  [axes] = panel_figure(draw_times, [times(1, 2.0, 1.0)]).axes
  assert [label.get_text() for label in axes.get_yticklabels()] == ['learn', 'rollout']


LEDGER = {
  'step': 2, 'kind': 'ledger', 'ledger/gap_abs': 0.3, 'ledger/weights_abs': 0.2, 'ledger/kv_abs': 0.1, 'ledger/routing_abs': 0.0,
  'ledger/interaction_abs': 0.05, 'ledger/interaction_weights_kv_abs': 0.05, 'ledger/reproduction_abs': 1e-6,
  'edges': [-0.1, 0.1],
  'histograms': {
    'gap': [1, 2, 3], 'weights': [0, 4, 2], 'kv': [2, 4, 0], 'routing': [0, 6, 0], 'interaction': [1, 5, 0],
    'interaction_weights_kv': [1, 5, 0],
  },
}  # fmt: skip


def test_the_ledger_panel_draws_parts_as_lines_and_what_is_no_cause_dashed():
  figure = panel_figure(draw_ledger, [LEDGER])
  drawn = {'gap': 0.3, 'weights': 0.2, 'kv': 0.1, 'reproduction': 1e-6, 'interaction': 0.05}
  assert curves(figure) == {name: [(2, value)] for name, value in drawn.items()}
  styles = {str(line.get_label()): line.get_linestyle() for line in figure.axes[0].lines}
  assert [name for name, style in styles.items() if style == '--'] == ['reproduction', 'interaction']


def test_the_ledger_histogram_draws_entries_that_are_not_all_near_0_without_the_pairs():
  [axes] = panel_figure(draw_ledger_histogram, [LEDGER]).axes
  assert bars_of(axes) == [[1, 2, 3], [0, 4, 2], [2, 4, 0], [1, 5, 0]]
  assert [container.get_label() for container in axes.containers] == ['gap', 'weights', 'kv', 'interaction']
  colours = [container[0].get_facecolor() for container in axes.containers]
  assert len(set(colours)) == 4


# --- timeline.png ----------------------------------------------------------------------------------------------------

TRACKS = ('controller', 'engine 0', 'learner', 'groups')
SPANS = [
  ('controller', 'evaluate', 10.0, 2.0), ('engine 0', 'chunk', 12.0, 4.0), ('engine 0', 'chunk', 16.0, 1.0),
  ('engine 0', 'chunk', 30.0, 1.0), ('learner', 'update 1', 17.0, 12.0), ('learner', 'sync 1', 29.0, 1.0),
  ('learner', 'update 2', 31.0, 1.0), ('learner', 'update 3', 33.0, 1.0), ('groups', 'group 7', 12.0, 5.0),
]  # fmt: skip
EVENTS = [{'ph': 'M', 'tid': i, 'args': {'name': name}} for i, name in enumerate(TRACKS)] + [
  {'ph': 'X', 'tid': TRACKS.index(track), 'name': name, 'ts': start * 1e6, 'dur': length * 1e6}
  for track, name, start, length in SPANS
]


def test_the_timeline_names_tracks_steps_and_compilation(tmp_path):
  figure = timeline_figure(EVENTS)
  [axes] = figure.axes
  assert [label.get_text() for label in axes.get_yticklabels()] == list(TRACKS)
  assert [text.get_text() for text in axes.texts] == ['step 1', 'step 2', 'step 3', 'compiles', 'compiles']
  assert axes.get_xlim() == (0.0, 24.0)  # from the first span
  assert 'seconds' in axes.get_xlabel()
  [legend] = figure.legends
  assert 'learner: update' in [text.get_text() for text in legend.get_texts()]
  spans, groups = axes.collections
  boxes = [path.get_extents() for path in spans.get_paths()]
  assert (boxes[4].x0, boxes[4].x1) == (7.0, 19.0)  # update 1
  assert len(groups.get_paths()) == 1


def test_a_part_of_the_timeline_is_drawn(tmp_path):
  (tmp_path / 'trace.json').write_text(json.dumps({'traceEvents': EVENTS}))
  assert plot_timeline(tmp_path, (20.0, 22.0)).read_bytes().startswith(b'\x89PNG')
  [axes] = timeline_figure(EVENTS, (20.5, 22.5)).axes
  assert [text.get_text() for text in axes.texts][:1] == ['step 2']


def test_an_empty_trace_is_drawn():
  assert timeline_figure([]).axes[0].collections


def test_labels_of_steps_keep_their_distance():
  spans = [('learner', 'update 1', 0.0, 60.0), *(('learner', f'update {i}', 60.0 + i, 0.5) for i in range(2, 12))]
  events = [{'ph': 'M', 'tid': 0, 'args': {'name': 'learner'}}] + [
    {'ph': 'X', 'tid': 0, 'name': name, 'ts': start * 1e6, 'dur': length * 1e6} for _, name, start, length in spans
  ]
  [axes] = timeline_figure(events).axes
  assert [text.get_text() for text in axes.texts if 'step' in text.get_text()] == [
    'step 1',
    'step 4',
    'step 8',
  ]  # ends 60, 64.5, 68.5: 3.6 apart
