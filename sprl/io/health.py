"""Health gates: the ranges in which the mismatch metrics of a healthy run stay (docs/methods/losses.md, "Health ranges")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sprl.objective.guards import HEALTHY


@dataclass(frozen=True)
class Gate:
  """The value of a metric and the range in which it should be."""

  metric: str
  value: float
  low: float
  high: float

  @property
  def passed(self) -> bool:
    """Whether the value is in the range. NaN is not."""
    return self.low <= self.value <= self.high


def gates(record: Mapping[str, Any]) -> list[Gate]:
  """Return a gate for each metric of a line of metrics.jsonl that has a range."""
  return [Gate(name, record[name], low, high) for name, (low, high) in HEALTHY.items() if name in record]


def gates_markdown(found: list[Gate]) -> str:
  """Return the gates as a Markdown table."""
  rows = [
    f'| `{g.metric}` | {g.value:.3g} | {g.low:.3g} to {g.high:.3g} | {"ok" if g.passed else "**look closer**"} |' for g in found
  ]
  return '\n'.join(['| metric | value | healthy | |', '|---|---|---|---|', *rows])
