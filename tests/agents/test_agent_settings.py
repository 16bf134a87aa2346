"""Settings of agents: what is refused before any process is started, and what the program of a task is."""

from contextlib import ExitStack
from pathlib import Path

import hermes
import pytest

from sprl.agents import from_verifiers
from sprl.config import Evaluation, Run, SettingsError, Task, to_dict
from sprl.config_reader import resolve
from sprl.io.tokenizer import Tokenizer
from sprl.rollout.agent_setup import agent_data, agent_program, check_agents
from sprl.rollout.prompts import seeds
from sprl.rollout.setup import RolloutSetup


def settings(**task):
  given = to_dict(Run())
  given['model']['path'] = 'model'
  given['task'] |= {'kind': 'agent', 'name': 'mine.py:agent', **task}
  return given


@pytest.mark.parametrize(
  ('task', 'said'),
  [
    ({'name': None}, r"config\.task\.name = None: expected 'verifiers', or `file\.py:function`"),
    ({'name': 'frozen_lake'}, r"config\.task\.name = 'frozen_lake'"),
    ({'chat': False}, r'config\.task\.chat = False'),
    ({'system': 'Be brief.'}, r'config\.task\.system'),
    ({'executor': 'ray'}, r'config\.task\.executor'),
    ({'branches': 0}, r'config\.task\.branches = 0'),
  ],
)
def test_settings_that_contradict_agents_are_refused(task, said):
  with pytest.raises(SettingsError, match=said):
    resolve(settings(**task))


def test_agents_do_not_share_prompts_in_rows():
  assert resolve(settings()).packing.share_prefix is False
  assert resolve(settings(kind='environment', name='frozen_lake')).packing.share_prefix is True
  assert (resolve(settings()).branches, resolve(settings(kind='environment', name='frozen_lake')).branches) == (4, 1)


def test_the_program_of_a_task(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  program, options = agent_program(Task(kind='agent', name='mine.py:agent', args={'word': 'x', 'python': '/p', 'port': 7}))
  assert (program.agent, program.args, program.python) == (f'{tmp_path}/mine.py:agent', {'word': 'x'}, '/p')
  assert options == {'python': '/p', 'port': 7}
  shipped, _ = agent_program(Task(kind='agent', name='verifiers', args={'taskset': 'letters'}))
  assert shipped.agent.endswith('sprl/agents/from_verifiers.py:agent')


@pytest.mark.parametrize(
  ('task', 'said'),
  [
    ({'name': 'absent.py:agent'}, r'absent\.py: no such file'),
    ({'args': {'python': '/no/such/python'}}, r"config\.task\.args\['python'\] = '/no/such/python'"),
    ({'args': {'python': 3}}, r"config\.task\.args\['python'\] = 3: expected an interpreter"),
    ({'args': {'port': '80'}}, r"config\.task\.args\['port'\] = '80': expected a number from 0 to 65535"),
    ({'args': {'port': 65536}}, r"config\.task\.args\['port'\] = 65536: expected a number from 0 to 65535"),
    ({'path': 'nowhere'}, r"config\.task\.path = 'nowhere'.*train\.jsonl: no such file"),
  ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, monkeypatch, task, said):
  monkeypatch.chdir(tmp_path)
  hermes.write_tokenizer(tmp_path)
  (tmp_path / 'mine.py').write_text('def agent(base_url, row): return 0.0\n')
  tokenizer = Tokenizer.load(tmp_path)
  check_agents(Task(kind='agent', name='mine.py:agent'), tokenizer)
  with pytest.raises(SettingsError, match=said):
    check_agents(Task(kind='agent', **{'name': 'mine.py:agent', **task}), tokenizer)


def test_rows_may_not_have_the_columns_that_every_row_gets(tmp_path):
  for split, row in (('train', '{"prompt": "1?"}'), ('test', '{"seed": 7, "split": "easy"}')):
    (tmp_path / f'{split}.jsonl').write_text(f'{{"prompt": "0?"}}\n{row}\n')
  task = Task(kind='agent', name='mine.py:agent', path=str(tmp_path))
  assert len(agent_data(task, 'train')) == 2
  with pytest.raises(SettingsError, match=r'test\.jsonl:2: columns seed, split: expected other names'):
    agent_data(task, 'test')


@pytest.mark.parametrize(('problems', 'count'), [(128, 3), (2, 2)])
def test_an_evaluation_asks_no_row_twice(tmp_path, problems, count):
  hermes.write_tokenizer(tmp_path)
  for split in ('train', 'test'):
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(f'{{"prompt": "{i}?"}}' for i in range(3)))
  task = Task(kind='agent', name=f'{Path(__file__).parent / "agent_programs.py"}:talk', path=str(tmp_path))
  run = Run(steps=1, task=task, eval=Evaluation(problems=problems))
  with ExitStack() as stack:
    assert RolloutSetup.open(run, Tokenizer.load(tmp_path)).begin_evaluation(stack.enter_context).count == count


@pytest.mark.parametrize(('held_out', 'count', 'shared'), [(3, 8, False), (3, None, False), (7, 8, False), (0, 8, True)])
def test_tasks_of_verifiers_that_are_held_out_are_not_trained_on(held_out, count, shared):
  def asked(split, order=0, groups=20):
    rows = [{'seed': seeds(i, split == 'test', False), 'split': split} for i in range(groups)]
    return [from_verifiers.place(row, held_out, count, order) for row in rows]

  places = {split: asked(split) for split in ('train', 'test')}
  assert len(set(places['train'])) == (20 if count is None else count - held_out)
  assert len(set(places['test'])) == (held_out or count)
  assert bool(set(places['train']) & set(places['test'])) == shared
  assert asked('test', order=1) == places['test']
  if count is not None:
    left = count - held_out
    epochs = {order: [asked('train', order, 10 * left)[i * left : (i + 1) * left] for i in range(10)] for order in (0, 1)}
    assert all(sorted(epoch) == list(range(held_out, count)) for epoch in epochs[0])
    assert left == 1 or (epochs[0] != epochs[1] and len(set(map(tuple, epochs[0]))) > 1)


@pytest.mark.parametrize('held_out', [-1, 8, 9, True])
def test_verifiers_must_have_tasks_left_for_training(held_out):
  taskset = Tasks(8)
  assert from_verifiers.tasks_of(taskset, 7) == list(range(8))
  with pytest.raises(ValueError, match=r"config\.task\.args\['held_out'\] = .*: expected a whole number from 0 to 7: .* 8 tasks"):
    from_verifiers.tasks_of(taskset, held_out)


class Tasks(list):
  bounded = True

  def __init__(self, count):
    super().__init__(range(count))
