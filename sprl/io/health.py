"""Gates that a healthy run's mismatch metrics stay within (spec: fp8_rollouts 5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sprl.objective.guards import HEALTHY


@dataclass(frozen=True)
class Gate:
  """One metric, the range it should stay in, and where a run stands."""

  metric: str
  value: float
  low: float
  high: float

  @property
  def passed(self) -> bool:
    """Whether the value is in range; NaN is not."""
    return self.low <= self.value <= self.high


def gates(record: Mapping[str, Any]) -> list[Gate]:
  """The gates of the metrics that a line of metrics.jsonl holds."""
  return [Gate(name, record[name], low, high) for name, (low, high) in HEALTHY.items() if name in record]


def gates_markdown(found: list[Gate]) -> str:
  """A table of gates for people."""
  rows = [
    f'| `{g.metric}` | {g.value:.3g} | {g.low:.3g} to {g.high:.3g} | {"ok" if g.passed else "**look closer**"} |' for g in found
  ]
  return '\n'.join(['| metric | value | healthy | |', '|---|---|---|---|', *rows])
