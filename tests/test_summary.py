"""The summary at the end of a run: what the rollouts cost, from the lines of metrics.jsonl."""

from sprl import summary
from sprl.config import Cache, Quant, Run, Task
from sprl.session import Finished
from sprl.summary import closing_report, costs_of_rollouts

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


def test_answers_that_were_not_graded_are_counted(monkeypatch, tmp_path):
  for name in ('plot_run', 'plot_timeline', 'write_report'):
    monkeypatch.setattr(summary, name, lambda workdir: workdir)
  monkeypatch.setattr(summary, 'read_metrics', lambda workdir: [])

  def result(ungraded):
    scores = {'eval/avg@k': 0.0, 'eval/low': 0.0, 'eval/high': 0.1, 'eval/problems': 5.0, 'eval/samples': 4.0}
    return {'metrics': scores | {'eval/ungraded': ungraded}, 'samples': []}

  def report(before, after):
    return closing_report(Run(), tmp_path, Finished(3, True, None, None, None, result(before), result(after)))  # pyright: ignore

  assert '  a reward failed, and counts 0, for 19 of 20 answers before and 20 of 20 after\n' in report(19.0, 20.0)
  assert 'failed' not in report(0.0, 0.0)


def test_the_summary_says_how_each_evaluation_was_made(monkeypatch, tmp_path):
  for name in ('plot_run', 'plot_timeline', 'write_report'):
    monkeypatch.setattr(summary, name, lambda workdir: workdir)
  monkeypatch.setattr(summary, 'read_metrics', lambda workdir: [])

  def result(temperature):
    scores = {'eval/avg@k': 0.5, 'eval/problems': 5.0, 'eval/samples': 4.0, 'eval/ungraded': 0.0}
    return {'metrics': scores, 'samples': [], 'how': {'own': {'eval': {'temperature': temperature}}, 'sets': {}}}

  def report(before, after, rewards=()):
    run = Run(task=Task(rewards=rewards))
    return closing_report(run, tmp_path, Finished(3, True, None, None, None, result(before), result(after)))  # pyright: ignore

  assert '(4 samples each at temperature 1):' in report(1.0, 1.0)  # the settings of now are greedy
  assert 'do not compare' not in report(1.0, 1.0)
  assert 'these two do not compare, because evaluations have changed: eval.temperature: 1.0 -> 0.5' in report(1.0, 0.5)
  older = {name: value for name, value in result(1.0).items() if name != 'how'}
  text = closing_report(Run(), tmp_path, Finished(3, True, None, None, None, older, result(1.0)))  # pyright: ignore
  assert 'do not compare' not in text  # an older version did not record how
  assert '  before  score of the first reward 0.500' in report(1.0, 1.0, ('math', 'mine.py:brief=0.2'))
