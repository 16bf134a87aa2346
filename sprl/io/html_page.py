"""The parts of a page of sprl: one HTML file that needs no server.

The page holds its style, its one script (sprl/web/report.js), and the data that the script draws. Its content security policy
lets the browser run this script only. Text that a model or a user wrote must be escaped, as `table` does.
"""

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files as resources
from typing import Any

from sprl.io.report_charts import Chart


def page(title: str, header: str, sections: Mapping[str, str], found: Mapping[str, Any], source: str) -> str:
  """Return a page.

  `header` is HTML, and so are the sections, by title. `found` maps the id of each chart, and `timeline`, to what report.js draws
  there. The footer says that `source` holds the numbers.
  """
  script, style = (resources('sprl').joinpath(f'web/report.{end}').read_text(encoding='utf-8') for end in ('js', 'css'))
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  links = ''.join(f'<a href="#{_anchor(name)}">{name}</a>' for name in sections)
  body = ''.join(f'<section id="{_anchor(name)}"><h2>{name}</h2>{text}</section>' for name, text in sections.items())
  return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>{escape(title)} · sprl</title>
<style>{style}</style>
</head>
<body>
<header>{header}</header>
<nav>{links}</nav>
<main>{body}</main>
<footer>Written by sprl at {date(time.time())}. {source} holds the numbers.</footer>
<noscript><p class="absent">The charts and the timeline need JavaScript. It is part of this file.</p></noscript>
<script type="application/json" id="data">{_json(found)}</script>
<script>{script}</script>
</body>
</html>
"""


def headline(title: str, facts: Sequence[str]) -> str:
  """Return the title of a page and a line of facts."""
  return f'<h1>{escape(title)}</h1><p class="facts">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</p>'


def section_of_charts(found: dict[str, Any], key: str, made: Sequence[Chart], absent_because: str) -> str:
  """Return the places of the charts, whose data is added to `found`; the sentence `absent_because` if there are none."""
  made = [chart for chart in made if chart['series']]
  if not made:
    return absent(absent_because)
  places = []
  for number, chart in enumerate(made):
    found[f'{key}-{number}'] = chart
    wide = ' wide' if chart.get('wide') else ''
    places.append(f'<figure class="chart{wide}" data-chart="{escape(key)}-{number}"></figure>')
  return f'<div class="grid">{"".join(places)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Return a table of texts, which are escaped."""
  head = ''.join(f'<th>{escape(name)}</th>' for name in heads)
  body = ''.join(f'<tr>{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>' for row in rows)
  return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def absent(why: str) -> str:
  """Return a sentence in the place of something that a page lacks."""
  return f'<p class="absent">{escape(why)}</p>'


def note(text: str) -> str:
  """Return a sentence below a title."""
  return f'<p class="note">{escape(text)}</p>'


def date(seconds: float) -> str:
  """Return a time in seconds since 1970 as text."""
  return time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(seconds))


def _anchor(title: str) -> str:
  return title.lower().replace(' ', '-')


def _json(data: Mapping[str, Any]) -> str:
  """Return JSON that a script element can hold: without `<`, which could end the element."""
  return json.dumps(data, separators=(',', ':'), allow_nan=False).replace('<', '\\u003c')
