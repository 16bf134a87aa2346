"""docs/claims.md, written from the saved results: claim, the paper's figure, ours, verdict, picture."""

from collections.abc import Mapping
from typing import Any

from claims.experiment import Claim, Experiment, Records, find
from claims.verdict import compared, judged
from common import ROOT

PAGE = ROOT / 'docs' / 'claims.md'
INTRODUCTION = """# The papers' claims

Does a small model show what the papers claim? `python benchmarks/claims --page` writes this page from the committed results.

An experiment fixes its arms, seeds, thresholds and measure before it runs (`benchmarks/claims/experiments/`). The measure is the
accuracy of the newest weights on held-out problems, sampled at temperature 1 with a dense cache. Arms are paired: the same warm
start, problems and seed. An interval has 95 %. It covers seeds and problems. A claim **holds** if the whole interval is above its
threshold, **does not hold** if none of it is, and otherwise the experiment **cannot tell**. A verdict is about these small
models: it does not say that a paper is wrong about large ones.
"""


def write(results: Mapping[str, Records]) -> None:
  """Write the page. `results` are the records of each experiment, by name."""
  PAGE.write_text(text(results), encoding='utf-8')


def text(results: Mapping[str, Records]) -> str:
  """Return the text of the page."""
  parts = [INTRODUCTION]
  done = {name: records for name, records in results.items() if any(records.values())}
  if done:
    parts.append('| Claim | Paper | Here | Verdict |\n|---|---|---|---|')
    parts[-1] += ''.join(line(claim, records) for name, records in done.items() for claim in find(name).claims) + '\n'
  parts += [section(find(name), records) for name, records in done.items()]
  waiting = [find(name) for name in results if name not in done]
  if waiting:
    parts.append('## Not run yet\n\n' + '\n'.join(map(waits, waiting)) + '\n')
  return '\n'.join(parts)


def waits(experiment: Experiment) -> str:
  """Return the line of an experiment without results."""
  place = 'a core' if experiment.device == 'core' else 'one H200, by lower bounds of the planner'
  return f'* `{experiment.name}`: {experiment.question} {len(experiment.runs)} runs, about {experiment.hours:g} hours of {place}.'


def line(claim: Claim, records: Records) -> str:
  """Return a claim's line of the table."""
  rows = judged(claim, records)
  ours = '; '.join(f'{row["comparison"]} {found(row)}' for row in rows)
  return f'\n| {claim.statement} | {claim.theirs} ({claim.paper}) | {ours} | **{rows[0]["verdict"]}** |'


def found(row: Mapping[str, Any]) -> str:
  """Return the mean difference of a comparison and its interval. An interval needs two seeds."""
  if row['seeds'] < 2:
    return 'not run' if not row['seeds'] else f'{row["mean"]:+.3f} (one seed)'
  return f'{row["mean"]:+.3f} ({row["low"]:+.3f} to {row["high"]:+.3f}, {row["seeds"]} seeds)'


def section(experiment: Experiment, records: Records) -> str:
  """Return the section of an experiment: question, design, picture, thresholds, reasons."""
  runs = [found for of in records.values() for found in of.values()]
  missing = len(experiment.runs) - len(runs)
  machines = sorted({found['machine'] for found in runs})
  lines = [
    f'## {experiment.question}\n',
    f'{experiment.task.sentence}. {len(experiment.arms)} arms, {experiment.seeds} seeds, {experiment.steps} steps; '
    f'{len(runs)} runs on {", ".join(machines)}' + (f', {missing} runs are missing' if missing else '') + '.\n',
    f'![{experiment.question}](results/claims/{experiment.name}.png)\n',
  ]
  for claim in experiment.claims:
    wanted = ' and '.join(f'{compared(each)} > {each.above:+g}' for each in claim.comparisons)
    lines.append(f'* {claim.statement} Here this means: {wanted}.{" " + claim.reason if claim.reason else ""}')
  lines.append(f'\n`python benchmarks/claims {experiment.name}`; [result](results/claims/{experiment.name}.json).\n')
  return '\n'.join(lines)
