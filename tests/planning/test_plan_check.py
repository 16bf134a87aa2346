"""What benchmarks/plan_check.py would compile; nothing of it is compiled here."""

import dataclasses
import sys
from pathlib import Path

import pytest

from sprl.planning.devices import device

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmarks'))
import plan_check


@pytest.mark.parametrize(('gb', 'optimiser', 'fits'), [(141, 'adamw', True), (30, 'adafactor', True), (15, 'adafactor', False)])
def test_largest_batches_are_beside_an_optimiser_whose_update_fits_or_say_so(gb, optimiser, fits, monkeypatch):
  """Two layers of Qwen2.5-7B are 1.56 B weights: 25 GB with AdamW's moments and gradients, 12 without the moments."""
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
