"""A run with several rewards, one of them groupwise: metrics, evaluation, samples and resumption."""

import json
from pathlib import Path

import pytest
import tiny
from test_async import dense_run

from sprl.io.metrics import read_metrics
from sprl.train import train

REWARDS = """
import asyncio


def vowels(completion, prompt, parity):
  assert parity == int(prompt.split()[1]) % 2, 'the column belongs to the prompt'
  return sum(completion.count(v) for v in 'aeiou') / 4


async def tokens(tokens, finish):
  await asyncio.sleep(0.001)
  return len(tokens) + (finish == 'length')


def rank(prompts, completions, **kwargs):
  assert len(set(prompts)) == 1
  return [sum(len(other) < len(own) for other in completions) / len(completions) for own in completions]
"""


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder)
  for name, count in (('train', 10), ('test', 5)):
    lines = [json.dumps({'prompt': f'{name} {i} + {i} = ', 'answer': str(2 * i), 'parity': i % 2}) for i in range(count)]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines))
  (folder / 'rewards.py').write_text(REWARDS)
  return folder


def rewarded(inputs, steps, **changes):
  """Return the settings of a dense tiny run with three rewards."""
  given = tuple(f'{inputs}/rewards.py:{each}' for each in ('vowels', 'tokens=-0.125', 'rank=2'))
  common = {'task.grader': 'auto', 'task.rewards': given, 'checkpoint.every': 1, 'eval.every': 2, 'log.samples_every': 1}
  return dense_run(inputs, steps, **common, **changes)


def metrics_of(workdir, kind):
  return [{k: v for k, v in line.items() if k != 'time'} for line in read_metrics(workdir) if line['kind'] == kind]


@pytest.mark.slow
def test_a_run_logs_each_reward_and_a_resumed_run_goes_on_as_if_it_had_not_stopped(inputs, tmp_path):
  train(rewarded(inputs, 4), tmp_path / 'whole')
  train(rewarded(inputs, 2), tmp_path / 'halves')
  train(rewarded(inputs, 4), tmp_path / 'halves')
  steps = metrics_of(tmp_path / 'whole', 'train')
  assert len(steps) == 4
  assert metrics_of(tmp_path / 'halves', 'train') == steps
  for line in steps:
    parts = line['reward/vowels'] - 0.125 * line['reward/tokens'] + 2 * line['reward/rank']
    assert line['reward/mean'] == pytest.approx(parts, abs=1e-5)
    assert line['grading/ok'] == 16
    assert all(line[f'grading/failed/{name}'] == 0 for name in ('vowels', 'tokens', 'rank'))
    assert line['reward/tokens'] == pytest.approx(line['completion/length_mean'] + line['completion/truncated'], abs=1e-5)
  for line in metrics_of(tmp_path / 'whole', 'eval'):
    assert line['eval/avg@k'] == pytest.approx(line['eval/reward/vowels'], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes', [{'rollout.async_ratio': 1.0, 'correction.level': 'token'}, {'rollout.extra_members': 2, 'rollout.members': 'all'}]
)
def test_rewards_of_runs_that_run_ahead_and_of_redundant_members(inputs, tmp_path, changes):
  train(rewarded(inputs, 2, **changes), tmp_path)
  for line in metrics_of(tmp_path, 'train'):
    parts = line['reward/vowels'] - 0.125 * line['reward/tokens'] + 2 * line['reward/rank']
    assert line['reward/mean'] == pytest.approx(parts, abs=1e-5)
    assert line['grading/ok'] == (24 if 'rollout.extra_members' in changes else 16)
