"""The families of models: what the network computes for each, and why it refuses some others.

docs/gen_reference.py makes the table of families from this file, which therefore imports nothing from sprl.
"""

from dataclasses import dataclass
from typing import Literal

# `model_type` in config.json
Family = Literal['llama', 'mistral', 'qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe', 'gemma3_text', 'olmo2']
Norms = Literal['before', 'after', 'both']
QKNorm = Literal['head', 'whole']
Activation = Literal['silu', 'gelu_tanh']


@dataclass(frozen=True)
class Traits:
  """What the network computes for a family, and the defaults of keys that its config.json may leave out."""

  architecture: str
  models: str
  norms: Norms = 'before'  # where the RMS norms of attention and MLP are
  norm_offset: float = 0.0  # added to the stored scale of every RMS norm
  qk_norm: QKNorm | None = None  # RMS norm of q and k: over each head, or over all heads together
  qkv_bias: bool = False  # biases on q, k and v
  activation: Activation = 'silu'  # of the MLP's gate
  scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(E)
  sliding_windows: Literal['none', 'all', 'some'] = 'none'  # layers that may have a sliding window
  experts: Literal['none', 'routed', 'routed and shared'] = 'none'
  tie_word_embeddings: bool = False
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  sliding_rope_theta: float | None = None  # of layers with a window; None: as the other layers
  head_dim: int | None = None  # None: hidden_size / num_attention_heads
  sliding_window: int | None = None


FAMILIES: dict[Family, Traits] = {
  'llama': Traits('LlamaForCausalLM', 'Llama, SmolLM2 and others with this architecture'),
  'mistral': Traits(
    'MistralForCausalLM', 'Mistral 7B, Mistral Nemo, Mistral Small without images', sliding_windows='all', sliding_window=4096
  ),
  'qwen2': Traits('Qwen2ForCausalLM', 'Qwen2, Qwen2.5', qkv_bias=True),
  'qwen3': Traits('Qwen3ForCausalLM', 'Qwen3', qk_norm='head', head_dim=128),
  'qwen2_moe': Traits('Qwen2MoeForCausalLM', 'Qwen2-MoE', qkv_bias=True, experts='routed and shared'),
  'qwen3_moe': Traits('Qwen3MoeForCausalLM', 'Qwen3-MoE', qk_norm='head', experts='routed'),
  'gemma3_text': Traits(
    'Gemma3ForCausalLM',
    'Gemma 3 (text)',
    norms='both',
    norm_offset=1.0,
    qk_norm='head',
    activation='gelu_tanh',
    scaled_embeddings=True,
    sliding_windows='some',
    tie_word_embeddings=True,
    rope_theta=1e6,
    sliding_rope_theta=1e4,
    head_dim=256,
    sliding_window=4096,
  ),
  'olmo2': Traits('Olmo2ForCausalLM', 'OLMo 2', norms='after', qk_norm='whole', rms_norm_eps=1e-5),
}

# Families that users ask for, each with what the network lacks.
REFUSED = {
  'gpt_oss': 'attention sinks, experts with biases and a clamped activation, and MXFP4 weights are missing',
  'gemma': 'Gemma 1 is missing; Gemma 3 is supported',
  'gemma2': 'soft caps of attention scores and logits are missing',
  'gemma3': 'images are missing; a folder with the text model alone has model_type gemma3_text',
  'olmo3': 'its window layers are missing; OLMo 2 is supported',
  'mixtral': 'its experts are missing',
  'deepseek_v2': 'latent attention is missing',
  'deepseek_v3': 'latent attention is missing',
  'phi3': 'joined projections are missing',
}
