"""The state of a run beside its train state: plain numbers, saved as JSON in every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RunState:
  """The state that a resumed run needs to continue exactly where it stopped.

  Everything else follows from the settings, the step number and the train state.
  """

  step: int = 0  # steps done
  capped: int = 0  # consecutive steps in which every completion was cut at its token limit (guards/stop.py)
  apart: int = 0  # consecutive steps in which sampler and learner were different policies (guards/stop.py)
  before: dict[str, Any] = field(default_factory=dict)  # held-out evaluation before the first update: metrics and samples
  after: dict[str, Any] = field(default_factory=dict)  # held-out evaluation after `step`; empty if there was none
  tokens_sampled: int = 0  # that the sampler drew for all steps, used or not; without those of repeated attempts
  tokens_trained: int = 0  # that the model wrote and an update saw
  prompts: dict[str, Any] = field(default_factory=dict)  # state of the stream of problems (RolloutSetup.state)
  scheduler: dict[str, Any] | None = None  # groups in flight (Scheduler.state); None before the first step
  amax: list[Any] = field(default_factory=list)  # largest queries, keys and values of past calibrations, newest last
  calibrated_updates: int = -1  # updates of the weights that the newest calibration saw
  base: str | None = None  # fingerprint of the frozen weights under adapters

  def to_json(self) -> dict[str, Any]:
    """Return the state as JSON-compatible values, without the step, which a checkpoint records itself."""
    return {name: value for name, value in asdict(self).items() if name != 'step'}

  @classmethod
  def from_json(cls, step: int, saved: Mapping[str, Any]) -> 'RunState':
    """Return the state saved by `to_json` in the checkpoint of `step`."""
    return cls(step=step, **saved)
