"""A run that samples with top-k, top-p and min-p: dense float32 rollouts have no mismatch, in the metrics and in the ledger."""

import jax
import numpy as np
import pytest
import tiny

from sprl import config as settings
from sprl import train
from sprl.config_reader import resolve
from sprl.io.metrics import read_metrics

STEPS = 2


def run(folder, **changes) -> settings.Run:
  scope: dict = {}
  exec((folder / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.steps, config.arm, config.quant.sampler, config.model.dtype = STEPS, 'dense', 'none', 'float32'
  config.eval.every, config.eval.problems, config.ledger.every, config.optimizer.minibatches = None, 1, 2, 1
  config.rollout.prompts, config.correction.veto = 2, 1e-4  # a veto needs the old policy's log-probs
  config.update_from_flattened_dict({f'sampling.{key}': value for key, value in changes.items()})
  return resolve(config)


@pytest.mark.parametrize(
  'filters',
  [{'top_k': 6, 'top_p': 0.8}, pytest.param({'top_p': 0.7, 'min_p': 0.02}, marks=pytest.mark.slow)],
  ids=['ids', 'mask'],
)
def test_equal_policies_have_no_mismatch(tmp_path, caplog, filters):
  tiny.write_inputs(tmp_path, num_hidden_layers=1)
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    assert train.train(run(tmp_path, **filters), tmp_path / 'run').completed
  assert sum(record.getMessage().startswith('Compiling jit(update)') for record in caplog.records) == 1
  records = read_metrics(tmp_path / 'run')
  steps = [record for record in records if record['kind'] == 'train']
  assert len(steps) == STEPS
  for step in steps:
    assert abs(step['rollout_corr/kl']) < 1e-5
  assert abs(steps[0]['policy/kl_ref']) < 1e-5  # the reference is the first policy, renormalised too
  assert steps[1]['policy/kl_ref'] > 1e-4
  found = [record for record in records if 'ledger/gap_abs' in record]
  assert len(found) == 1
  assert found[0]['ledger/gap_abs'] < 1e-5
  assert found[0]['ledger/reproduction_abs'] < 1e-5
  assert np.isfinite(found[0]['ledger/gap_p99'])
