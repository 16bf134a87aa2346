"""docs/gen_reference.py reads settings, and their meanings from comments, strings, metadata and helper functions."""

import importlib.util
import sys
from pathlib import Path

import pytest

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
  assert [(s.path, s.optional) for s in found] == [('config', False), ('config.inner', False), ('config.variant', True)]
  rows = [(s.name, s.type, s.default, s.meaning) for section in found for s in section.settings]
  assert rows == [
    ('steps', '`int`', '100', 'updates'),
    ('seed', '`int` or `None`', 'None', ''),
    ('args', '`Mapping[str, Any]`', '{}', ''),
    ('size', '`int`', '3', 'tokens kept'),
    ('kind', "`'a'`, `'b'`", "'a'", 'how it is chosen'),
    ('names', '`tuple[str, ...]`', "('q', 'k')", 'Names of linears.'),
    ('kinds', "any of `'a'`, `'b'`", "('a',)", 'which of them'),
    ('weight', '`float`', '1.0', 'weight of positive samples'),
  ]


def test_settings_page_has_every_section_of_the_config_module(gen_reference):
  page = gen_reference.settings_page()
  for name in ('config', 'config.cache', 'config.mesh.learner'):
    assert f'\n## {name}\n' in page
  assert '| `budget` |' in page


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
