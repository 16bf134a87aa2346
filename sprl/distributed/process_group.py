"""The processes of a run: who this process is, and how the processes find each other.

Three environment variables identify a process. The launchers in launch/ set them:

    SPRL_COORDINATOR   host:port of process 0; the port must be free on that host
    SPRL_PROCESSES     number of processes
    SPRL_PROCESS       number of this process, from 0

Without these variables, a process is alone. The variables of Slurm are ignored: from them JAX would give each task one GPU, but
here a process uses all GPUs that it sees.
"""

import contextlib
import logging
import math
import os
import secrets
import socket
import struct
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from sprl.config import SettingsError
from sprl.distributed.team import ALONE, Team
from sprl.distributed.watchdog import Watchdog, close_when_silent

JAX_DEFAULT = 100  # seconds without a heartbeat
INTRODUCTION = 10  # seconds that a connection may be silent before it has shown the key
JAX_LATER = 60  # seconds that JAX waits longer than a watchdog, which names the cause
VARIABLES = ('SPRL_COORDINATOR', 'SPRL_PROCESSES', 'SPRL_PROCESS')
JAX_MEETING = 300  # seconds in which all processes have to start
log = logging.getLogger(__name__)


class Identity(NamedTuple):
  """The place of a process in its run."""

  coordinator: str  # host:port of process 0
  processes: int
  process: int


def identity(environment: Mapping[str, str]) -> Identity | None:
  """Read the three variables. Return None if none of them is set.

  Raises SettingsError if only some of them are set, or if a value is invalid.
  """
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
  return Identity(coordinator, int(processes), int(process))


def initialize(environment: Mapping[str, str] = os.environ, patience: float = math.inf) -> int:
  """Join the other processes and return their number. From then on, `jax.devices()` are the devices of all processes.

  Waits until all processes have called it. A single process does not wait. JAX aborts the others when a process is silent for
  longer than `patience` seconds, or 100 s if there is no limit, and aborts all that have started if one is missing after
  JAX_MEETING seconds. Raises SettingsError as `identity` does, and if process 0 cannot listen on its port.
  """
  me = identity(environment)
  if me is not None and me.processes > 1:
    if me.process == 0:
      _check_port(me.coordinator)
    jax.config.update('jax_enable_preemption_service', False)  # it would catch SIGTERM, which the training loop handles
    # JAX aborts a process that waits in vain, and names no setting.
    log.info(f'SPRL_PROCESS={me.process} of {me.processes} meets the others at SPRL_COORDINATOR={me.coordinator}')
    jax.distributed.initialize(
      me.coordinator,
      me.processes,
      me.process,
      cluster_detection_method='deactivate',
      initialization_timeout=JAX_MEETING,
      heartbeat_timeout_seconds=heartbeat(patience),
    )
  _disable_cache_on_cpus()
  return 1 if me is None else me.processes


def _check_port(coordinator: str) -> None:
  """Raise SettingsError if the port is in use on this host. JAX would crash."""
  try:
    socket.create_server(('', int(coordinator.rpartition(':')[2]))).close()
  except OSError as error:
    raise SettingsError(f'SPRL_COORDINATOR = {coordinator!r}: expected a free port of this host ({error})') from error


def heartbeat(patience: float) -> int:
  """Return the seconds without a heartbeat after which JAX aborts. They are later than the verdict of a watchdog."""
  return JAX_DEFAULT if math.isinf(patience) else math.ceil(patience) + JAX_LATER


def check_devices(processes: int, process: int) -> None:
  """Raise SettingsError if the devices have other processes. The hosts of a TPU slice find each other without the variables."""
  if (found := (jax.process_count(), jax.process_index())) != (processes, process):
    raise SettingsError(
      f'SPRL_PROCESSES = {processes}, SPRL_PROCESS = {process}: expected {found[0]} and {found[1]}, because the devices of this '
      f'machine are those of process {found[1]} of {found[0]}, for example in a TPU slice. SPRL_COORDINATOR names the host of '
      'process 0'
    )


def require_single_process(command: str, environment: Mapping[str, str] = os.environ) -> None:
  """Prepare a command that runs in one process. Raises SettingsError, which names `command`, if there are several."""
  me = identity(environment)
  if me is not None and me.processes > 1:
    raise SettingsError(f'SPRL_PROCESSES = {me.processes}: expected 1, or unset, for {command}, which runs in one process')
  _disable_cache_on_cpus()


def _disable_cache_on_cpus() -> None:
  """Disable JAX's compilation cache if the devices are several CPUs.

  XLA orders the collectives of a CPU program by a resource that the whole process shares. A program that is read back from the
  cache loses that order. Its devices then send in different orders, and wait for each other or are ended by Gloo.
  """
  if jax.config.jax_compilation_cache_dir and jax.default_backend() == 'cpu' and jax.device_count() > 1:
    jax.config.update('jax_enable_compilation_cache', False)


@contextmanager
def join(environment: Mapping[str, str] = os.environ, patience: float = math.inf) -> Iterator[Team]:
  """Join the processes that `environment` describes, and yield their `Team`.

  Until the block ends, a watchdog (watchdog.py) ends this process if another process dies, fails, or makes no progress for
  `patience` seconds. An exception in the block ends the other processes. Raises SettingsError as `identity` does, and if the
  devices know of other processes.
  """
  me = identity(environment)
  processes = initialize(environment, patience)
  check_devices(processes, 0 if me is None else me.process)
  if processes == 1 or me is None:
    yield ALONE
    return
  team = _connect(me, patience)
  try:
    yield team
  except Exception:
    team.await_verdict()  # if the death of another process caused the exception, this process ends here and the cause is named
    traceback.print_exc()
    team.fail(1)


# --- connections -----------------------------------------------------------------------------------------------------


def _connect(me: Identity, patience: float) -> Team:
  """Connect process 0 with each other process, twice: one connection for the team, one for the watchdogs."""
  if me.process == 0:
    accepted = _accept(me.processes - 1)
    connections = [accepted[k, 'team'][0] for k in range(1, me.processes)]
    peers = [accepted[k, 'watchdog'] for k in range(1, me.processes)]
  else:
    key, port = _share(bytes(32), 0)
    host = me.coordinator.rpartition(':')[0]
    (connection, _), peer = (_connect_to((host, port), key, me.process, purpose) for purpose in ('team', 'watchdog'))
    connections, peers = [connection], [peer]
  for connection, _ in peers:
    close_when_silent(connection)
  team = Team(me.process, me.processes, connections)
  team.watchdog = Watchdog(
    _name(me.process, socket.gethostname()), peers, hub=team.leads, progress=team.progress, patience=patience
  )
  return team


def _accept(others: int) -> dict[tuple[int, str], tuple[Connection, str]]:
  """Accept both connections of each other process: (process, purpose) -> (connection, name of the process)."""
  key = secrets.token_bytes(32)
  accepted: dict[tuple[int, str], tuple[Connection, str]] = {}
  with Listener(('', 0), backlog=2 * (others + 1)) as listener:
    _share(key, int(listener.address[1]))
    while len(accepted) < 2 * others:
      with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger's connection
        connection = listener.accept()
        _limit_silence(connection, INTRODUCTION)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        process, purpose, host = connection.recv()
        connection.send(socket.gethostname())
        _limit_silence(connection, 0)
        accepted[process, purpose] = connection, _name(process, host)
  return accepted


def _limit_silence(connection: Connection, seconds: int) -> None:
  """Make a read raise OSError after so many seconds without a byte; 0: never."""
  with socket.socket(fileno=os.dup(connection.fileno())) as same:
    same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', seconds, 0))  # a C struct timeval


def _connect_to(address: tuple[str, int], key: bytes, process: int, purpose: str) -> tuple[Connection, str]:
  """Connect to process 0. Return the connection and the name of process 0."""
  try:
    connection = Client(address, authkey=key)
  except OSError as error:
    raise SettingsError(
      f'SPRL_COORDINATOR: process {process} cannot reach port {address[1]} of {address[0]}, which process 0 chose ({error}); '
      'expected all ports to be open between the machines of a run'
    ) from None
  connection.send((process, purpose, socket.gethostname()))
  return connection, _name(0, connection.recv())


def _share(key: bytes, port: int) -> tuple[bytes, int]:
  """Return the key and port of process 0. They travel over the devices, because there is no connection yet."""
  numbers = np.array([*key, port >> 8, port & 255], np.int32)
  *numbers, high, low = multihost_utils.broadcast_one_to_all(numbers).tolist()
  return bytes(numbers), high << 8 | low


def _name(process: int, host: str) -> str:
  return f'SPRL_PROCESS={process} ({host})'
