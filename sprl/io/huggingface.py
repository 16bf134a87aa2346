"""Load and export Hugging Face folders: safetensors, in one file or in shards with an index.

The table `tensors(config)` maps each leaf of the params tree to its tensor in a checkpoint. Loading, exporting and the GGUF
conversion share it. Shapes are those of the files: linear kernels are [out, in].

Loading checks the headers of all files against the table before any device work. It then reads slices, one leaf at a time: each
device gets only the part that it holds. Exporting writes to a draft folder, one tensor at a time, and renames it at the end.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from sprl.io.files import naming, rename
from sprl.models.config import ARCHITECTURES, ModelConfig
from sprl.quant.dot import plain
from sprl.sharding.transfer import fetch

Params = dict[Any, Any]  # nested dict of arrays
Keys = tuple[str | int, ...]  # the path of a leaf: ('layers', 0, 'mlp', 'up', 'kernel')

MARK = {'format': 'pt', 'written_by': 'sprl'}  # metadata of an export by sprl, which a later export may replace
DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}  # of weights in files: safetensors' name -> numpy's
_EMBED, _HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
_TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'tokenizer.model',
  'chat_template.jinja',
  'generation_config.json',
)
_NUMBER = '[0-9]' * 5
WRITTEN = (  # all names that an export by sprl may have, of full weights or of adapters, as patterns of fnmatch
  *_TOKENIZER_FILES,
  'config.json',
  'README.md',
  'model.safetensors',
  f'model-{_NUMBER}-of-{_NUMBER}.safetensors',
  'model.safetensors.index.json',
  'adapter_config.json',
  'adapter_model.safetensors',
)


# Name of each norm of a layer in checkpoints, by where a family's norms are: one name has three meanings.
_NORMS = {
  'before': {'attention_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm'},
  'after': {'attention_out_norm': 'post_attention_layernorm', 'mlp_out_norm': 'post_feedforward_layernorm'},
  'both': {
    'attention_norm': 'input_layernorm',
    'attention_out_norm': 'post_attention_layernorm',
    'mlp_norm': 'pre_feedforward_layernorm',
    'mlp_out_norm': 'post_feedforward_layernorm',
  },
}


class WeightsError(ValueError):
  """Weights that are incomplete or do not match config.json. The message names the file or tensor."""


class Tensor(NamedTuple):
  """The name and shape of a tensor in a checkpoint."""

  name: str
  shape: tuple[int, ...]


def tensors(config: ModelConfig) -> dict[Keys, Tensor]:
  """Map the path of each leaf of the params tree to its tensor in a checkpoint, in the order of the computation.

  The kernels of X experts are one leaf [X, out, in], but X tensors of a checkpoint. Their paths end in the expert's number.
  """
  V, E, D = config.vocab_size, config.hidden_size, config.head_dim
  outputs = {'q': config.num_heads * D, 'k': config.num_kv_heads * D, 'v': config.num_kv_heads * D}
  table: dict[Keys, Tensor] = {('embed',): Tensor(_EMBED, (V, E))}
  for i in range(config.num_layers):
    layer, name = ('layers', i), f'model.layers.{i}'
    for norm, stored in _NORMS[config.norms].items():
      table[*layer, norm, 'scale'] = Tensor(f'{name}.{stored}.weight', (E,))
    for part, width in outputs.items():
      table[*layer, 'attention', part, 'kernel'] = Tensor(f'{name}.self_attn.{part}_proj.weight', (width, E))
      if config.qkv_bias:
        table[*layer, 'attention', part, 'bias'] = Tensor(f'{name}.self_attn.{part}_proj.bias', (width,))
      if config.qk_norm and part != 'v':
        normed = D if config.qk_norm == 'head' else width
        table[*layer, 'attention', f'{part}_norm', 'scale'] = Tensor(f'{name}.self_attn.{part}_norm.weight', (normed,))
    table[*layer, 'attention', 'o', 'kernel'] = Tensor(f'{name}.self_attn.o_proj.weight', (E, outputs['q']))
    if config.experts is None or i not in config.experts.layers:
      table |= _mlp((*layer, 'mlp'), f'{name}.mlp', E, config.intermediate_size)
      continue
    X, F, shared = config.experts.count, config.experts.width, config.experts.shared_width
    table[*layer, 'mlp', 'router', 'kernel'] = Tensor(f'{name}.mlp.gate.weight', (X, E))
    for x in range(X):
      of_expert = _mlp((*layer, 'mlp', 'experts'), f'{name}.mlp.experts.{x}', E, F)
      table |= {(*path, x): tensor for path, tensor in of_expert.items()}
    if shared:
      table |= _mlp((*layer, 'mlp', 'shared'), f'{name}.mlp.shared_expert', E, shared)
      table[*layer, 'mlp', 'shared_gate', 'kernel'] = Tensor(f'{name}.mlp.shared_expert_gate.weight', (1, E))
  table['norm', 'scale'] = Tensor('model.norm.weight', (E,))
  if not config.tie_embeddings:
    table['head', 'kernel'] = Tensor(_HEAD, (V, E))
  return table


def _mlp(path: Keys, name: str, E: int, F: int) -> dict[Keys, Tensor]:
  shapes = {'gate': (F, E), 'up': (F, E), 'down': (E, F)}
  return {(*path, part, 'kernel'): Tensor(f'{name}.{part}_proj.weight', shape) for part, shape in shapes.items()}


# --- in --------------------------------------------------------------------------------------------------------------


def load_params(
  folder: str | Path, config: ModelConfig, shardings: Params | None = None, dtype: DTypeLike = jnp.float32
) -> Params:
  """Load the params tree of a checkpoint.

  Args:
    folder: a folder with safetensors files.
    config: the model's config.
    shardings: a tree of shardings with the structure of the params; None puts all leaves on the first device.
    dtype: the dtype of the leaves.

  The host holds the slices of one leaf at a time. Raises WeightsError before any device work: as `check_weights` does, and if
  tied embeddings come with another head.
  """
  where = check_weights(folder, config)
  params: Params = {}
  with ExitStack() as stack:
    files = {path: stack.enter_context(safe_open(path, 'numpy')) for path in set(where.values())}
    if config.tie_embeddings and _HEAD in where:
      embed, head = (files[where[name]].get_slice(name) for name in (_EMBED, _HEAD))
      _check_repeated(embed, head, where[_HEAD])
    for path, parts in _leaves(config).items():
      stored = [files[where[tensor.name]].get_slice(tensor.name) for tensor in parts]
      shape, read = parts[0].shape, partial(_read, stored[0], dtype)
      if 'experts' in path:
        shape, read = (len(parts), *shape), partial(_read_stacked, stored, dtype)
      sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if shardings is None else get(shardings, path)
      _set(params, path, jax.make_array_from_callback(shape, sharding, read))
  return params


def _check_repeated(embed, head, path: Path) -> None:
  """Raise WeightsError unless a head equals the embedding. The host holds 4096 rows of both at a time."""
  rows = embed.get_shape()[0]
  for start in range(0, rows, 4096):
    block = slice(start, min(start + 4096, rows))
    if not np.array_equal(embed[block], head[block]):
      raise WeightsError(
        f'{path}: {_HEAD} differs from {_EMBED}, but by config.json one is the other (tie_word_embeddings); expected equal '
        'weights, or tie_word_embeddings = false'
      )


def _read(stored, dtype, index) -> np.ndarray:
  return np.ascontiguousarray(stored[index], dtype=dtype)


def _read_stacked(stored, dtype, index) -> np.ndarray:
  """Read the slice `index` of experts stacked on a new first axis, without a second copy of them."""
  first, *others = stored[index[0]]
  part = _read(first, dtype, index[1:])
  found = np.empty((1 + len(others), *part.shape), dtype)
  found[0] = part
  for x, expert in enumerate(others, 1):
    found[x] = expert[index[1:]]
  return found


def _leaves(config: ModelConfig) -> dict[Keys, list[Tensor]]:
  """Map the path of each leaf to its tensors: one per expert for the kernels of experts, otherwise one."""
  leaves: dict[Keys, list[Tensor]] = {}
  for path, tensor in tensors(config).items():
    leaves.setdefault(path[:-1] if 'experts' in path else path, []).append(tensor)
  return leaves


def check_weights(folder: str | Path, config: ModelConfig) -> dict[str, Path]:
  """Check the headers of all weight files, and return the file of each tensor by the tensor's name.

  A checkpoint with tied embeddings may repeat the embedding as `lm_head.weight`; `load_params` compares the values.

  Raises WeightsError if the folder has only pickle files, if a file is missing or truncated, or if a tensor is missing, unknown,
  of a wrong shape, or stored in a type other than float32, float16 and bfloat16.
  """
  folder = Path(folder)
  expected = {tensor.name: tensor.shape for tensor in tensors(config).values()}
  found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
  for path in _weight_files(folder):
    try:
      with safe_open(path, 'numpy') as file:
        for name in file.keys():  # noqa: SIM118  (a safetensors handle, not a dict)
          if name in found:
            raise WeightsError(f'{path}: holds {name}, which is also in {found[name][0].name}')
          stored = file.get_slice(name)
          found[name] = (path, tuple(stored.get_shape()), stored.get_dtype())
    except (SafetensorError, OSError) as error:
      raise WeightsError(f'{path}: not a complete safetensors file ({error}); copy or download it again') from None

  if missing := [name for name in expected if name not in found]:
    raise WeightsError(f'{folder}: {_some(missing)} missing from the weights; config.json ({config.family}) requires them')
  if config.tie_embeddings and _HEAD in found:
    expected[_HEAD] = expected[_EMBED]
  extra = [name for name in found if name not in expected and not name.endswith('.rotary_emb.inv_freq')]
  if extra:
    raise WeightsError(f'{folder}: {_some(extra)} in the weights, but not in the model of config.json ({config.family})')
  for name, shape in expected.items():
    path, stored_shape, dtype = found[name]
    if stored_shape != shape:
      raise WeightsError(f'{path}: {name} has shape {stored_shape}; expected {shape} by config.json ({config.family})')
    if dtype not in DTYPES:
      raise WeightsError(f'{path}: {name} is stored as {dtype}; expected one of {", ".join(DTYPES)}')
  return {name: found[name][0] for name in expected}


def _weight_files(folder: Path) -> list[Path]:
  """Return the safetensors files of a folder. As in transformers, model.safetensors precedes an index."""
  single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  if single.is_file():
    return [single]
  if index.is_file():
    try:
      names = sorted(set(json.loads(index.read_text(encoding='utf-8'))['weight_map'].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
      raise WeightsError(f'{index}: not a safetensors index ({error!r})') from None
    for name in names:
      if not isinstance(name, str) or name != Path(name).name or not (folder / name).is_file():
        raise WeightsError(f'{index}: names {name!r}, which is not a file in this folder')
    return [folder / name for name in names]
  if pickles := sorted(p.name for p in folder.glob('*') if p.suffix in ('.bin', '.pt', '.pth', '.ckpt', '.pkl')):
    raise WeightsError(
      f'{folder}: has only pickle files ({_some(pickles)}), which can run code when they are read; expected safetensors'
    )
  raise WeightsError(f'{folder}: expected model.safetensors or model.safetensors.index.json; found neither')


# --- out -------------------------------------------------------------------------------------------------------------


def export_folder(
  folder: str | Path,
  params: Params,
  config: ModelConfig,
  tokenizer_source: str | Path | None = None,
  max_shard_bytes: int = 5_000_000_000,
  dtype: DTypeLike = jnp.bfloat16,
  card: str | None = None,
  leads: bool = True,
) -> None:
  """Write a folder that transformers loads: weights, config, generation config and tokenizer.

  Over several processes, all call this: they gather one tensor at a time, and process 0 writes it.

  Args:
    folder: the folder to write. It appears complete or not at all. An earlier export is replaced.
    params: the params tree. The host, and each device of a mesh, hold one whole tensor at a time.
    config: the model's config.
    tokenizer_source: the folder from which the tokenizer's files are copied; None copies none.
    max_shard_bytes: the largest size of one weight file.
    dtype: the dtype of the weights.
    card: the text of README.md; None writes none.
    leads: whether this process writes: process 0, or one that is alone.

  Raises WeightsError if `folder` is anything but an earlier export, or if it is `tokenizer_source`.
  """

  def weights():
    for path, tensor in tensors(config).items():
      yield tensor, (lambda path=path: np.asarray(fetch(plain(get(params, path)).astype(dtype))))

  if leads:
    write_folder(folder, config, weights(), jnp.dtype(dtype).name, tokenizer_source, max_shard_bytes, card)
  else:
    for _, gather in weights():  # the same tensors in the same order as process 0
      gather()


def write_folder(
  folder: str | Path,
  config: ModelConfig,
  weights: Iterable[tuple[Tensor, Callable[[], np.ndarray]]],
  dtype: str,
  tokenizer_source: str | Path | None,
  max_shard_bytes: int = 5_000_000_000,
  card: str | None = None,
) -> None:
  """Write the folder of `export_folder` from pairs (tensor, function that makes it), one tensor at a time."""
  if tokenizer_source is not None:
    check_apart(folder, tokenizer_source)
  with whole_folder(Path(folder)) as draft:
    _write_weights(draft, list(weights), dtype, max_shard_bytes)
    raw = {key: value for key, value in config.raw.items() if key not in ('dtype', 'torch_dtype')}
    raw |= {'architectures': [ARCHITECTURES[config.family]], 'torch_dtype' if 'torch_dtype' in config.raw else 'dtype': dtype}
    write_json(draft / 'config.json', raw)
    ids = {'bos_token_id': config.bos_token_id, 'eos_token_id': list(config.eos_token_ids), 'pad_token_id': config.pad_token_id}
    write_json(draft / 'generation_config.json', {key: value for key, value in ids.items() if value not in (None, [])})
    for name in _TOKENIZER_FILES if tokenizer_source is not None else ():
      source = Path(tokenizer_source or '') / name
      if source.is_file():
        shutil.copyfile(source, draft / name)
    write_card(draft, card)


def write_card(folder: Path, card: str | None) -> None:
  """Write the model card as README.md, if there is one."""
  if card is not None:
    (folder / 'README.md').write_text(card, encoding='utf-8')


def check_apart(folder: str | Path, source: str | Path) -> None:
  """Raise WeightsError if an export to `folder` would replace the model that it is made from, in the folder `source`."""
  if Path(folder).resolve() == Path(source).resolve():
    raise WeightsError(f'{folder}: is the model that this export is made from; expected another folder')


def check_free(folder: Path) -> None:
  """Raise WeightsError if a folder holds anything but an earlier export: the MARK in its weights, and names of WRITTEN alone."""
  if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
    return
  expected = 'expected a new folder, or an earlier export to replace'
  if not any(map(_marked, folder.glob('*.safetensors'))):
    raise WeightsError(f'{folder}: exists and is not an export by sprl; {expected}')
  if others := sorted(path.name for path in folder.iterdir() if not any(fnmatchcase(path.name, name) for name in WRITTEN)):
    raise WeightsError(f'{folder}: holds {_some(others)}, which no export by sprl writes; {expected}')


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
  """Yield a draft folder, and rename it to `folder` when the block ends. If the block raises, nothing is left of the draft.

  An earlier export is replaced. Raises WeightsError as `check_free` does.
  """
  folder = folder.resolve()  # a rename would replace a link instead of the folder that it names
  draft, old = (folder.with_name(f'.{folder.name}.sprl-{name}') for name in ('draft', 'old'))
  if old.exists() and not folder.exists():  # an export was killed between its two renames
    rename(old, folder)
  check_free(folder)
  for leftover in (draft, old):
    shutil.rmtree(leftover, ignore_errors=True)
  draft.mkdir(parents=True)
  try:
    with naming(draft):
      yield draft
    if folder.exists():
      rename(folder, old)  # a rename cannot replace a folder that is not empty
    rename(draft, folder)
  finally:
    shutil.rmtree(draft, ignore_errors=True)
  shutil.rmtree(old, ignore_errors=True)


def _marked(path: Path) -> bool:
  try:
    with safe_open(path, 'numpy') as file:
      return (file.metadata() or {}).items() >= MARK.items()
  except (SafetensorError, OSError):
    return False


def _write_weights(
  folder: Path, weights: list[tuple[Tensor, Callable[[], np.ndarray]]], dtype: str, max_shard_bytes: int
) -> None:
  def size(tensor):
    return int(np.prod(tensor.shape)) * jnp.dtype(dtype).itemsize

  shards, room = [[]], max_shard_bytes
  for tensor, make in weights:
    if shards[-1] and size(tensor) > room:
      shards.append([])
      room = max_shard_bytes
    shards[-1].append((tensor, make))
    room -= size(tensor)
  if len(shards) == 1:
    return write_safetensors(folder / 'model.safetensors', shards[0], dtype)
  names = [f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
  for name, shard in zip(names, shards):
    write_safetensors(folder / name, shard, dtype)
  weight_map = {tensor.name: name for name, shard in zip(names, shards) for tensor, _ in shard}
  total = sum(size(tensor) for tensor, _ in weights)
  write_json(folder / 'model.safetensors.index.json', {'metadata': {'total_size': total}, 'weight_map': weight_map})


def write_safetensors(path: Path, shard: list[tuple[Tensor, Callable[[], np.ndarray]]], dtype: str) -> None:
  """Write one safetensors file, tensor by tensor, in the given order. Its dtype must be 'float32', 'float16' or 'bfloat16'.

  The library's own writer needs all tensors in memory at once, and the order of its metadata differs between processes.
  The format: 8 bytes with the length of the header, little-endian; the header, which is JSON with the type, shape and byte range
  of each tensor, padded with spaces to a multiple of 8 bytes; the bytes of the tensors.
  """
  header: dict[str, Any] = {'__metadata__': MARK}
  end = 0
  code = next(code for code, name in DTYPES.items() if name == dtype)
  for tensor, _ in shard:
    begin, end = end, end + int(np.prod(tensor.shape)) * jnp.dtype(dtype).itemsize
    header[tensor.name] = {'dtype': code, 'shape': list(tensor.shape), 'data_offsets': [begin, end]}
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    for tensor, make in shard:
      array = np.ascontiguousarray(make(), dtype=dtype)
      if array.shape != tensor.shape:
        raise WeightsError(f'{tensor.name} has shape {array.shape}; expected {tensor.shape} by config.json')
      file.write(array.view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())


# --- the params tree -------------------------------------------------------------------------------------------------


def get(params: Mapping[Any, Any], path: Keys) -> Any:
  """Return the leaf at `path`."""
  node: Any = params
  for key in path:
    node = node[key]
  return node


def write_json(path: Path, value: Any) -> None:
  """Write indented JSON in UTF-8, without escapes for other characters than ASCII."""
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')


def _set(params: Params, path: Keys, leaf: Any) -> None:
  for key in path[:-1]:
    params = params.setdefault(key, {})
  params[path[-1]] = leaf


def _some(names: list[str]) -> str:
  """List the first few of many names."""
  return ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else '')
