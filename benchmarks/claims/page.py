"""docs/claims.md, written from the saved results: claim, the paper's figure, ours, verdict, picture."""

import json
from collections.abc import Mapping
from typing import Any

from claims.experiment import Claim, Experiment, Records, find
from claims.verdict import compared, judged
from common import RESULTS, ROOT

PAGE = ROOT / 'docs' / 'claims.md'
INTRODUCTION = """# The papers' claims

Does a small model show what the papers claim? `python benchmarks/claims --page` writes this page from the committed results.

An experiment fixes its arms, seeds, thresholds and measure before it runs (`benchmarks/claims/experiments/`). Pilots with another
seed chose them. The measure is the accuracy of the newest weights on held-out problems, sampled at temperature 1 with a dense
cache. Arms are paired: the same warm start, problems and seed. An interval has 95 %. It covers seeds and problems, but not warm
starts: there are two, and both have to be on the same side of the threshold.

A claim **holds** if the whole interval is above its threshold, **does not hold** if none of it is, and otherwise the experiment
**cannot tell**. Nothing is decided before all seeds have run. Intervals are not widened for the number of claims: of forty claims
at their threshold, chance alone decides two. A verdict is about these small models: it does not say that a paper is wrong about
large ones.
"""
SIMULATED = """## Which gains has asynchronous scheduling on a cluster, in a simulation?

A simulated cluster whose decode speed depends on the batch, 16 draws of lengths and latencies, and the split of the GPUs that was
best on other draws. [Its section](benchmarks.md#what-would-running-ahead-gain-on-a-cluster-simulated) has assumptions, pictures,
and what each arm drops. Measured with one engine: [queue scheduling](benchmarks.md#what-does-queue-scheduling-gain).

The verdict is whether the simulated gain is above the published one. Where several numbers of GPUs were simulated, the table has
the one with the largest gain, which favours the paper. Likely reasons for the verdicts that contradict it:

* `continuous` over `groups`: from 8 GPUs on, 512 samples do not fill the slots, so groups hold nothing up. The published baseline
  is not known, and may be slower than a queue of groups.
* Redundant prompts or environments gain as much as their slowest members cost. With latencies of N(10, 5) s nothing is slow; with
  one episode in a hundred ten times as slow, the gain is above the published one.
* Environment-level asynchrony gains more with more turns; the published number of turns is not known.

{table}

`python benchmarks/cluster_simulation.py --save`; [result](results/cluster_simulation.json).
"""
TABLE = '| Claim | Paper | Here | Verdict |\n|---|---|---|---|'


def write(results: Mapping[str, Records]) -> None:
  """Write the page. `results` are the records of each experiment, by name."""
  PAGE.write_text(text(results), encoding='utf-8')


def text(results: Mapping[str, Records]) -> str:
  """Return the text of the page."""
  parts = [INTRODUCTION]
  done = {name: records for name, records in results.items() if any(records.values())}
  if done:
    lines = [line(claim, find(name), records) for name, records in done.items() for claim in find(name).claims]
    parts.append('\n'.join([TABLE, *lines]) + '\n')
  parts += [section(find(name), records) for name, records in done.items()]
  parts.append(SIMULATED.format(table='\n'.join([TABLE, *simulated()])))
  waiting = [find(name) for name in results if name not in done]
  if waiting:
    parts.append('## Not run yet\n\n' + '\n'.join(map(waits, waiting)) + '\n')
  return '\n'.join(parts)


def waits(experiment: Experiment) -> str:
  """Return the line of an experiment without results."""
  place = 'a core' if experiment.device == 'core' else 'one H200, by lower bounds of the planner'
  return f'* `{experiment.name}`: {experiment.question} {len(experiment.runs)} runs, about {experiment.hours:g} hours of {place}.'


def line(claim: Claim, experiment: Experiment, records: Records) -> str:
  """Return a claim's line of the table."""
  rows = judged(claim, experiment, records)
  ours = '; '.join(f'{row["comparison"]} {found(row)}' for row in rows)
  return f'| {claim.statement} | {claim.theirs} ({claim.paper}) | {ours} | **{rows[0]["verdict"]}** |'


def found(row: Mapping[str, Any]) -> str:
  """Return the mean difference of a comparison and its interval. An interval needs two seeds."""
  if row['seeds'] < 2:
    return 'not run' if not row['seeds'] else f'{row["mean"]:+.3f} (one seed)'
  parts = ', '.join(f'{part:+.3f}' for part in row['by warm start'])
  return f'{row["mean"]:+.3f} ({row["low"]:+.3f} to {row["high"]:+.3f}; {row["seeds"]} seeds; by warm start {parts})'


def simulated() -> list[str]:
  """Return a line of the table for each comparison of the simulation with a published gain."""
  rows = json.loads((RESULTS / 'cluster_simulation.json').read_text())['rows']
  best = {}
  for row in rows:
    name = row['experiment'], row['arm'], row['against']
    if row['verdict'] and row['published'] != 1 and row['gain'] > best.get(name, row | {'gain': 0})['gain']:
      best[name] = row
  lines = []
  for row in best.values():
    statement = f'{row["experiment"]}: `{row["arm"]}` gains more than published over `{row["against"]}`'
    ours = f'{row["gain"]:.2f} ({row["low"]:.2f} to {row["high"]:.2f}) on {row["GPUs"]} GPUs'
    lines.append(f'| {statement} | {row["published"]:g} (ROLL Flash) | {ours} | **{row["verdict"]}** |')
  return lines


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
    against = f' **This contradicts the paper.** {claim.reason}' if claim.reason else ''
    lines.append(f'* {claim.statement} Here this means: {wanted}.{against}')
  lines.append(f'\n`python benchmarks/claims {experiment.name}`; [result](results/claims/{experiment.name}.json).\n')
  return '\n'.join(lines)
