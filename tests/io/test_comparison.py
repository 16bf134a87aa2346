"""The comparison of runs: arms, paired differences, settings that differ, and a page that is complete in itself."""

import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import sprl
from sprl.config import Run, SettingsError, to_dict
from sprl.io.arm_scores import difference, score, score_rows
from sprl.io.arms import arms_of, matching, read_runs, short_names
from sprl.io.comparison import comparison_html, number, score_table, score_text, write_comparison
from sprl.io.config_file import write_config
from sprl.io.metrics import RunLog
from sprl.io.paired import interval_of_one_run, paired_interval
from sprl.io.starts import Origin, add_start

ATTACK = '</script><img src=x onerror="document.title = 1">'


def write_run(
  workdir,
  scores,
  seed=0,
  budget=None,
  steps=2,
  answers=('4', '6'),
  reward=0.5,
  seconds=30.0,
  asked='',
  remat=None,
  rewards=(),
  graders=(),
  rows=None,
  numbers=None,
  prompt='',
  origin=None,
):
  """Write the folder of a run that ended with these scores of its held-out problems."""
  settings = to_dict(Run())
  changes = {
    'cache': {'budget': budget}, 'eval': {'temperature': 1.0 if asked else 0.0}, 'model': {'remat': remat or 'none'},
    'task': {'rewards': rewards},
  }  # fmt: skip
  write_config(workdir, settings | {'seed': seed} | {name: settings[name] | changes[name] for name in changes})
  add_start(workdir, origin, '2026-01-01T00:00:00', {'graders': dict(graders), 'rows': rows, 'folder': '/x'})
  log = RunLog(workdir, None)
  log.evaluation(0, {'eval/avg@k': 0.25, 'eval/low': 0.2, 'eval/high': 0.3})
  for step in range(1, steps + 1):
    log.write(
      step,
      {'reward/mean': reward * step, 'reward/std': 0.1, 'reward/brief': 3.0, 'rollout_corr/k3_kl': 0.5},
      {'rollout': seconds, 'learn': seconds},
    )
  mean = float(np.mean(scores))
  log.evaluation(steps, {'eval/avg@k': mean, 'eval/low': mean - 0.1, 'eval/high': mean + 0.1})
  log.close()
  folder = workdir / 'checkpoints' / f'step_{steps:06d}'
  folder.mkdir(parents=True)
  samples = [{'prompt': f'{asked}{prompt}{i}', 'answer': answer, 'completion': ATTACK} for i, answer in enumerate(answers)]
  asked_for = {} if numbers is None else {'numbers': list(numbers)}
  record = {'arrays': {}, 'extra': {'after': {'scores': list(scores), 'samples': samples, **asked_for}}}
  crc32 = zlib.crc32(json.dumps(record).encode())
  (folder / 'record.json').write_text(json.dumps({'record': record, 'crc32': crc32}) + '\n')
  return workdir


def compared(*workdirs):
  return arms_of(read_runs(workdirs, '--workdir'))


def page_of(workdirs):
  arms = compared(*workdirs)
  return comparison_html(arms, score_rows(arms))


def rows_of(arms):
  """Return the table of scores as a dictionary for each arm."""
  heads, *rows = score_table(score_rows(arms))
  return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


# --- intervals --------------------------------------------------------------------------------------------------------


def test_the_interval_of_one_run_is_that_of_a_paired_t_test():
  ours, theirs = np.array([1.0, 0.5, 0.0, 1.0, 0.25]), np.array([0.5, 0.0, 0.25, 1.0, 0.0])
  found = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
  assert interval_of_one_run(ours - theirs) == pytest.approx((0.2, found.low, found.high), abs=1e-12)
  assert interval_of_one_run(np.array([0.5])) == (0.5, -math.inf, math.inf)
  assert interval_of_one_run(np.array([0.0, 0.0])) == (0.0, -math.inf, math.inf)


def test_the_interval_over_seeds_alone_is_that_of_students_t_test():
  scores = np.array([[0.2], [0.5], [0.4]])
  found = stats.ttest_1samp(scores[:, 0], 0.0).confidence_interval(0.95)
  assert paired_interval(scores) == pytest.approx((scores.mean(), found.low, found.high), abs=1e-12)


def test_rounding_does_not_decide_the_width_of_an_interval():
  assert paired_interval(np.full((2, 3), 0.5)) == (0.5, 0.5, 0.5)
  assert paired_interval(np.array([[0.0, 1.0], [1.0, 0.0]])) == (0.5, -math.inf, math.inf)  # all of the variance is residual
  by_rounding = np.array([[0.1, 0.2, 0.3], [0.3, 0.1, 0.2 + 1e-17]])  # equal means of the seeds
  exact = np.array([[0.1, 0.2, 0.3], [0.3, 0.1, 0.2]])
  assert paired_interval(by_rounding) == pytest.approx(paired_interval(exact))


def test_an_interval_over_seeds_and_problems_contains_the_truth_as_often_as_it_says():
  rng = np.random.default_rng(0)
  hits = 0
  for _ in range(400):
    seeds, problems = rng.normal(0, 0.1, (4, 1)), rng.normal(0, 0.4, (1, 50))
    _, low, high = paired_interval(0.3 + seeds + problems + rng.normal(0, 0.5, (4, 50)))
    hits += low < 0.3 < high
  assert 0.92 < hits / 400 < 0.99


# --- arms and differences ---------------------------------------------------------------------------------------------


def test_runs_that_differ_only_in_the_seed_form_an_arm(tmp_path):
  runs = [
    write_run(tmp_path / f'{name}-{seed}', [0.0, 1.0], seed, budget)
    for name, budget in (('dense', None), ('sparse', 64))
    for seed in (0, 1)
  ]
  assert [(arm.name, [run.name for run in arm.runs]) for arm in compared(*runs)] == [
    ('dense', ['dense-0', 'dense-1']),
    ('sparse', ['sparse-0', 'sparse-1']),
  ]


def test_runs_with_other_rewards_or_rows_are_other_arms(tmp_path):
  one, other = {'python:r': '1'}, {'python:r': '2'}
  given = {'a-0': (one, 'x'), 'a-1': (one, 'x'), 'b': (other, 'x'), 'c': (one, 'y')}
  runs = [write_run(tmp_path / name, [0.0], seed, graders=g, rows=r) for seed, (name, (g, r)) in enumerate(given.items())]
  arms = compared(*runs)
  assert [arm.name for arm in arms] == ['a', 'b', 'c']
  settings = comparison_html(arms, score_rows(arms)).partition('id="settings"')[2].partition('</section>')[0]
  found = re.findall(r'<td>(.*?)</td>', settings)
  assert found == ['rows', 'x', 'x', 'y', 'source of python:r', 'checksum 1', 'checksum 2', 'checksum 1']


def test_runs_that_began_with_the_weights_of_other_runs_are_other_arms(tmp_path):
  """A seed may have its own first run: the digits at the end of its name do not count."""
  origins = {'a-0': ('/r/sft-0', 9), 'a-1': ('/r/sft-1', 9), 'b-0': ('/r/sft-0', 8), 'c-0': ('/r/other', 9)}
  for name, (folder, step) in origins.items():
    write_run(tmp_path / name, [0.0], int(name[-1]), origin=Origin(Path(folder), step))
  arms = compared(*(tmp_path / name for name in origins), write_run(tmp_path / 'd-0', [0.0]))
  assert [[run.name for run in arm.runs] for arm in arms] == [['a-0', 'a-1'], ['b-0'], ['c-0'], ['d-0']]


def test_the_folder_of_a_start_names_the_file_of_a_reward(tmp_path):
  given = [{'r.py:right': '1'}, {'/x/r.py:right': '1'}, {'../x/./r.py:right': '1'}]
  (arm,) = compared(*(write_run(tmp_path / f'a-{seed}', [0.0], seed, graders=each) for seed, each in enumerate(given)))
  assert arm.runs[0].inputs == {'source of /x/r.py:right': 'checksum 1'}


def test_arms_whose_runs_share_no_name_have_that_of_their_first_run(tmp_path):
  runs = [write_run(tmp_path / name, [0.0], seed, budget) for name, seed, budget in [('a', 0, 8), ('b', 1, 8), ('c', 0, 9)]]
  assert [arm.name for arm in compared(*runs)] == ['a', 'c']


def test_names_of_folders_are_as_long_as_they_must_be():
  folders = [Path('/x/one/run'), Path('/x/two/run'), Path('/x/two/other')]
  assert short_names(folders) == ['one/run', 'two/run', 'other']


def test_a_difference_pairs_seeds_and_problems(tmp_path):
  dense = {0: [1.0, 0.0, 1.0, 0.0], 1: [1.0, 1.0, 0.0, 0.0]}
  sparse = {0: [1.0, 1.0, 1.0, 0.0], 1: [1.0, 1.0, 1.0, 1.0]}
  runs = [write_run(tmp_path / f'sparse-{seed}', sparse[seed], seed, 64) for seed in (1, 0)]
  runs += [write_run(tmp_path / f'dense-{seed}', dense[seed], seed) for seed in (0, 1)]
  ours, theirs = compared(*runs)
  found = difference(ours, theirs)
  by_hand = np.array([np.subtract(sparse[seed], dense[seed]) for seed in (1, 0)])
  assert found is not None
  assert found[:3] == pytest.approx(paired_interval(by_hand))
  assert (found.mean, found.of) == (0.375, '4 problems, 2 seeds')


def test_problems_are_paired_by_their_numbers(tmp_path):
  """In run b problem 1 failed and was replaced by problem 4; in another seed none was."""
  runs = [write_run(tmp_path / 'a-0', [1.0, 0.0, 0.0, 1.0], 0, numbers=range(4), answers=('0', '1'))]
  runs += [write_run(tmp_path / 'a-1', [1.0, 1.0, 0.0, 0.0], 1, answers=('0', '1'))]
  runs += [write_run(tmp_path / 'b-0', [1.0, 1.0, 1.0, 0.0], 0, 8, numbers=(0, 2, 3, 4), answers=('0', '2'))]
  runs += [write_run(tmp_path / 'b-1', [0.0, 1.0, 0.0, 1.0], 1, 8, numbers=range(4), answers=('0', '1'))]
  first, other = compared(*runs)
  found = difference(other, first)
  assert found is not None
  by_hand = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])  # of problems 0, 2 and 3
  assert found[:3] == pytest.approx(paired_interval(by_hand))
  assert found.of == '3 problems, 2 seeds'


def test_without_answers_the_prompts_tell_which_problems_were_asked(tmp_path):
  first, alike, other = (
    write_run(tmp_path / name, [1.0, 0.0], 0, budget, answers=('', ''), prompt=prompt)
    for name, budget, prompt in (('a', None, 'lake '), ('b', 8, 'lake '), ('c', 9, 'pond '))
  )
  assert difference(*compared(first, alike)) is not None
  assert difference(*compared(first, other)) is None


def test_a_conversation_that_failed_and_was_not_replaced_leaves_the_others(tmp_path):
  runs = [write_run(tmp_path / 'a', [1.0, 0.0, 0.0], numbers=range(3), answers=())]
  first, other = compared(*runs, write_run(tmp_path / 'b', [0.0, 1.0], 0, 8, numbers=(0, 2), answers=()))
  found = difference(other, first)
  assert found is not None
  assert found[:3] == interval_of_one_run(np.array([-1.0, 1.0]))


def test_runs_of_one_seed_are_not_several_seeds(tmp_path):
  runs = [write_run(tmp_path / name, scores) for name, scores in (('dense-a', [0.0, 1.0, 0.0]), ('dense-b', [0.0, 1.0, 1.0]))]
  runs += [write_run(tmp_path / f'sparse-{x}', [1.0, 1.0, 1.0], budget=64) for x in 'ab']
  found = difference(*reversed(compared(*runs)))
  assert found is not None
  assert found[:3] == interval_of_one_run(np.array([1.0, 0.0, 0.5]))
  assert found.of == '3 problems'
  alone = difference(*reversed(compared(*runs[:3])))  # one sparse run for two dense ones
  assert alone is not None
  assert alone[:3] == found[:3]
  (tmp_path / 'link').symlink_to(runs[0])
  with pytest.raises(SettingsError, match='at least two different runs'):
    read_runs([runs[0], tmp_path / 'link'], 'runs')


def test_an_arm_is_scored_at_the_newest_step_of_all_its_runs(tmp_path):
  runs = [write_run(tmp_path / 'dense-0', [1.0, 1.0], 0, steps=2), write_run(tmp_path / 'dense-1', [0.0, 0.5], 1, steps=4)]
  row = rows_of(compared(*runs, write_run(tmp_path / 'b', [1.0, 1.0], 0, 64)))['dense']
  assert (row['step'], row['score']) == ('0', '0.250')  # the evaluation before training is the only one that both have
  assert row['95 % interval'] == 'unknown'  # equal scores


def test_an_older_evaluation_is_not_compared_in_place_of_the_newest(tmp_path):
  runs = [write_run(tmp_path / 'a', [1.0, 0.0]), write_run(tmp_path / 'b', [1.0, 1.0], budget=8)]
  with open(runs[1] / 'metrics.jsonl', 'a') as file:
    file.write(json.dumps({'kind': 'eval', 'step': 3, 'eval/avg@k': 0.1}) + '\n')
  first, second = compared(*runs)
  assert difference(second, first) is None
  assert rows_of([first, second])['b']['95 % interval'] == 'unknown'  # that of step 3, not of step 2


def test_a_difference_of_a_later_step_than_the_score_names_it(tmp_path):
  runs = [write_run(tmp_path / f'dense-{seed}', [0.0, 0.5], seed, steps=steps) for seed, steps in ((0, 4), (1, 2))]
  dense, sparse = compared(*runs, write_run(tmp_path / 'sparse-0', [1.0, 1.0], 0, 64, steps=4))
  assert score_rows([dense, sparse])[1]['covers'] == '2 problems, after step 4'


@pytest.mark.parametrize('runs', [((0, 4), (1, 2)), ((0, 4), (1, 4), (1, 2))])
def test_a_seed_that_ended_early_is_not_left_out_of_a_difference(tmp_path, runs):
  """A run that a guard stopped scores low. Without it the arm would look better than it is."""
  dense = [write_run(tmp_path / f'dense-{seed}', [0.8, 0.8], seed, steps=4) for seed in (0, 1)]
  sparse = [write_run(tmp_path / f'sparse-{seed}-{steps}', [steps / 4, 0.1], seed, 64, steps) for seed, steps in runs]
  row = score_rows(compared(*dense, *sparse))[1]
  assert np.isnan([row['difference'], row['difference_low'], row['difference_high']]).all()
  assert row['covers'] == '1 of 2 seeds are comparable'


def test_runs_of_a_seed_count_as_one_in_the_score(tmp_path):
  runs = [write_run(tmp_path / f'a-{name}', scores, seed) for name, scores, seed in
          (('x', [0.9, 0.9], 0), ('y', [0.9, 0.9], 0), ('z', [0.3, 0.3], 1))]  # fmt: skip
  row, _ = score_rows(compared(*runs, write_run(tmp_path / 'b', [1.0, 1.0], 0, 64)))
  assert row['score'] == pytest.approx(0.6)
  assert (row['low'] + row['high']) / 2 == pytest.approx(0.6)


def test_choices_of_a_machine_do_not_split_an_arm(tmp_path):
  (arm,) = compared(write_run(tmp_path / 'a-0', [1.0], 0), write_run(tmp_path / 'a-1', [1.0], 1, remat='full'))
  assert [run.name for run in arm.runs] == ['a-0', 'a-1']


@pytest.mark.parametrize(
  ('names', 'arm'),
  [
    (('budget64-0', 'budget64-1'), 'budget64'),
    (('naive@96-5', 'naive@96-6'), 'naive@96'),
    (('x-10', 'x-11'), 'x'),
    (('b-0', 'b-1'), 'b-0'),  # `b` is another run
  ],
)
def test_the_name_of_an_arm_is_without_the_seed(tmp_path, names, arm):
  runs = [write_run(tmp_path / name, [0.0], seed) for seed, name in enumerate(names)]
  assert [each.name for each in compared(*runs, write_run(tmp_path / 'b', [0.0], budget=8))] == [arm, 'b']


def test_one_seed_has_an_interval_over_problems(tmp_path):
  arms = compared(write_run(tmp_path / 'a', [1.0, 0.0, 0.5]), write_run(tmp_path / 'b', [1.0, 1.0, 1.0], budget=8))
  row = rows_of(arms)['b']
  low, high = stats.ttest_1samp([0.0, 1.0, 0.5], 0.0).confidence_interval(0.95)
  assert (row['difference'], row['its 95 % interval'], row['it covers']) == (
    '+0.500', f'{low:.3f} to {high:.3f}', '3 problems',
  )  # fmt: skip
  assert rows_of(arms)['a']['difference'] == ''


@pytest.mark.parametrize(
  'other',
  [
    {'seed': 1},
    {'answers': ('4', '7')},
    {'steps': 3},
    {'scores': [1.0]},
    {'asked': 'sampled '},
  ],
  ids=['seed', 'problems', 'steps', 'number of problems', 'settings of evaluation'],
)
def test_runs_that_cannot_be_paired_have_no_difference(tmp_path, other):
  first, second = compared(
    write_run(tmp_path / 'a', [1.0, 0.0]), write_run(tmp_path / 'b', budget=8, **{'scores': [1.0, 1.0], **other})
  )
  assert difference(second, first) is None
  assert rows_of([first, second])['b']['it covers'] == ''


@pytest.mark.parametrize(('right', 'paired'), [('1', True), ('2', False)])
def test_the_first_reward_decides_whether_scores_can_be_paired(tmp_path, right, paired):
  rewards = [('/x/r.py:right', '/x/r.py:brief=0.1'), ('/x/r.py:right=2', '/x/r.py:brief')]
  graders = [{'r.py:right': '1', 'r.py:brief': '1'}, {'/x/r.py:right': right, '/x/r.py:brief': '2'}]
  runs = [write_run(tmp_path / n, [0.0, i], rewards=r, graders=g) for i, (n, r, g) in enumerate(zip('ab', rewards, graders))]
  first, other = compared(*runs)
  assert (difference(other, first) is not None) == paired


def test_the_interval_of_several_runs_with_one_seed_is_not_known(tmp_path):
  (arm,) = compared(write_run(tmp_path / 'a-0', [1.0, 0.0]), write_run(tmp_path / 'a-1', [1.0, 1.0]))
  assert score(arm)[:3] == (2, 0.25, 0.75)
  assert np.isnan(score(arm)[3:]).all()


def test_the_rows_have_the_numbers_of_the_table(tmp_path):
  runs = [write_run(tmp_path / 'a', [1.0, 0.0, 0.5]), write_run(tmp_path / 'b', [1.0, 1.0, 1.0], budget=8)]
  first, second = score_rows(compared(*runs))
  low, high = stats.ttest_1samp([0.0, 1.0, 0.5], 0.0).confidence_interval(0.95)
  assert (second['difference'], second['difference_low'], second['difference_high']) == pytest.approx((0.5, low, high))
  assert (first['arm'], first['runs'], first['seeds'], first['step'], first['before']) == ('a', 1, 1, 2, 0.25)
  assert (first['score'], first['low'], first['high']) == pytest.approx((0.5, 0.4, 0.6))
  assert (first['seconds'], first['rollout_corr/k3_kl'], second['covers']) == (120.0, 0.5, '3 problems')
  assert np.isnan([first['difference'], first['sparse/bytes_saving']]).all()


def test_the_table_has_scores_and_costs_of_each_arm(tmp_path):
  runs = [write_run(tmp_path / f'dense-{seed}', [0.0, seed], seed) for seed in (0, 1)]
  rows = rows_of(compared(*runs, write_run(tmp_path / 'sparse', [1.0, 1.0], 0, 64, steps=4)))
  half = 0.25 * stats.t.ppf(0.975, 1)
  assert rows['dense'] | {'runs': '2', 'before': '0.250', 'score': '0.250'} == rows['dense']
  assert rows['dense']['95 % interval'] == f'{0.25 - half:.3f} to {0.25 + half:.3f}'
  assert (rows['sparse']['95 % interval'], rows['sparse']['step']) == ('0.900 to 1.100', '4')
  assert [row['time of steps'] for row in rows.values()] == ['2m 00s', '4m 00s']
  assert [row['mismatch (k3)'] for row in rows.values()] == ['0.5', '0.5']


def test_a_number_that_is_rounded_to_0_has_no_sign():
  assert [number(value, '{:.0%}') for value in (-0.004, -0.01, 0.0, np.nan)] == ['0%', '-1%', '0%', '']
  assert [number(value, '{:+.2g}') for value in (-0.0, -1e-05)] == ['0', '-1e-05']


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_draws_a_curve_for_each_arm_over_steps_and_over_time(tmp_path):
  runs = [write_run(tmp_path / f'dense-{seed}', [0.0, seed], seed, reward=seed) for seed in (0, 1)]
  page = page_of((*runs, write_run(tmp_path / 'sparse', [1.0], 0, 64, seconds=60.0)))
  found = json.loads(re.search(r'id="data">(.*)</script>', page)[1])  # type: ignore[index]
  charts = {chart['title']: chart for chart in found.values()}
  dense, sparse = charts['Sampled reward']['series']
  assert (dense['label'], dense['x'], dense['y']) == ('dense', [1, 2], [0.5, 1.0])
  assert (dense['low'], dense['high']) == ([0.0, 0.0], [1.0, 2.0])
  assert 'low' not in sparse
  assert [curve['x'] for curve in charts['Held out']['series']] == [[0, 2], [0, 2]]
  assert [curve['x'] for curve in charts['Held out, by time']['series']] == [[0.0, 2.0], [0.0, 4.0]]
  assert charts['Held out, by time']['across'] == 'minutes'
  assert 'Entropy' not in charts
  assert charts['reward/brief']['series'][0]['y'] == [3.0, 3.0]  # a reward of the user
  assert 'reward/std' not in charts


def test_the_page_names_the_settings_that_differ_and_no_others(tmp_path):
  page = page_of((write_run(tmp_path / 'a', [0.0]), write_run(tmp_path / 'b', [1.0], 1, 64)))
  settings = page.partition('id="settings"')[2].partition('</section>')[0]
  assert re.findall(r'<td>(.*?)</td>', settings) == ['config.cache.budget', 'None', '64']


def test_names_of_folders_stay_text(tmp_path):
  odd = 'a<img src=x>'
  page = page_of((write_run(tmp_path / odd, [0.0]), write_run(tmp_path / 'b', [1.0], 0, 64)))
  assert '<img' not in page
  assert 'a&lt;img src=x&gt;' in page


def test_a_comparison_is_written(tmp_path):
  arms = compared(write_run(tmp_path / 'a', [0.0, 1.0]), write_run(tmp_path / 'b', [1.0, 1.0], 0, 64))
  assert write_comparison(arms, score_rows(arms), tmp_path / 'comparison.html').read_text().startswith('<!DOCTYPE html>')
  assert [line.split()[0] for line in score_text(score_rows(arms)).splitlines()] == ['arm', 'a', 'b']


def test_runs_are_compared_in_python(tmp_path):
  runs = [write_run(tmp_path / f'dense-{seed}', [1.0, 0.0], seed) for seed in (0, 1)]
  write_run(tmp_path / 'sparse', [1.0, 1.0], budget=8)
  found = sprl.compare([f'{tmp_path}/dense-*', tmp_path / 'sparse'])
  assert [row['arm'] for row in found.rows] == ['dense', 'sparse']
  assert [row['runs'] for row in found.rows] == [2, 1]
  assert repr(found) == score_text(score_rows(compared(*runs, tmp_path / 'sparse')))
  assert found.save(tmp_path / 'page.html').read_text().startswith('<!DOCTYPE html>')
  with pytest.raises(SettingsError, match=r'runs = .*expected a list of work directories'):
    sprl.compare(f'{tmp_path}/dense-*')
  with pytest.raises(SettingsError, match=r"runs = '.*/none-\*'.*matches none"):
    sprl.compare([f'{tmp_path}/none-*'])


def test_what_cannot_be_compared_is_named(tmp_path):
  run = write_run(tmp_path / 'a', [0.0])
  with pytest.raises(SettingsError, match='expected at least two different runs'):
    read_runs([run, run], '--workdir')
  with pytest.raises(FileNotFoundError, match='expected a work directory'):
    read_runs([run, tmp_path / 'missing'], '--workdir')
  write_config(tmp_path / 'empty', to_dict(Run()))
  with pytest.raises(SettingsError, match='expected a run that has logged'):
    read_runs([run, tmp_path / 'empty'], '--workdir')


def test_a_star_stands_for_folders_of_runs_only(tmp_path):
  run = write_run(tmp_path / 'arm-0', [0.0])
  (tmp_path / 'arm-1').mkdir()
  assert matching('--workdir', f'{tmp_path}/arm-*') == [run]
  assert matching('--workdir', 'plain') == [Path('plain')]
  odd = write_run(tmp_path / 'g[1]' / 'a', [0.0])
  assert matching('--workdir', f'{tmp_path}/g[1]/*') == [odd]
  with pytest.raises(SettingsError, match=r'--workdir = .none/\*.*matches none'):
    matching('--workdir', 'none/*')
