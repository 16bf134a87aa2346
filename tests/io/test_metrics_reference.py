"""Every metric that the code produces has an entry in sprl/io/metrics_reference.py."""

import ast
import re
from pathlib import Path

import pytest

from sprl.io.metrics_reference import GROUPS, METRICS, documented, undocumented

SOURCES = Path(__file__).parents[2] / 'sprl'
KEY = re.compile(f'(?:{"|".join(GROUPS)})' + r'/[\w@{}]+(?:/[\w{}]+)?')


def keys_in(source: str) -> set[str]:
  """Return the metric keys that are dict keys in a module. Each expression of an f-string becomes `{}`."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    written = node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []
    for key in written:
      if isinstance(key, ast.JoinedStr):
        found.add(''.join(str(v.value) if isinstance(v, ast.Constant) else '{}' for v in key.values))
      elif isinstance(key, ast.Constant) and isinstance(key.value, str):
        found.add(key.value)
  return {key for key in found if KEY.fullmatch(key)}


def test_keys_in_finds_literals_and_fstrings():
  source = "a = {'reward/mean': 1, 'plain': 2, f'fp8/scale_{name}/{layer}': 3}\nb = {f'grading/{s}': 0 for s in x}"
  assert keys_in(source) == {'reward/mean', 'fp8/scale_{}/{}', 'grading/{}'}


def test_every_entry_has_a_group_and_a_sentence():
  for name, meaning in METRICS.items():
    assert name.split('/')[0] in GROUPS, name
    assert meaning[0].isupper() or meaning[0].isdigit(), name
    assert meaning.endswith('.'), name


def test_every_key_in_the_source_is_documented():
  """A key such as `ledger/{}_mean` is documented if an entry has the same text around its placeholders."""
  entries = '\n'.join(METRICS)

  def is_documented(key: str) -> bool:
    pattern = re.escape(key).replace(r'\{\}', r'[^/\n]+')
    return documented(key) is not None or re.search(f'^{pattern}$', entries, re.MULTILINE) is not None

  found = {key for path in SOURCES.rglob('*.py') for key in keys_in(path.read_text(encoding='utf-8')) if path.stem != 'plots'}
  assert len(found) > 30
  assert sorted(key for key in found if not is_documented(key)) == []


@pytest.mark.parametrize(
  ('name', 'entry'),
  [
    ('reward/mean', 'reward/mean'),
    ('grading/timeout', 'grading/{status}'),
    ('fp8/scale_k/11', 'fp8/scale_{tensor}/{layer}'),
    ('rollout_corr/rollout_rs_seq_mean_k3_masked_fraction', 'rollout_corr/rollout_rs_{option}_masked_fraction'),
    ('ledger/eviction_p99', 'ledger/{part}_p99'),
    ('completion/median', None),
  ],
)
def test_documented_finds_the_entry_of_a_key(name, entry):
  assert documented(name) == entry


def test_undocumented_names_keys_and_times_without_entry():
  record = {'step': 1, 'kind': 'train', 'reward/mean': 0.5, 'completion/median': 0.5, 'time': {'learn': 1.0, 'lunch': 2.0}}
  assert undocumented([record, {'eval/pass@8': 1.0}]) == ['completion/median', 'time/lunch']
