"""Exported adapters give the same logits in PEFT as in sprl, separate and merged.

SPRL_REFERENCE_PYTHON names an interpreter with transformers and PEFT; see test_parity.py.
"""

import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity
from test_parity import PROMPTS, compare, random_params, reference

from sprl.config import Lora
from sprl.io.huggingface import export_folder
from sprl.io.peft import export_adapters
from sprl.io.tokenizer import write_tiny
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.models.lora import Base, init_adapters

pytestmark = test_parity.pytestmark

CASES = {
  'llama': ('llama', Lora(rank=5, alpha=7.5)),
  'qwen2': ('qwen2', Lora(rank=4, alpha=16.0, targets=('k', 'o', 'up'))),
  'qwen3': ('qwen3', Lora(rank=1, alpha=2.0)),
  'gemma3': ('gemma3_text', Lora(rank=2, alpha=4.0)),
  'olmo2': ('olmo2', Lora(rank=2, alpha=4.0, targets=('q', 'k', 'down'))),
}


@pytest.fixture(scope='module')
def where(tmp_path_factory):
  """A folder with base, adapter and merged model of every case, and the results of transformers with PEFT."""
  has_peft = subprocess.run([os.environ['SPRL_REFERENCE_PYTHON'], '-c', 'import peft'], capture_output=True, check=False)
  if has_peft.returncode:
    pytest.skip(f'{os.environ["SPRL_REFERENCE_PYTHON"]} has no peft: make reference')
  where, jobs = tmp_path_factory.mktemp('peft'), []
  write_tiny(where / 'tokenizer')
  for name in CASES:
    config, base, adapters = random_adapters(name)
    export_folder(where / name, base.params, config, where / 'tokenizer', dtype=jnp.float32)
    export_folder(where / f'{name}.merged', base.under(adapters), config, where / 'tokenizer', dtype=jnp.float32)
    export_adapters(where / f'{name}.adapter', adapters, config, CASES[name][1], str(where / name))
    adapter = {'folder': str(where / name), 'adapter': str(where / f'{name}.adapter')}
    jobs += [adapter | {'tokens': PROMPTS, 'out': str(where / f'{name}.npz')}]
    jobs += [{'folder': str(where / f'{name}.merged'), 'tokens': PROMPTS, 'out': str(where / f'{name}.merged.npz')}]
  reference(jobs, where)
  return where


def random_adapters(name):
  """Return (config, frozen weights, random adapters) of a case."""
  family, lora = CASES[name]
  config = tiny(family)
  adapters = init_adapters(config, lora, jax.random.key(0))
  rng = np.random.default_rng(1)
  adapters = jax.tree.map(lambda w: jnp.asarray(rng.normal(0, 0.2, w.shape), jnp.float32), adapters)
  return config, Base(random_params(config), lora.alpha / lora.rank), adapters


@pytest.mark.parametrize('name', CASES)
def test_logits_with_adapters_equal_those_of_peft(where, name):
  config, base, adapters = random_adapters(name)
  tokens = jnp.asarray(PROMPTS, jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  def logits(params):
    graph, memory = transformer.graph(config), PackedAttention.of(jnp.ones_like(tokens))
    return transformer.forward(graph, params, tokens, positions, memory).hidden @ transformer.head_weight(params).T

  theirs = np.load(where / f'{name}.npz')['logits']
  np.testing.assert_allclose(jax.jit(logits)(base.under(adapters)), theirs, atol=1e-4)
  assert np.abs(np.asarray(jax.jit(logits)(base.params)) - theirs).max() > 0.1  # the adapters change the logits


@pytest.mark.parametrize('name', CASES)
def test_logits_of_the_merged_export_equal_those_of_peft(where, name):
  merged = compare(where / f'{name}.merged', where / f'{name}.merged.npz', PROMPTS)
  np.testing.assert_allclose(merged.logits, np.load(where / f'{name}.npz')['logits'], atol=1e-4)
