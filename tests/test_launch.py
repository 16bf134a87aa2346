"""Launch scripts, the JobSet and the Dockerfile."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from saving import SAVES

from sprl.distributed.process_group import VARIABLES

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'


@pytest.mark.parametrize('script', sorted(LAUNCH.glob('*.sh')), ids=lambda path: path.name)
def test_a_script_has_no_syntax_errors(script):
  shell = 'bash' if 'bash' in script.read_text().splitlines()[0] else 'sh'
  assert subprocess.run([shell, '-n', str(script)], capture_output=True, check=False).returncode == 0


# --- Slurm -----------------------------------------------------------------------------------------------------------


def slurm(folder: Path, end: str, status: int = 0, preempted: str = 'None'):
  """Run slurm.sh in a job of three tasks whose srun starts only the last task. Return the log's lines and the exit status."""
  programs = {
    'scontrol': 'case "$*" in "show hostnames"*) echo node17; echo node18;; "show job 123456") '
    f'echo "   PreemptEligibleTime=2026-01-02T03:04:05 PreemptTime={preempted}";; *) echo "scontrol $*" >>"$LOG";; esac',
    'srun': 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=2 exec "$@"',
    'python': f'echo "$SPRL_COORDINATOR $SPRL_PROCESSES $SPRL_PROCESS $*" >>"$LOG"; echo "$XLA_FLAGS" >>"$LOG"; exit {status}',
  }
  for name, body in programs.items():
    (folder / name).write_text(f'#!/bin/bash\n{body}\n')
    (folder / name).chmod(0o755)
  (folder / 'bin').symlink_to(folder)
  job = {'SLURM_JOB_ID': '123456', 'SLURM_JOB_NODELIST': 'node[17-18]', 'SLURM_NTASKS': '3', 'SLURM_JOB_END_TIME': end}
  environment = {
    'PATH': f'{folder}:{os.environ["PATH"]}',
    'LOG': str(folder / 'log'),
    'VENV': str(folder),
    'XLA_FLAGS': '--mine',
    **job,
  }
  command = ['bash', str(LAUNCH / 'slurm.sh'), '--config=a b.py', '--workdir=runs/x']
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  return (folder / 'log').read_text().splitlines(), done.returncode


def test_a_slurm_task_receives_coordinator_count_and_number(tmp_path):
  (command, flags), status = slurm(tmp_path, end='99999999999')
  assert status == 0
  assert command == 'node17:23456 3 2 -m sprl.main --config=a b.py --workdir=runs/x'
  assert flags.split() == ['--mine', '--xla_gpu_enable_latency_hiding_scheduler=true']


@pytest.mark.parametrize('left', [-1000, 300, 355])  # Slurm sends the signal up to 60 s before the requested 300 s
def test_a_job_is_requeued_at_its_time_limit(tmp_path, left):
  log, status = slurm(tmp_path, end=str(int(time.time()) + left))
  assert (log[-1], status) == ('scontrol requeue 123456', 0)


@pytest.mark.parametrize(('preempted', 'requeued'), [('2026-01-02T03:05:00', True), ('None', False)])
def test_a_job_that_ends_within_its_grace_time_is_requeued(tmp_path, preempted, requeued):
  log, status = slurm(tmp_path, end='99999999999', preempted=preempted)
  assert ('scontrol requeue 123456' in log, status) == (requeued, 0)


@pytest.mark.parametrize(('end', 'requeued'), [('1000', True), ('99999999999', False)])
def test_a_job_that_the_signal_ends_between_steps_is_requeued(tmp_path, end, requeued):
  log, status = slurm(tmp_path, end=end, status=143)
  assert ('scontrol requeue 123456' in log, status) == (requeued, 143)


def test_a_failed_job_is_not_requeued(tmp_path):
  log, status = slurm(tmp_path, end='1000', status=3)
  assert (len(log), status) == (2, 3)


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def of(properties, *required):
  """Return the schema of an object with these properties and no others."""
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
# The used part of the custom resource definition of jobset.x-k8s.io/v1alpha2. kubernetes-validate checks the Job in it.
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


def test_the_jobset_matches_its_resource_definition(jobset):
  Draft202012Validator.check_schema(JOBSET)
  errors = [f'{error.json_path}: {error.message}' for error in Draft202012Validator(JOBSET).iter_errors(jobset)]
  assert errors == []


def test_the_jobs_of_the_jobset_are_valid_for_kubernetes(jobset):
  kubernetes_validate = pytest.importorskip('kubernetes_validate', reason='kubernetes-validate is not installed: make setup')
  [job] = jobset['spec']['replicatedJobs']
  whole = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'sprl-nodes-0'}, 'spec': job['template']['spec']}
  kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


def test_pods_receive_coordinator_count_and_number(jobset):
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


def test_the_dockerfile_copies_existing_files_and_starts_a_run():
  lines = re.sub(r'\\\n', ' ', (LAUNCH / 'Dockerfile').read_text()).splitlines()
  steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith('#')]
  assert steps[0][0] == 'FROM'
  copied = [source for verb, rest in steps if verb == 'COPY' for source in rest.split()[:-1]]
  assert {'sprl', 'configs', 'pyproject.toml', 'uv.lock'} <= set(copied)
  ignored = (ROOT / '.dockerignore').read_text().split()
  assert [source for source in copied if not (ROOT / source).exists() or source in ignored] == []
  [entry] = [json.loads(rest) for verb, rest in steps if verb == 'ENTRYPOINT']
  assert entry == ['launch/preemptible.sh', 'python', '-m', 'sprl.main']


@pytest.mark.parametrize(('ends_with', 'terminated', 'status'), [(0, False, 0), (3, False, 3), (0, True, 75), (3, True, 3)])
def test_a_preempted_run_exits_with_75_unless_it_failed(ends_with, terminated, status):
  work = 'while true; do sleep 0.05; done' if terminated else f'exit {ends_with}'
  script = f'trap "exit {ends_with}" TERM; echo ready; {work}'
  process = subprocess.Popen(['sh', str(LAUNCH / 'preemptible.sh'), 'bash', '-c', script], stdout=subprocess.PIPE)
  assert process.stdout is not None
  assert process.stdout.readline() == b'ready\n'
  if terminated:
    process.terminate()
  assert process.wait(timeout=30) == status


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_of_a_preemptible_run_saves(number):
  command = ['sh', str(LAUNCH / 'preemptible.sh'), sys.executable, '-c', SAVES]
  heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell cannot trap a signal that it was started to ignore
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed)
  assert process.stdout is not None
  process.stdout.readline()
  os.killpg(process.pid, number)
  assert process.communicate(timeout=60)[0] == 'saved\n'
  assert process.returncode == 75
