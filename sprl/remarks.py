"""Remarks before the first step: settings that are accepted, but do something other than they suggest.

docs/troubleshooting.md, Remarks before the first step, explains them. Settings that contradict each other are refused
(sprl/config_checks.py).
"""

import dataclasses
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from sprl.cache.layout import CacheLayout, never_evicts
from sprl.config import EPISODES, Kernels, Run
from sprl.foreign import split_reference
from sprl.io.random_model import is_random
from sprl.kernels.platform import can_run
from sprl.presets import sources
from sprl.sampler.weights import multiplies_codes

# Optimisers that read the settings of moments, and those that decay weights.
ADAPTIVE, DECAYING = ('adamw', 'adam', 'lion'), ('adamw', 'lion', 'adafactor')


def remarks(run: Run, layout: CacheLayout, linears: Kernels, max_positions: int) -> list[str]:
  """Return warnings about settings that have no effect, and a cache or number format that will not do what its settings suggest.

  `linears` is the implementation of FP8 products, `max_positions` the number of positions the model is made for.
  """
  found = [never_evicts(run.cache, layout.prompt, layout.positions - layout.prompt)]
  if is_random(run.model.path):
    found.append(
      f'config.model.path = {run.model.path}: the weights are random. The run shows speed and memory; it learns nothing'
    )
  if run.steps == 0:
    found.append('config.steps = 0: the run evaluates and saves its first weights, and trains on nothing')
  if run.steps and run.optimizer.warmup_steps >= (updates := run.steps * run.optimizer.updates):
    found.append(
      f'config.optimizer.warmup_steps = {run.optimizer.warmup_steps}: the run has {updates} updates, so it ends before the '
      'learning rate reaches config.optimizer.learning_rate'
    )
  if run.rollout.equal_groups != 'train' and not run.advantage.within_groups:
    found.append(
      f'config.rollout.equal_groups = {run.rollout.equal_groups!r} leaves out groups from which config.advantage.estimator = '
      f'{run.advantage.estimator!r} learns'
    )
  if split_reference(run.loss.variant) and run.correction.mode == 'decoupled' and run.optimizer.updates == 1:
    found.append(
      f'config.loss.variant = {run.loss.variant!r}: with one update a batch and config.correction.mode = {run.correction.mode!r} '
      "the ratio is 1 for every token. config.correction.mode = 'bypass' has the ratio to the sampler"
    )
  if (run.loss.variant, run.correction.mode) == ('reinforce', 'decoupled') and run.optimizer.updates > 1:
    found.append(
      f"config.loss.variant = 'reinforce' does not correct for the drift of the {run.optimizer.updates} updates of a step. "
      "config.correction.mode = 'bypass' does, as does another loss"
    )
  if layout.positions > max_positions:
    found.append(
      f'config.sampling.max_prompt and max_tokens allow sequences of {layout.positions} tokens; the model is made for '
      f'{max_positions} (max_position_embeddings in its config.json)'
    )
  fp8 = 'w8a8' in run.quant.sampler or run.quant.learner == 'w8a8'
  for key in () if fp8 else ('format', 'arithmetic', 'skip_layers', 'skip_names'):
    found.append(_unused(run, f'quant.{key}', 'no linears are FP8', 'quant.sampler'))
  if not layout.fp8:
    found.append(_unused(run, 'quant.kv_scale', 'the cache is not FP8', 'quant.sampler'))
  found += [_unused(run, *unread) for unread in _unread(run)]
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


def _unread(run: Run) -> Iterator[tuple[str, str, str]]:
  """Yield each setting that another one leaves unread: its key, the reason, and the key of the other.

  Only the variant or method of its name reads a section of `loss` or `cache`.
  """
  for section, choice in (('loss', 'variant'), ('cache', 'method')):
    settings = getattr(run, section)
    chosen = getattr(settings, choice)
    for key in _keys(settings, section):
      variant = key.split('.')[1]
      if section == 'cache' and run.cache.budget is None:
        if run.arm != 'dense':  # which drops the budget, so that runs of all arms can have the same settings
          yield key, 'nothing is evicted', 'cache.budget'
      elif split_reference(chosen) and section == 'cache':
        continue  # a user's method may read all of them
      elif dataclasses.is_dataclass(getattr(settings, variant)) and variant != chosen:
        yield key, f'only {variant!r} reads it', f'{section}.{choice}'
  name = run.optimizer.name
  for key, readers in (('b1', ADAPTIVE), ('b2', ADAPTIVE), ('moment_dtype', ADAPTIVE), ('weight_decay', DECAYING)):
    if name not in readers:
      yield f'optimizer.{key}', f'{name} does not read it', 'optimizer.name'
  if run.correction.weight == 'truncate':
    yield 'correction.floor', 'weights have no lower bound', 'correction.weight'
  if run.lora.rank is None:
    yield from ((f'lora.{name}', 'there are no adapters', 'lora.rank') for name in ('alpha', 'targets'))
  if run.eval.temperature == 0:
    yield 'eval.top_p', 'greedy answers are not drawn', 'eval.temperature'
  if not {'wandb', 'mlflow'} & {*run.log.trackers}:
    yield 'log.project', 'only wandb and mlflow read it', 'log.trackers'
  if run.task.kind not in EPISODES:
    yield from ((f'task.{name}', 'there are no conversations', 'task.kind') for name in ('turns', 'turn_tokens', 'branches'))


def _keys(section: Any, prefix: str) -> Iterator[str]:
  for f in dataclasses.fields(section):
    value, key = getattr(section, f.name), f'{prefix}.{f.name}'
    yield from _keys(value, key) if dataclasses.is_dataclass(value) else [key]


def _unused(run: Run, key: str, why: str, choice: str) -> str:
  """Return that a setting has no effect, or '' if it has its default, or the value that the arm or preset sets."""
  value = attrgetter(key)(run)
  if value == attrgetter(key)(Run()) or key in sources(run):
    return ''
  return f'config.{key} = {value!r} has no effect: {why} (config.{choice} = {attrgetter(choice)(run)!r})'
