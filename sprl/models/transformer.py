"""The policy network: one decoder for all families of sprl/models/families.py. ModelConfig alone tells them apart.

Each weight is described once, where its module is created: shape and logical axes. `abstract_params` and the sharding rules
follow from that description. Values come from a checkpoint or from `init_params`. Split the network once at the start:

    graphdef = transformer.graph(config)                      # the network without weights
    params   = ...                                            # nested dict of arrays, see `abstract_params`
    out      = transformer.forward(graphdef, params, tokens, positions, attention)
    logits   = out.hidden @ transformer.head_weight(params).T

Letters: B rows, T tokens, L layers, H query heads, K kv heads, D head width, E model width, F feed-forward width, V vocabulary,
X experts, M layers with experts, k experts of a token. N and M in a linear layer's types are its outputs and inputs.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from sprl.config import Kernels, Remat
from sprl.kernels.append import Projected
from sprl.kernels.quantise import normalised, normalises
from sprl.kernels.rope import Turns, rotate, turns
from sprl.models.attention import Appends, Attention, PackedAttention
from sprl.models.config import Experts, ModelConfig
from sprl.models.families import Activation
from sprl.models.moe import ACTIVATIONS, AXES, ROUTER, gated, gates, mixture, probabilities, top_experts
from sprl.models.routing import LayerRouting, Routing, balance_of, replayed
from sprl.quant.block import BlockScaled, Quantised, gated_codes, normalised_codes, quantises
from sprl.quant.dot import PRODUCT, Parts, dot, parted_dot, plain
from sprl.quant.joined import Joined, Within
from sprl.sharding.rules import activation, kept, prefetch_barrier, shard, shares

Params = dict[str, Any]  # nested dict of arrays
ROUTE = 'route'  # name of the chosen experts, which are saved: recomputation could choose different ones
_only_these = jax.checkpoint_policies.save_only_these_names
SAVED = {'layer': _only_these(ROUTE), 'dots': _only_these(PRODUCT, ROUTE)}  # what the forward pass saves, by `remat`


class Forward(NamedTuple):
  """The result of a forward pass."""

  hidden: Float[Array, 'B T E']  # normalised hidden states, in the compute dtype
  attention: Any  # the attention argument after these tokens
  routing: Routing  # experts of each token and their balance; fields are None if the model has no experts


class Sum(NamedTuple):
  """The residual stream as a sum that is not computed yet: the kernel of the next norm may compute it (`RMSNorm.read_by`)."""

  x: Float[Array, '*B E']
  added: Float[Array, '*B E'] | Parts


Stream = Float[Array, '*B E'] | Sum


def added_up(x: Stream) -> Float[Array, '*B E']:
  """Return the residual stream as one array."""
  if not isinstance(x, Sum):
    return x
  return x.x + (x.added.whole(x.x.dtype) if isinstance(x.added, Parts) else x.added)


def _weight(axes: tuple[str | None, ...], *shape: int) -> nnx.Param:
  return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes)


class Linear(nnx.Module):
  """x @ kernel^T (+ bias). The kernel is [out, in], as in Hugging Face checkpoints."""

  def __init__(self, axes: tuple[str, str], outputs: int, inputs: int, bias: bool = False):
    self.axes = axes
    self.kernel = _weight(axes, outputs, inputs)
    self.bias = _weight(axes[:1], outputs) if bias else None

  def __call__(self, x: Float[Array, '*B M'] | Quantised) -> Float[Array, '*B N']:
    """Map [..., in] to [..., out]."""
    return self.biased(dot(x, self.kernel.get_value(), self.axes))

  def in_parts(self, x: Float[Array, '*B M'] | Quantised) -> Float[Array, '*B N'] | Parts:
    """Map [..., in] to [..., out], in parts if a GPU would split the sum."""
    if self.bias is not None:
      return self(x)
    product = parted_dot(x, self.kernel.get_value(), self.axes)
    return product if isinstance(product, Parts) else self.biased(product)

  def biased(self, product: Float[Array, '*B N']) -> Float[Array, '*B N']:
    """Return the output for a product of the inputs and the kernel."""
    y = shard(product, *activation(product.ndim, self.axes[0]))
    return y if self.bias is None else y + shard(self.bias.get_value(), self.axes[0]).astype(y.dtype)


def together(x: Float[Array, '*B M'] | Quantised, *linears: Linear) -> list[Float[Array, '*B _']]:
  """Return the outputs of linears that read the same x: one product if their kernels are joined (sprl/quant/joined.py)."""
  first = linears[0].kernel.get_value()
  if not isinstance(first, Joined):
    return [linear(x) for linear in linears]
  products = first.split(dot(x, first.weight, linears[0].axes))
  return [linear.biased(product) for linear, product in zip(linears, products, strict=True)]


@partial(jax.checkpoint, static_argnums=2)  # saves the inputs, not the float32 intermediates, which are cheap to recompute
def _normalised(x: Float[Array, '*B M'], scale: Float[Array, ' M'], eps: float) -> Float[Array, '*B M']:
  """Return x / rms(x) * scale over the last axis."""
  wide = x.astype(jnp.float32)
  normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (normed * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
  """x / rms(x) * (offset + scale) over the last axis, computed in float32. Gemma stores scale - 1, an offset of 1."""

  def __init__(self, axis: str, width: int, config: ModelConfig):
    self.scale = _weight((axis,), width)
    self.eps, self.offset = config.rms_norm_eps, config.norm_offset

  def __call__(self, x: Float[Array, '*B M']) -> Float[Array, '*B M']:
    """Normalise x. Shape and dtype stay."""
    return _normalised(x, self.factor, self.eps)

  def read_by(self, x: 'Stream', *linears: Linear) -> tuple[Float[Array, '*B M'], Float[Array, '*B M'] | Quantised]:
    """Return the stream, and its norm in the form that these linears multiply: in FP8 where a kernel adds, norms and casts."""
    first, added = x if isinstance(x, Sum) else (x, None)
    w = _codes(*linears)
    if w is None or isinstance(added, Parts) or not quantises(first.shape, first.dtype, w, norm=True):
      return self.of_stream(x)
    inputs, whole = normalised_codes(first, added, self.factor, self.eps, w)
    return whole, inputs

  def of_stream(self, x: 'Stream') -> tuple[Float[Array, '*B M'], Float[Array, '*B M']]:
    """Return the stream and its norm. A kernel adds a product in parts (`Layer._adds_parts`)."""
    if isinstance(x, Sum) and isinstance(x.added, Parts):
      normed, whole = normalised(x.x, x.added.of, self.factor, self.eps)
      return whole, normed
    whole = added_up(x)
    return whole, self(whole)

  @property
  def factor(self) -> Float[Array, ' M']:
    """What multiplies the normalised numbers."""
    scale = shard(self.scale.get_value(), None)
    return self.offset + scale.astype(jnp.float32) if self.offset else scale


def _codes(*linears: Linear) -> BlockScaled | None:
  """Return a weight of linears that all multiply FP8 codes; None if one of them does not."""
  kernels = [linear.kernel.get_value() for linear in linears]
  weights: list[Any] = [w.weight if isinstance(w, Joined) else w for w in kernels if not isinstance(w, Within)]
  return weights[0] if all(isinstance(w, BlockScaled) for w in weights) else None


def _read(norm: RMSNorm | None, x: Stream, *linears: Linear) -> tuple[Float[Array, '*B M'], Float[Array, '*B M'] | Quantised]:
  if norm is not None:
    return norm.read_by(x, *linears)
  whole = added_up(x)
  return whole, whole


def _maybe(norm: RMSNorm | None, x: Float[Array, '*B M']) -> Float[Array, '*B M']:
  return x if norm is None else norm(x)


def _normed_product(norm: RMSNorm | None, product: Float[Array, '*B M'] | Parts) -> Float[Array, '*B M'] | Parts:
  return product if isinstance(product, Parts) else _maybe(norm, product)  # `Layer._adds_parts`: there is no norm


class SelfAttention(nnx.Module):
  """Projections and rotary positions around the attention argument."""

  def __init__(self, config: ModelConfig, layer: int):
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    self.q = Linear(('heads', 'embed'), H * D, E, config.qkv_bias)
    self.k = Linear(('kv_heads', 'embed'), K * D, E, config.qkv_bias)
    self.v = Linear(('kv_heads', 'embed'), K * D, E, config.qkv_bias)
    self.o = Linear(('embed', 'heads'), E, H * D)
    whole = config.qk_norm == 'whole'
    axis, of_q, of_k = ('norm', H * D, K * D) if whole else ('head_dim', D, D)
    self.q_norm = RMSNorm(axis, of_q, config) if config.qk_norm else None
    self.k_norm = RMSNorm(axis, of_k, config) if config.qk_norm else None
    self.head_dim, self.whole_norm = D, whole
    self.sliding_window, self.query_scale = config.sliding_window(layer), config.query_scale

  def inputs(self, norm: RMSNorm | None, x: Stream) -> tuple[Float[Array, 'B T E'], Float[Array, 'B T E'] | Quantised]:
    """Return the stream, and its norm in the form that the projections multiply."""
    return _read(norm, x, self.q, self.k, self.v)

  def __call__(
    self, layer: int, x: Float[Array, 'B T E'] | Quantised, turns: Turns, attention: Attention, in_parts: bool = False
  ) -> tuple[Float[Array, 'B T E'] | Parts, Any]:
    """Return the output, with `in_parts` in parts, and the attention object after these tokens."""
    B, T, _ = x.shape
    heads, project = (B, T, -1, self.head_dim), self.o.in_parts if in_parts else self.o
    joined = self.q.kernel.get_value()
    # One token per row: a kernel takes the product of q, k and v from here to the cache.
    if T == 1 and isinstance(joined, Joined) and isinstance(attention, Appends) and self._appended(layer, joined, x, attention):
      with jax.named_scope('qkv'):
        product = parted_dot(x, joined.weight, self.q.axes)
        parts = product.of if isinstance(product, Parts) else product[None]
      with jax.named_scope('attend'):
        out, attention = attention.attend_projected(layer, self._projected(parts.reshape(-1, B, parts.shape[-1]), turns))
      with jax.named_scope('o'):
        return project(out.reshape(B, T, -1)), attention
    with jax.named_scope('qkv'):
      q, k, v = together(x, self.q, self.k, self.v)
      if not self.whole_norm:
        q, k = q.reshape(heads), k.reshape(heads)
      q, k, v = _maybe(self.q_norm, q).reshape(heads), _maybe(self.k_norm, k).reshape(heads), v.reshape(heads)
      q, k = rotate(q, turns, self.query_scale), rotate(k, turns)
    with jax.named_scope('attend'):
      out, attention = attention.attend(layer, q, k, v, self.sliding_window)
    with jax.named_scope('o'):
      return project(out.reshape(B, T, -1)), attention

  def _appended(self, layer: int, joined: Joined, x: Float[Array, 'B T E'] | Quantised, attention: Appends) -> bool:
    """Return whether the attention takes the product of x: with all heads of a token, and no norm over several heads."""
    product = jax.ShapeDtypeStruct((x.shape[0], sum(joined.sizes)), x.dtype)
    return shares('heads') == 1 and not self.whole_norm and attention.appends(layer, product)

  def _projected(self, product: Float[Array, 'P B N'], turns: Turns) -> Projected:
    q, k, v = (None if linear.bias is None else linear.bias.get_value() for linear in (self.q, self.k, self.v))
    bias = None if q is None or k is None or v is None else (q, k, v)
    norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
    norm = None if norms is None else (norms[0].factor, norms[1].factor)
    eps = 0.0 if norms is None else norms[0].eps
    return Projected(product, bias, norm, turns, eps, self.query_scale)


class MLP(nnx.Module):
  """down(activation(gate(x)) * up(x)), with the activation in float32."""

  def __init__(self, E: int, F: int, activation: Activation = 'silu'):
    self.gate = Linear(('mlp', 'embed'), F, E)
    self.up = Linear(('mlp', 'embed'), F, E)
    self.down = Linear(('embed', 'mlp'), E, F)
    self.activation: Activation = activation

  def inputs(self, norm: RMSNorm | None, x: Stream) -> tuple[Float[Array, 'B T E'], Float[Array, 'B T E'] | Quantised]:
    """Return the stream, and its norm in the form that gate and up multiply."""
    return _read(norm, x, self.gate, self.up)

  def __call__(self, x: Float[Array, 'B T E'] | Quantised) -> Float[Array, 'B T E']:
    """Apply the MLP to each token."""
    return self.down(self._hidden(x))

  def in_parts(self, x: Float[Array, 'B T E'] | Quantised) -> Float[Array, 'B T E'] | Parts:
    """Apply the MLP to each token. The output is in parts if a GPU would split the sum."""
    return self.down.in_parts(self._hidden(x))

  def _hidden(self, x: Float[Array, 'B T E'] | Quantised) -> Float[Array, 'B T F'] | Quantised:
    first, down = self.gate.kernel.get_value(), _codes(self.down)
    if down is not None and isinstance(first, Joined) and quantises((*x.shape[:-1], first.sizes[0]), x.dtype, down):
      return gated_codes(dot(x, first.weight, self.gate.axes), ACTIVATIONS[self.activation], down)
    gate, up = together(x, self.gate, self.up)
    return gated(gate, up, self.activation)


class Stack(nnx.Module):
  """One kernel for each expert of a layer: [X, out, in]."""

  def __init__(self, axes: tuple[str, ...], experts: int, outputs: int, inputs: int):
    self.kernel = _weight(axes, experts, outputs, inputs)


class ExpertMLPs(nnx.Module):
  """The MLPs of a layer's experts."""

  def __init__(self, X: int, E: int, F: int):
    self.gate = Stack(AXES['gate'], X, F, E)
    self.up = Stack(AXES['up'], X, F, E)
    self.down = Stack(AXES['down'], X, E, F)


class Mixture(nnx.Module):
  """Experts that a router chooses for each token, and a shared expert for all tokens if the model has one."""

  def __init__(self, E: int, experts: Experts):
    self.router = Linear(ROUTER, experts.count, E)
    self.experts = ExpertMLPs(experts.count, E, experts.width)
    self.shared = MLP(E, experts.shared_width) if experts.shared_width else None
    self.shared_gate = Linear(('router', 'embed'), 1, E) if experts.shared_width else None
    self.per_token, self.normalised = experts.per_token, experts.normalised

  def __call__(
    self, x: Float[Array, 'B T E'], routes: Int[Array, 'B T k'] | None, mask: Bool[Array, 'B T'] | None, kernels: Kernels
  ) -> tuple[Float[Array, 'B T E'], LayerRouting]:
    """Return the output of the experts, and which they were. See `forward` for `routes` and `mask`."""
    with jax.named_scope('router'):
      distribution = probabilities(x, self.router.kernel.get_value())
      chosen = replayed(checkpoint_name(top_experts(distribution, self.per_token), ROUTE), routes)
      routing = LayerRouting(chosen, balance_of(distribution, chosen, mask))
      weights = gates(distribution, chosen, self.normalised)
    with jax.named_scope('experts'):
      experts = {name: getattr(self.experts, name).kernel.get_value() for name in ('gate', 'up', 'down')}
      rows = (-1, self.per_token)
      tokens = x.reshape(-1, x.shape[-1])
      out = mixture(experts, tokens, chosen.reshape(rows), weights.reshape(rows), kernels).reshape(x.shape)
    if self.shared is not None and self.shared_gate is not None:
      with jax.named_scope('shared_expert'):
        out = out + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
    return out, routing


class Layer(nnx.Module):
  """Attention and an MLP or experts, each added to the residual stream. Norms are before them, after them, or both."""

  def __init__(self, config: ModelConfig, layer: int):
    E, experts = config.hidden_size, config.experts
    before, after = (config.norms in (where, 'both') for where in ('before', 'after'))
    self.attention_norm = RMSNorm('norm', E, config) if before else None
    self.attention = SelfAttention(config, layer)
    self.attention_out_norm = RMSNorm('norm', E, config) if after else None
    self.mlp_norm = RMSNorm('norm', E, config) if before else None
    mixture = Mixture(E, experts) if experts and layer in experts.layers else None
    self.mlp = mixture or MLP(E, config.intermediate_size, config.activation)
    self.mlp_out_norm = RMSNorm('norm', E, config) if after else None

  def __call__(self, layer: int, x: Stream, turns: Turns, attention: Attention, routes, mask, kernels: Kernels):
    """Return the stream [B, T, E], the attention object, and the routing of a layer with experts (else None)."""
    with jax.named_scope('attention'):
      x, inputs = self.attention.inputs(self.attention_norm, x)
      in_parts = self._adds_parts(x, kernels)
      out, attention = self.attention(layer, inputs, turns, attention, in_parts)
      x = Sum(x, _normed_product(self.attention_out_norm, out))
    with jax.named_scope('mlp'):
      if isinstance(self.mlp, Mixture):
        x = added_up(x)
        out, routing = self.mlp(_maybe(self.mlp_norm, x), routes, mask, kernels)
        return x + _maybe(self.mlp_out_norm, out), attention, routing
      x, inputs = self.mlp.inputs(self.mlp_norm, x)
      x = Sum(x, _normed_product(self.mlp_out_norm, (self.mlp.in_parts if in_parts else self.mlp)(inputs)))
      # If a kernel computed this norm, then most likely the next layer's too. Otherwise a sum would be two arrays to save.
      return x if in_parts or isinstance(inputs, Quantised) else added_up(x), attention, None

  def _adds_parts(self, x: Float[Array, 'B T E'], kernels: Kernels) -> bool:
    """Return whether a kernel adds the parts of products to the stream, when it computes the next norm of a decode step."""
    B, T, E = x.shape
    return T == 1 and self.attention_out_norm is None and self.mlp_out_norm is None and normalises(B, E, x.dtype, kernels)


def _block(layer: Layer, x, turns: Turns, attention: Attention, routes, mask, *, index: int, remat: Remat, kernels: Kernels):
  """Call a layer as number `index`. `remat` says what its backward pass recomputes."""
  block = partial(layer, index, kernels=kernels)
  block = block if remat == 'none' else jax.checkpoint(block, policy=SAVED[remat])
  return block(x, turns, attention, routes, mask)


_equal_block = jax.jit(_block, static_argnames=('index', 'remat', 'kernels'))  # traced and lowered once for equal layers


class Decoder(nnx.Module):
  """Tokens to hidden states. Callers that need logits apply the head: `head_weight`, `sprl.kernels.linear_logprob`."""

  def __init__(self, config: ModelConfig):
    V, E = config.vocab_size, config.hidden_size
    self.embed = _weight(('vocab', 'embed'), V, E)
    self.layers = nnx.List([Layer(config, i) for i in range(config.num_layers)])
    self.norm = RMSNorm('norm', E, config)
    self.rope, self.sliding_rope, self.head_dim = config.rope, config.sliding_rope, config.head_dim
    self.embed_scale = config.embed_scale
    self.head = None if config.tie_embeddings else Linear(('vocab', 'embed'), V, E)

  def __call__(self, tokens, positions, attention, routes, mask, dtype, remat: Remat, kernels: Kernels) -> Forward:
    """Run the network; see `forward`."""
    with jax.named_scope('embed'):
      # fsdp splits the vocabulary and the rows. The rows are gathered, not the table: each device looks up in its part of it.
      table = shard(kept(plain(self.embed.get_value()), 'vocab', 'embed'), 'vocab', None)
      tokens = shard(tokens, 'gathered_rows', 'tokens')
      x = shard(jnp.take(table, tokens, axis=0).astype(dtype), 'gathered_rows', 'tokens', None)
      x = shard(x, 'rows', 'tokens', None)
      x = x if self.embed_scale == 1 else x * jnp.asarray(self.embed_scale, dtype)  # rounded first, as in transformers
    angles = turns(positions, self.head_dim, self.rope)
    sliding_angles = angles if self.sliding_rope == self.rope else turns(positions, self.head_dim, self.sliding_rope)
    layers, routings = list(self.layers), []
    for i, layer in enumerate(layers):
      if i + 1 < len(layers):
        x, layers[i + 1] = prefetch_barrier(x, layers[i + 1])
      replay = routes[:, :, len(routings)] if routes is not None and isinstance(layer.mlp, Mixture) else None
      of_layer = angles if layer.attention.sliding_window is None else sliding_angles
      with jax.named_scope(f'layer{i}'):
        if isinstance(attention, PackedAttention):  # the same in all layers
          block, index = _equal_block, 0
        else:
          block, index = _block, i
        x, attention, routing = block(layer, x, of_layer, attention, replay, mask, index=index, remat=remat, kernels=kernels)
      routings += [routing] if routing is not None else []
    with jax.named_scope('norm'):
      return Forward(self.norm.of_stream(x)[1], attention, Routing.of(routings))


def forward(
  graphdef: nnx.GraphDef,
  params: Params,
  tokens: Int[Array, 'B T'],
  positions: Int[Array, 'B T'],
  attention: Attention,
  dtype=jnp.float32,
  remat: Remat = 'none',
  kernels: Kernels = 'auto',
  *,
  routes: Int[Array, 'B T M k'] | None = None,
  mask: Bool[Array, 'B T'] | None = None,
) -> Forward:
  """Run the network over tokens.

  Args:
    graphdef: the network without weights (`graph`).
    params: the weights.
    tokens: token ids.
    positions: positions of the tokens in their sequences.
    attention: what the tokens attend to: packed rows, or a KV cache.
    dtype: compute dtype.
    remat: what the backward pass recomputes.
    kernels: implementation of the experts' products. The attention object has its own.
    routes: experts that the tokens must use, MISSING where the router chooses (router replay); None: the router chooses all.
    mask: tokens that the balance statistics count; None: all tokens.

  Returns:
    The hidden states, the attention object after these tokens, and the routing.
  """
  return nnx.merge(graphdef, params)(tokens, positions, attention, routes, mask, dtype, remat, kernels)


# --- weights ---------------------------------------------------------------------------------------------------------


@cache
def _split(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
  return nnx.split(Decoder(config))


def graph(config: ModelConfig) -> nnx.GraphDef:
  """Return the network without its weights. It is hashable, so jitted functions can take it as a static argument."""
  return _split(config)[0]


def abstract_params(config: ModelConfig, dtype=jnp.float32) -> Params:
  """Return the weights' shapes as a nested dict of ShapeDtypeStruct. Kernels are [out, in], those of experts [X, out, in]."""
  pure = nnx.to_pure_dict(_split(config)[1])
  return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), pure)


def logical_axes(config: ModelConfig) -> Params:
  """Return the axis names of each weight in the same tree. A leaf is a tuple of names."""
  state = _split(config)[1]
  return nnx.to_pure_dict(jax.tree.map(lambda p: p.replace(p.axes), state, is_leaf=lambda p: isinstance(p, nnx.Param)))


def init_params(config: ModelConfig, key: Array, dtype=jnp.float32, scale: float = 0.02) -> Params:
  """Return random weights: matrices normal(0, scale), norms 1, biases 0. For tests and for models trained from scratch."""
  leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
  keys = jax.random.split(key, len(leaves))

  def init(path, leaf, key):
    name = path[-1].key
    if name in ('scale', 'bias'):
      return jnp.full(leaf.shape, 1 - config.norm_offset if name == 'scale' else 0, dtype)
    return (scale * jax.random.normal(key, leaf.shape)).astype(dtype)

  return jax.tree_util.tree_unflatten(tree, [init(p, leaf, k) for (p, leaf), k in zip(leaves, keys)])


def layers(params: Params) -> list[Params]:
  """Return the layers' weights, first to last."""
  return [params['layers'][i] for i in sorted(params['layers'])]


def key_biases(params: Params) -> tuple[Float[Array, ' KD'], ...]:
  """Return each layer's key bias. The model must have key biases (Qwen2)."""
  return tuple(layer['attention']['k']['bias'] for layer in layers(params))


def head_weight(params: Params) -> Any:
  """Return the output matrix [V, E], one row a token. It is the embedding if the two are tied.

  In the learner it may be a StraightThrough weight (sprl/learner/copies.py).
  """
  return jax.tree.map(lambda w: kept(w, 'vocab', 'embed'), params['head']['kernel'] if 'head' in params else params['embed'])
