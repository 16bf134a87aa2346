"""The policy network: one decoder for Llama, Qwen2/2.5 and Qwen3, dense or with experts, told apart by ModelConfig alone.

Every weight is described once, where its module is made: shape and logical axes. `abstract_params` and the sharding rules
follow from that description; values come from a checkpoint or from `init_params`. Split once at start:

    graphdef = transformer.graph(config)                      # the network without weights
    params   = ...                                            # nested dict of arrays, see `abstract_params`
    hidden, memory = transformer.forward(graphdef, params, tokens, positions, memory)
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sprl.kernels.rope import Turns, rotate, turns
from sprl.models.config import Experts, ModelConfig
from sprl.models.memory import Memory
from sprl.models.moe import AXES, ROUTER, gated, gates, likeliest, mixture, probabilities
from sprl.models.routing import Routed
from sprl.parallel.rules import in_turn, kept, shard
from sprl.quant.dot import PRODUCT, dot
from sprl.settings import Kernels, Remat

Params = dict[str, Any]  # nested dict of arrays
ROUTE = 'route'  # the experts chosen: kept, for computed again they might be others, to whom the output owes nothing
KEPT = jax.checkpoint_policies.save_only_these_names
SAVED = {'layer': KEPT(ROUTE), 'dots': KEPT(PRODUCT, ROUTE)}  # by the name of what is computed again


def _weight(axes: tuple[str | None, ...], *shape: int) -> nnx.Param:
  return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
  """x @ kernel^T (+ bias), the kernel [out, in] as in Hugging Face checkpoints."""

  def __init__(self, axes: tuple[str, str], outputs: int, inputs: int, bias: bool = False):
    self.axes = axes
    self.kernel = _weight(axes, outputs, inputs)
    self.bias = _weight(axes[:1], outputs) if bias else None

  def __call__(self, x: Float[Array, '*B M']) -> Float[Array, '*B N']:
    """[..., inputs] -> [..., outputs]."""
    y = shard(dot(x, self.kernel.get_value(), self.axes), 'rows', *[None] * (x.ndim - 2), self.axes[0])
    return y if self.bias is None else y + shard(self.bias.get_value(), self.axes[0]).astype(y.dtype)


@partial(jax.checkpoint, static_argnums=2)  # cheap to compute again: kept are the inputs, not their float32 intermediates
def _normalised(x: Float[Array, '*B M'], scale: Float[Array, ' M'], eps: float) -> Float[Array, '*B M']:
  """x / rms(x) * scale over the last axis."""
  wide = x.astype(jnp.float32)
  normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (normed * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, computed in float32."""

  def __init__(self, axis: str, width: int, eps: float):
    self.scale = _weight((axis,), width)
    self.eps = eps

  def __call__(self, x: Float[Array, '*B M']) -> Float[Array, '*B M']:
    """Same shape and dtype as x."""
    return _normalised(x, shard(self.scale.get_value(), None), self.eps)


class Attention(nnx.Module):
  """Projections, rotary positions, and a question to the memory."""

  def __init__(self, config: ModelConfig):
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    self.q = Linear(('heads', 'embed'), H * D, E, config.qkv_bias)
    self.k = Linear(('kv_heads', 'embed'), K * D, E, config.qkv_bias)
    self.v = Linear(('kv_heads', 'embed'), K * D, E, config.qkv_bias)
    self.o = Linear(('embed', 'heads'), E, H * D)
    self.q_norm = RMSNorm('head_dim', D, config.rms_norm_eps) if config.qk_norm else None
    self.k_norm = RMSNorm('head_dim', D, config.rms_norm_eps) if config.qk_norm else None
    self.head_dim = D

  def __call__(self, layer: int, x: Float[Array, 'B T E'], turns: Turns, memory: Memory):
    """[B, T, E] -> [B, T, E], and the memory that has seen these tokens."""
    heads = (*x.shape[:2], -1, self.head_dim)
    q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = rotate(q, turns), rotate(k, turns)
    out, memory = memory.attend(layer, q, k, v)
    return self.o(out.reshape(*x.shape[:2], -1)), memory


class MLP(nnx.Module):
  """down(silu(gate(x)) * up(x)), the activation in float32."""

  def __init__(self, E: int, F: int):
    self.gate = Linear(('mlp', 'embed'), F, E)
    self.up = Linear(('mlp', 'embed'), F, E)
    self.down = Linear(('embed', 'mlp'), E, F)

  def __call__(self, x: Float[Array, 'B T E']) -> Float[Array, 'B T E']:
    """Same shape."""
    return self.down(gated(self.gate(x), self.up(x)))


class Stack(nnx.Module):
  """The kernels of a layer's experts, one beside the other: [X, out, in]."""

  def __init__(self, axes: tuple[str, ...], experts: int, outputs: int, inputs: int):
    self.kernel = _weight(axes, experts, outputs, inputs)


class ExpertMLPs(nnx.Module):
  """The MLPs of a layer's experts."""

  def __init__(self, X: int, E: int, F: int):
    self.gate = Stack(AXES['gate'], X, F, E)
    self.up = Stack(AXES['up'], X, F, E)
    self.down = Stack(AXES['down'], X, E, F)


class Mixture(nnx.Module):
  """The experts that the router chooses for each token, and the one that all go through, where there is one."""

  def __init__(self, E: int, experts: Experts):
    self.router = Linear(ROUTER, experts.count, E)
    self.experts = ExpertMLPs(experts.count, E, experts.width)
    self.shared = MLP(E, experts.shared_width) if experts.shared_width else None
    self.shared_gate = Linear(('router', 'embed'), 1, E) if experts.shared_width else None
    self.chosen, self.normalised = experts.chosen, experts.normalised

  def __call__(self, x: Float[Array, 'B T E'], memory: Memory, kernels: Kernels):
    """[B, T, E] -> [B, T, E], and the memory, which may have a say in who is chosen."""
    with jax.named_scope('router'):
      distribution = probabilities(x, self.router.kernel.get_value())
      chosen = checkpoint_name(likeliest(distribution, self.chosen), ROUTE)
      if isinstance(memory, Routed):
        chosen, memory = memory.route(distribution, chosen)
      weights = gates(distribution, chosen, self.normalised)
    with jax.named_scope('experts'):
      experts = {name: getattr(self.experts, name).kernel.get_value() for name in ('gate', 'up', 'down')}
      rows = (-1, self.chosen)
      tokens = x.reshape(-1, x.shape[-1])
      out = mixture(experts, tokens, chosen.reshape(rows), weights.reshape(rows), kernels).reshape(x.shape)
    if self.shared is not None and self.shared_gate is not None:
      out = out + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
    return out, memory


class Layer(nnx.Module):
  """Attention and MLP or experts, each on a normalised input and added to the stream."""

  def __init__(self, config: ModelConfig, layer: int):
    self.attention_norm = RMSNorm('norm', config.hidden_size, config.rms_norm_eps)
    self.attention = Attention(config)
    self.mlp_norm = RMSNorm('norm', config.hidden_size, config.rms_norm_eps)
    E, experts = config.hidden_size, config.experts
    self.mlp = Mixture(E, experts) if experts and layer in experts.layers else MLP(E, config.intermediate_size)

  def __call__(self, layer: int, x: Float[Array, 'B T E'], turns: Turns, memory: Memory, kernels: Kernels):
    """[B, T, E] -> [B, T, E], and the memory."""
    with jax.named_scope('attention'):
      out, memory = self.attention(layer, self.attention_norm(x), turns, memory)
      x = x + out
    with jax.named_scope('mlp'):
      normed = self.mlp_norm(x)
      out, memory = self.mlp(normed, memory, kernels) if isinstance(self.mlp, Mixture) else (self.mlp(normed), memory)
      return x + out, memory


class Decoder(nnx.Module):
  """Tokens to hidden states. The head is applied by whoever needs logits: `head_weight`, `sprl.kernels.linear_logprob`."""

  def __init__(self, config: ModelConfig):
    V, E = config.vocab_size, config.hidden_size
    self.embed = _weight(('vocab', 'embed'), V, E)
    self.layers = nnx.List([Layer(config, i) for i in range(config.num_layers)])
    self.norm = RMSNorm('norm', E, config.rms_norm_eps)
    self.rope, self.head_dim = config.rope, config.head_dim
    self.head = None if config.tie_embeddings else Linear(('vocab', 'embed'), V, E)

  def __call__(self, tokens, positions, memory, dtype, remat: Remat, kernels: Kernels):
    """[B, T] ids -> [B, T, E] normalised hidden states, and the memory."""
    # Rows that fsdp splits see all of the vocabulary, a part of it on each of their devices: rows come together, not the table.
    table = shard(kept(self.embed.get_value(), 'vocab', 'embed'), 'vocab', None)
    tokens = shard(tokens, 'gathered_rows', None)
    x = shard(jnp.take(table, tokens, axis=0).astype(dtype), 'gathered_rows', None, None)
    x = shard(x, 'rows', None, None)
    angles = turns(positions, self.head_dim, self.rope)
    layers = list(self.layers)
    for i, layer in enumerate(layers):
      if i + 1 < len(layers):
        x, layers[i + 1] = in_turn(x, layers[i + 1])
      with jax.named_scope(f'layer{i}'):
        block = partial(layer, i, kernels=kernels)
        block = block if remat == 'none' else jax.checkpoint(block, policy=SAVED[remat])
        x, memory = block(x, angles, memory)
    return self.norm(x), memory


@cache
def graph(config: ModelConfig) -> nnx.GraphDef:
  """The network without its weights, hashable, for closing over in jitted functions."""
  return nnx.split(Decoder(config))[0]


def abstract_params(config: ModelConfig, dtype=jnp.float32) -> Params:
  """The weights' shapes as a nested dict of ShapeDtypeStruct; linear kernels are [out, in], those of experts [X, out, in]."""
  pure = nnx.to_pure_dict(nnx.split(Decoder(config))[1])
  return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), pure)


def logical_axes(config: ModelConfig) -> Params:
  """The name of each axis of each weight, in the same tree; a leaf is a tuple of names."""
  state = nnx.split(Decoder(config))[1]
  return nnx.to_pure_dict(jax.tree.map(lambda p: p.replace(p.axes), state, is_leaf=lambda p: isinstance(p, nnx.Param)))


def init_params(config: ModelConfig, key: Array, dtype=jnp.float32, scale: float = 0.02) -> Params:
  """Random weights: matrices normal(0, scale), norms 1, biases 0. For tests and for models trained from scratch."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
  keys = jax.random.split(key, len(leaves))

  def init(path, leaf, key):
    name = path[-1].key
    if name in ('scale', 'bias'):
      return jnp.full(leaf.shape, float(name == 'scale'), dtype)
    return (scale * jax.random.normal(key, leaf.shape)).astype(dtype)

  return jax.tree_util.tree_unflatten(tree, [init(p, leaf, k) for (p, leaf), k in zip(leaves, keys)])


def forward(
  graphdef: nnx.GraphDef,
  params: Params,
  tokens: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  memory: Memory,
  dtype=jnp.float32,
  remat: Remat = 'none',
  kernels: Kernels = 'auto',
) -> tuple[Float[Array, 'B T E'], Any]:
  """Normalised hidden states in `dtype`, and the memory after these tokens.

  `remat`: what the backward pass computes again; `kernels`: what multiplies by experts. What attends, the memory says.
  """
  return nnx.merge(graphdef, params)(tokens, positions, memory, dtype, remat, kernels)


def layers(params: Params) -> list[Params]:
  """The layers' weights, first to last."""
  return [params['layers'][i] for i in sorted(params['layers'])]


def key_biases(params: Params) -> tuple[Float[Array, ' KD'], ...]:
  """The layers' biases of the keys, of a family that has them."""
  return tuple(layer['attention']['k']['bias'] for layer in layers(params))


def head_weight(params: Params) -> Float[Array, 'V E']:
  """The output matrix, one row a token: the embedding itself where they are tied."""
  return kept(params['head']['kernel'] if 'head' in params else params['embed'], 'vocab', 'embed')
