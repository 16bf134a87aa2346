"""Which rows of a data set a split has: slices of a split, and conditions on the columns.

train[:95%]   train[95%:]   train[100:200]     slices, as the `datasets` package writes them
level>=3      type==algebra      answer!=null      problem~^Find      filters: COLUMN OPERATOR VALUE
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sprl.config import SettingsError, Task
from sprl.tasks.tables import Line, Table

ABSENT = object()  # the value of a column that a row does not have


# --- splits ----------------------------------------------------------------------------------------------------------

_SPLIT = re.compile(r'([\w.-]+)(?:\[(-?\d{1,18}%?)?:(-?\d{1,18}%?)?\])?')


@dataclass(frozen=True)
class Split:
  """A split by name, and the part of it that is used: bounds such as `10`, `95%`, or None for an end."""

  name: str
  start: str | None = None
  stop: str | None = None

  def rows(self, table: Table) -> range:
    """Return the indices of the rows of the part. A percentage is rounded to the nearest row, so that two parts can meet."""
    count = len(table)

    def place(bound: str | None) -> int | None:
      if bound is None or not bound.endswith('%'):
        return None if bound is None else int(bound)
      return math.floor(int(bound[:-1]) * count / 100 + 0.5)

    return range(*slice(place(self.start), place(self.stop)).indices(count))


def parse_split(text: str) -> Split:
  """Return the split of a text such as `train` or `train[:95%]`. Raises SettingsError."""
  found = _SPLIT.fullmatch(text)
  if found is None or any(b and b.endswith('%') and abs(int(b[:-1])) > 100 for b in found.groups()[1:]):
    raise SettingsError(
      f'config.task.splits has {text!r}: expected a split such as train, or a part such as train[:95%], train[95%:], train[:1000]'
    )
  return Split(*found.groups())


# --- filters ---------------------------------------------------------------------------------------------------------

_FILTER = re.compile(r'\s*([\w.-]+?)\s*(==|!=|>=|<=|>|<|~)\s*(.*?)\s*', re.DOTALL)
_COMPARED = {'>=': operator.ge, '<=': operator.le, '>': operator.gt, '<': operator.lt}


@dataclass(frozen=True)
class Filter:
  """A condition on one column."""

  text: str
  column: str
  compare: str
  value: str

  def keeps(self, where: str, row: Mapping[str, Any]) -> bool:
    """Return whether a row meets the condition. A null value, or a column that the row does not have, meets
    only `==null` and `!=` of another value.

    Raises SettingsError if the value of the row cannot be compared.
    """
    found = at(row, self.column)
    found = None if found is ABSENT else found
    if self.compare in ('==', '!='):
      return self._equal(found) == (self.compare == '==')
    if found is None:
      return False
    if self.compare == '~':
      return re.search(self.value, self._text(where, found)) is not None
    number = _number(found)
    if number is None:
      raise SettingsError(
        f'config.task.filters has {self.text!r}: {where} has {self.column} = {found!r:.60}, which is not a number; '
        f'expected ==, != or ~ for it'
      )
    return _COMPARED[self.compare](number, float(self.value))

  def _equal(self, found: Any) -> bool:
    match found:
      case None:
        return self.value == 'null'
      case bool():
        return self.value.lower() == str(found).lower()
      case int() | float():
        return _number(self.value) == found
    return str(found) == self.value

  def _text(self, where: str, found: Any) -> str:
    if not isinstance(found, str | int | float):
      kind = type(found).__name__
      raise SettingsError(f'config.task.filters has {self.text!r}: {where} has a {kind}; expected a column of text')
    return str(found)


def parse_filter(text: str) -> Filter:
  """Return the filter of a text such as `level>=3`. Raises SettingsError."""
  found = _FILTER.fullmatch(text)
  if found is None or not found[3]:
    wrong = 'expected COLUMN OPERATOR VALUE with the operator ==, !=, >=, <=, >, < or ~, such as level>=3 or type==algebra'
    raise SettingsError(f'config.task.filters has {text!r}: {wrong}')
  _, compare, value = found.groups()
  if compare in _COMPARED and _number(value) is None:
    raise SettingsError(f'config.task.filters has {text!r}: expected a number after {compare}')
  if compare == '~':
    try:
      re.compile(value)
    except re.error as error:
      raise SettingsError(f'config.task.filters has {text!r}: expected a regular expression after ~: {error}') from error
  quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in '\'"'
  return Filter(text, found[1], compare, value[1:-1] if quoted else value)


def _number(value: Any) -> float | None:
  try:
    return None if isinstance(value, bool) else float(value)
  except (TypeError, ValueError, OverflowError):
    return None


def at(row: Mapping[str, Any], column: str) -> Any:
  """Return the value of a column. `a.b` is the column of that name, or else `b` of the dict `a`. ABSENT if there is none."""
  if column in row:
    return row[column]
  first, dot, rest = column.partition('.')
  inner = row.get(first) if dot else None
  return at(inner, rest) if isinstance(inner, Mapping) else ABSENT


# --- rows ------------------------------------------------------------------------------------------------------------


def selected(task: Task, split: str, read: Callable[[str], Table]) -> Iterator[tuple[int, Line]]:
  """Yield (index, (place, row)) of the rows of a split that meet all filters. The index counts the rows of the whole split.

  Args:
    task: the settings.
    split: a split, or a part of one, such as `train[:95%]`.
    read: returns the table of a split by its name.

  Raises SettingsError if the split or a filter cannot be parsed; and after the last row, if no row has a filter's column, or none
  meets all filters.
  """
  part, filters = parse_split(split), [parse_filter(text) for text in task.filters]
  table = read(part.name)
  inside = None if part.start is part.stop is None else part.rows(table)
  kept = seen = 0
  columns: dict[str, None] = {}  # in their order
  absent = {f.column for f in filters}
  for i, (where, row) in enumerate(table):
    if inside is not None and i not in inside:
      continue
    seen += 1
    if absent:
      columns |= dict.fromkeys(row)
      absent = {column for column in absent if at(row, column) is ABSENT}
    if all(f.keeps(where, row) for f in filters):
      kept += 1
      yield i, (where, row)
  if absent and seen:
    raise SettingsError(
      f'config.task.filters = {task.filters!r}: no row has the column {sorted(absent)[0]}; there are {", ".join(columns)}'
    )
  if not kept:
    empty = f'config.task.path = {task.path!r}: its {split} split is empty; expected at least one problem'
    none = f'config.task.filters = {task.filters!r}: expected at least one problem; none of the {seen} rows of {split} meets them'
    raise SettingsError(none if seen else empty)
