"""An HTTP server in a thread of the run."""

import errno
import socket
import threading

import uvicorn
from starlette.applications import Starlette

from sprl.config import SettingsError


def bound(host: str = '127.0.0.1', port: int = 0, settings: tuple[str, str] = ('host', 'port')) -> socket.socket:
  """Return a socket that holds the port of `host`; 0: a free one. Raises SettingsError, which names `settings`, if it cannot."""
  held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
  held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    held.bind((host, port))
  except (OSError, OverflowError, UnicodeError) as error:  # in use, or no port number, or no host name
    held.close()
    if isinstance(error, socket.gaierror | UnicodeError) or error.args[:1] == (errno.EADDRNOTAVAIL,):
      raise SettingsError(f'{settings[0]} = {host!r}: expected an IPv4 address or a name of this machine ({error})') from None
    raise SettingsError(f'{settings[1]} = {port}: expected a free port of {host} ({error})') from None
  return held


class ServerThread:
  """Serves an application on a bound socket, or on a free port of this machine. A context manager; entering opens the port."""

  def __init__(self, app: Starlette, held: socket.socket | None = None, grace: float = 1.0):
    self._socket = held or bound()
    self.port: int = self._socket.getsockname()[1]
    config = uvicorn.Config(
      app, log_level='warning', access_log=False, lifespan='off', backlog=2048, timeout_graceful_shutdown=max(1, round(grace))
    )
    self._server = uvicorn.Server(config)
    # A daemon: the process can exit if the server does not end.
    self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name='endpoint', daemon=True)
    self._grace = grace

  def __enter__(self) -> 'ServerThread':
    self._socket.listen(2048)  # from here on the kernel accepts connections, so no client is refused
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    """Accept no more requests, wait for those that run, at most the time of grace, and close the server."""
    self._server.should_exit = True
    if self._thread.is_alive():
      self._thread.join(self._grace + 2)
      self._server.force_exit = True
      self._thread.join(2)
    self._socket.close()
