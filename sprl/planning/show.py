"""A plan as text, and as a picture of the memory of one device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from sprl.planning.estimate import Plan, RolloutPlan

GIB, MIB = 2**30, 2**20

_PARTS = {
  'parameters': '#2a6f97', 'optimiser': '#7b5ea7', 'reference': '#5c6470', 'copies': '#8c2f39', 'gradients': '#e07a1f',
  'activations': '#4c956c',
}  # fmt: skip
_COLOURS = _PARTS | {'sampler weights': '#c9a227', 'prefill': '#b8b8b8', 'sequences': '#c8553d'}


def as_json(value: Any) -> Any:
  """Return a dataclass, with its properties, as plain numbers and names."""
  if dataclasses.is_dataclass(value):
    properties = [name for name, each in vars(type(value)).items() if isinstance(each, property)]
    return {name: as_json(getattr(value, name)) for name in (*(field.name for field in dataclasses.fields(value)), *properties)}
  return [as_json(each) for each in value] if isinstance(value, tuple | list) else value


def as_text(plan: Plan) -> str:
  """Return the plan as a page of text."""
  d, shape, update, work, asked = plan.device, plan.shape, plan.update, plan.work, plan.evaluation
  where = 'on separate devices' if plan.apart else "on the learner's devices"
  parts = [f'{getattr(update, name) / GIB:.2f}' for name in _PARTS]
  lines = [
    f'{plan.model}: {plan.parameters / 1e9:.2f} B parameters; learner {plan.learner}, rollouts {plan.rollout}, {where}',
    f'{d.name}: {d.memory / 1e9:.4g} GB, of which {plan.usable / 1e9:.4g} may be filled; {d.bandwidth / 1e12:.4g} TB/s; '
    f'{d.bfloat16 / 1e12:.4g} TFLOP/s in bfloat16; links {d.link / 1e9:.4g} GB/s, network {d.network / 1e9:.4g} GB/s',
    f'  ({d.source})',
    *([f'flags for this layout: {" ".join(plan.flags)}'] if plan.flags else []),
    '',
    f'Update, on each device ({shape.micros} microbatches of {shape.rows // plan.learner.rows} x {shape.tokens} tokens; '
    f'model.remat = {plan.remat!r}):',
    '',
    *table(
      ['GiB', *_PARTS, 'total', 'fits'],
      [['', *parts, f'{update.total / GIB:.2f}', _fits(update.total + plan.caches, plan.usable)]],
    ),
    *([f"  and {update.host / GIB:.2f} GiB of moments in the host's memory, streamed past each device"] if update.host else []),
    *([f'  beside {plan.caches / GIB:.2f} GiB of rollouts that continue after it (rollout.sync=keep)'] if plan.caches else []),
    '',
    f'  all of a step: {work.flops / 1e15:.3g} PFLOP, {work.bytes / 1e12:.3g} TB of memory, {work.sent / 1e9:.3g} GB sent; '
    f'at least {work.seconds:.3g} s if every answer has max_tokens, {work.tokens_per_second:,.0f} packed tokens/s on all '
    f'devices; MFU at most {plan.most_mfu:.0%}',
    '',
    f'Rollouts of {plan.rows_asked:,} sequences, on each device:',
    '',
    *table(
      ['', 'cache', 'KV of one', 'weights', 'asked', 'a step', 'GFLOP', 'GB', 'tokens/s, all', 'would fit', 'tokens/s, all'],
      [_row(kind) for kind in plan.kinds],
    ),
    '',
    f'Evaluation (eval.memory={asked.memory}) of {asked.rows_asked:,} sequences: {asked.rows:,} on each device, '
    f'{asked.total / GIB:.2f} GiB with the state and the sampler weights; fits: {_fits(asked.total, plan.usable)}',
    '',
    'Weights and cache are counted; activations are estimated. Times are lower bounds that no program reaches. With shorter '
    'answers an update runs fewer microbatches.',
  ]
  return '\n'.join(lines)


def _fits(total: int, usable: float) -> str:
  return 'yes' if total <= usable else f'no, {(total - usable) / GIB:.1f} too much'


def _row(kind: RolloutPlan) -> list[str]:
  cells = [kind.name, f'{kind.slots:,} slots', f'{kind.kv_bytes / MIB:.1f} MiB', f'{kind.memory.weights / GIB:.2f} GiB']
  if kind.rows < 1:
    return [*cells, *[''] * 5, 'none', '']
  step, rows = kind.step, f'{kind.rows:,}' if kind.rows == kind.asked else f'{kind.rows:,} of {kind.asked:,}'
  return [
    *cells, rows, f'{step.seconds * 1e3:.2f} ms', f'{step.flops / 1e9:,.0f}', f'{step.bytes / 1e9:.2f}',
    f'{step.tokens_per_second:,.0f}', f'{kind.most_rows:,}', f'{kind.full.tokens_per_second:,.0f}',
  ]  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  """Return the lines of a table: the first column aligned to the left, the others to the right."""
  widths = [max(map(len, column)) for column in zip(head, *rows)]
  return [
    '  ' + '  '.join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
    for row in (head, *rows)
  ]


def as_figure(plan: Plan) -> Figure:
  """Draw the memory of the update, and of each kind of rollouts with as many sequences as are asked for and fit."""
  update = {name: getattr(plan.update, name) for name in _PARTS}
  state = {} if plan.apart else {name: update[name] for name in ('parameters', 'optimiser', 'reference')}
  bars = {'update': (update | {'sequences': plan.caches}, '')}
  for kind in plan.kinds:
    held, label = kind.memory, f'{kind.rows:,} sequences; {kind.most_rows:,} would fit' if kind.most_rows > 0 else 'does not fit'
    own = {'sampler weights': held.weights, 'prefill': held.prefill, 'sequences': kind.rows * held.row + held.kept}
    bars[kind.name] = state | own, label
  figure = Figure(figsize=(8.0, 3.2), layout='constrained')
  axes = figure.subplots()
  left = [0.0] * len(bars)
  for name, colour in _COLOURS.items():
    sizes = [parts.get(name, 0) / GIB for parts, _ in bars.values()]
    axes.barh(list(bars), sizes, left=left, color=colour, label=name)
    left = [start + size for start, size in zip(left, sizes)]
  for y, (_, label) in enumerate(bars.values()):
    axes.text(left[y], y, f' {label}', va='center', fontsize=7.5, color='#333333')
  axes.axvline(plan.usable / GIB, color='#222222', linewidth=1, linestyle='--')
  axes.set_xlim(0, max(plan.usable / GIB * 1.05, max(left) * 1.35))
  axes.invert_yaxis()
  axes.set_xlabel(f'GiB of one {plan.device.name}; dashed: limit (--usable)')
  axes.set_title(f'{plan.model}: learner {plan.learner}, rollouts {plan.rollout}', fontsize=9, loc='left')
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(fontsize=7, frameon=False, ncols=4, loc='upper center', bbox_to_anchor=(0.5, -0.22))
  return figure
