"""Chat templates: random programs in the template language, and changes of real templates.

A template is rendered or raises TokenizerError, within the limits of time and memory, and the next one is rendered after it.
The memory is the peak of the renderer process's address space, which only Linux tells.
In the sandbox no attribute and no element is a module, a class, a function or a part of Python's machinery.
"""

import contextlib
import random
import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hermes
import jinja2
import values

from sprl.io import template_process, templates
from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny

SECONDS = 60.0
LIMIT = 0.3  # seconds of CPU time for a template
WALL = 15.0  # seconds for two requests, each up to LIMIT, and a new process: less than 3 s alone, more on a busy machine
MEMORY = 1 << 28  # bytes that the renderer process may add
SLACK = 1 << 24  # bytes by which the address space of two processes may differ at their start
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + date_string + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at a time!") }}{%- endif %}
        {%- for arg_name, arg_val in message.tool_calls[0].function.arguments | items %}
            {{- arg_name + '="' + arg_val|string + '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWEN = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- macro render_extra_keys(json_dict, handled_keys) -%}
    {%- if json_dict is mapping %}
        {%- for json_key in json_dict if json_key not in handled_keys %}{{- json_dict[json_key] | tojson | safe }}{%- endfor %}
    {%- endif %}
{%- endmacro -%}
{%- for tool in tools or [] %}{{- render_extra_keys(tool.function, ['name']) }}{%- endfor %}
"""
REAL = (hermes.TEMPLATE, LLAMA, QWEN)
CONVERSATION = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'What is 2 + 3? 🙂'},
  {'role': 'assistant', 'content': None, 'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 2, 'b': '3'}}}]},
  {'role': 'tool', 'content': '5', 'name': 'add'},
]
NAMES = (
  'messages',
  'm',
  'i',
  'x',
  'ns',
  'ns.a',
  'tools',
  'loop',
  'loop.index',
  'bos_token',
  'f',
  'caller',
  'varargs',
  'kwargs',
  'self',
)
DEFINED = ('messages', 'messages[0]', 'messages[1].content', 'bos_token', 'ns.a', 'x', 'range(3)', '(messages | length)')
NAMES += ('cycler', 'joiner', 'lipsum', 'dict', 'range', 'namespace', 'raise_exception', 'strftime_now', 'undefined')
DUNDERS = ('__class__', '__globals__', '__init__', '__mro__', '__subclasses__', '__code__', '__self__', '__dict__', '__module__')
DUNDERS += (
  '__func__',
  '__builtins__',
  '__getattribute__',
  '__reduce__',
  'mro',
  'gi_frame',
  'f_back',
  'func_globals',
  'environment',
)
METHODS = tuple(sorted({n for kind in (str, list, dict, tuple, int, float) for n in dir(kind) if not n.startswith('__')}))
LITERALS = (
  '0',
  '1',
  '-1',
  '2',
  '7',
  '1000',
  '10**9',
  '2**70',
  '1.5',
  '1e308',
  'none',
  'true',
  "''",
  "'a'",
  "'{0.__class__}'",
  "'%s'",
)
LITERALS += (
  "'%999999999d'",
  "'{:999999999}'",
  '[]',
  '[1, 2]',
  '{}',
  "{'a': 1}",
  "'<eos>'",
  "'é🙂'",
  '()',
  "'a' * 999",
  '[0] * 999',
)
COSTLY = (  # each ends at a limit: of time, memory, or the length of the text
  '{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}',
  '{{ 9 ** (9 ** 9) }}',
  "{{ 'a' | center(10 ** 9) | length }}",
  "{{ 'a' * 10 ** 8 }}",
  '{{ ([0] * 10 ** 8) | length }}',
  '{% set ns = namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a = ns.a + ns.a + [i] %}{% endfor %}',
  "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) | length }}",
  "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
  '{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}{{ f(90) }}',
)


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  write_tiny(folder)
  filters, tests = sorted(template_process.make_environment().filters), sorted(template_process.make_environment().tests)
  tests = [test for test in tests if test.isidentifier()]
  before = templates.SECONDS, templates.MEMORY
  templates.SECONDS, templates.MEMORY = LIMIT, MEMORY
  templates.restart()
  templates.render('x', {}, True)
  yield SimpleNamespace(folder=folder, filters=filters, tests=tests, most=peak() + MEMORY + SLACK)
  templates.SECONDS, templates.MEMORY = before
  templates.restart()


# --- random programs ---------------------------------------------------------------------------------------------------


def expression(rng: random.Random, world: Any, depth: int = 3) -> str:
  if depth == 0 or rng.random() < 0.15:
    return rng.choice(DEFINED if rng.random() < 0.7 else NAMES) if rng.random() < 0.6 else f'({rng.choice(LITERALS)})'
  one = lambda: expression(rng, world, depth - 1)  # noqa: E731
  some = lambda: ', '.join(one() for _ in range(rng.choice((0, 1, 1, 2))))  # noqa: E731
  match rng.randrange(9):
    case 0:
      return f'({one()} {rng.choice(("+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "==", "<", "in", "not in"))} {one()})'
    case 1 | 2:
      arguments = some()
      return f'({one()} | {rng.choice(world.filters)}' + (f'({arguments}))' if arguments else ')')
    case 3:
      return f'({one()} is {rng.choice(world.tests)})'
    case 4 | 5:
      return f'{one()}.{rng.choice(METHODS)}({some()})'
    case 6:
      name = rng.choice(DUNDERS)
      hidden = f'.{name}', f"['{name}']", f" | attr('{name}')", f" | map(attribute='{name}') | list"
      return f'({one()}{rng.choice(hidden)})' if rng.random() < 0.7 else f'{one()}[{one()}]'
    case 7:
      return f'{one()}({some()})'
  return rng.choice((f'({one()} if {one()} else {one()})', f'[{some()}]', f'{one()}[{one()}:{one()}]', f"{{'a': {one()}}}"))


def statements(rng: random.Random, world: Any, depth: int = 3, loops: bool = False) -> str:
  """Return a few statements. `loops` says whether they are in a loop."""
  return ''.join(statement(rng, world, depth, loops) for _ in range(rng.choice((1, 1, 2, 3))))


def statement(rng: random.Random, world: Any, depth: int, loops: bool) -> str:
  kind = rng.randrange(13)
  value, inner = expression(rng, world, 2), statements(rng, world, depth - 1, loops=kind < 3) if depth else '-'
  match kind:
    case 0:
      return f'{{% for i in {value} %}}{inner}{{% else %}}e{{% endfor %}}'
    case 1:
      return f'{{% for i in range({rng.choice(("3", "99", "9999", value))}) %}}{inner}{{% endfor %}}'
    case 2:
      return f'{{% for m in messages recursive %}}{inner}{{{{ loop(messages[1:]) }}}}{{% endfor %}}'
    case 3:
      return f'{{% if {value} %}}{inner}{{% endif %}}'
    case 4:
      return f'{{% set x = {value} %}}'
    case 5:
      return f'{{% set ns = namespace(a={value}) %}}' if rng.random() < 0.4 else f'{{% set ns.a = {value} %}}'
    case 6:
      doubled = f'{{% set ns.a = {expression(rng, world, 1)} ~ ns.a ~ ns.a %}}'
      return f'{{% set ns = namespace(a="ab") %}}{{% for i in range(40) %}}{doubled}{{% endfor %}}'
    case 7:
      return f'{{% macro f(x=1) %}}{inner}{{% endmacro %}}{{{{ f({value}) }}}}'
    case 8:
      return f'{{% call f({value}) %}}{inner}{{% endcall %}}'
    case 9:
      return f'{{% filter {rng.choice(world.filters)} %}}{inner}{{% endfilter %}}'
    case 10:
      jump = ('{% break %}', '{% continue %}') if loops else ()
      return rng.choice(("{% include 'a' %}", '{% import x as y %}', '{% generation %}g{% endgeneration %}', *jump))
    case 11:
      return f'{{% set x %}}{inner}{{% endset %}}'
  return f'{{{{ {value} }}}}'


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  made = '{% set ns = namespace(a=messages[1].content) %}{% set x = [1, 2] %}' + statements(rng, world)
  if rng.random() < 0.25:
    made = values.changed_text(rng, rng.choice(REAL))
  elif rng.random() < 0.3:
    made = rng.choice(REAL).replace('{%- endfor %}', f'{made}{{%- endfor %}}', 1)
  if rng.random() < 0.03:
    made += rng.choice(COSTLY)
  messages = CONVERSATION if rng.random() < 0.5 else objects(values.changed_json(rng, CONVERSATION))
  return {
    'template': made,
    'messages': messages,
    'tools': rng.choice((None, [hermes.ADD], objects(values.changed_json(rng, [hermes.ADD])))),
  }


def objects(changed: Any) -> list[dict[str, Any]]:
  """Return the objects of a changed list: the callers of a template refuse anything else (sprl/agents/protocol.py)."""
  return [each for each in changed if isinstance(each, dict)] if isinstance(changed, list) else []


# --- how they end ------------------------------------------------------------------------------------------------------

LEAKS = (types.ModuleType, type, types.FunctionType, types.CodeType, types.FrameType, types.TracebackType, types.GeneratorType)


def check(world: Any, case: dict[str, Any]) -> str:
  (world.folder / 'chat_template.jinja').write_text(case['template'], encoding='utf-8')
  outcome = 'rendered'
  with peaks() as found:
    start = time.monotonic()
    try:
      tokenizer = Tokenizer.load(world.folder)
      text = tokenizer.render(case['messages'], tools=case['tools'] if 'tools' in tokenizer.variables else None)
      assert len(text) <= template_process.MAX_RENDERED
    except TokenizerError as error:
      outcome = next(
        (word for word in ('takes more than', 'ended its process', 'MemoryError', 'not valid') if word in str(error)), 'failed'
      )
    seconds = time.monotonic() - start
  assert seconds < WALL, f'the time limit does not hold: {seconds:.1f} s'
  assert max(found) <= world.most, f'the memory limit does not hold: {max(found) >> 20} MiB of {world.most >> 20}'
  if outcome in ('rendered', 'failed'):
    watched(case)
  return outcome


def peak() -> int:
  """Return the most address space that the renderer process has had, in bytes; 0 if it has ended or the system does not say."""
  process = templates._renderer._process
  try:
    status = Path(f'/proc/{process.pid}/status').read_text() if process else ''
  except OSError:
    return 0
  found = re.search(r'VmPeak:\s+(\d+) kB', status)  # not in the status of a zombie
  return int(found[1]) << 10 if found else 0


@contextlib.contextmanager
def peaks() -> Iterator[list[int]]:
  """Collect `peak()` every 5 ms, because a template can end its process, and at the end."""
  found, ended = [0], threading.Event()

  def collect():
    while not ended.wait(0.005):
      found.append(peak())

  thread = threading.Thread(target=collect)
  thread.start()
  try:
    yield found
  finally:
    ended.set()
    thread.join()
    found.append(peak())


def watched(case: dict[str, Any]) -> None:
  """Render a template that is known to end, in this process, and check every attribute and element that it gets.

  jinja2 calls `getattr` for `x.name`, and `getitem` for `x[name]` and for the attributes that filters such as `map` read. Both
  try the attribute and the element.
  """
  env, leaks = template_process.make_environment(), []

  def watch(get: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def got(owner: Any, name: Any) -> Any:
      found = get(owner, name)
      if isinstance(found, types.GenericAlias) or (isinstance(owner, str) and name in ('format', 'format_map')):
        return found  # `dict[name]`, from the lookup of an element; functions of jinja2 that replace those of str
      is_key = isinstance(owner, dict) and isinstance(name, str) and name in owner
      hidden = isinstance(name, str) and name.startswith('_') and not is_key
      if isinstance(found, LEAKS) or (hidden and not isinstance(found, jinja2.Undefined)):
        leaks.append(f'{type(owner).__name__}.{name} is {found!r:.100}')
      return found

    return got

  env.getattr = watch(env.getattr)  # pyright: ignore[reportAttributeAccessIssue]
  env.getitem = watch(env.getitem)  # pyright: ignore[reportAttributeAccessIssue]
  given = {'messages': case['messages'], 'tools': case['tools'], 'bos_token': '<bos>', 'eos_token': '<eos>', 'documents': None}
  with contextlib.suppress(Exception):
    template_process.rendered(env.from_string(case['template']), given, True)
  assert not leaks, leaks
