"""The packages of the endpoint, which are an extra."""

import importlib.util

from sprl.config import SettingsError


def check_installed(asked: str) -> None:
  """Raise SettingsError, which begins with what was `asked`, if starlette or uvicorn is not installed."""
  if missing := [name for name in ('starlette', 'uvicorn') if importlib.util.find_spec(name) is None]:
    raise SettingsError(f'{asked}: {" and ".join(missing)} not installed; make install EXTRAS=serve')
