"""docs/gen_reference.py reads settings, and their meanings from comments, strings, metadata and helper functions."""

import ast
import importlib.util
import re
import sys
from functools import reduce
from pathlib import Path

import pytest

from sprl.config import HeldOutSet, MixtureSource, default_config
from sprl.models.families import FAMILIES

PATH = Path(__file__).parents[1] / 'docs' / 'gen_reference.py'

SOURCE = '''
Kind = Literal['a', 'b']
NAMES = ('q', 'k')


@dataclass(frozen=True)
class Inner:
  """The inner section."""

  size: int = 3  # tokens kept
  # how it is
  # chosen
  kind: Kind = 'a'
  names: tuple[str, ...] = NAMES
  """Names of linears."""
  kinds: tuple[Kind, ...] = ('a',)  # which of them


@dataclass(frozen=True)
class Variant:
  weight: float = field(default=1.0, metadata={'doc': 'weight of positive samples', 'low': 0})


@dataclass(frozen=True)
class Run:
  """Everything."""

  steps: int = setting(100, 'updates', low=0)
  seed: int | None = None
  args: Mapping[str, Any] = field(default_factory=dict)
  inner: Inner = field(default_factory=Inner)
  other: Inner = field(default_factory=lambda: Inner(size=5))
  variant: Variant | None = None
'''


@pytest.fixture(scope='module')
def gen_reference():
  spec = importlib.util.spec_from_file_location('gen_reference', PATH)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules['gen_reference'] = module  # dataclasses look up the module here
  spec.loader.exec_module(module)
  return module


def test_sections_reads_comments_strings_metadata_and_helpers(gen_reference):
  found = gen_reference.sections(SOURCE)
  paths = [('config', False), ('config.inner', False), ('config.other', False), ('config.variant', True)]
  assert [(s.path, s.optional) for s in found] == paths
  rows = [(s.name, s.type, s.default, s.meaning) for section in found for s in section.settings]
  inner = [
    ('kind', "`'a'`, `'b'`", "'a'", 'how it is chosen'),
    ('names', '`tuple[str, ...]`', "('q', 'k')", 'Names of linears.'),
    ('kinds', "any of `'a'`, `'b'`", "('a',)", 'which of them'),
  ]
  assert rows == [
    ('steps', '`int`', '100', 'updates'),
    ('seed', '`int` or `None`', 'None', ''),
    ('args', '`Mapping[str, Any]`', '{}', ''),
    ('size', '`int`', '3', 'tokens kept'),
    *inner,
    ('size', '`int`', '5', 'tokens kept'),
    *inner,
    ('weight', '`float`', '1.0', 'weight of positive samples'),
  ]


def test_settings_page_has_every_section_of_the_config_module(gen_reference):
  page = gen_reference.settings_page()
  for name in ('config', 'config.cache', 'config.mesh.learner'):
    assert f'\n## {name}\n' in page
  assert '| `budget` |' in page


def defaults(page):
  """Yield (section, setting, default) of each row of the settings page."""
  for part in page.split('\n## ')[1:]:
    section, _, text = part.partition('\n')
    for cells in (line.split(' | ') for line in text.splitlines() if line.startswith('| `')):
      yield section, cells[0].strip('|` '), ast.literal_eval(cells[2].strip('`'))


def test_defaults_of_the_settings_page_are_those_of_the_code(gen_reference):
  config = default_config()
  of_named = {'config.task.mixture.NAME': MixtureSource(), 'config.eval.sets.NAME': HeldOutSet()}
  shown, found = {}, {}
  for section, name, default in defaults(gen_reference.settings_page()):
    of = of_named.get(section) or reduce(getattr, section.split('.')[1:], config)
    shown[section, name], found[section, name] = default, getattr(of, name)
  assert shown == {key: value.to_dict() if hasattr(value, 'to_dict') else value for key, value in found.items()}
  assert (shown['config.mesh.rollout', 'data'], shown['config.mesh.rollout', 'fsdp']) == (-1, 1)
  in_config = {(f'config.{path}'.rpartition('.')[0], path.rpartition('.')[2]) for path in leaves(config)}
  assert {key for key in shown if key[0] not in of_named} == in_config


def leaves(config, prefix=''):
  """Yield the path of each setting of a ConfigDict. A dictionary without sections is one setting."""
  for name, value in config.items():
    if hasattr(value, 'to_dict') and len(value):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}'


def test_code_in_docstrings_is_not_escaped(gen_reference):
  page = gen_reference.commands_page()
  assert '`config.eval.*`' in page
  assert not re.search(r'`[^`\n]*\\[*<]', page)


def test_pages_are_generated_from_the_repository(gen_reference):
  pages = {name: page() for name, page in gen_reference.PAGES.items()}
  assert '`reward/mean`' in pages['reference/metrics.md']
  assert 'python -m sprl.main' in pages['reference/commands.md']
  assert 'quickstart' in pages['reference/results.md']
  assert '| `gpt_oss` | attention sinks' in pages['reference/families.md']


def test_the_table_of_families_names_the_peers_of_their_parity_tests(gen_reference):
  [gemma] = [line for line in gen_reference.families_page().splitlines() if line.startswith('| `gemma3_text` |')]
  cells = gemma.split(' | ')
  assert (cells[3], cells[5], cells[-1]) == ('of each head', 'GELU (tanh)', 'transformers, PEFT |')
  assert gen_reference.tested_families()['transformers'] == set(FAMILIES)  # every family is compared with transformers
