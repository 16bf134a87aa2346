"""Attention of packed rows whose tokens lie on several devices (`mesh.learner.sequence`), between two all-to-alls.

Outside attention, everything is computed token by token, so each device has a part of a row's tokens and all heads. Attention
needs whole rows. The first all-to-all gives each device all tokens for a share of the heads. The device computes attention as on
one device, and the second all-to-all returns the outputs. With Q devices:

    [rows, tokens/Q, heads] -> all to all -> [rows, tokens, heads/Q] -> attention -> all to all -> [rows, tokens/Q, heads]

With fewer kv heads than devices, each kv head is repeated, and each copy serves a part of its query heads.
"""

import math

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from sprl.config import SettingsError
from sprl.models.config import ModelConfig
from sprl.sharding.rules import parts, shard, shares

QUERIES, KEYS = ('rows', None, 'attention_heads', None), ('rows', None, 'attention_kv_heads', None)


def whole_rows(
  q: Float[Array, 'B T H D'], k: Float[Array, 'B T K D'], v: Float[Array, 'B T K D']
) -> tuple[Float[Array, 'B T H D'], Float[Array, 'B T N D'], Float[Array, 'B T N D']]:
  """Return queries, keys and values with whole rows and a share of the heads on each device.

  N is the number of kv heads after they are repeated (`kv_copies`).
  """
  copies = kv_copies(k.shape[2] // parts('kv_heads', k.shape[2]), shares('tokens'))
  if copies > 1:
    k, v = jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)
  return shard(q, *QUERIES), shard(k, *KEYS), shard(v, *KEYS)


def own_tokens(out: Float[Array, 'B T H D']) -> Float[Array, 'B T H D']:
  """Return the outputs of attention with all heads and a share of the tokens on each device."""
  return shard(out, 'rows', 'tokens', 'heads', None)


def kv_copies(kv_heads: int, devices: int) -> int:
  """Return how often each kv head is repeated so that `devices` devices can split the heads evenly: 2 on 4 devices, twice."""
  return devices // math.gcd(devices, kv_heads)


def check_sequence(config: ModelConfig, mesh: Mesh | AbstractMesh, where: str = 'config.mesh.learner') -> None:
  """Raise SettingsError if the mesh cannot split the tokens of this model's rows. `where` names the mesh in the error."""
  if (devices := shares('tokens', mesh)) == 1:
    return
  if config.experts is not None:
    raise SettingsError(f'{where}.sequence = {devices}: expected 1 with a model of family {config.family}, which has experts')
  H, K = config.num_heads // shares('heads', mesh), config.num_kv_heads // shares('kv_heads', mesh)
  if H % (K * kv_copies(K, devices)):
    accepted = [n for n in range(1, H + 1) if H % (K * kv_copies(K, n)) == 0]
    raise SettingsError(
      f'{where}.sequence = {devices}: expected one of {", ".join(map(str, accepted))}, into which the {H} query heads and {K} kv '
      'heads of a device can be split'
    )
