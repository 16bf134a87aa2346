"""The program that renders chat templates: `python -P template_process.py SECONDS BYTES`. It imports nothing of sprl.

A chat template is a program from a downloaded folder. It runs in jinja2's immutable sandbox, sees only plain strings, lists and
dicts, and gets the functions that transformers offers. A sandbox bounds neither time nor memory: one filter can build a text of
any length. So templates run in a process of their own. The kernel ends it when a request takes more than SECONDS of CPU time, and
it gets at most BYTES of memory beside what it has at its start.

A line of standard input is a request, a line of standard output its answer, both in JSON:

    {"source": text}                             {"variables": the names that the template reads}
    {"source": text, "variables": {...},         {"text": the conversation}
     "add_generation_prompt": bool, "time": ISO 8601 or null}
    any request that fails                       {"error": why, "valid": whether the template could be compiled}
"""

import datetime
import functools
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import jinja2.utils
from jinja2.exceptions import SecurityError

MAX_RENDERED = 4_000_000  # characters of a rendered conversation


def main(seconds: float, memory: int) -> None:
  """Answer requests until the input closes."""
  statm = Path('/proc/self/statm')
  if statm.exists():  # elsewhere memory is not limited
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  for line in sys.stdin.buffer:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    reply = json.dumps(answer(line))
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(reply.encode() + b'\n')
    sys.stdout.buffer.flush()


def answer(line: bytes) -> dict[str, Any]:
  """Return the answer to a request, a line of JSON. Templates can raise anything, and values can be nested too deeply."""
  valid = False
  try:
    request = json.loads(line)
    template, variables = compiled(request['source'])
    valid = True
    if 'variables' not in request:
      return {'variables': variables}
    return {'text': rendered(template, request['variables'], request['add_generation_prompt'], request['time'])}
  except Exception as error:
    return {'error': f'{type(error).__name__}: {" ".join(str(error).split())}'[:1000], 'valid': valid}


@functools.lru_cache(16)
def compiled(source: str) -> tuple[jinja2.Template, list[str]]:
  """Return a template, and the names that it reads and that the environment does not define."""
  environment = make_environment()
  variables = jinja2.meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
  return environment.from_string(source), sorted(variables)


def rendered(template: jinja2.Template, variables: dict[str, Any], add_generation_prompt: bool, time: str | None = None) -> str:
  """Return the text of a template. Raises any error of the template, and TemplateError for a text beyond MAX_RENDERED.

  `strftime_now` gives `time`, or the time of the clock if that is None.
  """
  now = datetime.datetime.now() if time is None else datetime.datetime.fromisoformat(time)
  parts, length = [], 0
  for part in template.generate(variables, add_generation_prompt=add_generation_prompt, strftime_now=now.strftime):
    parts.append(part)
    length += len(part)
    if length > MAX_RENDERED:
      raise jinja2.TemplateError(f'more than {MAX_RENDERED} characters')
  return ''.join(parts)


# --- the sandbox -----------------------------------------------------------------------------------------------------


class _Namespace(jinja2.utils.Namespace):
  """jinja2's namespace without names that could reach Python's internals."""

  def __setitem__(self, name, value):
    if name.startswith('_'):
      raise SecurityError(f'namespace attribute {name!r}')
    super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
  """Renders the body of `{% generation %} ... {% endgeneration %}`, which marks text of the assistant."""

  tags = {'generation'}  # noqa: RUF012  (jinja2's interface)

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def make_environment() -> jinja2.Environment:
  """Return the sandbox with the options and functions that transformers gives templates."""
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
    optimized=False,  # nothing is evaluated before a template is rendered
  )

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes HTML. Models were trained without that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  def namespace(*args, **kwargs):
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
      made[name] = value
    return made

  env.filters['tojson'] = tojson
  env.globals['namespace'] = namespace
  env.globals['raise_exception'] = raise_exception
  env.globals['strftime_now'] = None  # each rendering sets it
  return env


if __name__ == '__main__':
  main(float(sys.argv[1]), int(sys.argv[2]))
