"""The share of a GPU's memory that JAX reserves when it first uses the GPU."""

from collections.abc import MutableMapping

SHARE = '0.92'  # NCCL's buffers and other libraries use the rest. JAX's default, 0.75, is below what the planner fills.
NAMES = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # the new name and the old one


def reserve(environment: MutableMapping[str, str]) -> None:
  """Let JAX reserve SHARE, unless the user has set a share under either name. With both names JAX would not use the GPU."""
  if not set(NAMES) & environment.keys():
    environment[NAMES[0]] = SHARE
