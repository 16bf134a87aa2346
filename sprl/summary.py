"""The summary printed at the end of a run: scores before and after, costs of the rollouts, files."""

import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sprl.config import Run
from sprl.io.checkpoint import CheckpointError, best_step
from sprl.io.html_report import partners, write_report
from sprl.io.metrics import read_metrics, series
from sprl.io.plots import plot_run, plot_timeline
from sprl.rollout.evaluate import differences
from sprl.session import Finished

log = logging.getLogger(__name__)


def _failed(metrics: Mapping[str, float]) -> str:
  return f'{metrics["eval/ungraded"]:.0f} of {metrics["eval/problems"] * metrics["eval/samples"]:.0f}'


def closing_report(run: Run, workdir: Path, finished: Finished) -> str:
  """Draw the plots, write report.html, and return the summary as text. Its last line names the report."""
  before, after = finished.before, finished.after
  count, k = int(after['metrics']['eval/problems']), int(after['metrics']['eval/samples'])
  temperature = after['how']['own']['eval']['temperature'] if 'how' in after else run.eval.temperature
  how = 'greedy' if temperature == 0 else f'{k} samples each at temperature {temperature:g}'
  score = 'score of the first reward' if len(run.task.rewards) > 1 else 'reward'
  lines = ['', f'What was learned in {finished.step} steps, on {count} held-out problems ({how}):', '']
  for name, result in (('before', before), ('after', after)):
    m = result['metrics']
    lines.append(f'  {name:7s} {score} {m["eval/avg@k"]:.3f}   ({_interval(m, "eval")})')
  if changes := differences(before, after, sets=False):
    lines.append(f'  these two do not compare, because evaluations have changed: {"; ".join(changes)}')
  if any(result['metrics']['eval/ungraded'] for result in (before, after)):
    failed = [_failed(result['metrics']) for result in (before, after)]
    lines.append(f'  a reward failed, and counts 0, for {failed[0]} answers before and {failed[1]} after')
  lines += _more_sets(before, after, score)
  for title, old, new in _examples(before['samples'], after['samples']):
    question = ' '.join(old['prompt'].split())  # its end is shown, for it may begin with a system message
    lines += [
      '', f'{title}: {question if len(question) <= 160 else "... " + question[-156:]}',
      f'  answer: {old["answer"]}',
      f'  before: {_one_line(old["completion"])}   [reward {old["reward"]:g}]',
      f'  after:  {_one_line(new["completion"])}   [reward {new["reward"]:g}]',
    ]  # fmt: skip
  lines += [
    '',
    *costs_of_rollouts(run, read_metrics(workdir)),
    '',
    f'plot:        {_drawn("the plot", plot_run, workdir)}',
    f'timeline:    {_drawn("the timeline", plot_timeline, workdir)}  (trace.json opens in ui.perfetto.dev)',
    f'metrics:     {workdir / "metrics.jsonl"}',
  ]
  lines += [f'samples:     {workdir / "samples"}', f'checkpoints: {workdir / "checkpoints"}{_best(workdir, finished.step)}']
  if run.export:
    lines.append(f'export:      {workdir / "export"}  (a Hugging Face folder)')
  else:
    lines.append(f'export with: python -m sprl.export --workdir={workdir} --out=FOLDER')
  lines.append(f'report:      {_drawn("the HTML report", write_report, workdir)}  (opens in a browser)')
  return '\n'.join(lines)


def _best(workdir: Path, last: int) -> str:
  """Return which checkpoint has the best score, unless it is that of the last step."""
  try:
    step = best_step(workdir / 'checkpoints')
  except CheckpointError:  # none has a score
    return ''
  return '' if step == last else f'  (best score: step {step}; export and evaluate take --step=best)'


def _drawn(what: str, draw: Callable[[Path], Path], workdir: Path) -> str:
  """Write a file and return its path. A failure is only logged: the run has finished, and its export may follow."""
  try:
    return str(draw(workdir))
  except Exception as error:
    log.warning('%s could not be written (%s: %s)', what, type(error).__name__, error)
    return 'not written'


def _more_sets(before: Mapping[str, Any], after: Mapping[str, Any], score: str) -> list[str]:
  """Return lines on the other held-out sets: the score, by this name, before and after, and a sample after."""
  lines = []
  for name, result in after.get('sets', {}).items():
    old, new = (found['metrics'].get(f'eval/{name}/avg@k', float('nan')) for found in (before, after))
    count = int(after['metrics'][f'eval/{name}/problems'])
    lines += [
      '',
      f'  {name} ({count} problems): {score} {old:.3f} before, {new:.3f} after ({_interval(after["metrics"], f"eval/{name}")})',
    ]
    for row in result['samples'][:1]:
      lines.append(f'    after: {_one_line(row["completion"])}   [answer {row["answer"]}, reward {row["reward"]:g}]')
  return lines


def _interval(metrics: Mapping[str, Any], group: str) -> str:
  low, high = (metrics.get(f'{group}/{end}') for end in ('low', 'high'))
  return '95 % interval unknown' if low is None or high is None else f'95 % interval {low:.3f} to {high:.3f}'


def costs_of_rollouts(run: Run, records: Sequence[Mapping[str, Any]]) -> list[str]:
  """Return lines on the memory that rollouts saved and on their mismatch with the learner; means over the lines of metrics."""

  def measured(name: str) -> bool:
    return len(series(records, name)[1]) > 0

  def mean(name: str) -> float:
    return float(series(records, name)[1].mean())

  if not measured('sparse/cache_bytes'):
    return ['The run sampled no rollouts.']
  size = mean('sparse/cache_bytes')
  dense = size / (1 - mean('sparse/bytes_saving'))
  saved = round(mean('sparse/bytes_saving'), 2) + 0.0  # + 0.0 turns -0.0 into 0.0
  saving = f'{abs(saved):.0%} {"less" if saved >= 0 else "more"}'
  kept = f'cache of {run.cache.budget} tokens by {run.cache.method}' if run.cache.budget else 'dense cache'
  fp8 = 'no FP8' if run.quant.sampler == 'none' else f'FP8: {run.quant.sampler}'
  mismatch = 'not measured, because no step had an update'
  if measured('sparse/agreement_mean'):
    mismatch = (
      f'agreement {mean("sparse/agreement_mean"):.3f} (5th percentile {mean("sparse/agreement_p05"):.3f}), '
      f'{mean("sparse/veto_fraction"):.1%} of the sequences vetoed, effective sample size {mean("sparse/ess"):.2f}'
    )
  return [
    f'What the rollouts cost ({kept}, {fp8}):',
    '',
    f'  KV cache   {size / 2**20:.1f} MiB, {saving} than {dense / 2**20:.1f} MiB (dense, unquantised)',
    f'  attended   {mean("sparse/accounting_saving"):.0%} fewer tokens; {mean("sparse/compressed"):.0%} of sequences compressed',
    f'  mismatch   {mismatch}',
  ]


def _examples(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any, Any]]:
  """Return up to two problems with their samples before and after.

  The first improved. The second got worse, or else is unchanged and wrong, or unchanged, or another that improved.
  """
  pairs = [(old, new) for old, new in partners(before, after) if new]
  learned = [('Improved', old, new) for old, new in pairs if new['reward'] > old['reward']]
  lost = [('Worse', old, new) for old, new in pairs if new['reward'] < old['reward']]
  same = [('Unchanged', old, new) for old, new in pairs if new['reward'] == old['reward']]
  wrong = [row for row in same if row[2]['reward'] < 1]
  return [*learned[:1], *[*lost, *wrong, *same, *learned[1:]][:1]]


def _one_line(text: str) -> str:
  return textwrap.shorten(text.replace('\n', ' / '), 200, placeholder=' ...')
