"""The soak's own checks: each finds the violation that it looks for, and nothing in a run that keeps its promises."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import pytest
from kills import Tally
from marks import Marks
from promises import differences, lost_or_repeated, no_export, unaccounted, wrong_grades
from starts import processes_with

from sprl.io.checkpoint import Checkpoints
from sprl.io.metrics import RunLog

STATE = {'version': 2, 'consumed': 8, 'next': 8, 'live': []}  # of the scheduler after two steps of four groups
TWO_STEPS = [(1, [(0, 0), (0, 1)]), (2, [(1, 2), (1, 3)])]  # of one group with two members each


def write_run(
  workdir: Path, reward=0.5, weight=1.0, state=STATE, steps=(1, 2), crashes=0, ungraded=0, exported=b'weights'
) -> Path:
  log = RunLog(workdir, None)
  for step in steps:
    log.write(step, {'reward/mean': reward, 'grading/ok': 16 - crashes, 'grading/crash': crashes}, {'rollout': step * 0.1})
  if ungraded:
    log.evaluation(2, {'eval/ungraded': ungraded})
  log.samples(2, [{'prompt': '1 + 1', 'completion': '2', 'answer': '2', 'reward': reward, 'finish': 'stop'}])
  log.close()
  checkpoints = Checkpoints(workdir / 'checkpoints', 1)
  checkpoints.save(max(steps), {'weight': jnp.float32(weight)}, {'scheduler': state})
  checkpoints.close()
  (workdir / 'export').mkdir()
  (workdir / 'export' / 'model.safetensors').write_bytes(exported)
  (workdir / 'export' / 'config.json').write_text('{}')
  (workdir / 'export' / 'README.md').write_text(str(workdir))  # the card names the starts of its run
  return workdir


@pytest.fixture(scope='module')
def expected(tmp_path_factory) -> Path:
  return write_run(tmp_path_factory.mktemp('expected') / 'run')


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({}, []),
    ({'weight': 1.0 + 2**-23}, ["the array ['weight'] differs"]),
    ({'state': {**STATE, 'next': 9}}, ['record.json differs in extra']),
    ({'exported': b'Weights'}, ['export/model.safetensors differs']),
    (
      {'reward': 0.5 + 2**-52},
      [f'line {n} of metrics.jsonl differs in reward/mean' for n in (1, 2)]
      + [f'samples/step_000002.{end} differs' for end in ('jsonl', 'md')],
    ),
    ({'steps': (2,)}, ['metrics.jsonl has 1 lines, expected 2', 'line 1 of metrics.jsonl differs in step']),
  ],
  ids=['equal', 'weight', 'record', 'export', 'reward', 'lost step'],
)
def test_every_difference_from_the_uninterrupted_run_is_named(expected, tmp_path, change, said):
  assert differences(write_run(tmp_path / 'run', **change), expected) == said


def test_a_run_that_ends_a_step_too_early_is_named(expected, tmp_path):
  early = shutil.copytree(expected, tmp_path / 'run')
  (early / 'checkpoints/step_000002').rename(early / 'checkpoints/step_000001')
  assert differences(early, expected) == ['the last checkpoint is of step 1, expected 2']


def test_a_step_that_a_kill_took_back_counts_once():
  """The first start gave step 2 to the learner and lost it. The second start resumed after step 1."""
  first, second = [*TWO_STEPS], [(2, [(1, 2), (1, 3)])]
  assert lost_or_repeated([first, second], steps=2, groups=1, members=2) == []


@pytest.mark.parametrize(
  ('given', 'said'),
  [
    (TWO_STEPS[:1], 'the learner got steps [1], expected 1 to 2'),
    ([TWO_STEPS[0], (2, TWO_STEPS[0][1])], 'sample (0, 0) of (group, sample) trained 2 times'),
    ([TWO_STEPS[0], (2, [(1, 2)])], 'lost: 1 samples of (group, sample), the first (1, 3)'),
    ([TWO_STEPS[0], (2, [(2, 4), (2, 5)])], '2 samples that the run does not have, the first (2, 4)'),
  ],
)
def test_lost_and_repeated_groups_are_named(given, said):
  assert said in lost_or_repeated([given], steps=2, groups=1, members=2)


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({}, []),
    ({'steps': (1, 2, 2)}, ['metrics.jsonl has the steps [1, 2, 2], expected 1 to 2']),
    ({'state': {**STATE, 'live': [7]}}, ['scheduler: live = [7], expected []']),
    ({'state': {**STATE, 'consumed': 7}}, ['scheduler: consumed = 7, expected 8']),
  ],
  ids=['all', 'step', 'live', 'consumed'],
)
def test_an_asynchronous_run_accounts_for_steps_and_groups(tmp_path, change, said):
  assert unaccounted(write_run(tmp_path / 'run', **change), steps=2, groups=4) == said


def test_a_worker_costs_at_most_one_grade(tmp_path):
  workdir = write_run(tmp_path / 'run', crashes=1)
  assert wrong_grades(workdir, samples=16, killed=2) == []
  assert wrong_grades(workdir, samples=16, killed=1) == ['2 samples lost their grade, but only 1 workers were killed']
  assert wrong_grades(workdir, samples=17, killed=2) == [f'step {n}: 15 grades and 1 crashes of 17' for n in (1, 2)]


def test_a_grade_of_an_evaluation_counts(tmp_path):
  workdir = write_run(tmp_path / 'run', ungraded=1)
  assert wrong_grades(workdir, samples=16, killed=1) == []
  assert wrong_grades(workdir, samples=16, killed=0) == ['1 samples lost their grade, but only 0 workers were killed']


def test_a_missing_export_is_named(expected, tmp_path):
  assert no_export(expected) == []
  (write_run(tmp_path / 'run') / 'export/model.safetensors').unlink()
  assert no_export(tmp_path / 'run') == ['export/model.safetensors is missing']


@pytest.fixture
def program(monkeypatch):
  """The module of the command `python tests/soak`."""
  monkeypatch.setattr(sys, 'path', [*sys.path])
  spec = importlib.util.spec_from_file_location('soak_program', Path(__file__).with_name('__main__.py'))
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize(
  ('tallies', 'enough'),
  [
    ([Tally(), Tally()], False),
    ([Tally(kills=Counter(main=1)), Tally()], False),
    ([Tally(runs=1), Tally()], False),
    ([Tally(kills=Counter(main=1)), Tally(runs=1)], True),
  ],
)
def test_a_soak_needs_a_kill_and_a_checked_run(program, tallies, enough):
  assert program.showed_something(dict(enumerate(tallies))) == enough


def test_a_soak_that_did_nothing_fails(tmp_path):
  command = [sys.executable, str(Path(__file__).parent), 'kills', 'dense', '--minutes=1e-9', f'--folder={tmp_path}']
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 1
  assert 'expected at least one kill and one checked run: give more --minutes' in done.stdout


def test_a_soak_that_checked_no_run_keeps_the_saved_figures(program, monkeypatch, tmp_path):
  saved = []
  monkeypatch.setattr(program.common, 'record', lambda name, rows, result: saved.append((rows, result['kills'])))
  monkeypatch.setattr(program, 'RESULT', tmp_path / 'soak.json')
  program.report({'dense': Tally(kills=Counter(main=2))}, save=True)
  assert saved == []
  program.report({'dense': Tally(kills=Counter(main=2), runs=1)}, save=True)
  assert [kills for _, kills in saved] == [2]


def test_the_processes_of_a_start_are_found_until_they_end():
  """Also a process whose parent has ended."""
  name = f'/logs of {os.getpid()}/marks_'
  shell = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!'], env={'SOAK_MARKS': f'{name}0'}, stdout=subprocess.PIPE)
  assert shell.stdout is not None
  sleeper = int(shell.stdout.readline())
  shell.wait()
  try:
    assert processes_with('SOAK_MARKS', name) == [sleeper]
    assert processes_with('SOAK_MARKS', f'{name}1') == []
  finally:
    os.kill(sleeper, signal.SIGKILL)
  until = time.monotonic() + 60
  while processes_with('SOAK_MARKS', name):
    assert time.monotonic() < until


def test_marks_tell_the_open_phase_and_the_time_of_each(tmp_path):
  """A save is committed on another thread while the next rollout runs. The last line is not whole."""
  path = tmp_path / 'marks'
  lines = [
    {'time': 3.0, 'thread': 1, 'begin': 'main'},
    {'time': 4.0, 'thread': 1, 'begin': 'save'},
    {'time': 5.0, 'thread': 2, 'begin': 'commit'},
    {'time': 6.0, 'thread': 1, 'end': 'save'},
    {'time': 7.0, 'thread': 1, 'begin': 'rollout'},
    {'time': 9.0, 'thread': 2, 'end': 'commit'},
  ]
  marks = Marks(path, begun=1.0)
  assert marks.read().phase == 'start'
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  path.write_text(text + '{"time": 10')
  assert marks.read().phase == 'rollout'
  assert marks.seconds() == {'start': 2.0, 'save': 2.0, 'commit': 4.0}
  path.write_text(text + '{"time": 10.0, "thread": 1, "end": "rollout", "step": 5}\n')
  assert (marks.read().phase, marks.noted('step'), marks.begins['rollout']) == ('main', [5], 1)
