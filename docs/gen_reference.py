"""Generates the reference pages from the code: settings, metrics, commands, families of models and benchmark results.

MkDocs calls `on_files` (mkdocs.yml, `hooks`), which adds the pages to the site without writing them to the source tree. It also
publishes the pictures and JSON files of benchmarks/results as `results/`. In the repository, links lead to their own folder.

    python docs/gen_reference.py --out FOLDER    # write the pages to a folder, to read them without MkDocs
    python docs/gen_reference.py --check         # name settings and source files that the pages mention and the code lacks

The script parses the source and imports nothing from sprl, so that the site builds without JAX.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / 'sprl/config.py'
METRICS = ROOT / 'sprl/io/metrics_reference.py'
FAMILIES = ROOT / 'sprl/models/families.py'
PARITY = ROOT / 'tests/parity'
RESULTS = ROOT / 'benchmarks/results'
COMMANDS = ('main', 'evaluate', 'serve', 'report', 'sft', 'export', 'plan')

# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
  """One field of a settings dataclass."""

  name: str
  type: str  # as written, aliases of Literal resolved
  default: str  # source text; '' if the field has no default
  meaning: str


@dataclass
class Section:
  """One settings dataclass and its place in the tree."""

  path: str  # 'config' or 'config.mesh.learner'
  doc: str
  optional: bool = False  # the section may be None
  settings: list[Setting] = field(default_factory=list)


def sections(source: str) -> list[Section]:
  """The sections of a config module, root first, each section before its subsections.

  The root is a dataclass that no other dataclass contains; of several, the one with most sections. Meanings come from field
  metadata or helper arguments named `doc`, `help`, `meaning` or `description`; else from a string after the field; else from a
  comment on the field's lines or on the lines before it.
  """
  tree, comments = ast.parse(source), _comments(source)
  classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and _is_dataclass(node)}
  constants = {
    target.id: node.value
    for node in tree.body
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name)
  }

  def contained(node: ast.ClassDef) -> list[str]:
    return [name for f in _fields(node) for name in _names(f.annotation) if name in classes]

  inside = {name for node in classes.values() for name in contained(node)}
  roots = [node for name, node in classes.items() if name not in inside]
  root = max(roots, key=lambda node: len(contained(node)))

  def walk(node: ast.ClassDef, path: str, optional: bool, given: dict[str, str]) -> Iterator[Section]:
    section = Section(path, ast.get_docstring(node) or '', optional)
    below: list[Section] = []
    bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    body = [statement for each in (*bases, node) for statement in each.body]
    for position, statement in enumerate(body):
      if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        continue
      name = statement.target.id
      of = [found for found in _names(statement.annotation) if found in classes]
      named = ast.unparse(statement.annotation).startswith('Mapping[')  # a section for each name that the user chooses
      if of:
        place = f'{path}.{name}{".NAME" if named else ""}'
        below += walk(classes[of[0]], place, 'None' in ast.unparse(statement.annotation), _arguments(statement.value))
      if of and not named:
        continue
      default, meaning = _default(statement.value, constants)
      after = body[position + 1] if position + 1 < len(body) else None
      meaning = meaning or _string_after(after) or _comment_of(statement, body, position, comments)
      section.settings.append(Setting(name, _type(statement.annotation, constants), given.get(name, default), meaning))
    return iter([section, *below])

  return list(walk(root, 'config', False, {}))


def _comments(source: str) -> dict[int, str]:
  """Comment text by line number."""
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return {t.start[0]: t.string.lstrip('# ').rstrip() for t in tokens if t.type == tokenize.COMMENT and 'fmt:' not in t.string}


def _is_dataclass(node: ast.ClassDef) -> bool:
  return any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list)


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
  return [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def _names(annotation: ast.AST) -> list[str]:
  return [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]


def _type(annotation: ast.AST, constants: dict[str, ast.expr]) -> str:
  if isinstance(annotation, ast.Name) and annotation.id in constants:
    return _type(constants[annotation.id], constants)
  if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
    return f'{_type(annotation.left, constants)} or {_type(annotation.right, constants)}'
  text = ast.unparse(annotation)
  if text.startswith('Annotated[') and isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
    meaning = annotation.slice.elts[1]
    shown = isinstance(meaning, ast.Constant) and isinstance(meaning.value, str)
    return f'`{meaning.value}`' if shown else _type(annotation.slice.elts[0], constants)
  if text.startswith('Literal[') and isinstance(annotation, ast.Subscript):
    values = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    return ', '.join(f'`{ast.unparse(value)}`' for value in values)
  if text.startswith('tuple[') and _names(annotation)[1:2] and _names(annotation)[1] in constants:  # of a named Literal
    return f'any of {_type(constants[_names(annotation)[1]], constants)}'
  return f'`{text}`'


_MEANINGS = ('doc', 'help', 'meaning', 'description')
_FACTORIES = {'dict': '{}', 'list': '[]', 'tuple': '()'}


def _default(value: ast.expr | None, constants: dict[str, ast.expr]) -> tuple[str, str]:
  """A field's default as source text, and its meaning where the default's expression holds one."""
  if value is None:
    return '', ''
  if not isinstance(value, ast.Call):
    if isinstance(value, ast.Name) and value.id in constants:
      value = constants[value.id]
    return ast.unparse(value), ''
  given = {k.arg: k.value for k in value.keywords if k.arg}
  found = next((_text(given[name]) for name in _MEANINGS if name in given), '')
  if isinstance(metadata := given.get('metadata'), ast.Dict):
    keys = {_text(k): v for k, v in zip(metadata.keys, metadata.values) if k is not None}
    found = found or next((_text(keys[name]) for name in _MEANINGS if name in keys), '')
  texts = [_text(a) for a in value.args[1:] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
  found = found or next(iter(texts), '')
  if 'default_factory' in given:
    factory = given['default_factory']
    body = factory.body if isinstance(factory, ast.Lambda) else None
    return ast.unparse(body) if body is not None else _FACTORIES.get(ast.unparse(factory), ast.unparse(factory) + '()'), found
  default = given.get('default') or (value.args[0] if value.args else None)
  return (ast.unparse(default) if default is not None else ''), found


def _arguments(value: ast.expr | None) -> dict[str, str]:
  """The arguments of a section's default, such as `field(default_factory=lambda: Mesh(data=-1))`, as source text by name."""
  keywords = value.keywords if isinstance(value, ast.Call) else []
  factory = next((k.value for k in keywords if k.arg == 'default_factory'), None)
  made = factory.body if isinstance(factory, ast.Lambda) else None
  return {k.arg: ast.unparse(k.value) for k in made.keywords if k.arg} if isinstance(made, ast.Call) else {}


def _text(node: ast.expr | None) -> str:
  try:
    return ' '.join(str(ast.literal_eval(node)).split()) if node is not None else ''
  except ValueError:
    return ''


def _string_after(statement: ast.stmt | None) -> str:
  if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
    return ' '.join(statement.value.value.split())
  return ''


def _comment_of(statement: ast.stmt, body: list[ast.stmt], position: int, comments: dict[int, str]) -> str:
  """The comments on a field's lines; else those on the lines between it and the statement before."""
  last = statement.end_lineno or statement.lineno
  own = [comments[line] for line in range(statement.lineno, last + 1) if line in comments]
  if own:
    return ' '.join(own)
  before = (body[position - 1].end_lineno or 0) if position else 0
  above = []
  for line in range(statement.lineno - 1, before, -1):
    if line not in comments:
      break
    above.insert(0, comments[line])
  return ' '.join(above)


def settings_page() -> str:
  """reference/settings.md."""
  found = sections(CONFIG.read_text(encoding='utf-8'))
  count = sum(len(section.settings) for section in found if not section.path.endswith('.NAME'))
  lines = [
    '# Settings',
    '',
    f'Generated from `{CONFIG.relative_to(ROOT)}`: {count} settings in {len(found)} sections.',
    '',
    'A config file sets values on the object that `default_config()` returns. The command line overrides them, for example',
    '`--config.optimizer.learning_rate=3e-6`. Unknown names, wrong types and impossible combinations are errors before any',
    'device work. `None` means that a feature is off, or that sprl chooses the value.',
    '',
  ]
  for section in found:
    lines += [f'## {section.path}', '', _sentences(section.doc), '']
    if section.optional:
      lines += ['This section is optional: `None` turns the feature off.', '']
    if section.settings:
      lines += ['| Setting | Type | Default | Meaning |', '|---|---|---|---|']
      lines += [
        f'| `{s.name}` | {s.type} | {f"`{s.default}`" if s.default else "required"} | {_cell(s.meaning)} |'
        for s in section.settings
      ]
      lines.append('')
  return '\n'.join(lines)


def _cell(text: str) -> str:
  return re.sub(r'(?<![`\\])([|<>*_])', lambda m: '\\' + m[1], text) if '`' not in text else text.replace('|', '\\|')


def _sentences(doc: str) -> str:
  """Escapes a docstring for Markdown. Text in backticks and indented lines, which Markdown shows as code, stay as they are."""
  parts = re.split(r'(`[^`]*`|^ {4}.*$)', doc, flags=re.MULTILINE)
  return ''.join(part if i % 2 else re.sub(r'(?<!\\)([<*])', r'\\\1', part) for i, part in enumerate(parts))


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
  """reference/metrics.md."""
  module: dict[str, Any] = {}
  exec(compile(METRICS.read_text(encoding='utf-8'), str(METRICS), 'exec'), module)
  metrics, groups = module['METRICS'], module['GROUPS']
  lines = [
    '# Metrics',
    '',
    f'Generated from `{METRICS.relative_to(ROOT)}`. A test checks that every key of a run is listed here.',
    '',
    '`metrics.jsonl` holds one JSON object a line. `kind` is `train`, `eval` or `ledger`, and `step` is the number of finished',
    'steps. TensorBoard shows the same names. Numbers that are not finite are the strings `NaN`, `Infinity` and `-Infinity`.',
    '`sprl.io.metrics.read_metrics` turns them back into floats. A name in braces stands for several keys.',
    '',
  ]
  for prefix, intro in groups.items():
    lines += [f'## {prefix}', '', intro, '', '| Metric | Meaning |', '|---|---|']
    lines += [f'| `{name}` | {_metric_cell(meaning)} |' for name, meaning in metrics.items() if name.split('/')[0] == prefix]
    lines.append('')
  return '\n'.join(lines)


def _metric_cell(text: str) -> str:
  """Escapes a meaning for a Markdown table; text in backticks stays as it is."""
  parts = re.split('(`[^`]*`)', text)
  return ''.join(part if i % 2 else part.replace('|', '\\|').replace('<', '&lt;') for i, part in enumerate(parts))


# --- commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> str:
  """reference/commands.md: each command's module docstring, its first line as code."""
  lines = ['# Commands', '', 'Generated from the docstrings of the command modules. `--help` lists every flag.', '']
  for name in COMMANDS:
    doc = ast.get_docstring(ast.parse((ROOT / f'sprl/{name}.py').read_text(encoding='utf-8'))) or ''
    usage, _, rest = doc.partition('\n')
    lines += [f'## sprl.{name}', '', '```text', usage, '```', '', _sentences(rest.strip()), '']
  return '\n'.join(lines)


# --- families of models -----------------------------------------------------------------------------------------------

_COLUMNS = (
  '`model_type`', 'Models', 'RMS norms', 'Norms of q and k', 'Biases', 'Activation', 'Layers with a sliding window', 'Experts',
  'Tested with',
)  # fmt: skip
_NORMS = {'before': 'before attention and MLP', 'after': 'after attention and MLP', 'both': 'before and after attention and MLP'}
_QK_NORMS = {None: 'none', 'head': 'of each head', 'whole': 'of all heads together'}
_ACTIVATIONS = {'silu': 'SiLU', 'gelu_tanh': 'GELU (tanh)'}
_WINDOWS = {
  'none': 'none',
  'all': 'all layers, or none if `sliding_window` is null',
  'some': 'the layers that `layer_types` or `sliding_window_pattern` names',
}


def families_page() -> str:
  """reference/families.md."""
  module: dict[str, Any] = {'__name__': 'families'}
  exec(compile(FAMILIES.read_text(encoding='utf-8'), str(FAMILIES), 'exec'), module)
  peers = tested_families()
  lines = [
    '# Families of models',
    '',
    f'Generated from `{FAMILIES.relative_to(ROOT)}`. One network computes all families. `make parity` compares them with the',
    f'peers in the last column (`{PARITY.relative_to(ROOT)}`). [Models](../models.md) says what else sprl reads from a folder.',
    '',
    f'| {" | ".join(_COLUMNS)} |',
    '|---' * len(_COLUMNS) + '|',
  ]
  for name, traits in module['FAMILIES'].items():
    norms = _NORMS[traits.norms] + (', stored as scale - 1' if traits.norm_offset else '')
    biases = 'q, k and v' if traits.qkv_bias else 'none'
    tested = ', '.join(peer for peer, families in peers.items() if name in families) or 'nothing'
    cells = (
      f'`{name}`', traits.models, norms, _QK_NORMS[traits.qk_norm], biases, _ACTIVATIONS[traits.activation],
      _WINDOWS[traits.sliding_windows], traits.experts, tested,
    )  # fmt: skip
    lines.append(f'| {" | ".join(cells)} |')
  lines += ['', '## Refused families', '', 'sprl names the reason when it reads the `config.json` of one of these:', '']
  lines += ['| `model_type` | Reason |', '|---|---|']
  lines += [f'| `{name}` | {reason} |' for name, reason in module['REFUSED'].items()]
  return '\n'.join([*lines, ''])


def tested_families() -> dict[str, set[str]]:
  """The families in the cases of the parity tests, by peer."""
  cases = {'transformers': 'test_parity.py', 'PEFT': 'test_peft.py'}
  return {peer: set(_families_of(ast.parse((PARITY / file).read_text(encoding='utf-8')))) for peer, file in cases.items()}


def _families_of(tree: ast.Module) -> Iterator[str]:
  """The families of a module's CASES, a dict of dicts with a key `family`, or of tuples that begin with the family."""
  cases = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == 'CASES')
  assert isinstance(cases, ast.Dict)
  for case in cases.values:
    if isinstance(case, ast.Dict):
      yield next(_text(value) for key, value in zip(case.keys, case.values) if _text(key) == 'family')
    elif isinstance(case, ast.Tuple):
      yield _text(case.elts[0])


# --- benchmark results ------------------------------------------------------------------------------------------------


def results_page() -> str:
  """reference/results.md: command, machine and commit of every committed benchmark result."""
  lines = [
    '# Benchmark results: commands and machines',
    '',
    'Generated from the JSON files in `benchmarks/results/`. [Benchmarks](../benchmarks.md) explains the figures.',
    '',
    'A commit with `+changes` means that the checkout had uncommitted changes.',
    '',
    '| Result | Command | Machine | jax | Commit |',
    '|---|---|---|---|---|',
  ]
  for path in sorted(RESULTS.rglob('*.json')):
    name = path.relative_to(RESULTS).with_suffix('')
    record = json.loads(path.read_text(encoding='utf-8'))
    commit, changes = record['commit'].partition('+')[::2]
    jax = record['machine'].get('versions', {}).get('jax', '')
    picture = f'<br>[picture](../results/{name}.png)' if path.with_suffix('.png').exists() else ''
    lines.append(
      f'| [`{name}`](../results/{name}.json){picture} | `{record["command"]}` | {_machine(record["machine"])} | {jax} '
      f'| `{commit[:8]}`{" +changes" if changes else ""} |'
    )
  return '\n'.join([*lines, ''])


def _machine(machine: dict[str, Any]) -> str:
  flags = machine.get('cpu_flags', [])
  matrix = 'AMX' if 'amx_bf16' in flags else 'AVX512-BF16, no AMX' if 'avx512_bf16' in flags else 'AVX2 only'
  cpu = re.sub(r'\(R\)|\(TM\)| Processor', '', machine['cpu']).strip()
  devices = ', '.join(map(str, machine.get('accelerators') or [])) or 'no accelerator'
  return f'{machine["cores"]} cores of {cpu} ({matrix}), {machine.get("memory_gib", "?")} GiB, {devices}'


PAGES = {
  'reference/settings.md': settings_page,
  'reference/metrics.md': metrics_page,
  'reference/commands.md': commands_page,
  'reference/families.md': families_page,
  'reference/results.md': results_page,
}


# --- MkDocs -----------------------------------------------------------------------------------------------------------


def on_files(files, config):
  """MkDocs hook: adds the generated pages and the benchmarks' pictures and JSON files."""
  from mkdocs.structure.files import File

  for name, page in PAGES.items():
    files.append(File.generated(config, name, content=page()))
  for path in sorted([*RESULTS.rglob('*.png'), *RESULTS.rglob('*.json')]):
    files.append(File.generated(config, f'results/{path.relative_to(RESULTS)}', abs_src_path=str(path)))
  return files


def on_page_markdown(markdown, page, config, files):
  """MkDocs hook: points the links of a page to benchmarks/results to the site's copy."""
  return re.sub(r'\]\(((?:\.\./)*)\.\./benchmarks/results/', r'](\1results/', markdown)


# --- check ------------------------------------------------------------------------------------------------------------

_SETTING = re.compile(r'\bconfig((?:\.[a-z_0-9]+)+)')
_SOURCE = re.compile(r'\b((?:sprl|benchmarks|tests|configs|launch|notebooks)/[\w./-]*[\w-](?:\.(?:py|sh|yaml|ipynb)|/)?)')
_FREE = ('config.task.args', 'config.task.template_args', 'config.task.columns', 'config.task.mixture', 'config.eval.sets')
_EXAMPLES = ('configs/mine.py',)


def missing() -> list[str]:
  """`file: name` for every setting or source path that a page or the README mentions and that does not exist."""
  found = sections(CONFIG.read_text(encoding='utf-8'))
  known = {s.path for s in found} | {f'{s.path}.{f.name}' for s in found for f in s.settings}
  pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
  problems = []
  for page in pages:
    text = page.read_text(encoding='utf-8')
    for match in _SETTING.finditer(text):
      name = f'config{match[1]}'
      if name not in known and not name.startswith(_FREE) and not name.endswith(('.py', '.json', '.update', '.toml')):
        problems.append(f'{page.relative_to(ROOT)}: {name}')
    for match in _SOURCE.finditer(text):
      if match[1] not in _EXAMPLES and not (ROOT / match[1]).exists() and not list(ROOT.glob(f'{match[1]}*')):
        problems.append(f'{page.relative_to(ROOT)}: {match[1]}')
  return sorted(set(problems))


def main() -> int:
  """The command line of the module docstring."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=Path, help='folder for the generated pages')
  parser.add_argument('--check', action='store_true', help='exit 1 if a page names a setting or a file that does not exist')
  options = parser.parse_args()
  if options.out:
    for name, page in PAGES.items():
      path = options.out / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(page(), encoding='utf-8')
  if options.check and (problems := missing()):
    print('\n'.join(problems), file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
