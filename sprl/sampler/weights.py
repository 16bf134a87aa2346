"""The sampler's weights: the learner's weights in the formats that the sampler multiplies (docs/methods/fp8.md).

A run calls one jitted function after every update; `weights_function` makes it from the settings. It casts all weights, quantises
the linears that the settings name, and joins those that read the same activations (sprl/quant/joined.py). `self_check` then looks
for stale layouts and unset buffers, which this design should rule out.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from sprl.cache.scales import Scales
from sprl.config import LINEARS, UNQUANTISED, Kernels, Quant, SettingsError
from sprl.kernels.platform import can_run, chosen
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params, abstract_params, head_weight, logical_axes
from sprl.quant import fp8
from sprl.quant.block import FORMATS, BlockScaled, Emulated, cut_within_blocks, quantise
from sprl.quant.dot import LowRank, dot, plain
from sprl.quant.joined import Joined, Within, join_all, separated
from sprl.sharding.rules import KEPT, Names, OnMesh, between_meshes, is_names, shardings

LINEAR = re.compile(
  rf"\['layers'\]\[(\d+)\]\['(?:attention|mlp)'\](?:\['(experts|shared)'\])?\['({'|'.join(LINEARS)})'\]\['kernel'\]"
)
MAX_PRODUCT_ERROR = 0.25  # relative; healthy 0.026 to 0.052, a broken layout about 1.7 (docs/methods/fp8.md, self-checks)


class SamplerWeights(NamedTuple):
  """The network's weights in the sampler's formats, and the scales of its FP8 cache."""

  params: Params
  scales: Scales | None = None
  probe: dict[str, Array] | None = None  # FP8 codes of the middle layer's linears, by name, to count how many an update changes

  @property
  def head(self) -> Float[Array, 'V E']:
    """The output matrix."""
    return head_weight(self.params)


def same_weights(one: Quant, other: Quant) -> bool:
  """Return whether sampler weights under these settings differ in nothing but the scales of an FP8 cache; False if they may."""
  return one == other or not ('w8a8' in one.sampler or 'w8a8' in other.sampler)


def check_linears(quant: Quant, layers: int) -> None:
  """Raise SettingsError if FP8 linears are asked for and `skip_*` excludes every linear of a model with `layers` layers."""
  if 'w8a8' not in quant.sampler and quant.learner == 'none':
    return
  instead = f'config.quant.sampler = {"kv8" if "kv8" in quant.sampler else "none"!r} quantises no linears'
  if quant.learner != 'none':
    instead = f"config.quant.learner = 'none' with {instead}"
  said = f'config.quant.skip_layers = {quant.skip_layers}: expected'
  if not all(-layers <= layer < layers for layer in quant.skip_layers):
    raise SettingsError(f'{said} numbers from {-layers} to {layers - 1} with a model of {layers} layers')
  if len(_skipped(quant, layers)) == layers:
    raise SettingsError(f'{said} to leave one of the {layers} layers of the model; {instead}')
  if set(quant.skip_names) >= set(LINEARS):
    raise SettingsError(f'config.quant.skip_names = {quant.skip_names}: expected to leave one of {", ".join(LINEARS)}; {instead}')


def quantised_linears(params: Params, quant: Quant) -> list[str]:
  """Return the paths of the weights that are FP8 under these settings."""
  return [jax.tree_util.keystr(path) for path, _ in _leaves(params) if _is_quantised(path, params, quant)]


def linear_kernels(config: ModelConfig, quant: Quant, kernels: Kernels, meshes: Iterable[Mesh | AbstractMesh]) -> Kernels:
  """Return which implementation multiplies FP8 linears: `kernels`, or 'reference' if a mesh cuts a weight within its blocks.

  Emulated products do not multiply codes, so they are split on any mesh. Raises SettingsError if `kernels` forces the kernel of
  products of codes where a mesh cuts a weight.
  """
  if quant.arithmetic == 'emulate' or (reason := _cut(config, quant, meshes)) is None:
    return kernels
  chosen('block-scaled matmul', kernels, lambda: reason)  # logs the reason, or raises
  return 'reference'


def check_learner_mesh(config: ModelConfig, quant: Quant, kernels: Kernels, mesh: Mesh | AbstractMesh) -> None:
  """Raise SettingsError if the learner would multiply FP8 codes of weights that its mesh cuts within their blocks.

  Each device would gather such a weight and repeat the product of the others. Emulated products are split on any mesh.
  """
  if multiplies_codes(quant, kernels) and (reason := _cut(config, quant.in_learner, (mesh,))):
    raise SettingsError(
      f"config.quant.learner = {quant.learner!r}: expected 'none', or config.quant.arithmetic = 'emulate', or another "
      f'config.mesh.learner: {reason}'
    )


def _cut(config: ModelConfig, quant: Quant, meshes: Iterable[Mesh | AbstractMesh]) -> str | None:
  """Return which FP8 linear a mesh cuts within its blocks; None if there is none."""
  params = abstract_params(config)
  for (path, w), names in zip(_leaves(params), jax.tree.leaves(logical_axes(config), is_leaf=is_names), strict=True):
    for mesh in meshes if _is_quantised(path, params, quant) else ():
      if cut_within_blocks(names, w.shape, quant.format, mesh):
        return f'{jax.tree_util.keystr(path)} {list(w.shape)} is cut within its blocks on a mesh of {dict(mesh.shape)}'
  return None


def multiplies_codes(quant: Quant, kernels: Kernels) -> bool:
  """Whether FP8 linears multiply codes, block by block. Otherwise they multiply the numbers that the codes stand for.

  `auto` does so where a kernel can run. The kernels take blocks of 128 x 128.
  """
  kernel = FORMATS[quant.format][:2] == (128, 128) and can_run(kernels)
  return quant.arithmetic == 'blockwise' or (quant.arithmetic == 'auto' and kernel)


def sampler_weights(
  params: Params,
  dtype,
  quant: Quant = UNQUANTISED,
  kernels: Kernels = 'auto',
  *,
  config: ModelConfig | None = None,
  mesh: Mesh | None = None,
  from_mesh: Mesh | None = None,
  used_on: tuple[Mesh | AbstractMesh, ...] | None = None,
) -> SamplerWeights:
  """Return the sampler weights of `params`. The settings are those of `weights_function`."""
  return weights_function(jnp.dtype(dtype), quant, kernels, config, mesh, from_mesh, used_on)(params)


@cache
def weights_function(
  dtype,
  quant: Quant,
  kernels: Kernels = 'auto',
  config: ModelConfig | None = None,
  mesh: Mesh | None = None,
  from_mesh: Mesh | None = None,
  used_on: tuple[Mesh | AbstractMesh, ...] | None = None,
):
  """Return the jitted function from the network's weights to the sampler weights without scales of an FP8 cache.

  It casts the weights to `dtype`, with the linears in FP8 that `quant` names (docs/methods/fp8.md, eq. 2). All arrays are copies,
  because an update overwrites the arrays of its state. An adapter is merged into its frozen weight in float32, and the sum is
  rounded once. Blockwise arithmetic keeps codes and scales, and `kernels` selects their product. Emulation keeps code times
  scale, so that decoding does not repeat this product for every token.

  `mesh` is the sampler's mesh, and `config` names the axes of the weights; without a mesh the weights stay where they are.
  `from_mesh` is the mesh that holds the network's weights (the default: `mesh`), with the same devices. Weights are cast before
  they move. `used_on` are all meshes on which the weights will be multiplied (the default: `mesh`). Linears that these meshes cut
  alike are joined.
  """
  meshes = used_on if used_on is not None else () if mesh is None else (mesh,)
  target = None if mesh is None or mesh.size == 1 else mesh

  def placed(x, names):
    return x if target is None else between_meshes(x, names, from_mesh or target, target)

  def function(params: Params) -> SamplerWeights:
    codes_multiplied = multiplies_codes(quant, kernels)
    middle = _depth(params) // 2
    probe = {}

    def leaf(path, w, names=()):
      w = plain(w)
      if not _is_quantised(path, params, quant):
        return placed(w.astype(dtype), names)
      scaled = quantise(w, quant.format)
      codes = fp8.from_bytes(placed(fp8.to_bytes(scaled.codes), names))
      scaled = replace(scaled, codes=codes, scale=placed(scaled.scale, _of_scale(names)), kernels=kernels)
      layer, name = _named(path)
      if layer == middle:
        probe[name] = scaled.codes
      return scaled if codes_multiplied else scaled.emulated(dtype)

    axes = () if target is None or config is None else (logical_axes(config),)
    linears_apart = jax.tree_util.tree_map_with_path(leaf, params, *axes, is_leaf=_is_weight)
    return SamplerWeights(join_all(linears_apart, meshes), probe=probe or None)

  if target is None:
    return jax.jit(function)
  assert config is not None, "the names of the weights' axes on a mesh follow from the config"
  # Set `out_shardings`: XLA replicates the outputs of a function with two meshes.
  shapes = jax.eval_shape(function, abstract_params(config))
  return jax.jit(function, out_shardings=shardings(target, sampler_weight_axes(shapes, config), shapes, KEPT))


def sampler_weight_axes(weights: SamplerWeights, config: ModelConfig) -> SamplerWeights:
  """Return the names of the arrays' axes. A scale is replicated over the devices that hold parts of its weight."""

  def leaf(w, names):
    match w:
      case Joined():
        return replace(w, weight=leaf(w.weight, names))
      case Within():
        return w
      case BlockScaled():
        return replace(w, codes=names, scale=_of_scale(names))
      case Emulated():
        return replace(w, values=names)
    return names

  axes = logical_axes(config)
  params = jax.tree.map(leaf, weights.params, axes, is_leaf=_is_weight)
  linears = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_names)[0]
  middle = {_named(path)[1]: names for path, names in linears if _named(path)[0] == config.num_layers // 2}
  probe = None if weights.probe is None else {name: middle[name] for name in weights.probe}
  return SamplerWeights(params, jax.tree.map(lambda x: (None,), weights.scales), probe)


@jax.jit
def codes_changed(old: dict[str, Array], new: dict[str, Array]) -> Float[Array, '']:
  """Return the fraction of the FP8 codes that differ between two probes."""
  changed = [jnp.sum(_bits(old[name]) != _bits(new[name])) for name in new]
  return jnp.stack(changed).sum() / sum(codes.size for codes in new.values())


def sync_metrics(weights: SamplerWeights, before: dict[str, Array] | None) -> dict[str, float]:
  """Return metrics of a sync: the fraction of FP8 codes that changed since the probe `before`, and the cache's scales."""
  metrics = {}
  if weights.probe and before:
    metrics['fp8/codes_changed_fraction'] = float(codes_changed(before, weights.probe))
  if weights.scales is not None:
    for name, values in weights.scales._asdict().items():
      metrics |= {f'fp8/scale_{name}/{layer}': float(value) for layer, value in enumerate(np.asarray(values))}
  return metrics


def self_check(params: Params, weights: SamplerWeights, dtype, quant: Quant, mesh: Mesh | None = None) -> list[str]:
  """Return one sentence for each fault of sampler weights made from `params` (docs/methods/fp8.md, self-checks).

  `mesh` holds the weights; None: one device.
  """
  declared, leaves = set(quantised_linears(params, quant)), _leaves(jax.eval_shape(separated, weights.params))
  found = {jax.tree_util.keystr(path) for path, w in leaves if isinstance(w, BlockScaled | Emulated)}
  faults = [f'{name}: {"not " * (name in declared)}quantised, against config.quant' for name in sorted(declared ^ found)]
  faults += [
    f'{jax.tree_util.keystr(path)}: {w.dtype}, expected the dtype {jnp.dtype(dtype)}'
    for path, w in leaves
    if isinstance(w, jax.ShapeDtypeStruct) and w.dtype != dtype
  ]
  finite, error = jax.device_get(_measure.on(mesh)(params, weights, min(declared, default=None), jnp.dtype(dtype)))
  if not finite:
    faults.append(
      'a sampler weight is not finite: the weights diverged, or those of config.model.path are damaged. '
      'Try a lower config.optimizer.learning_rate; another config.model.path.'
    )
  if not error <= MAX_PRODUCT_ERROR:
    faults.append(
      f'{min(declared)}: relative error {error:.3g} of its FP8 product, expected at most {MAX_PRODUCT_ERROR}. '
      'Try config.quant.skip_names, which leaves a linear out of FP8.'
    )
  return faults


@OnMesh
@partial(jax.jit, static_argnames=('name', 'dtype'))
def _measure(params, weights, name, dtype):
  """Return whether all weights are finite, and the relative error of the product of linear `name` on fixed random inputs."""
  finite = jnp.array([jnp.all(jnp.isfinite(x.astype(jnp.float32))) for x in jax.tree.leaves(weights.params)]).all()
  if name is None:
    return finite, jnp.zeros(())
  trees = params, separated(weights.params)
  w, q = ({jax.tree_util.keystr(path): leaf for path, leaf in _leaves(tree)}[name] for tree in trees)
  w = plain(w)
  if w.ndim > 2:
    w, q = jax.tree.map(lambda of_experts: of_experts[0], (w, q))
  x = jax.random.normal(jax.random.key(0), (16, w.shape[1]))
  exact, got = x @ w.astype(jnp.float32).T, dot(x.astype(dtype), q).astype(jnp.float32)  # `dot` is the sampler's product
  return finite, jnp.linalg.norm(got - exact) / jnp.maximum(jnp.linalg.norm(exact), 1e-30)


def _leaves(params) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_weight)[0]


def _is_weight(w) -> bool:
  return isinstance(w, BlockScaled | Emulated | LowRank | Joined | Within)


def _named(path) -> tuple[int, str]:
  """Return (layer, name) of a layer's linear; an expert's name is like experts.up. Other weights give (-1, '')."""
  match = LINEAR.fullmatch(jax.tree_util.keystr(path))
  return (int(match[1]), '.'.join(filter(None, match.groups()[1:]))) if match else (-1, '')


def _of_scale(names: Names) -> Names:
  """Return the axes of a weight's scales: they are split like its experts and in no other way."""
  return (*names[:-2], None, None)


def _depth(params) -> int:
  return len(params['layers'])


def _is_quantised(path, params, quant: Quant) -> bool:
  layer, name = _named(path)
  if 'w8a8' not in quant.sampler or layer < 0:
    return False
  return layer not in _skipped(quant, _depth(params)) and name.rpartition('.')[2] not in quant.skip_names


def _skipped(quant: Quant, layers: int) -> set[int]:
  return {layer % layers for layer in quant.skip_layers}


def _bits(codes):
  return jax.lax.bitcast_convert_type(codes, jnp.uint8)
