"""Health checks: the ranges in which the mismatch metrics of a healthy run stay (docs/methods/losses.md, "Health ranges")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sprl.guards.checks import HEALTHY


@dataclass(frozen=True)
class HealthCheck:
  """The value of a metric and the range in which it should be."""

  metric: str
  value: float
  low: float
  high: float

  @property
  def passed(self) -> bool:
    """Whether the value is in the range. NaN is not."""
    return self.low <= self.value <= self.high


def health_checks(record: Mapping[str, Any]) -> list[HealthCheck]:
  """Return a check for each metric of a line of metrics.jsonl that has a range."""
  return [HealthCheck(name, record[name], low, high) for name, (low, high) in HEALTHY.items() if name in record]


def health_markdown(found: list[HealthCheck]) -> str:
  """Return the checks as a Markdown table."""
  rows = [
    f'| `{g.metric}` | {g.value:.3g} | {g.low:.3g} to {g.high:.3g} | {"ok" if g.passed else "**look closer**"} |' for g in found
  ]
  return '\n'.join(['| metric | value | healthy | |', '|---|---|---|---|', *rows])
