"""The staleness window: how far rollouts may run ahead, and which groups a step consumes (docs/methods/async.md, eq. 1 to 6).

alpha bounds the age of every sample: a group that the step v -> v + 1 consumes started under a version s >= v - alpha of the
weights. The invariants, in numbers of groups with Bp groups per step:

    (I1) admission   started - refunded <= (v + 1) Bp + alpha Bp + extra
    (I2) buffer      running + complete <= (1 + alpha) Bp + extra
    (I3) window      v - s <= ceil(alpha) for every consumed group

alpha Bp is a whole number. With a fractional alpha the oldest version makes up at most its fraction of Bp. `extra` are redundant
groups (order `completion` only): they may run while a batch is gathered, and are `surplus` once it is taken. With the orders
`start` and `deadline` I1 implies I3, and no group is ever too old. With `completion` the `expired` groups must be dropped before
each new version.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Entry:
  """A group in the window."""

  number: int  # in the order of starting
  start_version: int


@dataclass
class Window:
  """The groups of one run that are started and not consumed, and the credits. Only the scheduler changes it."""

  prompts: int  # Bp
  alpha: float
  order: Literal['start', 'deadline', 'completion'] = 'start'
  extra: int = 0
  version: int = 0  # v: finished steps
  gathering: bool = True  # whether the next step still needs groups; after that only later steps do
  started: int = 0
  refunded: int = 0
  consumed: int = 0
  running: dict[int, Entry] = field(default_factory=dict)  # by number
  complete: dict[int, Entry] = field(default_factory=dict)  # in the order of completion

  @property
  def ahead(self) -> int:
    """alpha Bp: groups that may start before their step's turn. The settings make it a whole number."""
    return round(self.alpha * self.prompts)

  @property
  def live(self) -> int:
    """Number of groups that run or wait to be consumed."""
    return len(self.running) + len(self.complete)

  @property
  def most(self) -> int:
    """Largest number of live groups, without extra ones."""
    return self.prompts + self.ahead

  def may_start(self) -> bool:
    """Whether there is a credit for one more group."""
    extra = self.extra if self.gathering else 0
    credit = (self.version + 1) * self.prompts + self.ahead + extra
    return self.started - self.refunded < credit and self.live < self.most + extra

  def start(self, number: int) -> Entry:
    """Spend a credit. The group's age counts from now."""
    assert self.may_start(), 'no credit for another group'
    self.started += 1
    self.running[number] = Entry(number, self.version)
    return self.running[number]

  def finish(self, number: int) -> None:
    """Mark a group as complete."""
    self.complete[number] = self.running.pop(number)

  def refund(self, number: int) -> None:
    """Remove a group that will not be trained on, and give its credit back."""
    (self.running if number in self.running else self.complete).pop(number)
    self.refunded += 1

  def ready(self) -> list[int] | None:
    """The groups that this step consumes, by number. None: it has to wait."""
    if self.live < self.prompts or len(self.complete) < self.prompts:
      return None
    if self.order == 'start':
      oldest = sorted({*self.running, *self.complete})[: self.prompts]
      return oldest if self.complete.keys() >= set(oldest) else None
    finished = list(self.complete) if self.order == 'completion' else sorted(self.complete)
    chosen = sorted(finished[: self.prompts])
    return chosen if self.order == 'completion' or self._leaves_time(chosen) else None

  def _leaves_time(self, chosen: Collection[int]) -> bool:
    """Whether the groups left behind can all be consumed before they are too old (eq. 6)."""
    left = [e.start_version for e in (*self.running.values(), *self.complete.values()) if e.number not in chosen]
    return all(sum(start <= s for start in left) <= max(0, (s - self.version) * self.prompts + self.ahead) for s in set(left))

  def consume(self, numbers: Sequence[int]) -> None:
    """Remove the groups that a step trains on."""
    for number in numbers:
      del self.complete[number]
    self.consumed += len(numbers)
    self.gathering = False

  def surplus(self) -> list[int]:
    """The redundant groups that are left once a batch is taken (eq. 5): first the oldest running ones, then the oldest
    complete ones."""
    over = self.live - self.ahead if self.extra else 0
    return [*sorted(self.running), *sorted(self.complete)][: max(over, 0)]

  def expired(self) -> list[int]:
    """The groups that will be too old for the step after this one (eq. 4)."""
    oldest = self.version - math.ceil(self.alpha)
    return [e.number for e in (*self.running.values(), *self.complete.values()) if e.start_version <= oldest]

  def advance(self) -> None:
    """Count a finished step."""
    self.version += 1
    self.gathering = True

  def state(self) -> dict[str, int]:
    """The state for a checkpoint. Live groups start again after a resume, and spend their credits again."""
    return {'version': self.version, 'consumed': self.consumed}

  def restore(self, state: dict[str, int], live: int) -> None:
    """Continue from a state, with `live` groups that will start again."""
    self.version, self.consumed = state['version'], state['consumed']
    self.started, self.refunded = self.consumed, 0
    self.running, self.complete, self.gathering = {}, {}, True
    assert live <= self.most + self.extra
