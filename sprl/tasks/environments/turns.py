"""The actions of an episode, counted: the one piece of state that all shipped environments share."""


class Turns:
  """Counts actions up to `limit`, after which the episode is cut short; refuses one before the first reset or after the end."""

  def __init__(self, limit: int):
    if limit < 1:
      raise ValueError(f'max_actions = {limit}: expected 1 or more')
    self.limit, self.taken, self._open = limit, 0, False

  def begin(self) -> None:
    """A new episode."""
    self.taken, self._open = 0, True

  def take(self) -> None:
    """One action more. Raises RuntimeError where no episode is under way."""
    if not self._open:
      raise RuntimeError('no episode is under way: reset comes before step')
    self.taken += 1

  def end(self, terminated: bool) -> bool:
    """Whether the episode is truncated by this action, which is its last if it terminated it."""
    truncated = self.taken >= self.limit and not terminated
    self._open = not (terminated or truncated)
    return truncated
