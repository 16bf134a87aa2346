"""Weights as served: the learner's weights in the form that the sampler multiplies (fp8_rollouts 2).

`serve` is one jitted function, run after every update: it casts, and quantises the linears that the settings name. What the
quantiser cannot get wrong by construction (stale layouts, unset buffers) is checked all the same: `self_check`.
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
from sprl.kernels.platform import can_run, chosen
from sprl.models.config import ModelConfig
from sprl.models.transformer import Params, abstract_params, head_weight, logical_axes
from sprl.parallel.rules import KEPT, Names, OnMesh, from_mesh, is_names, spec
from sprl.quant import fp8
from sprl.quant.block import BlockScaled, Emulated, cut_within_blocks, quantise
from sprl.quant.dot import LowRank, dot, plain
from sprl.settings import LINEARS, UNQUANTISED, Kernels, Quant, SettingsError

LINEAR = re.compile(
  rf"\['layers'\]\[(\d+)\]\['(?:attention|mlp)'\](?:\['(experts|shared)'\])?\['({'|'.join(LINEARS)})'\]\['kernel'\]"
)
MAX_PRODUCT_ERROR = 0.25  # relative; healthy 0.026 to 0.052, a broken layout about 1.7 (fp8_rollouts 7)


class Served(NamedTuple):
  """The network's weights in the sampler's formats, and the scales of its FP8 cache."""

  params: Params
  scales: Scales | None = None
  probe: dict[str, Array] | None = None  # FP8 codes of one layer's linears, by name, to see how many an update changes

  @property
  def head(self) -> Float[Array, 'V E']:
    """The output matrix."""
    return head_weight(self.params)


def check_linears(quant: Quant, layers: int) -> None:
  """Raises SettingsError where linears are to be FP8, and what is spared leaves none of a model of so many layers."""
  if 'w8a8' not in quant.sampler:
    return
  instead = f'config.quant.sampler = {"kv8" if "kv8" in quant.sampler else "bf16"!r} quantises no linears'
  if quant.skip_first_layers + quant.skip_last_layers >= layers:
    spared = ', '.join(f'config.quant.{name} = {getattr(quant, name)}' for name in ('skip_first_layers', 'skip_last_layers'))
    raise SettingsError(f'{spared}: expected together fewer than the {layers} layers of the model; {instead}')
  if set(quant.skip_names) >= set(LINEARS):
    raise SettingsError(f'config.quant.skip_names = {quant.skip_names}: expected to leave one of {", ".join(LINEARS)}; {instead}')


def quantised_linears(params: Params, quant: Quant) -> list[str]:
  """The paths of the weights that are FP8 under these settings."""
  return [jax.tree_util.keystr(path) for path, _ in _leaves(params) if _is_quantised(path, params, quant)]


def linear_kernels(config: ModelConfig, quant: Quant, kernels: Kernels, meshes: Iterable[Mesh | AbstractMesh]) -> Kernels:
  """What multiplies FP8 linears: `kernels`, or the references where one of the meshes cuts a weight within its blocks of scales.

  Raises SettingsError where the kernel is forced then.
  """
  params = abstract_params(config)
  for (path, w), names in zip(_leaves(params), jax.tree.leaves(logical_axes(config), is_leaf=is_names), strict=True):
    for mesh in meshes if _is_quantised(path, params, quant) else ():
      if cut_within_blocks(names, w.shape, quant.format, mesh):
        reason = f'{jax.tree_util.keystr(path)} {list(w.shape)} is cut within its blocks on a mesh of {dict(mesh.shape)}'
        chosen('block-scaled matmul', kernels, lambda reason=reason: reason)  # says so, or raises
        return 'reference'
  return kernels


def multiplies_codes(quant: Quant, kernels: Kernels) -> bool:
  """Whether FP8 linears multiply their codes, block by block; else the numbers that the codes stand for are multiplied."""
  return quant.arithmetic == 'blockwise' or (quant.arithmetic == 'auto' and can_run(kernels))


def serve(
  params: Params,
  dtype,
  quant: Quant = UNQUANTISED,
  config: ModelConfig | None = None,
  held: Mesh | None = None,
  kernels: Kernels = 'auto',
) -> Served:
  """The weights in `dtype`, linears in FP8 where `quant` says so: arrays of their own throughout, for an update
  writes over those of its state.

  What is trained beside a frozen weight is added to it, in float32, and rounded once.
  Blockwise arithmetic keeps codes and scales, and `kernels` says what multiplies them; emulation keeps their products, which it
  need not make again for every token.
  Given the model's config they are laid out for the mesh in use; `held` is the mesh that they lie on now, where that is another
  of the same devices. They are cast first, so that what changes hands is no larger than what is served.
  """
  return serving(jnp.dtype(dtype), quant, config, held, kernels)(params)


def serving(
  dtype, quant: Quant = UNQUANTISED, config: ModelConfig | None = None, held: Mesh | None = None, kernels: Kernels = 'auto'
):
  """`serve` as a jitted function of the weights, for the mesh in use."""
  return _serving(jnp.dtype(dtype), quant, config, held, kernels, jax.sharding.get_abstract_mesh())


@cache
def _serving(dtype, quant: Quant, config: ModelConfig | None, held: Mesh | None, kernels: Kernels, mesh: AbstractMesh):
  function = partial(_serve, dtype=dtype, quant=quant, config=config, held=held, kernels=kernels)
  if config is None or mesh.empty or mesh.size == 1:
    return jax.jit(function)
  # Said again of what comes out: of a function with two meshes XLA would hand out copies of the whole.
  shapes = jax.eval_shape(function, abstract_params(config))
  places = jax.tree.map(lambda x, names: spec(mesh, names, x.shape, KEPT), shapes, served_axes(shapes, config))
  return jax.jit(function, out_shardings=places)


def _serve(params: Params, dtype, quant: Quant, config: ModelConfig | None, held: Mesh | None, kernels: Kernels) -> Served:
  codes_multiplied = multiplies_codes(quant, kernels)
  middle = _depth(params) // 2
  probe = {}

  def placed(x, names):
    return x if config is None else from_mesh(x, held, *names)

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

  axes = () if config is None else (logical_axes(config),)
  return Served(jax.tree_util.tree_map_with_path(leaf, params, *axes, is_leaf=_is_weight), probe=probe or None)


def served_axes(served: Served, config: ModelConfig) -> Served:
  """The names of the axes of the weights as served; scales are whole on every device that has some of the weight."""

  def leaf(w, names):
    match w:
      case BlockScaled():
        return replace(w, codes=names, scale=_of_scale(names))
      case Emulated():
        return replace(w, values=names)
    return names

  axes = logical_axes(config)
  params = jax.tree.map(leaf, served.params, axes, is_leaf=_is_weight)
  linears = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_names)[0]
  middle = {_named(path)[1]: names for path, names in linears if _named(path)[0] == config.num_layers // 2}
  probe = None if served.probe is None else {name: middle[name] for name in served.probe}
  return Served(params, jax.tree.map(lambda x: (None,), served.scales), probe)


@jax.jit
def codes_changed(old: dict[str, Array], new: dict[str, Array]) -> Float[Array, '']:
  """The fraction of the probed layer's FP8 codes that differ."""
  changed = [jnp.sum(_bits(old[name]) != _bits(new[name])) for name in new]
  return jnp.stack(changed).sum() / sum(codes.size for codes in new.values())


def sync_metrics(served: Served, before: dict[str, Array] | None) -> dict[str, float]:
  """What a sync did to the sampler: the FP8 codes that changed since the probe `before`, and the scales of its cache."""
  metrics = {}
  if served.probe and before:
    metrics['fp8/codes_changed_fraction'] = float(codes_changed(before, served.probe))
  if served.scales is not None:
    for name, values in served.scales._asdict().items():
      metrics |= {f'fp8/scale_{name}/{layer}': float(value) for layer, value in enumerate(np.asarray(values))}
  return metrics


def self_check(params: Params, served: Served, dtype, quant: Quant) -> list[str]:
  """What is wrong with the weights as served, one sentence each; nothing where they are as declared (fp8_rollouts 7.2, 7.3)."""
  declared = set(quantised_linears(params, quant))
  found = {jax.tree_util.keystr(path) for path, w in _leaves(served.params) if isinstance(w, BlockScaled | Emulated)}
  wrong = [f'{name}: {"not " * (name in declared)}quantised, against config.quant' for name in sorted(declared ^ found)]
  wrong += [
    f'{jax.tree_util.keystr(path)}: {w.dtype}, expected {jnp.dtype(dtype)}'
    for path, w in _leaves(served.params)
    if isinstance(w, jax.Array) and w.dtype != dtype
  ]
  finite, error = jax.device_get(_measured(params, served, min(declared, default=None), jnp.dtype(dtype)))
  if not finite:
    wrong.append('a served weight is not finite')
  if not error <= MAX_PRODUCT_ERROR:
    wrong.append(f'{min(declared)}: its FP8 product is off by {error:.3g} of itself, beyond {MAX_PRODUCT_ERROR}')
  return wrong


@OnMesh
@partial(jax.jit, static_argnames=('name', 'dtype'))
def _measured(params, served, name, dtype):
  """Whether every served number is finite, and the relative error of one quantised product on fixed random inputs."""
  finite = jnp.array([jnp.all(jnp.isfinite(x.astype(jnp.float32))) for x in jax.tree.leaves(served.params)]).all()
  if name is None:
    return finite, jnp.zeros(())
  w, q = ({jax.tree_util.keystr(path): leaf for path, leaf in _leaves(tree)}[name] for tree in (params, served.params))
  w = plain(w)
  if w.ndim > 2:
    w, q = jax.tree.map(lambda of_experts: of_experts[0], (w, q))
  x = jax.random.normal(jax.random.key(0), (16, w.shape[1]))
  meant, got = x @ w.astype(jnp.float32).T, dot(x.astype(dtype), q).astype(jnp.float32)  # as the sampler multiplies
  return finite, jnp.linalg.norm(got - meant) / jnp.maximum(jnp.linalg.norm(meant), 1e-30)


def _leaves(params) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_weight)[0]


def _is_weight(w) -> bool:
  return isinstance(w, BlockScaled | Emulated | LowRank)


def _named(path) -> tuple[int, str]:
  """(layer, name) of a linear of a layer, of an expert's such as experts.up; (-1, '') for other weights."""
  match = LINEAR.fullmatch(jax.tree_util.keystr(path))
  return (int(match[1]), '.'.join(filter(None, match.groups()[1:]))) if match else (-1, '')


def _of_scale(names: Names) -> Names:
  """A scale lies where its expert does."""
  return (*names[:-2], None, None)


def _depth(params) -> int:
  return len(params['layers'])


def _is_quantised(path, params, quant: Quant) -> bool:
  layer, name = _named(path)
  if 'w8a8' not in quant.sampler or layer < 0:
    return False
  spared = name.rpartition('.')[2] in quant.skip_names
  return quant.skip_first_layers <= layer < _depth(params) - quant.skip_last_layers and not spared


def _bits(codes):
  return jax.lax.bitcast_convert_type(codes, jnp.uint8)
