"""The lock file, the set-up script, the Makefile, and the commands that benchmarks start. Nothing here uses the network."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


# --- the lock file ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def packages():
  return [package for package in tomllib.loads((ROOT / 'uv.lock').read_text())['package'] if package['name'] != 'sprl']


def test_lock_names_no_index_but_pypi():
  hosts = re.findall(r'[a-z]+://[^/"\s]*', (ROOT / 'uv.lock').read_text())
  assert set(hosts) == {'https://pypi.org', 'https://files.pythonhosted.org'}


def test_locked_packages_need_no_c_compiler(packages):
  pure_python = {'cellpylib', 'zss'}  # source distributions without C code
  assert {package['name'] for package in packages if not package.get('wheels')} == pure_python


def test_lock_has_the_newest_and_the_oldest_jax(packages):
  jax, jaxlib = ([p['version'] for p in packages if p['name'] == name] for name in ('jax', 'jaxlib'))
  assert jax == jaxlib
  assert [version[:6] for version in jax] == ['0.11.2', '0.12.0']


def test_lock_satisfies_the_requirements_of_pyproject(packages):
  pyproject = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  project = pyproject['project']
  lists = [project['dependencies'], *project['optional-dependencies'].values(), *pyproject['dependency-groups'].values()]
  locked = {}
  for package in packages:
    locked.setdefault(package['name'], []).append(package['version'])
  for requirement in (Requirement(line) for each in lists for line in each):
    versions = locked.get(re.sub(r'[-_.]+', '-', requirement.name).lower(), [])
    assert any(requirement.specifier.contains(version) for version in versions), requirement


def test_reference_requirements_are_exact_versions():
  lines = (ROOT / 'benchmarks/peers/requirements.txt').read_text().splitlines()
  versions = [line for line in lines if not line.startswith('#')]
  assert [line for line in versions if not re.fullmatch(r'[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*', line)] == []


# --- launch/environment.sh -------------------------------------------------------------------------------------------


class Checkout:
  """A folder with environment.sh. Each program that the script calls is a stand-in that logs its arguments."""

  def __init__(self, folder: Path):
    self.root, self.bin = folder / 'checkout', folder / 'bin'
    (self.root / 'launch').mkdir(parents=True)
    self.bin.mkdir()
    shutil.copy(ROOT / 'launch/environment.sh', self.root / 'launch')
    (self.root / 'requirements.txt').write_text('torch==2.0\n')
    for name in ('sh', 'mkdir', 'chmod', 'cat', 'cp', 'cmp'):
      (self.bin / name).symlink_to(shutil.which(name))

  def program(self, path: Path | str, body: str = '') -> None:
    file = self.bin / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >>"$LOG"\n{body}\n')
    file.chmod(0o755)

  def uv(self, path: Path | str = 'uv', sync: str = '') -> None:
    """Make a stand-in for uv. Its `venv` makes a folder with a Python; `uv sync` runs the shell command `sync`."""
    python = 'for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python"'
    self.program(path, f'case $1 in venv) {python} ;; sync) {sync or ":"} ;; esac')

  def run(self, *arguments: str, **environment: str) -> tuple[list[str], subprocess.CompletedProcess]:
    """Run environment.sh. Return the logged lines, without options that print less, and the process."""
    log = self.root / 'log'
    log.unlink(missing_ok=True)
    variables = {'PATH': str(self.bin), 'HOME': str(self.root / 'home'), 'LOG': str(log), **environment}
    command = ['sh', 'launch/environment.sh', *arguments]
    done = subprocess.run(command, cwd=self.root, env=variables, capture_output=True, text=True, timeout=30)
    lines = log.read_text().splitlines() if log.exists() else []
    return [re.sub(r' (--quiet|-qq|--disable-pip-version-check|--no-compile)', '', line) for line in lines], done


SYNC = 'uv sync --locked --inexact --extra ray'


@pytest.fixture
def checkout(tmp_path):
  return Checkout(tmp_path)


def test_environment_is_made_and_then_only_checked(checkout):
  checkout.uv(sync='[ -e made ] || { case $* in *--check*) exit 1 ;; *) : >made ;; esac; }')
  first, done = checkout.run('.venv', '--extra', 'ray')
  assert (first, done.returncode) == ([f'{SYNC} --check', SYNC], 0)
  second, done = checkout.run('.venv', '--extra', 'ray')
  assert (second, done.returncode, done.stderr) == ([f'{SYNC} --check'], 0, '')


def test_a_failed_installation_is_reported(checkout):
  checkout.uv(sync='exit 1')
  _, done = checkout.run('.venv')
  assert done.returncode == 1
  assert '.venv' in done.stderr


def test_uv_is_installed_by_python_where_it_is_missing(checkout):
  # python3 -m venv FOLDER makes a Python, whose pip makes a uv beside it
  checkout.uv('stand-in')
  install = f'case $* in *install*) cp {checkout.bin}/stand-in .uv/bin/uv ;; esac'
  checkout.program('pip', install)
  checkout.program('python3', f'mkdir -p .uv/bin; cp {checkout.bin}/pip .uv/bin/python')
  lines, done = checkout.run('.venv')
  assert done.returncode == 0, done.stderr
  assert lines[0] == 'python3 -m venv --clear .uv'
  assert re.fullmatch(r'python -m pip install uv==[\d.]+', lines[1])
  assert lines[-1] == 'uv sync --locked --inexact --check'
  assert not any('pip' in line for line in checkout.run('.venv')[0])


def test_without_uv_and_python_the_page_on_installation_is_named(checkout):
  _, done = checkout.run('.venv')
  assert done.returncode == 1
  assert 'docs/install.md' in done.stderr


@pytest.mark.parametrize('variable', ['UV_DEFAULT_INDEX', 'UV_INDEX_URL'])
def test_another_index_is_asked_for_the_locked_versions(checkout, variable):
  checkout.uv()
  lines, done = checkout.run('.venv', '--extra', 'ray', **{variable: 'https://example.org/simple'})
  assert done.returncode == 0
  assert lines == [
    'uv venv --allow-existing .venv',
    'uv export --frozen --output-file .venv/requirements.txt --extra ray',
    'uv pip install --python .venv --requirements .venv/requirements.txt',
  ]


def test_a_requirements_file_is_installed_once_and_again_after_a_change(checkout):
  checkout.uv()
  made = ['uv venv --clear --seed --python 3.11 .peers', 'python -m pip install -r requirements.txt']
  assert checkout.run('.peers', '--requirements', 'requirements.txt')[0] == made
  assert checkout.run('.peers', '--requirements', 'requirements.txt')[0] == []
  (checkout.root / 'requirements.txt').write_text('torch==2.1\n')
  assert checkout.run('.peers', '--requirements', 'requirements.txt')[0] == made


@pytest.mark.parametrize('place', ['PYENV_ROOT', 'HOME', 'beside pyenv'])
def test_the_newest_version_of_pyenv_comes_first(checkout, tmp_path, place):
  root = {'PYENV_ROOT': tmp_path / 'pyenv', 'HOME': checkout.root / 'home/.pyenv', 'beside pyenv': tmp_path / 'other'}[place]
  for version in ('3.12.1', '3.13.0', '3.9.18'):
    checkout.program(root / 'versions' / version / 'bin/python3')
  checkout.program(root / 'bin/pyenv')
  checkout.program('uv', 'echo "$PATH" >>"$LOG"')
  path = f'{root}/bin:{checkout.bin}' if place == 'beside pyenv' else str(checkout.bin)
  lines, _ = checkout.run('.venv', PATH=path, **({place: str(root)} if place == 'PYENV_ROOT' else {}))
  assert lines[1].split(':')[:2] == [f'{root}/versions/{version}/bin' for version in ('3.13.0', '3.12.1')]


# --- the Makefile and git --------------------------------------------------------------------------------------------


def make(*arguments: str) -> str:
  """Return the output of make in the checkout. Variables of a make that runs this suite are removed."""
  removed = ('MAKEFLAGS', 'MFLAGS', 'MAKEOVERRIDES', 'MAKELEVEL', 'JAX', 'PYTHON', 'VENV', 'WORKDIR', 'ARGS', 'EXTRAS')
  environment = {name: value for name, value in os.environ.items() if name not in removed}
  command = ['make', *arguments, '-C', str(ROOT)]
  return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


needs_make = pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')


@needs_make
def test_make_alone_lists_the_targets():
  listed = re.findall(r'^  ([a-z]+) +\S', make('-s'), re.MULTILINE)
  assert {'quickstart', 'install', 'test', 'slow', 'coverage', 'parity', 'lint', 'types', 'docs', 'clean'} <= set(listed)


@needs_make
def test_quickstart_installs_and_trains():
  text = make('-n', 'quickstart')
  assert "launch/environment.sh '.venv'" in text
  assert ".venv/bin'/python -m sprl.main --config=configs/quickstart.py --workdir='runs/quickstart'" in text


@needs_make
def test_another_jax_has_its_own_environment_and_group():
  assert "launch/environment.sh '.venv-jax0.11.2' --group jax-0.11.2" in make('-n', 'setup', 'JAX=0.11.2')


@pytest.mark.skipif(not shutil.which('git') or not (ROOT / '.git').exists(), reason='not a git checkout')
def test_git_ignores_environments_caches_and_runs():
  folders = ('.venv', '.venv-reference', '.venv-jax0.11.2', '.venv-aot', '.uv', '.cache', 'runs', 'site', 'sprl.egg-info')
  paths = [f'{folder}/x' for folder in folders]
  result = subprocess.run(['git', '-C', str(ROOT), 'check-ignore', *paths], capture_output=True, text=True)
  assert result.stdout.split() == paths


# --- benchmarks ------------------------------------------------------------------------------------------------------


def started_modules(path: Path) -> set[str]:
  """Return each NAME that a benchmark starts as `python -m sprl.NAME`, in a list of arguments."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.List):
      values = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.elts]
      modules = [value for flag, value in pairwise(values) if flag == '-m' and isinstance(value, str)]
      found |= {module.removeprefix('sprl.') for module in modules if module.startswith('sprl.')}
  return found


def test_every_command_that_a_benchmark_starts_exists():
  started = {path.name: started_modules(path) for path in sorted((ROOT / 'benchmarks').rglob('*.py'))}
  assert 'main' in started['quickstart.py']  # by ['-m', 'sprl.main', ...]
  named = [(file, name) for file, names in started.items() for name in names]
  assert [(file, name) for file, name in named if not (ROOT / f'sprl/{name}.py').exists()] == []
