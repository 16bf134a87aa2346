"""A wheel of sprl, installed into an empty environment, has all that the quickstart's command needs."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import compilation_cache
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel of this checkout. Its build tools come from a package index."""
  folder, source = tmp_path_factory.mktemp('wheel'), tmp_path_factory.mktemp('source')
  for name in ('sprl', 'configs'):  # a copy: a build leaves files beside its source
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('pyproject.toml', 'setup.py', 'MANIFEST.in', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source / name)
  build = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--wheel-dir', str(folder), str(source)]
  result = subprocess.run(build, capture_output=True, text=True)
  if result.returncode and 'No matching distribution' in result.stderr:
    pytest.skip('no package index: a wheel cannot be built')
  assert result.returncode == 0, result.stderr
  (found,) = folder.glob('sprl-*.whl')
  return found


@pytest.mark.slow
def test_a_wheel_has_the_configs_and_their_data(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  for path in sorted((ROOT / 'configs').rglob('*')):
    if path.is_file() and '__pycache__' not in path.parts:
      assert f'sprl/{path.relative_to(ROOT)}' in names
  assert not [name for name in names if name.startswith(('tests', 'benchmarks', 'configs'))]


@pytest.mark.slow
def test_an_installed_wheel_runs_the_command_of_the_quickstart(wheel, tmp_path):
  folder = tmp_path / 'environment'
  subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
  python = folder / 'bin' / 'python'
  subprocess.run([python, '-m', 'pip', 'install', '--quiet', wheel], check=True)
  command = [python, '-m', 'sprl.main', '--config=configs/quickstart.py', '--config.steps=1', '--config.rollout.prompts=2']
  environment = {**os.environ, **compilation_cache.variables()}
  result = subprocess.run([*command, '--config.export=False'], cwd=tmp_path, env=environment, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  assert 'step 1/1' in result.stdout
  assert (tmp_path / 'runs' / 'quickstart' / 'metrics.jsonl').is_file()
  first = result.stderr.partition('\n')[0]
  assert first.startswith(('INFO: ', 'WARNING: ')), first  # of sprl: no warning of another package comes first
