"""The check `update` of gpu_check.py: whole updates of a model with random weights."""

import time
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from gpu_check_bench import BF16, Bench, Case, Row, Rows, config_of, judged

from sprl.config import Correction, Lora, Loss, Optimizer
from sprl.learner.batch import Shape, Tokens, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.models import transformer
from sprl.planning.utilisation import update_flops
from sprl.types import LogProbs, Trajectory


def check_update(bench: Bench) -> Iterator[Case]:
  """Time updates of all layers, and of 8 layers first, which compile faster."""
  name = bench.sizes('Qwen2.5-1.5B', 'toy')
  T, sequences = bench.sizes((4096, 4), (64, 2))
  for layers in bench.sizes((8, config_of(name).num_layers), (1,)):
    case = f'{name} {sequences} x {T} tokens L {layers}'
    yield Case('update', case, partial(one_update, bench, name, T, sequences, layers))


def one_update(bench: Bench, name: str, T: int, sequences: int, layers: int, before: Rows) -> Row:
  """Time three updates. The row has the last one: model FLOP/s, without recomputation, also as a share of the bfloat16 rate."""
  config = config_of(name, layers)
  rng = np.random.default_rng(0)
  trajectories = [trajectory(rng, i, T // 8, T - T // 8, config.vocab_size) for i in range(sequences)]
  batch, _ = pack(trajectories, rng.normal(size=sequences), Shape(sequences, 1, T, sequences, T - T // 8), share_prefix=False)
  params = jax.jit(partial(transformer.init_params, config))(jax.random.key(0))
  optimizer = make_optimizer(Optimizer(), 10)
  state = TrainState.create(params, optimizer)
  computation = UpdateConfig(Correction(), Loss(), ForwardConfig(1.0, BF16, None), 'none')  # the defaults of a run on an H200
  update = make_update(transformer.graph(config), optimizer, computation)
  flops = update_flops(config, Lora(), Tokens.of([batch], config.sliding_windows))
  batch = jax.device_put(batch)
  del params
  times = []
  for _ in range(3):
    start = time.perf_counter()
    state, metrics = update(state, batch, LogProbs(sampler=batch.sampler_logp))
    jax.block_until_ready((state, metrics))
    times.append(time.perf_counter() - start)
  row = {
    'us': 1e6 * times[-1], 'TFLOP/s': flops / times[-1] / 1e12,
    'tokens/s': sequences * T / times[-1], 'share of ceiling': flops / times[-1] / bench.ceilings.bf16,
  }  # fmt: skip
  return judged(row, {'share of ceiling': 0.5} if layers == config_of(name).num_layers else {})


def trajectory(rng: np.random.Generator, uid: int, prompt: int, new: int, vocabulary: int) -> Trajectory:
  """Return a trajectory of `prompt` + `new` random tokens, of which the model wrote the last `new`."""
  mask = np.arange(prompt + new) >= prompt
  return Trajectory(
    uid=uid,
    group=uid,
    tokens=rng.integers(0, vocabulary, prompt + new).astype(np.int32),
    mask=mask,
    sampler_logp=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
    version=np.where(mask, 0, -1).astype(np.int32),
    attended=np.where(mask, np.arange(prompt + new), 0).astype(np.int32),
    prompt_length=prompt,
    finish='length',
    reward=float(uid % 2),
  )
