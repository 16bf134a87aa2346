"""A fixture for tests that make a million small calls."""

import jaxtyping
import pytest


@pytest.fixture(scope='module')
def unchecked():
  """Turns off the checks of signatures, which take three quarters of a simulation's time. Other files check the same code."""
  before = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', before)
