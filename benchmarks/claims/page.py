"""docs/claims.md, written from the saved results: claim, the paper's number, ours, verdict, picture."""

import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from claims.experiment import ACCURACY, ALL, BEFORE, OWN, REWARD, SECONDS, Claim, Comparison, Experiment, Records, count, find
from claims.verdict import judged, measured, over_models, values, verdict
from common import RESULTS, ROOT

PAGE = ROOT / 'docs' / 'claims.md'
INTRODUCTION = """# The papers' claims

Which claims of the papers hold for small models? `python benchmarks/claims --page` writes this page from the committed results.
A verdict is about these small models: it does not say that a paper is wrong about large ones.

**Plans.** An experiment (`benchmarks/claims/experiments/`) fixes its arms, seeds, thresholds and measures before it runs. An
arm is one combination of settings. In `sparse_rl_phases`, `sparse_rl_snapkv_176`, `fp8_rl`, `fp8_key_bias`, `environments` and
`staleness`, thresholds or settings were chosen with pilot runs of seeds that no verdict uses. In `fp8_more_key_bias` the size of
the biases was chosen by answers before training. Pilots are not saved.
An earlier plan of `sparse_rl_phases` was replaced after eleven of its runs ([below](#sparse_rl_phases)). After the results, the
sentences of some claims were changed to say more exactly what is compared; comparisons and thresholds were not. A result has a
checksum of its plan; in four results it was computed again, because the sentences were part of it. Two runs of
`mixture_replay` are older than two of its claims.

**Measures.** Unless a comparison names another measure, it compares the accuracy of the newest weights on held-out problems,
sampled at temperature 1 with a dense cache. Arms are paired by seed: both have the same warm start (the fine-tuned model from
which training begins) and the same problems. There are two warm starts.

**Verdicts.** A claim **holds** if the whole confidence interval of 95 % is above its threshold, and **does not hold** if it is
wholly below it. Otherwise the experiment **cannot tell**. It also cannot tell before all seeds have run, and if the seeds
of the two warm starts have their means on different sides of the threshold. A threshold is seldom 0. Where a paper calls two
arms equal, the first one may lose up to 0.05 here; the tables say what share of the accuracy it keeps. Where it reports a drop,
the drop has to be above 0.05. An interval without 0 shows a difference, even if it is too small for the claim. Comparisons that
were added after the runs have tables of their own, and no verdict.

**What the intervals leave out.** They cover other seeds, and those of an accuracy also other problems. Half of the seeds begin
from each of two models, and all are taken to be independent: a difference between the models widens an interval, but no interval
covers other models. {models} The intervals take the seeds to be normally distributed. Suppose one run in seven
collapses: eight seeds then often contain no such run, or one, which widens the interval on both sides. The tables of means give
the lowest seed. No interval is corrected for the number of claims. With so many, a few of the verdicts are probably chance. If a
claim has several comparisons, one of them below its threshold refutes it. Only there the level is corrected for their number, so
an interval of 95 % in the tables may be wholly below the threshold of a comparison that cannot tell.

**Tasks.** The problems are running totals, except in `environments`. The prompt has 20 to 40 digits, and the answer gives the
total after each of them, modulo 10. A token is a byte. Only the last total is graded, so a guess is right in one case of ten:
an accuracy of 0.10 means that a policy solves nothing. Before training, the models answer well greedily and poorly if they
sample. Where greedy answers were evaluated after training too, they were no better, so much of the gains is probably a sharper
distribution ([limits](limits.md#weak-evidence)).

**Words**, beside those of the [glossary](glossary.md):

* `before`: the model before training. `at the start`, `at the end`: means over the first and the last fifth of the steps.
* `k3` (`rollout_corr/k3_kl`): the mismatch, in nats per token. It is the mean of r - 1 - log r, where r is the probability of a
  token for the learner divided by that for the sampler.
* `naive`: no correction. `sparse_rl`: [the correction of Sparse-RL](methods/sparse.md), which rejects a sequence that has a
  nearly impossible token (veto) and weights tokens by r. `veto_only`, `reweight_only`: one half of it. `random_veto`: as many
  sequences are rejected, but at random. `learner_mask`: no correction, but the learner sees only the tokens that the sampler
  saw. `sparse_rl_code`: the formulas of the released code. R-KV and SnapKV choose which tokens a cache of `cache.budget` tokens
  keeps.
* `w8a8`: FP8 linears. `kv8`: an FP8 cache. `both`: both of them (in `environments`: `ahead` and `redundant`). `full`: neither.
  `frozen`: the scales of the FP8 cache stay as they were before the first update. `end_to_end`: FP8 linears in the learner too.
* `tis`: token-level [truncated weights](methods/losses.md). `mis`: tokens whose weight is not in 0.5 to 2 are left out. `alone`:
  neither. R2 and R3 [replay](methods/fp8.md) the experts of the old policy, or of the sampler.
* `sparse/accounting_saving`: share of attended tokens that eviction saves. `sparse/bytes_saving`: share of the cache's bytes.
  `sparse/agreement_p05`: the fifth percentile of the agreement, which is the smaller one of r and 1 / r. `ledger/CAUSE_abs`:
  mean absolute part of a [cause](methods/ledger.md) in the mismatch, in nats per token. `fp8/kv_saturation`: share of keys and
  values beyond the range of the FP8 cache.
* `async/age_mean`: mean age of the samples when they train, in steps. `async/dropped_tokens`: tokens of a step that redundant
  samples had drawn and no update used. `async/dropped_reward_bias`: mean reward of the used samples minus that of all.
  `time/rollout`: seconds of a step until its samples are complete.
* A claim in seconds compares logarithms: a difference of 0.41 is a factor of 1.5.

A run takes one core. Several models in one program would be slower
([measured](benchmarks.md#would-several-small-models-in-one-program-train-faster)).
"""
SIMULATED = """## How much does asynchronous scheduling gain on a simulated cluster?

The decode speed of the simulated cluster depends on the batch. A gain is the ratio of mean times over 16 draws of lengths and
latencies. The split into GPUs that generate and GPUs that train is the best one on other draws.
[Benchmarks](benchmarks.md#what-would-running-ahead-gain-on-a-cluster-simulated) has the assumptions, the pictures and the
samples that each arm drops. The gain of [queue scheduling](benchmarks.md#what-does-queue-scheduling-gain) was also measured,
with one engine.

A claim **holds** if the whole interval of the simulated gain is above nine tenths of the published gain. The tenth was chosen
after the results: no simulation can be expected to exceed the number that it reproduces. Gains that an assumed input decides have
no verdict (a share of slow environments; other numbers of turns than FrozenLake's 10). This rule, the ratio of mean times and the
64 GPUs came after the results of an earlier simulation. The verdict on `alpha = 2` is fragile: its lower end is 0.007 above the
threshold on 64 GPUs, and on 32, the most before, it would be "cannot tell" (1.96 to 2.34). Where several numbers of GPUs were
simulated, the table has all of them, with a verdict each. The published gain of running ahead is one that a cluster can have
"up to", so it is compared at the number of GPUs with the largest gain on the other draws. Most of the published gains are
[second-hand](methods/async.md#published-numbers). The arms:

* `rlvr` (single answers, which a program grades): 64 prompts with 8 samples each. `groups` keeps the slots of a prompt until
  its longest sample ends. `continuous` schedules each sample alone: this is prompt replication. Its published gains are those of
  32 prompts with 16 samples and of 64 with 16, which were simulated too. `alpha = 2, best` runs up to two updates ahead, with the
  best split of the GPUs. No arm waits for whole batches, which is the baseline of the published 2.16 of queue scheduling.
  `spare`, which starts 16 more prompts than it needs, has no verdict: the published run starts 16 more than 8.
* `environments` (rollouts only) and `agentic` (with training): 32 groups of 8 conversations, `32 x 8`. `barrier a turn` waits
  for all conversations after each turn. `environment-level` does not wait. `alpha = 1` also runs ahead of the training. `36 x 9`
  and `redundant` start more conversations than they need, and use the first 32 x 8 that finish. With `1% slow`, one episode in a
  hundred is ten times as slow. Training takes 30 % of the time of a synchronous update, which sets a part of the gain of `alpha =
  1`; [Benchmarks](benchmarks.md#what-would-running-ahead-gain-on-a-cluster-simulated) has the gains with half as much. The
  published gains with training are those of ALFWorld; those of SWE are lower: 1.23, 1.68 and 1.81 for the three arms.

Likely reasons for the claims that do not hold:

* `continuous` over `groups`: 8 GPUs have a slot for each of 512 samples, and 16 for each of 1,024, so no sample waits for a group
  there. The published baseline and its number of GPUs are not known.
* Redundant prompts or environments save the time of the slowest members. With latencies of N(10, 5) s no member is slow. With
  `1% slow`, which is an assumption, the gain is above the published one (7.92 times).
* Environment-level asynchrony gains more with more turns. The published number of turns is not known. With `1% slow`, both arms
  wait for the slowest episode, so there is less to gain without running ahead.

{table}

`python benchmarks/cluster_simulation.py --save`; [result](../benchmarks/results/cluster_simulation.json).
"""
OVERVIEW = """A claim of a paper is confirmed if the result is on the paper's side of our threshold. The published size may not be
reached. A claim about five budgets counts five times. Not every confirmation is evidence for a method: in `fp8_rl` (at the usual
learning rate), `fp8_bfloat16` and `mixture_replay` the arm without a correction, or without replay, is as good too, so the
claims that TIS, MIS and R3 train as well could hardly fail there. That FP8 adds mismatch to a sampler with the learner's numbers
could not fail at all. *Other claims*: claims that no paper makes, and the check that training
improves the policy (`all three papers`).

| Experiment | Claims of papers: confirmed | not confirmed | cannot tell | Other claims: hold | Runs |
|---|---|---|---|---|---|"""
UNPLANNED = '\nNot planned, and therefore without a verdict:\n\n| Comparison | Difference | Found |\n|---|---|---|'
TABLE = '| Claim | Paper | Needs | Found | Verdict |\n|---|---|---|---|---|'
ABSTRACT = 2.24, 2.72  # gains in the abstract of ROLL Flash; its other gains are second-hand
GAINS = '| Claim | Paper | Here | Verdict |\n|---|---|---|---|'


def write(results: Mapping[str, Records]) -> None:
  """Write the page. `results` are the records of each experiment, by name."""
  PAGE.write_text(text(results), encoding='utf-8')


def text(results: Mapping[str, Records]) -> str:
  """Return the text of the page."""
  parts = [INTRODUCTION.format(models=models(results))]
  done = {name: records for name, records in results.items() if any(records.values())}
  if done:
    parts.append('\n'.join([OVERVIEW, *(summary(find(name), records) for name, records in done.items())]) + '\n')
  parts += [section(find(name), records) for name, records in done.items()]
  parts.append(SIMULATED.format(table='\n'.join([GAINS, *simulated()])))
  waiting = [waits(find(name), count(records)) for name, records in results.items()]
  if any(waiting):
    parts.append('## Not run yet\n\n' + '\n'.join(filter(None, waiting)) + '\n')
  return '\n'.join(parts)


def models(results: Mapping[str, Records]) -> str:
  """Return how many comparisons would keep their verdicts if the warm starts were a sample of models."""
  decided, kept = Counter[str](), Counter[str]()
  for name, records in results.items():
    experiment = find(name)
    for claim in experiment.claims:
      for row in judged(claim, experiment, records):
        of_row = row['verdict of the comparison']
        decided[of_row] += 1
        kept[of_row] += of_row != 'cannot tell' and verdict(over_models(row['by warm start']), row['above']) == of_row
  hold, fail = 'holds', 'does not hold'
  return (
    f'If the models were a sample of models, {kept[hold]} of the {decided[hold]} comparisons that hold would still hold,\nand '
    f'{kept[fail]} of the {decided[fail]} that do not hold would still be below their thresholds.'
  )


def waits(experiment: Experiment, done: int) -> str:
  """Return the line of an experiment of which `done` runs have results; '' if none is missing."""
  runs = len(experiment.runs)
  if done == runs:
    return ''
  number = f'{experiment.hours * (runs - done) / runs:.2g}'
  bound = '' if experiment.device == 'one core' else ' or more: the planner, which estimates them, gives lower bounds'
  missing = f'{runs - done} of {runs} runs' if done else f'{runs} runs'
  hours = f'{number} hour{"s" * (number != "1")}'
  return f'* `{experiment.name}`: {experiment.question} {missing}, about {hours} of {experiment.device}{bound}.'


def summary(experiment: Experiment, records: Records) -> str:
  """Return the line of an experiment in the overview: how many claims have each verdict, and how many runs there are.

  Other claims are those of no paper, and that training improves a policy at all. A claim that does not hold, as the paper
  expects, counts as confirmed.
  """
  theirs = [claim.paper not in (ALL, OWN) for claim in experiment.claims]
  found = [judged(claim, experiment, records)[0]['verdict'] for claim in experiment.claims]
  verdicts = [
    'holds' if claim.expected and verdict == 'does not hold' else verdict for claim, verdict in zip(experiment.claims, found)
  ]
  counts = [
    str(sum(of_paper for of_paper, verdict in zip(theirs, verdicts) if verdict == each))
    for each in ('holds', 'does not hold', 'cannot tell')
  ]
  others = [verdict == 'holds' for of_paper, verdict in zip(theirs, verdicts) if not of_paper]
  runs = f'{count(records)} of {len(experiment.runs)}'
  return f'| [{experiment.question}](#{experiment.name}) | {" | ".join(counts)} | {sum(others)} of {len(others)} | {runs} |'


def line(claim: Claim, experiment: Experiment, records: Records) -> str:
  """Return a claim's line of the table. A claim with several comparisons has a line in the cell for each."""
  rows = judged(claim, experiment, records)
  needs = '<br>'.join(f'{row["comparison"]} > {row["above"]:+.3g}' for row in rows)
  if claim.given:
    given = measured(claim.given, experiment, records)
    needs += f'<br>decided only if {given["comparison"]} > {given["above"]:+g}'
  shown = [found(row) + kept(each, records) + factor(each, row) for row, each in zip(rows, claim.comparisons)]
  theirs = claim.paper if claim.theirs == '-' else f'{claim.theirs} ({claim.paper})'
  verdict = f'**{rows[0]["verdict"]}**' + ', as the paper expects' * (claim.expected and rows[0]['verdict'] == 'does not hold')
  return f'| {claim.statement} | {theirs} | {needs} | {"<br>".join(shown)} | {verdict} |'


def unplanned(experiment: Experiment, records: Records) -> list[str]:
  """Return the table of the comparisons that were not planned."""
  rows = {statement: measured(each, experiment, records) for statement, each in experiment.unplanned.items()}
  lines = [f'| {statement} | {row["comparison"]} | {found(row)} |' for statement, row in rows.items()]
  return [UNPLANNED, *lines] if lines else []


def found(row: Mapping[str, Any]) -> str:
  """Return the mean difference of a comparison and its interval. An interval needs two seeds.

  Numbers have three decimals. A small difference that is compared with 0 has more: two digits of its mean.
  """
  if not row['seeds']:
    return 'not run'
  decimals = max(3, 1 - math.floor(math.log10(abs(row['mean'])))) if row['above'] == 0 and row['mean'] else 3
  mean, low, high, *parts = (f'{each:+.{decimals}f}' for each in (row['mean'], row['low'], row['high'], *row['by warm start']))
  if row['seeds'] < 2:
    return f'{mean} (one seed)'
  return f'{mean} ({low} to {high}; {row["seeds"]} seeds; by warm start {", ".join(parts)})'


def kept(each: Comparison, records: Records) -> str:
  """Return the accuracy of an arm as a share of that of another one, for a claim that both are equal; else ''."""
  if each.above >= 0 or BEFORE in (each.arm, each.against) or each.measures != (ACCURACY, ACCURACY):
    return ''
  both = records.get(each.arm, {}).keys() & records.get(each.against, {}).keys()
  ours, theirs = (np.mean([records[arm][seed]['scores'] for seed in both]) if both else 0.0 for arm in (each.arm, each.against))
  return f', which is {100 * ours / theirs:.0f} % of `{each.against}`' if theirs else ''


def factor(each: Comparison, row: Mapping[str, Any]) -> str:
  """Return the factor of time that a difference of logarithms is; '' for other measures."""
  if not each.measure.startswith(SECONDS) or row['seeds'] < 2:
    return ''
  mean, low, high = (f'{math.exp(row[name]):.2f}' for name in ('mean', 'low', 'high'))
  return f', a factor of {mean} ({low} to {high})'


def simulated() -> list[str]:
  """Return a line of the table for each comparison of the simulation with a published gain, with all numbers of GPUs."""
  groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
  for row in json.loads((RESULTS / 'cluster_simulation.json').read_text())['rows']:
    if row['verdict'] and row['published'] != 1:
      groups.setdefault((row['experiment'], row['arm'], row['against']), []).append(row)
  lines = []
  for (experiment, arm, against), rows in groups.items():
    statement = f'{experiment}: the gain of `{arm}` over `{against}` is about the published one or above it'
    published = rows[0]['published']
    theirs = f'{published:.3g} (ROLL Flash{", second-hand" * (published not in ABSTRACT)})'
    verdicts = '<br>'.join(f'**{row["verdict"]}**' for row in rows)
    lines.append(f'| {statement} | {theirs} | {"<br>".join(map(gain, rows))} | {verdicts} |')
  return lines


def gain(row: Mapping[str, Any]) -> str:
  """Return a simulated gain as text."""
  text = f'{row["gain"]:.2f} ({row["low"]:.2f} to {row["high"]:.2f}) on {row["GPUs"]} GPUs'
  if row['dropped'] is None:
    return text
  return f'{text}; drops {100 * row["dropped"]:.0f} % of the samples; the others are {-100 * row["bias"]:.0f} % shorter than all'


def arms(experiment: Experiment) -> str:
  """Return what the names of the arms mean, as a folded list. HTML, which both the repository and the site can fold."""
  rows = [f'<li><code>{arm}</code>: {_settings(changes)}</li>' for arm, changes in experiment.arms.items()]
  beside = f', with <code>{_settings(experiment.settings)}</code>' if experiment.settings else ''
  return '\n'.join([f'<details><summary>The settings of the arms{beside}</summary><ul>', *rows, '</ul></details>\n'])


def before(experiment: Experiment, records: Records) -> list[str]:
  """Return a line on the models before training: sampled as in the comparisons, and greedily (benchmarks/warm_starts.py)."""
  rows = json.loads((RESULTS / 'warm_starts.json').read_text())['rows']
  greedy = [row['greedy'] for row in rows if row['task'] == experiment.task.name]
  if not greedy:
    return []
  starts = range(len(experiment.task.warm))
  of_seeds = {seed: np.mean(found['before']) for of_arm in records.values() for seed, found in of_arm.items()}
  of_start = [[score for seed, score in of_seeds.items() if seed % len(starts) == i] for i in starts]
  sampled, greedily = (' and '.join(f'{each:.2f}' for each in of) for of in ([np.mean(one) for one in of_start if one], greedy))
  return [f'Before training the two models solve {sampled} of the held-out problems if they sample, and {greedily} greedily.\n']


def means(experiment: Experiment, records: Records) -> str:
  """Return what the arms measured, as a folded table: the accuracy and each series, with means for each warm start."""
  names = (ACCURACY, REWARD, *experiment.series)
  rows = [_row('th', ('arm', ACCURACY, 'lowest seed', *names[1:]))]
  for arm, of_arm in records.items():
    first, *cells = (_by_start(of_arm, name, len(experiment.task.warm)) for name in names)
    lowest = f'{min(np.mean(found["scores"]) for found in of_arm.values()):.3g}' if of_arm else '-'
    rows.append(_row('td', (f'<code>{arm}</code>', first, lowest, *cells)))
  summary = 'Means of the runs: accuracy after training, and series over the steps; a number for each warm start'
  return '\n'.join([f'<details><summary>{summary}</summary><table>', *rows, '</table></details>\n'])


def _by_start(of_arm: Mapping[int, Mapping[str, Any]], name: str, starts: int) -> str:
  parts = []
  for i in range(starts):
    numbers = [np.mean(values(found, '', name)) for seed, found in of_arm.items() if seed % starts == i]
    parts.append(f'{np.nanmean(numbers):.3g}' if np.isfinite(numbers).any() else '-')
  return ' / '.join(parts)


def _row(cell: str, texts: Iterable[str]) -> str:
  return f'<tr>{"".join(f"<{cell}>{text}</{cell}>" for text in texts)}</tr>'


def versions(records: Records) -> str:
  """Return how many commits of sprl made the runs, and which seeds have arms of several commits, and of several machines."""
  commits, mixed = _mixed(records, 'commit')
  machines = _mixed(records, 'machine')[1]
  told = f', at {len(commits)} commits of sprl' if len(commits) > 1 else ''
  told += f' (of {mixed} different arms ran at different commits)' if mixed else ''
  return told + (f'; of {machines} different arms ran on different machines' if machines else '')


def _mixed(records: Records, fact: str) -> tuple[set[str], str]:
  """Return the values of a fact of the runs, and the seeds whose arms have several."""
  of_seeds: dict[int, set[str]] = {}
  for of_arm in records.values():
    for seed, found in of_arm.items():
      of_seeds.setdefault(seed, set()).add(found[fact])
  seeds = [str(seed) for seed, of in sorted(of_seeds.items()) if len(of) > 1]
  return set().union(*of_seeds.values()), f'seed{"s" * (len(seeds) > 1)} {", ".join(seeds)}' if seeds else ''


def _settings(changes: Mapping[str, Any]) -> str:
  return ', '.join(f'{key} = {html.escape(str(value))}' for key, value in changes.items()) or 'the defaults'


def reasons_of(experiment: Experiment) -> list[str]:
  """Return the reasons for claims that do not hold. Claims with the same reason share a line."""
  statements: dict[str, list[str]] = {}
  for claim in experiment.claims:
    if claim.reason:
      statements.setdefault(claim.reason, []).append(claim.statement)
  return [f'* {" ".join(several)} {reason}' for reason, several in statements.items()]


def section(experiment: Experiment, records: Records) -> str:
  """Return the section of an experiment: question, design, note, picture, claims, reasons."""
  runs = [found for of in records.values() for found in of.values()]
  missing = len(experiment.runs) - len(runs)
  machines = sorted({found['machine'] for found in runs})
  lines = [
    f'## {experiment.name}\n',
    f'**{experiment.question}**\n',
    f'{experiment.task.sentence}. {len(experiment.arms)} arms, {experiment.seeds} seeds, {experiment.steps} steps; '
    f'{len(runs)} runs on {", ".join(machines)}'
    + versions(records)
    + (f'; {missing} runs are missing' if missing else '')
    + '.\n',
    *before(experiment, records),
    *([experiment.note + '\n'] if experiment.note else []),
    f'![{experiment.question}](../benchmarks/results/claims/{experiment.name}.png)\n',
    arms(experiment),
    means(experiment, records),
    TABLE,
    *(line(claim, experiment, records) for claim in experiment.claims),
    *unplanned(experiment, records),
  ]
  if reasons := reasons_of(experiment):
    lines += ['\nThese claims do not hold here. The likely reasons, claim by claim:\n', *reasons]
  lines.append(
    f'\n`python benchmarks/claims {experiment.name}`; [result](../benchmarks/results/claims/{experiment.name}.json).\n'
  )
  return '\n'.join(lines)
