"""64 conversations at a time of the official client, and of an environment of verifiers, with agents, hosts and clients that die.

The environment of verifiers needs an interpreter with verifiers 0.4: SPRL_AGENTS_PYTHON.
"""

import os
import random
import threading
import time
from pathlib import Path

import hermes
import pytest
from checks import drawn, trained
from fake_engine import FakeEngine
from pools import alive

from sprl.agents.pool import AgentPool, Program
from sprl.config import Rollout, Sampling
from sprl.io.tokenizer import Tokenizer
from sprl.rollout.agent_setup import AgentSource, rows
from sprl.rollout.codec import ChatCodec
from sprl.rollout.episodes import Limits
from sprl.rollout.scheduler import Scheduler
from sprl.types import sequences

HERE = Path(__file__).parent


def run(folder, program, group=8, groups=8, retries=8, disturb=lambda pool: None):
  """Return (trajectories, engine, counts) of one batch of `groups` groups, all at a time."""
  hermes.write_tokenizer(folder)
  engine = FakeEngine(capacity=64, chunk=2, stop=0.1)
  with AgentPool(program, Sampling(), Sampling(), 'tiny', 120.0) as pool:
    limits = Limits(turns=8, turn_tokens=24, max_prompt=400, max_tokens=400)
    row = lambda number: rows([], 'train', lambda n: 2 * n, 0, number)  # noqa: E731
    source = AgentSource(row, limits, 4, ChatCodec(Tokenizer.load(folder)), pool.release)
    settings = Rollout(prompts=groups, group=group)
    scheduler = Scheduler([engine], pool, source, settings, time.monotonic, groups=groups, retries=retries)
    threading.Thread(target=disturb, args=(pool,), daemon=True).start()
    found = [t for each in scheduler.batch() for t in each.trajectories]
    assert engine.load == 0
    assert not pool._episodes
  return found, engine, scheduler.counts


def check(trajectories, engine):
  """Every trained token was drawn, once, and what was drawn for a finished attempt is trained or counted as dropped."""
  for t in trajectories:
    assert not trained(t) - drawn(engine, t.uid)
    tokens = sum(int(s.mask.sum()) for s in sequences(t)) + t.metrics['agent/tokens_dropped']
    assert tokens <= sum(len(c.tokens) for c in engine.completions if c.request.uid == t.uid)


@pytest.mark.slow
@pytest.mark.usefixtures('no_pauses')
def test_64_agents_of_which_many_die_or_hang_up(tmp_path):
  pytest.importorskip('openai')

  def disturb(pool):
    time.sleep(3)
    os.kill(pool._host._process.pid, 9)

  trajectories, engine, counts = run(tmp_path, Program(f'{HERE}/openai_agent.py:agent', {'kills': 0.3}), disturb=disturb)
  assert len(trajectories) == 64
  check(trajectories, engine)
  assert counts['errors'] > 0
  assert {t.metrics['agent/turns'] for t in trajectories} <= {3, 4}
  assert all(t.metrics['letters'] > 0 for t in trajectories)


@pytest.mark.slow
@pytest.mark.skipif('SPRL_AGENTS_PYTHON' not in os.environ, reason='needs SPRL_AGENTS_PYTHON, an interpreter with verifiers 0.4')
@pytest.mark.usefixtures('no_pauses')
def test_64_episodes_of_an_environment_of_verifiers(tmp_path):
  args = {'taskset': 'letters', 'path': str(HERE)}
  program = Program(str(HERE.parents[1] / 'sprl/agents/from_verifiers.py') + ':agent', args, os.environ['SPRL_AGENTS_PYTHON'])
  killed = []

  def disturb(pool):
    for _ in range(12):
      time.sleep(0.5)
      host = pool._host._process.pid
      children = Path(f'/proc/{host}/task/{host}/children').read_text().split()
      living = [pid for pid in children if alive(pid) and pid not in killed]
      if living:
        killed.append(random.choice(living))
        os.kill(int(killed[-1]), 9)

  trajectories, engine, counts = run(tmp_path, program, disturb=disturb)
  assert len(trajectories) == 64
  check(trajectories, engine)
  assert counts['errors'] > 0  # a kill after the agent has written its outcome costs nothing
  assert killed
  tokenizer = Tokenizer.load(tmp_path)
  asked = {}  # group -> letter
  for t in trajectories:
    letter = tokenizer.decode(t.tokens).removeprefix('<bos>user\nWrite ')[0]
    assert asked.setdefault(t.group, letter) == letter
    assert tokenizer.decode(t.tokens).startswith(f'<bos>user\nWrite {letter}.<eos>')
    answers = tokenizer.decode(t.tokens[t.mask], skip_special=True)
    assert t.reward == pytest.approx(answers.count(letter) / max(len(answers), 1))
    assert t.metrics['letters'] == len(answers)
  epochs = [''.join(asked[group] for group in range(first, first + 8)) for first in range(0, len(asked) - 7, 8)]
  assert [sorted(epoch) for epoch in epochs] == [list('abcdefgh')] * len(epochs)
  assert epochs
