"""benchmarks/plan_check.py: the programs that it chooses to compile. Nothing is compiled here."""

import dataclasses

import plan_check
import pytest

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
