"""Model FLOPs counted by loops and by hand, and the devices whose peak is known."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import small

from sprl.config import Lora, Packing, Rollout, Sampling
from sprl.learner.batch import Tokens, pack, shape
from sprl.models.config import tiny
from sprl.planning import utilisation


def test_tokens_of_packed_rows_by_loops():
  """Two prompts of 3 and 5 tokens, each shared by two completions."""
  lengths, prompts = [(2, 4), (1, 3)], [3, 5]
  made = small.rollouts(lengths, prompts)
  sizes = shape(Sampling(max_prompt=5, max_tokens=4), Rollout(prompts=2, group=2), Packing(), minibatches=1)
  batch, metrics = pack(made, np.ones(4, np.float32), sizes, share_prefix=True)
  found = Tokens.of([batch, batch])
  pairs = 0
  for P, completions in zip(prompts, lengths):
    pairs += sum(t + 1 for t in range(P))
    pairs += sum(P + t + 1 for n in completions for t in range(n))
  assert found == Tokens(read=2 * (8 + 10), pairs=2 * pairs, trained=2 * 10)
  assert found.read == 2 * metrics['packing/tokens']
  # One layer of three sees the two newest tokens.
  windowed = sum(min(2, t + 1) for P in prompts for t in range(P)) + sum(2 for n in (2, 4, 1, 3) for _ in range(n))
  assert Tokens.of([batch, batch], (None, 2, None)).pairs == round(2 * (2 * pairs + windowed) / 3)


def test_flops_of_an_update_by_hand():
  config = tiny('llama')
  E, F, L, V, D = config.hidden_size, config.intermediate_size, config.num_layers, config.vocab_size, config.head_dim
  H, K = config.num_heads, config.num_kv_heads
  weights = L * (E * (H + 2 * K) * D + H * D * E + 3 * E * F)
  tokens = Tokens(read=7, pairs=20, trained=4)
  forward, attention = 2 * weights * 7 + 2 * V * E * 4, 4 * L * H * D * 20
  assert utilisation.update_flops(config, Lora(), tokens) == 3 * (forward + attention)
  adapters = L * 2 * (E + H * D + H * D + E)  # A and B of rank 2 of q and o
  found = utilisation.update_flops(config, Lora(rank=2, targets=('q', 'o')), tokens)
  assert found == 2 * forward + 3 * (attention + 2 * adapters * 7)


def test_a_token_meets_the_chosen_experts_alone():
  config, tokens = tiny('qwen3_moe'), Tokens(read=1)
  more = dataclasses.replace(config, experts=dataclasses.replace(config.experts, per_token=config.experts.per_token + 1))
  added = utilisation.update_flops(more, Lora(), tokens) - utilisation.update_flops(config, Lora(), tokens)
  assert added == 6 * len(config.experts.layers) * 3 * config.hidden_size * config.experts.width


def test_the_peak_of_a_known_device_alone():
  h100, card = SimpleNamespace(device_kind='NVIDIA H100 80GB HBM3'), SimpleNamespace(device_kind='NVIDIA H100 PCIe')
  assert (utilisation.peak(h100, jnp.bfloat16), utilisation.peak(h100, jnp.float32)) == (989e12, 494e12)
  assert utilisation.peak(card, jnp.bfloat16) is None  # another peak, and no entry
  assert utilisation.peak(jax.devices()[0], jnp.float32) is None


def test_memory_is_that_of_the_fullest_device():
  devices = [SimpleNamespace(memory_stats=lambda n=n: {'bytes_in_use': n, 'peak_bytes_in_use': 10 - n}) for n in (3, 5, 4)]
  found = utilisation.memory(devices)
  assert (found['device_memory'], found['device_memory_peak']) == (5.0, 7.0)
  assert set(utilisation.memory([SimpleNamespace(memory_stats=lambda: None)])) <= {'host_memory'}
