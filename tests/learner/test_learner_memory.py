"""benchmarks/learner_memory.py: what it would compile. Nothing of it is compiled here."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / 'benchmarks'))
from learner_memory import CASES, program

from sprl.models.config import tiny


@pytest.mark.parametrize('name', CASES)
def test_an_update_takes_what_is_said_to_be_given_and_returns_the_state_it_had(name):
  step, state, *given = program(name, tiny('qwen2', num_hidden_layers=1))
  after, metrics = jax.eval_shape(step, state, *given)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
  assert metrics['update/loss'].shape == ()
