"""The way in: finding a Python, making the environment, the pins, the Makefile. No network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / 'launch' / 'environment.sh'


@pytest.fixture
def path(tmp_path):
  """A folder of programs to stand in for PATH: the few that the scripts call, and no Python."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  for name in ('sh', 'sort', 'awk', 'cat', 'sed', 'cksum', 'dirname', 'tr', 'mkdir', 'chmod'):
    (folder / name).symlink_to(shutil.which(name))
  return folder


def fake(folder, name, version, lacks='-'):
  """A Python that answers the finder's question as one of `version` at this place would, and does nothing else."""
  folder.mkdir(parents=True, exist_ok=True)
  minor, micro = version.split('.')
  program = folder / name
  program.write_text(f'#!/bin/sh\necho "{minor} {micro} {lacks} {program}"\n')
  program.chmod(0o755)
  return str(program)


def find(path, *arguments, **environment):
  environment = {'PATH': str(path), 'HOME': str(Path(path).parent / 'home'), **environment}
  script = str(ROOT / 'launch' / 'find_python.sh')
  return subprocess.run(['sh', script, *arguments], env=environment, capture_output=True, text=True)


def test_finder_takes_the_newest_whatever_its_name_and_place(path):
  fake(path, 'python3', '11.9')
  fake(path, 'python3.12', '12.11')
  newest = fake(path, 'python3.13', '13.2')
  assert find(path).stdout.strip() == newest


def test_finder_compares_versions_as_numbers(path):
  fake(path, 'python3.12', '12.9')
  newest = fake(path, 'python', '12.10')
  assert find(path).stdout.strip() == newest


def test_finder_looks_past_the_first_of_a_name_on_path(path, tmp_path):
  shim = path / 'python3.13'  # a version manager's shim for a version not in use
  shim.write_text('#!/bin/sh\nexit 127\n')
  shim.chmod(0o755)
  real = fake(tmp_path / 'with space', 'python3.13', '13.1')
  assert find(f'{path}:{tmp_path / "with space"}').stdout.strip() == real


@pytest.mark.parametrize('place', ['PYENV_ROOT', 'home', 'beside shims'])
def test_finder_looks_among_the_versions_of_pyenv(path, tmp_path, place):
  fake(path, 'python3', '11.7')
  root = tmp_path / ('home/.pyenv' if place == 'home' else 'pyenv')
  fake(root / 'versions/3.12.1/bin', 'python', '12.1')
  newest = fake(root / 'versions/3.13.0/bin', 'python', '13.0')
  search = f'{root}/shims:{path}' if place == 'beside shims' else path
  environment = {'PYENV_ROOT': str(root)} if place == 'PYENV_ROOT' else {}
  assert find(search, **environment).stdout.strip() == newest


def test_finder_passes_over_the_too_new_and_the_incomplete(path):
  fake(path, 'python3', '15.0')
  fake(path, 'python3.14', '14.0', lacks='GIL')
  fake(path, 'python3.13', '13.5', lacks='ensurepip')
  usable = fake(path, 'python3.12', '12.3')
  assert find(path).stdout.strip() == usable


def test_finder_says_what_it_found_and_how_to_get_one(path):
  old, new = fake(path, 'python3', '11.2'), fake(path, 'python', '15.1')
  bare = fake(path, 'python3.13', '13.5', lacks='ensurepip')
  result = find(path)
  assert (result.returncode, result.stdout) == (1, '')
  assert 'No usable Python 3.12 to 3.14 on PATH' in result.stderr
  assert f'3.11.2  {old}: too old' in result.stderr
  assert f'3.15.1  {new}: too new' in result.stderr
  assert f'3.13.5  {bare}: its module ensurepip is missing; on Debian and Ubuntu: apt install python3.13-venv' in result.stderr
  assert 'pyenv install 3.13' in result.stderr


def test_finder_says_so_when_there_is_no_python_at_all(path):
  result = find(path)
  assert result.returncode == 1
  assert 'Found: no Python 3 at all.' in result.stderr


def test_finder_tries_a_named_python_alone(path, tmp_path):
  fake(path, 'python3.13', '13.0')
  named = fake(tmp_path / 'elsewhere', 'mine', '12.4')
  assert find(path, PYTHON=named).stdout.strip() == named
  result = find(path, PYTHON='/no/such/python')
  assert result.returncode == 1
  assert 'PYTHON=/no/such/python is not a usable Python 3.12 to 3.14' in result.stderr


def test_finder_takes_other_bounds(path):
  fake(path, 'python3.13', '13.0')
  reference = fake(path, 'python3.11', '11.7')
  assert find(path, '11', '11').stdout.strip() == reference


def test_finder_probes_a_real_python_whatever_pythonpath_holds(path, tmp_path):
  (tmp_path / 'venv.py').write_text('raise ImportError("not the one of the standard library")')
  result = find(path, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
  minor = sys.version_info.minor
  expected = 0 if 12 <= minor <= 14 else 1
  assert result.returncode == expected, result.stderr


@pytest.fixture
def checkout(tmp_path, path):
  """A checkout whose Python logs the environments and installations asked of it to `log`, and makes neither for real."""
  root = tmp_path / 'checkout'
  (root / 'launch').mkdir(parents=True)
  for name in ('find_python.sh', 'environment.sh'):
    shutil.copy(ROOT / 'launch' / name, root / 'launch' / name)
  (root / 'pyproject.toml').write_text('[project]\n')
  (root / 'constraints.txt').write_text('flax==1.0\njax==0.12.0\njaxlib==0.12.0\njaxtyping==0.3\n')
  program = path / 'python3.13'
  program.write_text(
    f"""#!/bin/sh
case "$*" in
  *sys.version_info*) echo "13 0 - {program}" ;;
  *'-m venv'*) echo "$*" >> log; for folder; do :; done; mkdir -p "$folder/bin"; cp_self "$folder/bin/python" ;;
  *'install'*) echo "$*" >> log; [ ! -e offline ] ;;
esac
"""
  )
  copier = path / 'cp_self'
  copier.write_text(f'#!/bin/sh\ncat {program} > "$1"\nchmod +x "$1"\n')
  for file in (program, copier):
    file.chmod(0o755)
  return root


def make_environment(checkout, path, *arguments, **environment):
  environment = {'PATH': str(path), 'HOME': str(checkout / 'home'), **environment}
  command = ['sh', 'launch/environment.sh', *(arguments or ('.venv', 'constraints.txt', 'gguf'))]
  return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def log(checkout):
  file = checkout / 'log'
  lines = file.read_text().splitlines() if file.exists() else []
  file.unlink(missing_ok=True)
  return [re.sub(r'--\S+ ', '', line) for line in lines]


def test_environment_is_made_once_and_again_when_its_pins_or_pyproject_change(checkout, path):
  assert make_environment(checkout, path).returncode == 0
  assert log(checkout) == ['-I -m venv .venv', '-m pip install -c constraints.txt -e .[gguf]']
  assert make_environment(checkout, path).returncode == 0
  assert log(checkout) == []
  for name in ('constraints.txt', 'pyproject.toml'):
    with (checkout / name).open('a') as file:
      file.write('# changed\n')
    assert make_environment(checkout, path).returncode == 0
    assert log(checkout) == ['-m pip install -c constraints.txt -e .[gguf]']


def test_environment_that_failed_is_tried_again_with_a_reason_shown(checkout, path):
  (checkout / 'offline').touch()
  failed = make_environment(checkout, path)
  assert failed.returncode == 1
  assert 'pip could not install into .venv' in failed.stderr
  assert 'There is no C compiler here' in failed.stderr
  (checkout / 'offline').unlink()
  assert make_environment(checkout, path).returncode == 0
  assert log(checkout)[-1] == '-m pip install -c constraints.txt -e .[gguf]'


def test_environment_puts_the_asked_jax_in_place_of_the_pinned_one(checkout, path):
  assert make_environment(checkout, path, JAX='0.11.2').returncode == 0
  assert log(checkout)[-1] == '-m pip install -c .venv/pins.txt -e .[gguf]'
  assert (checkout / '.venv/pins.txt').read_text() == 'flax==1.0\njax==0.11.2\njaxlib==0.11.2\njaxtyping==0.3\n'


def test_environment_without_extras_installs_the_pins_alone(checkout, path):
  assert make_environment(checkout, path, '.peers', 'constraints.txt', '', '13', '13').returncode == 0
  assert log(checkout)[-1] == '-m pip install -r constraints.txt'


@pytest.mark.parametrize('file', ['constraints.txt', 'benchmarks/peers/requirements.txt'])
def test_pins_are_exact_and_name_no_index_host_or_path(file):
  lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith('#')]
  assert lines
  assert [line for line in lines if not re.fullmatch(r'[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*', line)] == []
  names = [line.partition('==')[0].lower().replace('_', '-') for line in lines]
  assert len(names) == len(set(names))


def test_every_direct_dependency_is_pinned():
  import tomllib

  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  wanted = [*project['dependencies'], *(line for extra in project['optional-dependencies'].values() for line in extra)]
  names = {re.match(r'[A-Za-z0-9_.-]+', line).group().lower().replace('_', '-') for line in wanted}
  pins = (ROOT / 'constraints.txt').read_text().lower().replace('_', '-')
  assert [name for name in sorted(names) if f'\n{name}==' not in pins] == []


def make(*arguments: str) -> str:
  """What make prints in the checkout, free of the variables of a make that this suite may itself run under."""
  inherited = ('MAKEFLAGS', 'MFLAGS', 'MAKEOVERRIDES', 'MAKELEVEL', 'JAX', 'VENV', 'WORKDIR', 'ARGS')
  environment = {name: value for name, value in os.environ.items() if name not in inherited}
  command = ['make', *arguments, '-C', str(ROOT)]
  return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not shutil.which('make'), reason='no make here')
def test_make_alone_lists_the_targets():
  text = make('-s')
  for target in ('quickstart', 'test', 'slow', 'parity', 'lint', 'types', 'clean'):
    assert re.search(rf'^  {target} +\S', text, re.MULTILINE), target


@pytest.mark.skipif(not shutil.which('make'), reason='no make here')
def test_quickstart_sets_up_and_then_runs_the_command_the_readme_tells():
  text = make('-n', 'quickstart')
  assert 'launch/environment.sh' in text
  assert ".venv/bin/python -m sprl.main --config=configs/quickstart.py --workdir='runs/quickstart'" in text


@pytest.mark.skipif(not (ROOT / 'README.md').exists(), reason='README.md is not written yet')
@pytest.mark.parametrize('command', ['make quickstart', 'make test'])
def test_readme_tells_the_two_commands(command):
  assert command in (ROOT / 'README.md').read_text()


@pytest.mark.skipif(not shutil.which('git') or not (ROOT / '.git').exists(), reason='not a git checkout')
def test_environments_and_runs_are_ignored_by_git():
  paths = [
    '.venv/x',
    '.venv-reference/x',
    '.venv-jax0.11.2/x',
    '.venv-aot/x',
    '.venv-tpu/x',
    'runs/x',
    'sprl.egg-info/x',
    'sprl/__pycache__/x',
  ]
  result = subprocess.run(['git', '-C', str(ROOT), 'check-ignore', *paths], capture_output=True, text=True, env={**os.environ})
  assert result.stdout.split() == paths
