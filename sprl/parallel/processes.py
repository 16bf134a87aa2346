"""Joining the processes of one run, before any device is used.

Three environment variables say who they are, and the launchers in launch/ set them:

    SPRL_COORDINATOR   host:port of process 0, which must be free there
    SPRL_PROCESSES     how many there are
    SPRL_PROCESS       which one this is, from 0

Without them a process is alone. JAX would find its place among the tasks of Slurm by itself, but then leaves each task one GPU,
even where a task has the whole node; here every process has all the GPUs that it sees.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

import jax

from sprl.settings import SettingsError

VARIABLES = ('SPRL_COORDINATOR', 'SPRL_PROCESSES', 'SPRL_PROCESS')


class Place(NamedTuple):
  """A process among those of a run."""

  coordinator: str
  processes: int
  process: int


def place(environment: Mapping[str, str]) -> Place | None:
  """What the three variables say; None where none is set. Raises SettingsError where only some are, or one cannot be read."""
  given = {name: environment[name] for name in VARIABLES if environment.get(name)}
  if not given:
    return None
  if missing := [name for name in VARIABLES if name not in given]:
    raise SettingsError(f'{missing[0]} is not set: expected all of {", ".join(VARIABLES)}, or none; set are {", ".join(given)}')
  coordinator, processes, process = (given[name] for name in VARIABLES)
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise SettingsError(f'SPRL_COORDINATOR = {coordinator!r}: expected host:port')
  if not processes.isdecimal() or int(processes) < 1:
    raise SettingsError(f'SPRL_PROCESSES = {processes!r}: expected a number, 1 or more')
  if not process.isdecimal() or int(process) >= int(processes):
    raise SettingsError(f'SPRL_PROCESS = {process!r}: expected a number below SPRL_PROCESSES = {processes}')
  return Place(coordinator, int(processes), int(process))


def initialize(environment: Mapping[str, str] = os.environ) -> int:
  """How many processes there are, after waiting for the others and joining them: from here on jax.devices() are those of all.

  Alone, it joins nobody. Raises SettingsError as `place`.
  """
  here = place(environment)
  if here is not None and here.processes > 1:
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM for itself
    jax.distributed.initialize(here.coordinator, here.processes, here.process, cluster_detection_method='deactivate')
  _forgo_cache()
  return 1 if here is None else here.processes


def only_one(command: str, environment: Mapping[str, str] = os.environ) -> None:
  """In place of `initialize`: raises SettingsError, naming the command, where this process is one of several."""
  here = place(environment)
  if here is not None and here.processes > 1:
    raise SettingsError(
      f'SPRL_PROCESSES = {here.processes}: expected 1, or nothing, for {command}, which uses the devices of one process'
    )
  _forgo_cache()


def _forgo_cache() -> None:
  """Where several devices are CPUs, programs are compiled anew, whatever compilation cache JAX was given.

  XLA's programs for CPUs order what they send by a resource that all of it uses. Read back from the cache, a loop has another one
  than what stands beside it: devices send in different orders, and wait for each other, or Gloo ends their processes.
  """
  if jax.config.jax_compilation_cache_dir and jax.default_backend() == 'cpu' and jax.device_count() > 1:
    jax.config.update('jax_enable_compilation_cache', False)
