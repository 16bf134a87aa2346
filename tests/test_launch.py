"""The launchers: scripts that parse and hand on what they should, a JobSet and a Dockerfile of the right form."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from sprl.parallel.processes import VARIABLES

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'


@pytest.mark.parametrize('script', sorted(LAUNCH.glob('*.sh')), ids=lambda path: path.name)
def test_scripts_parse(script):
  shell = 'bash' if 'bash' in script.read_text().splitlines()[0] else 'sh'
  assert subprocess.run([shell, '-n', str(script)], capture_output=True, check=False).returncode == 0


# --- Slurm -----------------------------------------------------------------------------------------------------------


def slurm(folder: Path, end: str, status: int = 0):
  """slurm.sh within a job of three tasks, of which a stand-in for srun starts the last; (what happened, exit status)."""
  programs = {
    'scontrol': 'if [ "$1" = show ]; then echo node17; echo node18; else echo "scontrol $*" >>"$LOG"; fi',
    'srun': 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=2 exec "$@"',
    'python': f'echo "$SPRL_COORDINATOR $SPRL_PROCESSES $SPRL_PROCESS $*" >>"$LOG"; echo "$XLA_FLAGS" >>"$LOG"; exit {status}',
  }
  for name, body in programs.items():
    (folder / name).write_text(f'#!/bin/bash\n{body}\n')
    (folder / name).chmod(0o755)
  (folder / 'bin').symlink_to(folder)
  job = {'SLURM_JOB_ID': '123456', 'SLURM_JOB_NODELIST': 'node[17-18]', 'SLURM_NTASKS': '3', 'SLURM_JOB_END_TIME': end}
  known = {
    'PATH': f'{folder}:{os.environ["PATH"]}',
    'LOG': str(folder / 'log'),
    'VENV': str(folder),
    'XLA_FLAGS': '--mine',
    **job,
  }
  arguments = ['--config=a b.py', '--workdir=runs/x']
  done = subprocess.run(['bash', str(LAUNCH / 'slurm.sh'), *arguments], env=known, capture_output=True, text=True, check=False)
  return (folder / 'log').read_text().splitlines(), done.returncode


def test_a_task_of_slurm_is_told_its_place(tmp_path):
  (told, flags), status = slurm(tmp_path, end='99999999999')
  assert status == 0
  assert told == 'node17:23456 3 2 -m sprl.main --config=a b.py --workdir=runs/x'
  assert flags.split() == ['--mine', '--xla_gpu_enable_latency_hiding_scheduler=true']


@pytest.mark.parametrize('left', [-1000, 300, 355])  # Slurm may send its signal 60 s before the 300 that are asked for
def test_a_job_is_queued_again_where_its_time_is_up(tmp_path, left):
  log, status = slurm(tmp_path, end=str(int(time.time()) + left))
  assert (log[-1], status) == ('scontrol requeue 123456', 0)


def test_a_job_that_failed_is_not_queued_again(tmp_path):
  log, status = slurm(tmp_path, end='1000', status=3)
  assert (len(log), status) == (2, 3)


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def of(properties, *required):
  """A schema of an object that has these properties and no others."""
  return {'type': 'object', 'properties': properties, 'required': list(required), 'additionalProperties': False}


NAME = {'type': 'string', 'pattern': '^[a-z]([-a-z0-9]*[a-z0-9])?$', 'maxLength': 40}
RULE = of(
  {
    'name': {'type': 'string', 'pattern': '^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$'},
    'action': {'enum': ['FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts']},
    'onJobFailureReasons': {'type': 'array', 'items': {'enum': ['BackoffLimitExceeded', 'DeadlineExceeded', 'PodFailurePolicy']}},
    'targetReplicatedJobs': {'type': 'array', 'items': NAME},
  },
  'action',
  'name',
)
# Of jobset.x-k8s.io/v1alpha2, by its custom resource definition, the part in use. A Job is Kubernetes' own affair.
JOBSET = of(
  {
    'apiVersion': {'const': 'jobset.x-k8s.io/v1alpha2'},
    'kind': {'const': 'JobSet'},
    'metadata': of({'name': NAME}, 'name'),
    'spec': of(
      {
        'network': of({'enableDNSHostnames': {'type': 'boolean'}, 'subdomain': NAME}),
        'failurePolicy': of(
          {
            'maxRestarts': {'type': 'integer', 'minimum': 0},
            'restartStrategy': {'enum': ['Recreate', 'BlockingRecreate']},
            'rules': {'type': 'array', 'items': RULE},
          }
        ),
        'replicatedJobs': {
          'type': 'array',
          'minItems': 1,
          'items': of(
            {'name': NAME, 'replicas': {'type': 'integer', 'minimum': 1}, 'template': of({'spec': {'type': 'object'}}, 'spec')},
            'name',
            'template',
          ),
        },
      },
      'replicatedJobs',
    ),
  },
  'apiVersion',
  'kind',
  'metadata',
  'spec',
)


@pytest.fixture(scope='module')
def jobset():
  return yaml.safe_load((LAUNCH / 'kubernetes' / 'jobset.yaml').read_text())


def test_the_jobset_has_the_form_of_its_definition(jobset):
  Draft202012Validator.check_schema(JOBSET)
  errors = [f'{error.json_path}: {error.message}' for error in Draft202012Validator(JOBSET).iter_errors(jobset)]
  assert errors == []


def test_its_job_has_the_form_that_kubernetes_wants(jobset):
  kubernetes_validate = pytest.importorskip('kubernetes_validate', reason='kubernetes-validate is not installed (make setup)')
  [job] = jobset['spec']['replicatedJobs']
  whole = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'sprl-nodes-0'}, 'spec': job['template']['spec']}
  kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


def test_its_pods_are_told_their_place(jobset):
  [job] = jobset['spec']['replicatedJobs']
  spec, name = job['template']['spec'], jobset['metadata']['name']
  [container] = spec['template']['spec']['containers']
  environment = {each['name']: each.get('value', each.get('valueFrom')) for each in container['env']}
  assert set(VARIABLES) <= set(environment)
  assert spec['parallelism'] == spec['completions'] == int(environment['SPRL_PROCESSES'])
  host, _, port = environment['SPRL_COORDINATOR'].partition(':')
  assert host == f'{name}-{job["name"]}-0-0.{name}'
  assert int(port) in [each['containerPort'] for each in container['ports']]
  assert {mount['name'] for mount in container['volumeMounts']} == {each['name'] for each in spec['template']['spec']['volumes']}


# --- Docker ----------------------------------------------------------------------------------------------------------


def test_what_the_dockerfile_copies_is_there_and_starts_the_run():
  """hadolint looks at the rest (make lint)."""
  lines = re.sub(r'\\\n', ' ', (LAUNCH / 'Dockerfile').read_text()).splitlines()
  steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith('#')]
  assert steps[0][0] == 'FROM'
  copied = [source for verb, rest in steps if verb == 'COPY' for source in rest.split()[:-1]]
  assert {'sprl', 'configs', 'constraints.txt'} <= set(copied)
  ignored = (ROOT / '.dockerignore').read_text().split()
  assert [source for source in copied if not (ROOT / source).exists() or source in ignored] == []
  [entry] = [json.loads(rest) for verb, rest in steps if verb == 'ENTRYPOINT']
  assert entry == ['launch/preemptible.sh', 'python', '-m', 'sprl.main']


@pytest.mark.parametrize(('ends_with', 'terminated', 'status'), [(0, False, 0), (3, False, 3), (0, True, 75), (3, True, 3)])
def test_a_run_that_was_preempted_is_not_done(ends_with, terminated, status):
  then = 'while true; do sleep 0.05; done' if terminated else f'exit {ends_with}'
  script = f'trap "exit {ends_with}" TERM; echo ready; {then}'
  process = subprocess.Popen(['sh', str(LAUNCH / 'preemptible.sh'), 'bash', '-c', script], stdout=subprocess.PIPE)
  assert process.stdout is not None
  assert process.stdout.readline() == b'ready\n'
  if terminated:
    process.terminate()
  assert process.wait(timeout=30) == status
