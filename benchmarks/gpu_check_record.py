"""The rows of gpu_check.py: they are planned first, then measured part by part, each part within its time."""

import time
from collections.abc import Iterable, Iterator, Sequence

import jax
from gpu_check_bench import Case, Row, Rows, measured

NOT_RUN = 'not run'  # the status of a planned row


def key(row: Row) -> tuple[str, str]:
  """Return the check and case of a row, which name it."""
  return row['check'], row['case']


def planned(cases: Iterable[Case], earlier: Iterable[Row] = ()) -> dict[tuple[str, str], Row]:
  """Return a row for each case: the row of an earlier run if its status is ok, else one with the status `not run`."""
  done = {key(row): row for row in earlier if row['status'] == 'ok'}
  rows = [{'check': each.check, 'case': each.case, 'status': NOT_RUN} for each in cases]
  return {key(row): done.get(key(row), row) for row in rows}


def run(name: str, cases: Sequence[Case], rows: Rows, until: float) -> Iterator[Row]:
  """Measure the cases that have no row with status ok, and yield each row at once.

  No case begins after the time `until` (of time.monotonic, in seconds).
  """
  start, left = time.monotonic(), [each for each in cases if rows[each.check, each.case]['status'] != 'ok']
  while left and time.monotonic() <= until:
    case, *left = left
    row = measured(case, rows)
    print(
      '  '.join(f'{column} {value:.4g}' if isinstance(value, float) else f'{value}' for column, value in row.items()), flush=True
    )
    yield row
  cut = f'; out of time, not run: {"; ".join(f"{each.check} {each.case}" for each in left)}' if left else ''
  print(f'{name}: {time.monotonic() - start:.0f} s{cut}', flush=True)
  jax.clear_caches()


def deadline(start: float, until: float, part: float, later: float) -> float:
  """Return the time (of time.monotonic, in seconds) after which a part that begins at `start` begins no more cases.

  That is `part` seconds after `start`, or later if the parts after it leave time: they need `later` seconds. It is never after
  `until`.
  """
  return min(until, max(start + part, until - later))


def table(rows: Iterable[Row]) -> list[Row]:
  """Return the rows with the union of their columns."""
  rows = list(rows)
  between = dict.fromkeys(column for row in rows for column in row if column not in ('check', 'case', 'asked', 'status'))
  return [{column: row.get(column) for column in ('check', 'case', *between, 'asked', 'status')} for row in rows]


def summary(rows: Iterable[Row], **about: object) -> Row:
  """Return the summary: counts of rows and targets, missed targets, failed rows, and rows that did not run.

  A target that was not measured counts as asked, but neither as met nor as missed.
  """
  rows = list(rows)
  targets = [(row, each) for row in rows for each in filter(None, str(row.get('asked') or '').split('; '))]
  return {
    **about,
    'checks': len(rows),
    'asked': len(targets),
    'met': sum(each.endswith(', met') for _, each in targets),
    'missed': [f'{row["check"]} {row["case"]}: {each}' for row, each in targets if each.endswith('MISSED')],
    'bad': [f'{row["check"]} {row["case"]}'.strip() for row in rows if row['status'] not in ('ok', NOT_RUN)],
    'not run': [f'{row["check"]} {row["case"]}' for row in rows if row['status'] == NOT_RUN],
  }
