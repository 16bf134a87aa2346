"""`compare` compares runs: their scores as numbers, and the page of `python -m sprl.report`."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sprl.api.training import Training
from sprl.config import SettingsError
from sprl.foreign import expanded
from sprl.io.arm_scores import ArmRow, score_rows
from sprl.io.arms import Arm, arms_of, matching, read_runs
from sprl.io.comparison import score_text, write_comparison


@dataclass(frozen=True)
class Comparison:
  """Several runs, as arms: runs that differ only in the seed."""

  arms: tuple[Arm, ...]

  @cached_property
  def rows(self) -> list[ArmRow]:
    """One dictionary for each arm, for `pandas.DataFrame`. What is not known is NaN.

        arm, runs, seeds                             its name, and how many runs and seeds it has
        step, before, score, low, high               of the newest evaluation that all its runs have, with a 95 % interval
        difference, difference_low, difference_high  from the first arm, for the same seeds and problems
        covers                                       what the interval of the difference covers, or why there is none
        seconds                                      of the steps of a run
        METRIC                                       medians of speed, saved memory and mismatch, such as rollout_corr/k3_kl

    [The comparison of runs](../trackers.md#the-comparison-of-runs) describes the intervals.
    """
    return score_rows(self.arms)

  def save(self, path: str | Path = 'comparison.html') -> Path:
    """Write the page with scores, settings that differ, and curves. Return its path."""
    return write_comparison(self.arms, self.rows, expanded(path))

  def __repr__(self) -> str:
    return score_text(self.rows)


def compare(runs: Iterable[str | Path | Training]) -> Comparison:
  """Compare runs: their work directories, names with `*` that match several, or what `fit` or `open_run` returned.

      comparison = sprl.compare(['runs/dense-*', 'runs/sparse-*'])
      print(comparison)
      comparison.save('comparison.html')

  The first run is in the arm that the others are compared with. Raises FileNotFoundError for a folder without a run. Raises
  SettingsError for a name that matches no run, for fewer than two runs, and for a run that has logged nothing.
  """
  if isinstance(runs, str | Path | Training):
    raise SettingsError(f'runs = {runs!r:.200}: expected a list of work directories or runs')
  folders: list[Path] = []
  for run in runs:
    folders += [run.workdir] if isinstance(run, Training) else matching('runs', str(run))
  return Comparison(tuple(arms_of(read_runs(folders, 'runs'))))
