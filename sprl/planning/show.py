"""A plan for people: a page of text, and a picture of what fills a device."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from sprl.planning.plan import Kind, Plan

GIB, MIB = 2**30, 2**20

_PARTS = {
  'parameters': '#2a6f97', 'optimiser': '#7b5ea7', 'reference': '#5c6470', 'gradients': '#e07a1f', 'activations': '#4c956c',
}  # fmt: skip
_WEIGHTS, _FIXED, _ROWS = '#c9a227', '#b8b8b8', '#c8553d'


def page(plan: Plan) -> str:
  """The plan as text."""
  d, update, work, asked = plan.device, plan.update, plan.work, plan.evaluation
  where = 'on devices of their own' if plan.apart else "on the learner's devices"
  shape, there = plan.shape, plan.shape.rows // plan.learner.rows
  lines = [
    f'{plan.model}: {plan.parameters / 1e9:.2f} B parameters; learner {plan.learner}, rollouts {plan.rollout}, {where}',
    f'{d.name}: {d.memory / 1e9:.4g} GB, of which {plan.usable / 1e9:.4g} may be filled; {d.bandwidth / 1e12:.4g} TB/s; '
    f'{d.bfloat16 / 1e12:.4g} TFLOP/s in bfloat16; links {d.link / 1e9:.4g} GB/s, network {d.network / 1e9:.4g} GB/s',
    f'  ({d.source})',
    *([f'a run laid out so: {" ".join(plan.flags)}'] if plan.flags else []),
    '',
    f'An update, on each device ({shape.micros} microbatches of {there} x {shape.tokens} tokens):',
    '',
    *table(
      ['GiB', *(name for name in _PARTS), 'together', 'fits'],
      [
        [
          '',
          *(f'{getattr(update, name) / GIB:.2f}' for name in _PARTS),
          f'{update.total / GIB:.2f}',
          _fits(update.total, plan.usable),
        ]
      ],
    ),
    *([f"  and {update.host / GIB:.2f} GiB of moments in the host's memory, streamed past each device"] if update.host else []),
    '',
    f"  all of a step's: {work.flops / 1e15:.3g} PFLOP, {work.bytes / 1e12:.3g} TB of memory, {work.sent / 1e9:.3g} GB sent; "
    f'{plan.seconds:.3g} s at the least, {work.tokens / plan.seconds:,.0f} tokens/s on all devices',
    '',
    f'Rollouts of {plan.rows_asked:,} sequences, on each device:',
    '',
    *table(
      ['', 'cache', 'KV of one', 'weights', 'asked', 'a step', 'GFLOP', 'GB', 'tokens/s, all', 'would fit', 'tokens/s, all'],
      [_row(kind) for kind in plan.kinds],
    ),
    '',
    f'An evaluation (eval.memory={asked.memory}) of {asked.rows_asked:,} sequences: {asked.rows:,} on each device, '
    f"{asked.total / GIB:.2f} GiB with the state and rollouts' weights; fits: {_fits(asked.total, plan.usable)}",
    '',
    'Weights and cache are counted; activations are estimated; times are what the ceilings allow, and no program reaches them.',
  ]
  return '\n'.join(lines)


def _fits(total: int, usable: float) -> str:
  return 'yes' if total <= usable else f'no, {(total - usable) / GIB:.1f} too much'


def _row(kind: Kind) -> list[str]:
  cache = f'{kind.slots:,} slots'
  told = [kind.name, cache, f'{kind.kv_bytes / MIB:.1f} MiB', f'{kind.memory.weights / GIB:.2f} GiB']
  if kind.rows < 1:
    return [*told, *[''] * 5, 'none', '']
  step = kind.step
  return [
    *told, f'{kind.rows:,}', f'{kind.seconds * 1e3:.2f} ms', f'{step.flops / 1e9:,.0f}', f'{step.bytes / 1e9:.2f}',
    f'{step.tokens / kind.seconds:,.0f}', f'{kind.most_rows:,}', f'{kind.full.tokens / kind.full_seconds:,.0f}',
  ]  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  """Columns as wide as they need be: the first to the left, the others to the right."""
  widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
  return [
    '  ' + '  '.join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
    for row in (head, *rows)
  ]


def picture(plan: Plan) -> Figure:
  """Bars of one device's memory: the update, and rollouts of each kind with as many sequences as are asked for and fit."""
  figure = Figure(figsize=(8.0, 3.2), layout='constrained')
  axes = figure.subplots()
  names = ['update', *(kind.name for kind in plan.kinds)]
  beside = [name for name in _PARTS if name in ('parameters', 'optimiser', 'reference') and not plan.apart]
  columns: dict[str, list[float]] = {
    name: [getattr(plan.update, name), *(getattr(plan.update, name) if name in beside else 0 for _ in plan.kinds)]
    for name in _PARTS
  }
  served = [kind.memory.weights for kind in plan.kinds]
  columns |= {
    'weights as served': [0, *served],
    'prefill': [0, *(kind.memory.biases + kind.memory.prefill for kind in plan.kinds)],
    'sequences': [0, *(kind.rows * kind.memory.row for kind in plan.kinds)],
  }
  colours = _PARTS | {'weights as served': _WEIGHTS, 'prefill': _FIXED, 'sequences': _ROWS}
  left = [0.0] * len(names)
  for name, sizes in columns.items():
    axes.barh(names, [size / GIB for size in sizes], left=left, color=colours[name], label=name)
    left = [start + size / GIB for start, size in zip(left, sizes)]
  for y, kind in enumerate(plan.kinds, 1):
    most = f'{kind.rows:,} sequences; {kind.most_rows:,} would fit' if kind.most_rows > 0 else 'does not fit'
    axes.text(left[y], y, f' {most}', va='center', fontsize=7.5, color='#333333')
  axes.axvline(plan.usable / GIB, color='#222222', linewidth=1, linestyle='--')
  axes.set_xlim(0, max(plan.usable / GIB * 1.05, max(left) * 1.35))
  axes.invert_yaxis()
  axes.set_xlabel(f'GiB of one {plan.device.name}; dashed: what may be filled')
  axes.set_title(f'{plan.model}: learner {plan.learner}, rollouts {plan.rollout}', fontsize=9, loc='left')
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(fontsize=7, frameon=False, ncols=4, loc='upper center', bbox_to_anchor=(0.5, -0.22))
  return figure
