"""An experiment of benchmarks/claims, from its file to its saved records."""

import numpy as np
import pytest
import tiny
from claims import command

EXAMPLE = """
import shutil
from pathlib import Path

from claims.experiment import Claim, Comparison, Experiment, Task

INPUTS = Path({inputs!r})
TASK = Task(
  'tiny', 'A tiny model', lambda folder: shutil.copytree(INPUTS, folder), (str(INPUTS / 'model'),) * 2,
  {{
    'model.dtype': 'float32', 'task.kind': 'jsonl', 'task.chat': False, 'task.workers': 1, 'task.path': '{{folder}}',
    'task.grader': '{{folder}}/grader.py:grade', 'rollout.prompts': 2, 'rollout.group': 4, 'rollout.stop_when_capped': False,
    'sampling.max_prompt': 16, 'sampling.max_tokens': 12, 'sampling.chunk': 4, 'sampling.prompt_buckets': (16,),
    'packing.row_tokens': 64, 'packing.rows': 1, 'packing.score_chunk': 16, 'optimizer.learning_rate': 1e-3,
    'cache.budget': 12, 'cache.interval': 3, 'cache.window': 2, 'eval.problems': 3, 'eval.max_tokens': 4, 'log.trackers': (),
  }},
  final={{'eval.problems': 5}},
)
EXPERIMENT = Experiment(
  'example', 'Does it run?', TASK, {{'dense': {{'arm': 'dense'}}, 'vetoed': {{'arm': 'sparse_rl', 'random_veto': True}}}},
  (Claim('They differ.', 'Nobody', '0', (Comparison('dense', 'vetoed', 0.0),)),), steps=2, seeds=1,
  settings={{'eval.every': 1}}, series=('rollout_corr/k3_kl',),
  asked=('dense',), inference={{'small': {{'arm': 'naive', 'cache.budget': 8, 'cache.interval': 2, 'cache.window': 1}}}},
)
"""


@pytest.mark.slow
def test_an_experiment_runs_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
  """Workers find the experiment in a second folder of the package `claims`."""
  tiny.write_inputs(tmp_path / 'inputs', num_hidden_layers=1)
  (tmp_path / 'more/claims/experiments').mkdir(parents=True)
  (tmp_path / 'more/claims/experiments/example.py').write_text(EXAMPLE.format(inputs=str(tmp_path / 'inputs')))
  monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'more'))
  monkeypatch.setattr(command, 'SAVED', tmp_path)
  scope: dict = {}
  exec((tmp_path / 'more/claims/experiments/example.py').read_text(), scope)
  experiment, first = scope['EXPERIMENT'], {}
  command.run(experiment, first, tmp_path / 'runs', None)
  assert {arm: sorted(of) for arm, of in first.items()} == {'dense': [1], 'vetoed': [1]}
  for found in (of[1] for of in first.values()):
    assert found['stopped'] is None
    assert found['accuracy']['steps'] == [0, 1, 2]
    assert np.mean(found['scores'][:3]) == pytest.approx(found['accuracy']['mean'][-1], abs=1e-3)
    assert len(found['scores']) == len(found['before']) == 5
    assert len(found['under'].get('small', [])) == (5 if found['arm'] == 'dense' else 0)
    assert len(found['curves']['rollout_corr/k3_kl']) == 1
  assert first['dense'][1]['before'] == first['vetoed'][1]['before']
  assert first['dense'][1]['measures'] != first['vetoed'][1]['measures']
  kept = command.saved(experiment)
  assert kept == first
  del kept['vetoed']
  command.run(experiment, kept, tmp_path / 'again', None)  # a fresh folder: only the missing run is done
  assert not (tmp_path / 'again/dense-1').exists()
  assert kept['dense'] == first['dense']
  assert kept['vetoed'][1]['scores'] == first['vetoed'][1]['scores']
  assert kept['vetoed'][1]['measures'] == first['vetoed'][1]['measures']
