"""A counter of the actions of an episode, shared by the shipped environments."""


class Turns:
  """Counts actions up to `limit`, which truncates the episode. Refuses actions before the first reset and after the end."""

  def __init__(self, limit: int):
    if limit < 1:
      raise ValueError(f'max_actions = {limit}: expected 1 or more')
    self.limit, self.taken, self._open = limit, 0, False

  def begin(self) -> None:
    """Begin a new episode."""
    self.taken, self._open = 0, True

  def take(self) -> None:
    """Count one action. Raises RuntimeError if no episode is in progress."""
    if not self._open:
      raise RuntimeError('no episode is in progress: call reset before step')
    self.taken += 1

  def end(self, terminated: bool) -> bool:
    """Return whether this action truncates the episode. `terminated` says whether the action ended the episode by itself."""
    truncated = self.taken >= self.limit and not terminated
    self._open = not (terminated or truncated)
    return truncated
