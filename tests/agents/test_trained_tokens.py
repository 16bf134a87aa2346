"""Agents on the engine itself: what is trained is what the engine drew, and the learner gives its tokens the same log-probs."""

import time

import hermes
import numpy as np
import pytest
import small
from checks import drawn, trained
from serving import ROWS, engine
from test_agent_episodes import PROGRAMS

from sprl.agents.pool import AgentPool, Program
from sprl.config import Cache, Rollout, Sampling
from sprl.io.tokenizer import Tokenizer
from sprl.rollout.agent_setup import AgentSource, rows
from sprl.rollout.codec import ChatCodec
from sprl.rollout.episodes import Limits
from sprl.rollout.scheduler import Scheduler
from sprl.sampler.engine import Engine
from sprl.types import sequences

SAMPLING = Sampling(max_prompt=32, max_tokens=96, prompt_buckets=(32,), chunk=8)


class Recorded(Engine):
  """An engine that remembers its completions."""

  def collect(self):
    ended = super().collect()
    self.completions = [*getattr(self, 'completions', []), *ended]
    return ended


@pytest.mark.slow
@pytest.mark.parametrize('cache', [Cache(), Cache(budget=24, interval=8, window=4)], ids=['dense', 'sparse'])
def test_branches_and_turns_on_the_engine(tmp_path, cache):
  hermes.write_tokenizer(tmp_path)
  tokenizer = Tokenizer.load(tmp_path)
  plain = engine(tokenizer, SAMPLING, cache=cache)
  recorded = Recorded(plain.config, plain.weights)
  with AgentPool(Program(f'{PROGRAMS}:edits', {}), SAMPLING, SAMPLING, 'tiny', 120.0) as pool:
    row = lambda number: rows([], 'train', lambda n: 2 * n, 0, number)  # noqa: E731
    source = AgentSource(row, Limits(8, 8, 32, 96), 4, ChatCodec(tokenizer), pool.release)
    scheduler = Scheduler([recorded], pool, source, Rollout(prompts=2, group=ROWS // 2), time.monotonic, groups=2)
    trajectories = [t for group in scheduler.batch() for t in group.trajectories]
  assert recorded.load == 0
  assert len(trajectories) == ROWS
  config, params = small.model('qwen2', num_hidden_layers=1, max_position_embeddings=512)
  for t in trajectories:
    assert trained(t) == drawn(recorded, t.uid)
    for sequence in sequences(t):
      if not cache.budget:
        expected = small.teacher_forced(config, params, sequence)
        np.testing.assert_allclose(sequence.sampler_logp[sequence.mask], expected[sequence.mask], rtol=0, atol=2e-5)
      assert sequence.attended[sequence.mask].max() <= (24 + 8 if cache.budget else len(sequence.tokens))
  assert recorded.usage.prefix_hits > 0
