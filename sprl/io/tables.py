"""Tables as Markdown: completions to be read by people, and rows of numbers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def samples_markdown(rows: Rows) -> str:
  """Return rows as Markdown: a heading `### 1 · reward 1.0 · finish stop` for each, then prompt, completion and answer."""
  blocks = []
  for number, row in enumerate(rows, 1):
    facts = [f'{name} {value}' for name, value in row.items() if name not in ('prompt', 'completion', 'answer')]
    blocks.append(f'### {" · ".join([str(number), *facts])}\n')
    blocks.append(f'Prompt\n\n{_fenced(row["prompt"])}\n')
    blocks.append(f'Completion\n\n{_fenced(row["completion"])}\n')
    if 'answer' in row:
      blocks.append(f'Answer\n\n{_fenced(str(row["answer"]))}\n')
  return '\n'.join(blocks)


def table_markdown(rows: Rows) -> str:
  """Return rows as a Markdown table with a column for each key of any row. Floats have four significant digits."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  lines = [names, ['---'] * len(names), *([_cell(row.get(name, '')) for name in names] for row in rows)]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def _cell(value: Any) -> str:
  text = f'{value:.4g}' if isinstance(value, float) else str(value)
  return text.replace('|', '\\|').replace('\n', ' ')


def _fenced(text: str) -> str:
  """Return a code block whose fence is longer than every run of backticks in `text`."""
  fence = '`' * max([3, *(len(run) + 1 for run in re.findall('`+', text))])
  return f'{fence}text\n{text}\n{fence}'
