"""Context of the checks of gpu_check.py: the models and shapes that they share, cases, timed rows, and verdicts on targets."""

import dataclasses
import json
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from device_timing import Ceilings, seconds
from kernel_resources import MODELS, Model

from sprl.kernels.cost import Cost
from sprl.models.config import ModelConfig

BF16, FP8 = jnp.dtype('bfloat16'), jnp.dtype('float8_e4m3fn')
TOY = Model(4, 2, 128, 256, 384)
DECODES = [('Qwen2.5-7B', 256, 640), ('Qwen2.5-7B', 256, 4096), ('Qwen2.5-1.5B', 256, 4096), ('Qwen3-8B', 64, 4096)]
ROWS = [('Qwen2.5-1.5B', 2, 4096), ('Qwen2.5-7B', 1, 8192)]
GENERATED = 'Qwen2.5-1.5B', 64, 512, 64  # model, rows, prompt tokens and new tokens for transformers' generate
Row = dict[str, Any]
Rows = Mapping[tuple[str, str], Row]  # measured rows by check and case


class Case(NamedTuple):
  """A planned row of the result, and how to measure it."""

  check: str
  case: str
  measure: Callable[[Rows], Row]  # rows measured before -> the columns of this row


@dataclasses.dataclass(frozen=True)
class Bench:
  """Context of the checks."""

  rehearse: bool
  ceilings: Ceilings
  torch: Row = dataclasses.field(default_factory=dict)  # result of peers/torch_gpu.py

  def sizes(self, real: Any, toy: Any) -> Any:
    """Return the real sizes, or the toy sizes of a rehearsal."""
    return toy if self.rehearse else real

  def timed(
    self, name: str, case: str, kernel: Callable, make: Callable, least: Cost, peers=None, makes=None, moving=0, fp8=False
  ) -> Row:
    """Return the row of a kernel: its time, the share of the ceiling, and the times of its peers.

    `make(key)` returns the arguments of a call; `makes` has other functions for peers whose arguments have another layout.
    `least` has the fewest bytes and operations that the call needs. The outputs replace the first `moving` arguments in the next
    call.
    """
    rate = self.ceilings.fp8_rate if fp8 else self.ceilings.bf16
    least_seconds = max(least.bytes / self.ceilings.copy, least.flops / rate)
    time_of = partial(seconds, moving=moving, **({'runs': 1, 'least': 0, 'inputs': 2} if self.rehearse else {}))
    ours = time_of(kernel, make)
    row = {'check': name, 'case': case, 'us': 1e6 * ours, 'share of ceiling': least_seconds / ours}
    row |= {'GB/s': least.bytes / ours / 1e9, 'TFLOP/s': least.flops / ours / 1e12}
    for peer, call in (peers or {}).items():
      try:
        row[f'{peer} us'] = 1e6 * time_of(call, (makes or {}).get(peer, make))
      except Exception as error:  # an unsupported peer becomes a note
        row['note'] = f'{row.get("note", "")} {peer}: {type(error).__name__}'.strip()
    others = [row[f'{peer} us'] for peer in peers or {} if f'{peer} us' in row]
    return row | ({'times best peer': min(others) / row['us']} if others else {})


def judged(row: Row, asked: dict[str, float]) -> Row:
  """Return the row with the targets of its columns and their verdicts. Targets are lower bounds."""
  verdicts = []
  for column, least in asked.items():
    value = row.get(column)
    verdict = 'not measured' if value is None else f'{value:.3g}, {"met" if value >= least else "MISSED"}'
    verdicts.append(f'{column} >= {least:g}: {verdict}')
  return row | {'asked': '; '.join(verdicts)}


def measured(case: Case, before: Rows) -> Row:
  """Measure a case; return its row. If that fails, print the traceback and return a row with the error."""
  row = {'check': case.check, 'case': case.case, 'status': 'ok'}
  try:
    return row | case.measure(before)
  except Exception as error:
    traceback.print_exception(error)
    return row | {'status': f'FAILED: {type(error).__name__}', 'note': ' '.join(str(error).split())[:200]}


def torch_time(bench: Bench, row: Row, kind: str, *shape: int) -> Row:
  """Return the row with PyTorch's time added to its peers, if PyTorch was measured on this shape."""
  theirs = bench.torch.get(kind, {}).get(json.dumps(shape))
  if theirs is None:
    return row
  return row | {'torch us': theirs, 'times best peer': min(theirs / row['us'], row.get('times best peer', np.inf))}


def config_of(name: str, layers: int | None = None) -> ModelConfig:
  """Return the config of a model with its real shapes. `layers` replaces the number of layers."""
  depth, vocabulary = {'Qwen2.5-1.5B': (28, 151936), 'Qwen2.5-7B': (28, 152064)}.get(name, (2, 512))
  H, K, D, E, F = MODELS.get(name, TOY)
  return ModelConfig.from_json(
    {
      'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'vocab_size': vocabulary, 'hidden_size': E,
      'intermediate_size': F, 'num_hidden_layers': layers or depth, 'num_attention_heads': H, 'num_key_value_heads': K,
      'head_dim': D, 'max_position_embeddings': 32768, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6,
      'tie_word_embeddings': name == 'Qwen2.5-1.5B', 'hidden_act': 'silu', 'eos_token_id': 0,
    }
  )  # fmt: skip
