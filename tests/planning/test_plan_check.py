"""benchmarks/plan_check.py: the programs that it chooses to compile. Nothing is compiled here."""

import dataclasses
import json
import subprocess
import sys

import plan_check
import pytest
from plans import ROOT

from sprl.planning.devices import device


@pytest.mark.parametrize(('gb', 'optimiser', 'fits'), [(141, 'adamw', True), (30, 'adafactor', True), (15, 'adafactor', False)])
def test_the_optimiser_of_the_largest_batches_is_one_whose_update_fits(gb, optimiser, fits, monkeypatch):
  """Two layers of Qwen2.5-7B have 1.56 B weights: 25 GB with AdamW's moments and gradients, 12 GB without the moments."""
  planned = plan_check.ModelConfig.read

  def shallow(folder):
    return dataclasses.replace(planned(folder), num_layers=2)

  monkeypatch.setattr(plan_check.ModelConfig, 'read', shallow)
  monkeypatch.setattr(plan_check, 'device', lambda name: device(name, memory=gb * 1e9))
  jobs = list(plan_check.largest(('Qwen2.5-7B',)))
  assert [job.name for job in jobs] == [f'largest Qwen2.5-7B {kind} {optimiser}' for kind in plan_check.KINDS]
  for job in jobs:
    told = job.more
    assert (told['optimiser'], told['update fits']) == (optimiser, fits)
    assert (told['update'] <= 0.9 * gb * 1e9 / 2**30) == fits


@pytest.fixture
def history(tmp_path, monkeypatch):
  """Return two commits of a checkout in which the second one changed a program. Its saved figures are of the first."""

  def git(*arguments):
    identity = ('-c', 'user.name=a', '-c', 'user.email=a@b')
    return subprocess.run(['git', *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

  program = tmp_path / 'sprl' / plan_check.MADE_OF[0] / 'update.py'
  program.parent.mkdir(parents=True)
  git('init', '-q')
  commits = []
  for text in ('a = 1', 'a = 2'):
    program.write_text(text)
    git('add', '.')
    git('commit', '-qm', text)
    commits.append(git('rev-parse', 'HEAD'))
  monkeypatch.setattr(plan_check, 'ROOT', tmp_path)
  return commits


def test_figures_of_the_same_files_are_compared(history):
  earlier, now = history
  assert plan_check.stale(now) is None
  assert plan_check.stale(earlier) == (
    f'1 files of the programs, such as sprl/{plan_check.MADE_OF[0]}/update.py, have changed since commit {earlier}'
  )
  assert plan_check.stale('0' * 40) == f'commit {"0" * 40} is not in this checkout'


def test_saved_figures_of_other_programs_are_refused(history, tmp_path, monkeypatch, capsys):
  saved = tmp_path / 'saved.json'
  saved.write_text(json.dumps({'commit': history[0], 'result': {}, 'rows': []}))
  monkeypatch.setattr(sys, 'argv', ['plan_check.py', f'--recheck={saved}'])
  with pytest.raises(SystemExit):
    plan_check.main()
  assert 'compile again' in capsys.readouterr().err


@pytest.mark.slow
def test_the_planning_page_gives_the_sequences_that_fit_today():
  page = (ROOT / 'docs' / 'planning.md').read_text(encoding='utf-8')
  for model in plan_check.DENSE:
    jobs = list(plan_check.largest((model,)))
    optimiser = {'adamw': 'AdamW', 'adafactor': 'Adafactor'}[jobs[0].more['optimiser']]
    rows = ' | '.join(f'{job.kind.rows:,}' for job in jobs)
    assert f'| {model} | {optimiser}, {jobs[0].plan.update.state / 2**30:.1f} GiB | {rows} |' in page
