"""Remarks before the first step: settings that are accepted, but do something other than they suggest.

docs/troubleshooting.md, Remarks before the first step, explains them. Settings that contradict each other are refused
(sprl/config_checks.py).
"""

from sprl.cache.layout import CacheLayout, never_evicts
from sprl.config import UNQUANTISED, Kernels, Quant, Run
from sprl.io.random_model import is_random
from sprl.kernels.platform import can_run
from sprl.sampler.weights import multiplies_codes


def remarks(run: Run, layout: CacheLayout, linears: Kernels, max_positions: int) -> list[str]:
  """Return warnings about a cache or a number format that will not do what its settings suggest.

  `linears` is the implementation of FP8 products, `max_positions` the number of positions the model is made for.
  """
  found = [never_evicts(run.cache, layout.prompt, layout.positions - layout.prompt)]
  if is_random(run.model.path):
    found.append(
      f'config.model.path = {run.model.path}: the weights are random. The run shows speed and memory; it learns nothing'
    )
  if run.steps == 0:
    found.append('config.steps = 0: the run evaluates and saves its first weights, and trains on nothing')
  if layout.positions > max_positions:
    found.append(
      f'config.sampling.max_prompt and max_tokens allow sequences of {layout.positions} tokens; the model is made for '
      f'{max_positions} (max_position_embeddings in its config.json)'
    )
  fp8 = 'w8a8' in run.quant.sampler or run.quant.learner == 'w8a8'
  for key in () if fp8 else ('format', 'arithmetic', 'skip_layers', 'skip_names'):
    found.append(_unused(run.quant, key, 'no linears are FP8'))
  if not layout.fp8:
    found.append(_unused(run.quant, 'kv_scale', 'the cache is not FP8'))
  if fp8 and not multiplies_codes(run.quant, linears):
    found.append(f'FP8 linears are emulated: numbers rounded to FP8 are multiplied in {layout.dtype} (config.quant.arithmetic)')
  if fp8 and run.quant.arithmetic == 'blockwise' and not can_run(linears):
    found.append('FP8 linears are emulated: FP8 codes are multiplied as bfloat16, block by block (config.quant.arithmetic)')
  if run.quant.learner == 'w8a8' and 'w8a8' not in run.quant.sampler:
    found.append(
      'the linears of the learner are FP8 and those of the sampler are not, which adds mismatch (config.quant.learner)'
    )
  if layout.fp8 and not can_run(layout.kernels):
    found.append(f'the FP8 cache is emulated: it is stored in FP8 and converted to {layout.dtype} when read')
  if run.masked_learner and run.quant.sampler != 'none':
    found.append(f'the learner evicts as the sampler does, but the mismatch that {run.quant.sampler} adds is not corrected')
  return [remark for remark in found if remark]


def _unused(quant: Quant, key: str, why: str) -> str:
  """Return that a setting of FP8 has no effect, or '' if it has its default."""
  value = getattr(quant, key)
  if value == getattr(UNQUANTISED, key):
    return ''
  return f'config.quant.{key} = {value!r} has no effect: {why} (config.quant.sampler = {quant.sampler!r})'
