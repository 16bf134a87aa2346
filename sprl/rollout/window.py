"""How far rollouts may run ahead: credits, the staleness window, and which groups an update consumes (async_rollouts 2).

alpha bounds the age of every single sample: a group that the update v -> v + 1 consumes was started under a version
s >= v - alpha of the weights. Numbers of groups, with Bp groups an update:

    (I1) admission   started - refunded <= (v + 1) Bp + alpha Bp + extra      (alpha Bp is a whole number)
    (I2) buffer      running + complete <= (1 + alpha) Bp + extra             (what was consumed is in neither)
    (I3) window      v - s <= ceil(alpha) for every group consumed; of a fractional alpha, the oldest make up its fraction of Bp

`extra` are redundant groups (order completion only): there while a batch is gathered, `surplus` once it is taken. With `start`
and `deadline` I1 implies I3, and nothing is ever too old; `completion` needs `expired` to be dropped before each new version.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Entry:
  """A group as the window sees it."""

  number: int  # in the order of starting
  start_version: int


@dataclass
class Window:
  """The counts of one run. Only the controller changes it, one event at a time."""

  prompts: int  # Bp
  alpha: float
  order: Literal['start', 'deadline', 'completion'] = 'start'
  extra: int = 0
  version: int = 0  # v: finished updates
  gathering: bool = True  # a batch for the next update; once it is taken, only what later ones may use is started
  started: int = 0
  refunded: int = 0
  consumed: int = 0
  running: dict[int, Entry] = field(default_factory=dict)  # by number
  complete: dict[int, Entry] = field(default_factory=dict)  # in the order of completion

  @property
  def ahead(self) -> int:
    """alpha Bp: the groups that may be started before their update's turn. The settings make it a whole number."""
    return round(self.alpha * self.prompts)

  @property
  def live(self) -> int:
    """Groups that run or wait to be consumed."""
    return len(self.running) + len(self.complete)

  @property
  def most(self) -> int:
    """The live groups that the window has room for, without extra ones."""
    return self.prompts + self.ahead

  def may_start(self) -> bool:
    """Whether there is a credit for one more group."""
    extra = self.extra if self.gathering else 0
    credit = (self.version + 1) * self.prompts + self.ahead + extra
    return self.started - self.refunded < credit and self.live < self.most + extra

  def start(self, number: int) -> Entry:
    """Spends a credit: the group's age is counted from now."""
    assert self.may_start(), 'no credit for another group'
    self.started += 1
    self.running[number] = Entry(number, self.version)
    return self.running[number]

  def finish(self, number: int) -> None:
    """All that was asked of a group is there."""
    self.complete[number] = self.running.pop(number)

  def refund(self, number: int) -> None:
    """A group that will not be trained on gives its credit back."""
    (self.running if number in self.running else self.complete).pop(number)
    self.refunded += 1

  def ready(self) -> list[int] | None:
    """The groups that this update would consume, in the order of their numbers; None while it has to wait."""
    if self.live < self.prompts or len(self.complete) < self.prompts:
      return None
    if self.order == 'start':
      oldest = sorted({*self.running, *self.complete})[: self.prompts]
      return oldest if self.complete.keys() >= set(oldest) else None
    finished = list(self.complete) if self.order == 'completion' else sorted(self.complete)
    chosen = sorted(finished[: self.prompts])
    return chosen if self.order == 'completion' or self._leaves_time(chosen) else None

  def _leaves_time(self, chosen: Collection[int]) -> bool:
    """Whether those left behind can all be consumed before they are too old (order deadline)."""
    left = [e.start_version for e in (*self.running.values(), *self.complete.values()) if e.number not in chosen]
    return all(sum(start <= s for start in left) <= max(0, (s - self.version) * self.prompts + self.ahead) for s in set(left))

  def consume(self, numbers: Sequence[int]) -> None:
    """These groups are trained on now."""
    for number in numbers:
      del self.complete[number]
    self.consumed += len(numbers)
    self.gathering = False

  def surplus(self) -> list[int]:
    """The groups beyond the window's room once a batch is taken, which only redundancy starts: the oldest that still run,
    for whom the others did not wait, then the oldest."""
    over = self.live - self.ahead if self.extra else 0
    return [*sorted(self.running), *sorted(self.complete)][: max(over, 0)]

  def expired(self) -> list[int]:
    """The groups that will be too old for the update after this one."""
    oldest = self.version - math.ceil(self.alpha)
    return [e.number for e in (*self.running.values(), *self.complete.values()) if e.start_version <= oldest]

  def advance(self) -> None:
    """An update is finished."""
    self.version += 1
    self.gathering = True

  def state(self) -> dict[str, int]:
    """What a checkpoint holds of it: groups that live are asked anew, and spend their credits again."""
    return {'version': self.version, 'consumed': self.consumed}

  def restore(self, state: dict[str, int], live: int) -> None:
    """Continues from `state`, with `live` groups to be started again."""
    self.version, self.consumed = state['version'], state['consumed']
    self.started, self.refunded = self.consumed, 0
    self.running, self.complete, self.gathering = {}, {}, True
    assert live <= self.most + self.extra
