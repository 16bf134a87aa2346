"""The summary at the end of a run: what the rollouts cost, from the lines of metrics.jsonl."""

from sprl.config import Cache, Quant, Run
from sprl.summary import costs_of_rollouts

ROLLOUTS = {
  'sparse/cache_bytes': 2.0**20, 'sparse/bytes_saving': 0.75, 'sparse/accounting_saving': 0.5, 'sparse/compressed': 1.0,
}  # fmt: skip
MISMATCH = {'sparse/agreement_mean': 0.9, 'sparse/agreement_p05': 0.8, 'sparse/veto_fraction': 0.25, 'sparse/ess': 0.5}


def costs(*steps):
  run = Run(cache=Cache(budget=24), quant=Quant(sampler='w8a8'))
  return costs_of_rollouts(run, [{'step': i, 'kind': 'train', **metrics} for i, metrics in enumerate(steps, 1)])


def test_the_costs_of_rollouts_are_means_over_the_steps_that_measured_them():
  assert costs(ROLLOUTS | MISMATCH, ROLLOUTS, ROLLOUTS | MISMATCH | {'sparse/agreement_mean': 0.8}) == [
    'What the rollouts cost (cache of 24 tokens by rkv, FP8: w8a8):',
    '',
    '  KV cache   1.0 MiB, 75% less than 4.0 MiB (dense, unquantised)',
    '  attended   50% fewer tokens; 100% of sequences compressed',
    '  mismatch   agreement 0.850 (5th percentile 0.800), 25.0% of the sequences vetoed, effective sample size 0.50',
  ]


def test_a_cache_that_is_larger_than_a_dense_one_has_more_bytes():
  assert costs(ROLLOUTS | {'sparse/bytes_saving': -0.25})[2] == '  KV cache   1.0 MiB, 25% more than 0.8 MiB (dense, unquantised)'
  assert costs(ROLLOUTS | {'sparse/bytes_saving': -0.001})[2] == '  KV cache   1.0 MiB, 0% less than 1.0 MiB (dense, unquantised)'


def test_a_run_without_an_update_has_measured_no_mismatch():
  assert costs(ROLLOUTS, ROLLOUTS)[-1] == '  mismatch   not measured, because no step had an update'
  assert costs() == ['The run sampled no rollouts.']
