"""Held-out sets and mixtures in the setup of a run: the problems of each set, in every process, and metrics by source."""

import dataclasses
import json
import math
from contextlib import ExitStack

import numpy as np
import pytest
import small
from teams import together

from sprl.config import Evaluation, HeldOutSet, MixtureSource, ModelSettings, Rollout, Run, Sampling, SettingsError, Task
from sprl.config_checks import validate
from sprl.io.metrics_reference import documented
from sprl.io.tokenizer import Tokenizer, write_tiny
from sprl.rollout import collect
from sprl.rollout.evaluate import scores
from sprl.rollout.setup import RolloutSetup, problem_sources
from sprl.tasks.grader_pool import Grade
from sprl.tasks.rewards import Sample


def write(folder, name, split, count):
  (folder / name).mkdir(exist_ok=True)
  lines = [json.dumps({'prompt': f'{name} {split} {i}', 'answer': f'{name}{i}'}) for i in range(count)]
  (folder / name / f'{split}.jsonl').write_text('\n'.join(lines))
  return str(folder / name)


def mixed_run(folder):
  """Return a run that trains on two sources and evaluates on two more sets."""
  write_tiny(folder)
  paths = {name: write(folder, name, 'train', 40) for name in ('one', 'two')}
  for name, count in (('one', 5), ('two', 2), ('dev', 9)):
    write(folder, name, 'test', count)
  sources = {name: MixtureSource(path=path, weight={'0': 1.0, '2': float(i)}) for i, (name, path) in enumerate(paths.items())}
  sets = {
    'dev': HeldOutSet(path=str(folder / 'dev'), problems=3, samples=2, grader='exact'),
    'tail': HeldOutSet(path=str(folder / 'dev'), split='test[-2:]', suffix='!'),
  }
  return Run(
    steps=4,
    model=ModelSettings(str(folder)),
    task=Task(kind='mixture', mixture=sources, suffix='?'),
    sampling=Sampling(max_prompt=64),
    rollout=Rollout(prompts=4),
    eval=Evaluation(problems=4, temperature=1.0, sets=sets),
  )


def test_every_process_knows_the_problems_of_all_sets_and_of_the_mixture(tmp_path):
  run = mixed_run(tmp_path)
  tokenizer = Tokenizer.load(tmp_path)

  def program(team):
    setup = RolloutSetup.open(run, tokenizer, team)
    held_out = {name: [some.problem(i) for i in range(len(some.order))] for name, some in setup.held_out.items()}
    return {name: [(p.prompt, p.answer) for p in some] for name, some in held_out.items()}, [
      setup.stream.at(i) for i in range(16)
    ]

  (alone,) = together(program)
  sets, asked = alone
  assert sets == {
    '': [('one test 0?', 'one0'), ('two test 0?', 'two0'), ('one test 1?', 'one1'), ('two test 1?', 'two1')],
    'dev': [(f'dev test {i}?', f'dev{i}') for i in range(3)],
    'tail': [('dev test 7!', 'dev7'), ('dev test 8!', 'dev8')],
  }
  sources = [problem.answer[:3] for problem in asked]
  assert sorted(sources[:8]) == ['one'] * 4 + ['two'] * 4
  assert sources[8:] == ['two'] * 8  # from the third step on
  for processes in (2, 3):
    assert together(*[program] * processes) == [alone] * processes


def test_each_set_asks_for_its_own_grader(tmp_path):
  run = mixed_run(tmp_path)
  graders = {name: task.grader for name, task in problem_sources(run).items()}
  assert graders == {'one': 'auto', 'two': 'auto', 'eval/dev': 'exact', 'eval/tail': 'auto'}
  setup = RolloutSetup.open(run, Tokenizer.load(tmp_path))
  assert setup.held_out['dev'].problem(0).extra['grader'] == 'eval/dev'
  assert setup.held_out['dev'].problem(0).id == 'eval/dev/dev/test/0'


def test_evaluation_alone_reads_no_training_problems(tmp_path):
  run = mixed_run(tmp_path)
  (tmp_path / 'one/train.jsonl').unlink()
  setup = RolloutSetup.open(run, Tokenizer.load(tmp_path), train=False)
  assert (setup.stream, list(setup.held_out)) == (None, ['', 'dev', 'tail'])
  with pytest.raises(
    SettingsError, match=r"config\.task\.mixture\.one\.splits has 'train': expected a split of .*, which has test"
  ):
    RolloutSetup.open(run, Tokenizer.load(tmp_path))


def test_an_environment_run_may_have_sets_of_problems(tmp_path):
  """Limits of an environment do not limit the graders of the sets."""
  run = mixed_run(tmp_path)
  task = Task(kind='environment', name='frozen_lake', executor='threads', time_limit=77.0, suffix='?')
  run = dataclasses.replace(
    run, task=task, sampling=Sampling(max_prompt=512), eval=dataclasses.replace(run.eval, sets={'dev': run.eval.sets['dev']})
  )
  validate(run)
  assert {name: (task.kind, task.executor) for name, task in problem_sources(run).items()} == {'eval/dev': ('dataset', None)}
  with ExitStack() as stack:
    _, _, held_out = RolloutSetup.open(run, Tokenizer.load(tmp_path)).begin(stack.enter_context)
    dev = held_out.more['dev']
    ticket = dev.workers.submit(Sample('', 'dev0', 'dev0', extra={'grader': 'eval/dev'}))
    while not (found := dev.workers.poll([ticket])):
      dev.workers.wait(1.0)
  assert (held_out.count, dev.count, dev.samples) == (4, 3, 2)
  assert dev.different == 3  # a problem that is lost is not replaced by one behind the last
  assert found == {ticket: Grade(1.0, 'ok')}


def test_a_wrong_set_is_named_in_every_process(tmp_path):
  run = mixed_run(tmp_path)
  wrong = {'dev': dataclasses.replace(run.eval.sets['dev'], columns={'prompt': 'question'})}
  run = dataclasses.replace(run, eval=dataclasses.replace(run.eval, sets=wrong))
  tokenizer = Tokenizer.load(tmp_path)
  for error in together(*[lambda team: RolloutSetup.open(run, tokenizer, team)] * 2):
    assert "config.eval.sets.dev.columns: prompt reads the column 'question'" in str(error)


def test_metrics_by_source_are_shares_and_mean_rewards():
  trajectories = small.rollouts([(3, 2), (1, 1), (2, 2)], (4, 4, 4))
  rewards = [0.0, 1.0, 0.5, 0.25, 1.0, 1.0]
  trajectories = [dataclasses.replace(t, reward=r) for t, r in zip(trajectories, rewards)]
  found = collect.by_source(trajectories, ['x', 'y', 'z'], {0: 'x', 1: 'y', 2: 'x'}.__getitem__)
  assert found == {
    'data/x/share': pytest.approx(4 / 6), 'data/x/reward': pytest.approx(3 / 4),
    'data/y/share': pytest.approx(2 / 6), 'data/y/reward': pytest.approx(0.375), 'data/z/share': 0.0,
  }  # fmt: skip
  assert all(documented(name) for name in [*found, 'eval/dev/avg@k', 'eval/dev/pass@4'])
  assert collect.by_source(trajectories, [], lambda group: None) == {}


def test_an_infinite_interval_is_in_no_log():
  trajectories = [dataclasses.replace(t, reward=8.0) for t in small.rollouts([(2,), (2,)], (4, 4))]
  metrics = scores(trajectories, 2, 1)['metrics']
  assert metrics['eval/avg@k'] == 8.0
  assert not metrics.keys() & {'eval/low', 'eval/high'}
  assert all(math.isfinite(value) for value in metrics.values())


def test_scores_average_the_samples_of_a_problem_first():
  trajectories = small.rollouts([(2, 2, 2), (2, 2, 2)], (4, 4))
  rewards = np.array([[1, 0, 0], [1, 1, 0.5]])
  trajectories = [dataclasses.replace(t, reward=float(r)) for t, r in zip(trajectories, rewards.reshape(-1))]
  metrics = scores(trajectories, 2, 3)['metrics']
  assert metrics['eval/avg@k'] == pytest.approx(rewards.mean())
  assert (metrics['eval/pass@1'], metrics['eval/pass@3']) == (pytest.approx((1 / 3 + 2 / 3) / 2), 1.0)
  assert (metrics['eval/problems'], metrics['eval/samples'], metrics['eval/truncated']) == (2, 3, 1)


def test_the_length_of_an_episode_counts_the_answers_on_its_branches():
  (t,) = small.rollouts([(3,)], (4,))
  (branch,) = small.rollouts([(6,)], (4,))
  found = scores([dataclasses.replace(t, branches=(branch,))], 1, 1)['metrics']
  assert found['eval/length_mean'] == 9
