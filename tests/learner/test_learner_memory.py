"""benchmarks/learner_memory.py: the shapes of its programs. Nothing is compiled here."""

import jax
import pytest
from learner_memory import CASES, program

from sprl.models.config import tiny

REPRESENTATIVE = 'adapters of rank 32, adamw'


@pytest.mark.parametrize(
  'name', [name if name == REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_update_returns_a_state_of_the_same_shapes(name):
  step, state, *given = program(name, tiny('qwen2', num_hidden_layers=1))
  after, metrics = jax.eval_shape(step, state, *given)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
  assert metrics['update/loss'].shape == ()
