"""A fixture for simulations, which make a million small calls."""

import jaxtyping
import pytest


@pytest.fixture(scope='module')
def unchecked():
  """Turn off the checks of signatures: they take three quarters of a simulation's time. Other files check the same code."""
  before = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', before)
