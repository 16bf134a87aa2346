"""Compiling an engine before its weights exist: what it compiles is what the engine calls."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_engine import engine_config, network, requests

from sprl.cache.scales import unit
from sprl.config import UNQUANTISED, Cache, Quant
from sprl.sampler.compile_ahead import compile_engine, outputs
from sprl.sampler.engine import generate
from sprl.sampler.weights import weights_function


@pytest.mark.parametrize(
  ('settings', 'quant'),
  [
    (Cache(), UNQUANTISED),
    (Cache(budget=10, interval=4, window=4), Quant(sampler='w8a8_kv8')),
    (Cache(method='h2o', budget=10, interval=4, window=4), UNQUANTISED),  # these two store a number for each slot
    pytest.param(Cache(method='gkv', budget=10, interval=4, window=4), UNQUANTISED, marks=pytest.mark.slow),
  ],
  ids=['dense', 'sparse fp8', 'h2o', 'gkv'],
)
def test_an_engine_that_was_compiled_ahead_compiles_nothing(settings, quant, caplog):
  config = replace(engine_config(settings, quant), seed=7, record_support=True)  # a program of no other test
  here = NamedSharding(Mesh(np.array(jax.devices()[:1]), ('data',)), PartitionSpec())
  config = replace(config, mesh=here.mesh)
  params = jax.device_put(network()[1], here)
  convert = weights_function(jnp.dtype('float32'), quant, 'reference')
  scales = unit(config.layout.layers) if config.layout.fp8 else None
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), params)
  compile_engine(config, outputs(convert, abstract)._replace(scales=scales))
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    found = generate(config, convert(params)._replace(scales=scales), requests(group=2))
  assert len(found) == 6
  compiled = [r.getMessage() for r in caplog.records if 'Compiling' in r.getMessage()]
  assert not [m for m in compiled if any(f'jit({name})' in m for name in ('prefill', 'insert', 'decode', 'read', 'function'))]


@pytest.mark.parametrize(('longest', 'bucket'), [(None, 0), (0, 0), (1, 1)], ids=['unknown', 'short', 'long'])
def test_the_prefill_of_the_first_prompts_is_compiled(longest, bucket, caplog):
  here = NamedSharding(Mesh(np.array(jax.devices()[:1]), ('data',)), PartitionSpec())
  config = replace(engine_config(Cache(), UNQUANTISED), seed=8 + bucket, mesh=here.mesh)
  lengths = [1] * config.prefill + [config.buckets[1] + 1]  # prompts after the first prefill do not count
  if longest is not None:
    lengths[0] = config.buckets[0] + longest
  convert = weights_function(jnp.dtype('float32'), UNQUANTISED, 'reference')
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), network()[1])
  jax.clear_caches()
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    compile_engine(config, outputs(convert, abstract), () if longest is None else lengths)
  [compiled] = [r.getMessage() for r in caplog.records if r.getMessage().startswith('Compiling jit(prefill)')]
  assert f'int32[{config.prefill},{config.buckets[bucket]}]' in compiled
