"""benchmarks/plan_check.py: the programs that it chooses to compile. Nothing is compiled here."""

import dataclasses
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


def test_saved_figures_of_other_programs_are_refused(monkeypatch, capsys):
  saved = ROOT / 'benchmarks' / 'results' / 'plan_check.json'
  monkeypatch.setattr(sys, 'argv', ['plan_check.py', f'--recheck={saved}'])
  with pytest.raises(SystemExit):
    plan_check.main()
  assert 'compile again' in capsys.readouterr().err


def test_figures_of_the_same_files_are_compared():
  head = subprocess.run(['git', '-C', str(ROOT), 'rev-parse', 'HEAD'], capture_output=True, text=True, check=False).stdout.strip()
  unknown = plan_check.stale('0' * 40)
  assert unknown is not None
  assert 'is not in this checkout' in unknown
  if head and not subprocess.run(['git', '-C', str(ROOT), 'diff', '--quiet'], check=False).returncode:
    assert plan_check.stale(head) is None


def test_the_planning_page_gives_the_sequences_that_fit_today():
  page = (ROOT / 'docs' / 'planning.md').read_text(encoding='utf-8')
  for model in plan_check.DENSE:
    jobs = list(plan_check.largest((model,)))
    optimiser = {'adamw': 'AdamW', 'adafactor': 'Adafactor'}[jobs[0].more['optimiser']]
    rows = ' | '.join(f'{job.kind.rows:,}' for job in jobs)
    assert f'| {model} | {optimiser}, {jobs[0].plan.update.state / 2**30:.1f} GiB | {rows} |' in page
