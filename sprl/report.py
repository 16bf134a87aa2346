"""The end of a run, for the person who waited for it: what was learned, and where it is."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sprl.io.plots import plot_run
from sprl.saved import export
from sprl.settings import Run
from sprl.trainer import Finished


def closing_report(run: Run, workdir: Path, finished: Finished) -> str:
  """Draws the plot, writes the export where the settings ask for one, and tells of both, and of before and after."""
  before, after = finished.before, finished.after
  count, k = int(after['metrics']['eval/problems']), int(after['metrics']['eval/samples'])
  how = 'greedy' if run.eval.temperature == 0 else f'{k} sampled at temperature {run.eval.temperature:g}'
  lines = ['', f'What was learned in {finished.step} steps, on {count} held-out problems ({how}):', '']
  for name, result in (('before', before), ('after', after)):
    m = result['metrics']
    lines.append(f'  {name:7s} reward {m["eval/avg@k"]:.3f}   (95 % interval {m["eval/low"]:.3f} to {m["eval/high"]:.3f})')
  for title, old, new in _examples(before['samples'], after['samples']):
    question = ' '.join(old['prompt'].split())  # its end, for the beginning may be a system message
    lines += [
      '', f'{title}: {question if len(question) <= 160 else "... " + question[-156:]}',
      f'  answer: {old["answer"]}',
      f'  before: {_one_line(old["completion"])}   [reward {old["reward"]:g}]',
      f'  after:  {_one_line(new["completion"])}   [reward {new["reward"]:g}]',
    ]  # fmt: skip
  lines += ['', f'plot:        {plot_run(workdir)}', f'metrics:     {workdir / "metrics.jsonl"}']
  lines += [f'samples:     {workdir / "samples"}', f'checkpoints: {workdir / "checkpoints"}']
  if run.export:
    folder = export(finished.policy, finished.params, workdir / 'export')
    lines.append(f'export:      {folder}  (a Hugging Face folder)')
  else:
    lines.append(f'export with: python -m sprl.export --workdir={workdir} --out=FOLDER')
  return '\n'.join(lines)


def _examples(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any, Any]]:
  """Two problems, each with its sample before and after: the first that was learned, and the first that was not."""
  pairs = list(zip(before, after))
  learned = [('One that it learned', old, new) for old, new in pairs if new['reward'] > old['reward']]
  lost = [('One that it unlearned', old, new) for old, new in pairs if new['reward'] < old['reward']]
  same = [('One that did not change', old, new) for old, new in pairs if new['reward'] == old['reward']]
  wrong = [row for row in same if row[2]['reward'] < 1]
  return [*learned[:1], *[*lost, *wrong, *same, *learned[1:]][:1]]


def _one_line(text: str) -> str:
  return textwrap.shorten(text.replace('\n', ' / '), 200, placeholder=' ...')
