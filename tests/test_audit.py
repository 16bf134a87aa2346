"""The audit of dependencies (.ci/audit.py), with a stand-in for pip-audit. Nothing here uses the network."""

import importlib.util
import json
import re
import sys
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location('audit', ROOT / '.ci/audit.py')
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)

PACKAGES = [('a', '1.0'), ('b', '1.0'), ('b', '2.0')]


# --- licences --------------------------------------------------------------------------------------------------------


def metadata(**fields):
  made = Message()
  for name, values in fields.items():
    for value in [values] if isinstance(values, str) else values:
      made[name.replace('_', '-')] = value
  return made


def test_a_licence_is_the_expression_else_the_classifiers_else_the_first_line():
  classifiers = ['Topic :: Software', 'License :: OSI Approved :: MIT License', 'License :: OSI Approved :: BSD License']
  assert audit.licence(metadata(License_Expression='MIT', Classifier=classifiers, License='GPL')) == 'MIT'
  assert audit.licence(metadata(Classifier=classifiers, License='GPL')) == 'MIT License AND BSD License'
  assert (
    audit.licence(metadata(Classifier=['License :: OSI Approved'], License='Apache License\n  Version 2.0')) == 'Apache License'
  )
  assert audit.licence(metadata(Name='x')) == ''


@pytest.mark.parametrize(
  ('stated', 'allowed'),
  [
    ('MIT', True),
    ('mit license', True),
    ('Mozilla Public License 2.0 (MPL 2.0)', True),
    ('GPL-3.0', False),
    ('', False),
    ('MIT OR GPL-3.0', True),
    ('MIT AND GPL-3.0', False),
    ('GPL-3.0 OR MIT AND BSD', True),
    ('MIT AND (GPL-3.0 OR ISC)', False),  # stricter than the expression
    ('(MIT OR ISC) AND BSD-3-Clause', True),
    ('GPL-2.0 WITH Classpath-exception-2.0', False),
  ],
)
def test_a_licence_is_allowed_by_all_parts_of_an_alternative(stated, allowed):
  assert audit.is_allowed(stated) is allowed


def test_a_licence_outside_the_list_is_a_fault_unless_the_package_is_an_exception(capsys):
  (name, (stated, _)), *_ = audit.EXCEPTIONS.items()
  assert audit.report_licences({'a': 'MIT', name: stated}, ['a', 'absent']) == []
  assert 'not judged: absent' in capsys.readouterr().out
  (fault,) = audit.report_licences({'a': 'MIT', name: 'another'}, [])
  assert fault.startswith(f"{name} has the licence 'another'")
  (fault,) = audit.report_licences({'a': stated}, [])
  assert fault.startswith('a has')
  assert audit.report_licences({'nvidia-x': 'NVIDIA Proprietary Software', 'libtpu': ''}, []) == []


# --- vulnerabilities -------------------------------------------------------------------------------------------------


@pytest.fixture
def pip_audit(tmp_path):
  """Return a function that makes a stand-in for pip-audit. `answers`: database -> an error, or the entries of some packages."""

  def make(**answers):
    program, log = tmp_path / 'pip-audit', tmp_path / 'log'
    program.write_text(
      f'#!{sys.executable}\n'
      'import json, sys\n'
      f'answers = json.loads({json.dumps(json.dumps(answers))})\n'
      'database = [a for a in sys.argv if a.startswith("--vulnerability-service=")][0].partition("=")[2]\n'
      'lines = open(sys.argv[-1]).read().split()\n'
      f'open({str(log)!r}, "a").write(database + " " + " ".join(lines) + "\\n")\n'
      'of = answers.get(database, "no route")\n'
      'if isinstance(of, str):\n'
      '  sys.exit("ERROR:pip_audit: " + of)\n'
      'named = [(line, *line.split("==")) for line in lines]\n'
      'found = [dict(of.get(line, {"vulns": []}), name=name, version=version) for line, name, version in named]\n'
      'print(json.dumps({"dependencies": found, "fixes": []}))\n'
      'sys.exit(any(each.get("vulns") for each in found))\n'
    )
    program.chmod(0o755)
    return str(program), log

  return make


SKIPPED = {'skip_reason': 'Dependency not found on PyPI'}
VULNERABLE = {'vulns': [{'id': 'PYSEC-1', 'aliases': ['CVE-2'], 'fix_versions': ['2.1']}]}


def test_every_version_is_asked_about_and_a_vulnerability_is_a_fault(pip_audit, capsys):
  program, log = pip_audit(pypi={'b==2.0': VULNERABLE})
  assert audit.report_vulnerabilities(program, PACKAGES) == ['b 2.0: PYSEC-1 CVE-2, fixed in 2.1']
  assert log.read_text().splitlines() == ['pypi a==1.0', 'pypi a==1.0 b==2.0', 'pypi b==1.0']
  assert 'pypi was asked about 3 packages' in capsys.readouterr().out


def test_an_accepted_vulnerability_is_printed_and_no_fault(pip_audit, capsys, monkeypatch):
  monkeypatch.setattr(audit, 'ACCEPTED', {'CVE-2': 'no code of sprl reaches it'})
  assert audit.report_vulnerabilities(pip_audit(pypi={'a==1.0': VULNERABLE})[0], PACKAGES) == []
  assert 'fixed in 2.1: no code of sprl reaches it' in capsys.readouterr().out


@pytest.mark.parametrize('first', ['no route', {'a==1.0': SKIPPED}])
def test_the_second_database_is_asked_where_the_first_does_not_answer(pip_audit, first):
  program, log = pip_audit(pypi=first, osv={'b==1.0': VULNERABLE})
  assert audit.report_vulnerabilities(program, PACKAGES) == ['b 1.0: PYSEC-1 CVE-2, fixed in 2.1']
  assert log.read_text().splitlines()[0] == 'pypi a==1.0'


def test_without_a_database_nothing_is_checked_and_the_audit_says_so(pip_audit, capsys):
  program, log = pip_audit(pypi={'a==1.0': SKIPPED})
  assert audit.report_vulnerabilities(program, PACKAGES) == []
  said = capsys.readouterr().out
  assert 'known vulnerabilities were NOT checked' in said
  assert 'pypi: it knows none of 1 packages; osv: ERROR:pip_audit: no route' in said
  assert log.read_text().splitlines() == ['pypi a==1.0', 'osv a==1.0']  # one question each


def test_packages_that_the_database_does_not_know_are_named(pip_audit, capsys):
  assert audit.report_vulnerabilities(pip_audit(pypi={'b==1.0': SKIPPED})[0], PACKAGES) == []
  assert 'does not know b' in capsys.readouterr().out


@pytest.mark.parametrize(('faults', 'status'), [([], 0), (['a has the licence X'], 1)])
def test_a_fault_fails_the_audit(faults, status, monkeypatch, capsys):
  monkeypatch.setattr(audit, 'report_licences', lambda *_: faults)
  monkeypatch.setattr(audit, 'report_vulnerabilities', lambda *_: [])
  assert audit.main('pip-audit') == status
  assert ('FAULT: a has the licence X' in capsys.readouterr().out) == bool(faults)


# --- this project ----------------------------------------------------------------------------------------------------


def test_the_installed_packages_have_allowed_licences(capsys):
  installed = {audit.canonical(d.metadata['Name']): audit.licence(d.metadata) for d in audit.importlib.metadata.distributions()}
  locked = {name for name, _ in audit.locked(audit.tomllib.loads(audit.LOCK.read_text()))}
  judged = {name: stated for name, stated in installed.items() if name in locked}
  assert len(judged) > 30
  assert audit.report_licences(judged, locked) == []


def test_the_locked_packages_are_those_of_an_index():
  lock = {'package': [
    {'name': 'sprl', 'version': '0.1.0', 'source': {'editable': '.'}},
    {'name': 'a', 'version': '2', 'source': {'registry': 'https://pypi.org/simple'}},
  ]}  # fmt: skip
  assert audit.locked(lock) == [('a', '2')]


def test_the_audit_runs_in_ci():
  assert re.search(r'^stage audit make audit$', (ROOT / '.ci/run').read_text(), re.MULTILINE)
