"""`import sprl`: a front of the loop and the engine that the command uses, with the same numbers."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import jax
import jaxtyping
import numpy as np
import pytest
import tiny

import sprl
from sprl.api import loaded as loaded_model
from sprl.api.inputs import inputs_of
from sprl.api.rollouts import SideBySide
from sprl.api.settings import merged
from sprl.api.training import _call
from sprl.config import Cache, Quant, SettingsError, to_dict
from sprl.config_reader import resolve
from sprl.io.checkpoint import CheckpointError
from sprl.io.config_file import config_differences
from sprl.io.metrics import RunLog, read_metrics
from sprl.learner import learner
from sprl.learner.restore import restore
from sprl.model import Model
from sprl.planning import room
from sprl.rollout.scheduler import Scheduler
from sprl.sampler.engine import generate
from sprl.session import StepReport
from sprl.train import train
from sprl.types import Request

SETTINGS = {
  'seed': 3,
  'steps': 2,
  'model.dtype': 'float32',
  'task': {'chat': False, 'workers': 1},
  'rollout': {'prompts': 2, 'group': 4, 'stop_when_capped': False},
  'sampling': {'max_prompt': 16, 'max_tokens': 12, 'chunk': 4, 'prompt_buckets': (16,)},
  'packing': {'row_tokens': 64, 'rows': 1, 'score_chunk': 16},
  'arm': 'sparse_rl',
  'cache': {'budget': 12, 'interval': 3, 'window': 2},
  'quant.sampler': 'w8a8',
  'optimizer.learning_rate': 1e-4,
  'eval': {'every': None, 'problems': 2, 'max_tokens': 4},
  'checkpoint.every': 1,
  'log': {'samples_every': 2, 'trackers': ()},
}


def reward(prompt, completion, answer):
  return (len(completion.encode()) * 7 + sum(completion.encode())) % 5 / 4


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Model, problems and grader of the tiny run."""
  folder = tmp_path_factory.mktemp('front')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


@pytest.fixture(scope='module')
def by_files(folder):
  """A run as the command trains it: problems and grader in files."""
  task = {'kind': 'jsonl', 'path': str(folder), 'grader': f'{folder}/grader.py:grade'}
  run = resolve(merged(SETTINGS, {'model.path': f'{folder}/model', 'task': task}))
  workdir = folder / 'by-files'
  return run, workdir, train(run, workdir)


def rows(folder, split):
  return [json.loads(line) for line in (folder / f'{split}.jsonl').read_text().splitlines()]


def fit(folder, **changes):
  given = {'test': rows(folder, 'test'), **SETTINGS, **changes}
  return sprl.fit(folder / 'model', rows(folder, 'train'), reward, **given)


def assert_same_metrics(workdir, expected):
  """Assert that the lines of metrics.jsonl are equal, apart from `time`."""
  lines, others = ([{k: v for k, v in r.items() if k != 'time'} for r in read_metrics(f)] for f in (workdir, expected))
  assert lines == others
  assert len(lines) > 2


def assert_same_arrays(tree, expected):
  leaves, others = (jax.tree.leaves_with_path(jax.device_get(t)) for t in (tree, expected))
  assert [(path, leaf.tobytes()) for path, leaf in leaves] == [(path, leaf.tobytes()) for path, leaf in others]
  assert len(leaves) > 5


def test_the_kind_of_files_is_that_of_the_caller_or_of_the_folder(folder):
  for kind, expected in ((None, 'jsonl'), ('dataset', 'dataset')):
    assert inputs_of(folder, kind=kind)[0]['task']['kind'] == expected
  with pytest.raises(SettingsError, match=r'config\.task\.columns: prompt reads the column'):  # of the kind `dataset`
    sprl.fit(folder / 'model', folder, task={'kind': 'dataset', 'columns': {'prompt': 'no such column'}}, steps=1)


def test_rows_and_functions_in_memory_train_as_files_do_bit_for_bit(folder, by_files):
  _, workdir, finished = by_files
  reports = []
  run = fit(folder, workdir=folder / 'in-memory', callbacks=[reports.append])
  assert_same_metrics(run.workdir, workdir)
  assert_same_arrays(run.model.params, finished.params)
  assert (run.step, run.completed) == (2, True)
  tables = {step: workdir / f'samples/step_{step:06d}.jsonl' for step in (1, 2)}  # the first step, and every second one
  assert run.samples == {step: [json.loads(line) for line in path.read_text().splitlines()] for step, path in tables.items()}
  # A callback sees the metrics of its step, with the evaluation at the end of the run.
  assert [report.step for report in reports] == [1, 2]
  steps, means = run.series('reward/mean')
  assert (steps.tolist(), means.tolist()) == ([1, 2], [report.metrics['reward/mean'] for report in reports])
  assert 'eval/avg@k' not in reports[0].metrics
  assert reports[1].metrics['eval/avg@k'] == run.after['metrics']['eval/avg@k'] == run.evaluate()['metrics']['eval/avg@k']
  again = run.model.evaluate(rows(folder, 'test')[:2], reward, **{'task.workers': 2})
  assert again['metrics'] == run.after['metrics']
  assert len(run.plot().axes) > 3
  assert 'complete' in repr(run)


def test_a_run_of_the_command_is_opened_again_with_its_weights_and_evaluations(folder, by_files):
  run, workdir, finished = by_files
  opened = sprl.open_run(workdir)
  recorded = ["model.remat: 'none' -> 'auto'"]  # a run records what it chose
  assert config_differences(to_dict(opened.config), to_dict(run), {}) == recorded
  assert (opened.step, opened.completed) == (2, True)
  assert [opened.before, opened.after] == json.loads(json.dumps([finished.before, finished.after]))
  assert opened.metrics == read_metrics(workdir)
  assert list(opened.samples) == [1, 2]
  assert 'Training: 2 steps, complete, held-out reward' in repr(opened)
  jax.tree.map(np.testing.assert_array_equal, opened.model.params, finished.params)
  assert opened.model is opened.model
  assert opened.evaluate()['scores'] == finished.after['scores']
  rollouts = opened.model.sampler(arm='naive').generate(['1 + 1 ='], samples=2)  # another arm than that of the run
  assert (rollouts.run.arm, rollouts.run.cache.budget, rollouts.run.quant.sampler) == ('naive', 12, 'w8a8')


def test_an_earlier_step_of_a_run_in_progress_is_opened(folder, tmp_path):
  callback = lambda report: report.step == 1  # noqa: E731
  fit(folder, workdir=tmp_path, callbacks=[callback])
  opened = sprl.open_run(tmp_path)
  assert (opened.step, opened.completed, opened.after) == (1, False, {})
  assert fit(folder, workdir=tmp_path, **{'checkpoint.keep_last': 2}).step == 2
  first, second = sprl.open_run(tmp_path, step=1), sprl.open_run(tmp_path)
  assert (first.step, second.step, second.completed) == (1, 2, True)
  assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), first.model.params, second.model.params)))
  with pytest.raises(CheckpointError, match='no checkpoint of step 7'):
    sprl.open_run(tmp_path, step=7)
  (tmp_path / 'checkpoints' / 'step_000002' / 'record.json').write_text('{')
  assert sprl.open_run(tmp_path).step == 1


def test_the_weights_are_those_of_the_step_at_which_the_run_was_opened(folder, tmp_path):
  fit(folder, workdir=tmp_path, callbacks=[lambda report: report.step == 1], **{'checkpoint.keep_last': 2})
  opened = sprl.open_run(tmp_path)
  fit(folder, workdir=tmp_path, **{'checkpoint.keep_last': 2})
  assert (opened.step, opened.model.version) == (1, 1)


def test_a_run_whose_mesh_does_not_fit_is_opened_and_evaluated_on_all_devices(by_files, tmp_path, caplog):
  _, workdir, finished = by_files
  there = tmp_path / 'there'
  shutil.copytree(workdir, there)
  settings = json.loads((there / 'config.json').read_text())
  settings['mesh']['learner']['data'] = 2 * jax.device_count()
  (there / 'config.json').write_text(json.dumps(settings))
  opened = sprl.open_run(there)
  assert opened.evaluate()['scores'] == finished.after['scores']
  assert 'uses all devices of this machine' in caplog.text


def test_a_run_of_rows_in_memory_is_evaluated_with_the_same_rows(folder, tmp_path):
  trained = fit(folder, workdir=tmp_path)
  with pytest.raises(SettingsError, match='rows in memory'):
    sprl.open_run(tmp_path).evaluate()
  opened = sprl.open_run(tmp_path, rows(folder, 'train'), reward, test=rows(folder, 'test'))
  assert opened.evaluate()['scores'] == trained.after['scores']


def test_a_run_that_held_out_its_last_rows_is_opened_with_all_rows(folder, tmp_path):
  trained = fit(folder, workdir=tmp_path, test=None)
  assert sprl.open_run(tmp_path, rows(folder, 'train'), reward).evaluate()['scores'] == trained.after['scores']


def test_a_folder_without_a_run_is_not_opened(tmp_path):
  with pytest.raises(FileNotFoundError, match='expected a work directory'):
    sprl.open_run(tmp_path)
  with pytest.raises(SettingsError, match='gs://bucket/run'):
    sprl.open_run('gs://bucket/run')


def test_an_evaluation_with_the_samplers_linears_makes_no_copy_of_the_weights(folder, monkeypatch):
  copies, make = [], Model.sampler_weights
  monkeypatch.setattr(Model, 'sampler_weights', lambda *given: copies.append(given) or make(*given))
  run = fit(folder, workdir=folder / 'shared', steps=1, eval={**SETTINGS['eval'], 'memory': 'sampler'})
  assert len(copies) == 2  # before the step and after it: the evaluations at both times use these
  assert run.after['metrics'] == run.evaluate()['metrics']
  assert len(copies) == 3  # a finished run has only the learner's weights


@pytest.mark.slow
def test_one_update_of_a_loaded_model_is_a_step_of_a_run(folder, by_files, monkeypatch):
  """The prompts are those of the run's first step, in its order. The cache is FP8, with scales from the prompts."""
  run = replace(by_files[0], quant=Quant('w8a8_kv8'))
  questions = []
  batch = Scheduler.batch

  def recorded(scheduler, stopped):
    groups = batch(scheduler, stopped)
    questions.extend(scheduler.source.prompt(group.number) for group in groups if group.number < 2)
    return groups

  monkeypatch.setattr(Scheduler, 'batch', recorded)
  one_step = replace(run, steps=1, eval=replace(run.eval, problems=1))
  finished = train(one_step, folder / 'one-step')
  monkeypatch.undo()
  model = sprl.load(
    folder / 'model', seed=3, task=SETTINGS['task'], optimizer={'learning_rate': 1e-4}, model={'dtype': 'float32'}
  )
  prompts = [model.model.tokenizer.decode(ids.tolist()) for ids in questions]
  sampler = model.sampler(
    **{name: SETTINGS[name] for name in ('sampling', 'cache', 'packing', 'arm')}, quant={'sampler': 'w8a8_kv8'}
  )
  rollouts = sampler.generate(prompts, samples=4, evictions=True).grade(reward)  # recorded evictions do not change the update
  seen = rollouts[0].visible
  assert seen.shape == (len(rollouts[0].tokens), len(rollouts[0].trajectory.tokens))
  np.testing.assert_allclose(seen.sum(axis=1), rollouts[0].attended, atol=1e-6)  # the engine counts slots
  metrics = model.update(rollouts, steps=1, rollout={'stop_when_capped': False})
  (logged,) = [record for record in read_metrics(folder / 'one-step') if record['kind'] == 'train']
  assert {name: logged[name] for name in metrics} == metrics
  assert metrics['update/grad_norm'] > 0
  assert_same_arrays(model.params, finished.params)


def test_a_reward_that_fails_for_every_answer_ends_the_run_before_its_first_step(folder, tmp_path):
  def keyed(completion, row):
    return row['difficulty']

  given = {'test': rows(folder, 'test'), **SETTINGS, 'workdir': tmp_path / 'run'}
  said = r"'python:keyed': no answer of the first evaluation .* KeyError: 'difficulty' \(.*test_front\.py:\d+, in keyed\)"
  with pytest.raises(sprl.SettingsError, match=said):
    sprl.fit(folder / 'model', rows(folder, 'train'), keyed, **given)
  assert [line['kind'] for line in read_metrics(tmp_path / 'run')] == ['eval']
  run = sprl.fit(folder / 'model', rows(folder, 'train'), reward, **given | {'steps': 0})  # the corrected call begins again
  assert run.completed


def test_a_changed_reward_and_a_run_without_steps_left_are_said_at_a_resume(folder, tmp_path, caplog):
  def fit_with(reward):
    given = {'test': rows(folder, 'test'), **SETTINGS, 'steps': 0, 'workdir': tmp_path / 'run'}
    caplog.clear()
    sprl.fit(folder / 'model', rows(folder, 'train'), reward, **given)
    return [text for text in caplog.messages if 'changed' in text or 'steps are done' in text]

  def graded(value):
    if value:

      def own(completion):
        return 1.0
    else:

      def own(completion):
        return 0.5

    return own

  nothing = f'{tmp_path}/run: all 0 steps are done; a larger config.steps continues the run'
  assert fit_with(graded(True)) == []
  assert fit_with(graded(True)) == [nothing]
  changed = (
    'python:own has changed since an earlier start of this run: earlier steps used the old version, later steps use the new one'
  )
  assert fit_with(graded(False)) == [changed, nothing]


def test_generate_gives_what_the_engine_gives(folder):
  model = sprl.load(folder / 'model', seed=5, model={'dtype': 'float32'}, task={'chat': False})
  sampler = model.sampler(sampling=SETTINGS['sampling'], cache={'budget': 8, 'interval': 2, 'window': 2})
  rollouts = sampler.generate(['1 + 1 = ', 'two = '], samples=2)
  requests = rollouts.trajectories
  asked = [Request(t.uid, t.group, t.tokens[: t.prompt_length], 12) for t in requests]
  weights = rollouts.engine, sampler.model.sampler_weights(model.params, sampler.run.quant)
  expected = generate(*weights, asked)
  assert [t.uid for t in requests] == [0, 1, 2, 3]
  assert [t.group for t in requests] == [0, 0, 1, 1]
  for sample, t in zip(rollouts, expected):
    assert sample.tokens.tolist() == t.completion.tolist()
    assert sample.logp.tobytes() == t.sampler_logp[t.prompt_length :].tobytes()
    assert sample.text == model.model.tokenizer.decode(t.completion.tolist(), skip_special=True)
    assert sample.attended.max() <= 8 + 2
  again = sampler.generate(['1 + 1 = ', 'two = '], samples=2)
  assert again.texts == rollouts.texts
  other = model.sampler(seed=6, sampling=SETTINGS['sampling']).generate(['1 + 1 = ', 'two = '], samples=2)
  assert other.texts != rollouts.texts


def test_an_update_with_some_prompts_is_that_of_rollouts_of_these_prompts_alone(folder):
  prompts, settings = ['1 + 1 =', '2 + 2 =', '3 + 3 ='], {'sampling': SETTINGS['sampling'], 'packing': SETTINGS['packing']}
  made = [sprl.load(folder / 'model', task=SETTINGS['task'], model={'dtype': 'float32'}) for _ in range(2)]
  every, some = (
    model.sampler(**settings).generate(asked, samples=4).grade(reward) for model, asked in zip(made, (prompts, prompts[:2]))
  )
  kept = every.keep([True, True, False])
  assert kept.texts == every.texts[:8] == some.texts
  np.testing.assert_array_equal(kept.rewards, every.rewards[:2])
  assert every.keep([1, 0]).texts == every.texts[4:8] + every.texts[:4]
  assert every.keep(np.array([2])).rewards.shape == (1, 4)
  assert made[0].update(kept) == made[1].update(some)
  assert_same_arrays(made[0].params, made[1].params)
  for wrong in ([], [True], [False] * 3, [0, 0], np.array([[0]])):
    with pytest.raises(ValueError, match='expected'):
      every.keep(wrong)
  with pytest.raises(IndexError):
    every.keep([3])


@pytest.mark.slow
def test_updates_with_other_group_sizes_share_the_reference_of_the_kl_term(folder, monkeypatch):
  model = sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})
  sampler = model.sampler(sampling=SETTINGS['sampling'], packing=SETTINGS['packing'])
  loads, load = [], Model.load
  monkeypatch.setattr(Model, 'load', lambda self, *args: loads.append(args) or load(self, *args))
  for samples in (2, 4, 2):
    metrics = model.update(sampler.generate(['a = ', 'b = '], samples=samples).grade(reward), loss={'kl_coef': 0.1})
    assert 'policy/kl_ref' in metrics
  assert len(loads) == 1


@pytest.mark.slow
def test_moments_go_on_where_the_learning_rate_changes_and_programs_are_kept(folder, monkeypatch, caplog):
  model = sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})
  sampler = model.sampler(sampling=SETTINGS['sampling'], packing=SETTINGS['packing'])
  made, make = [], loaded_model.make_update
  monkeypatch.setattr(loaded_model, 'make_update', lambda *args: made.append(args) or make(*args))
  for count, rate in enumerate((1e-3, 1e-4, 1e-3), 1):
    rollouts = sampler.generate(['a = ', 'b = '], samples=2).grade(reward)
    metrics = model.update(rollouts, optimizer={'learning_rate': rate})
    assert metrics['optimizer/learning_rate'] == pytest.approx(rate)
    [adam] = [s for s in jax.tree.leaves(model._learner.state.opt_state, is_leaf=is_adam) if is_adam(s)]
    assert int(adam.count) == count
  assert len(made) == 2
  assert 'another config.optimizer' not in caplog.text
  rollouts = sampler.generate(['a = ', 'b = '], samples=2).grade(reward)
  model.update(rollouts, optimizer={'name': 'sgd'})
  assert 'another config.optimizer' in caplog.text
  row = rollouts.rows()[1]
  assert (row['prompt'], row['completion'], row['reward']) == ('a = ', rollouts[1].text, rollouts[1].reward)


def is_adam(state):
  return hasattr(state, 'mu') and hasattr(state, 'nu')


@pytest.mark.slow
def test_an_interrupted_update_leaves_a_model_that_can_be_used(folder, monkeypatch):
  """Its weights are in the arrays of the update: the ones before are overwritten."""
  model = sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})
  sampler = model.sampler(sampling=SETTINGS['sampling'], packing=SETTINGS['packing'])
  rollouts = sampler.generate(['a = ', 'b = '], samples=2).grade(reward)
  before = jax.device_get(model.params)

  def interrupted(found):
    jax.block_until_ready(found)
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(learner, 'fetch', interrupted)
    with pytest.raises(KeyboardInterrupt):
      model.update(rollouts, optimizer={'learning_rate': 0.1}, correction={'level': None})
  assert model.version == 1
  assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(jax.device_get(model.params))[0])
  model.update(sampler.generate(['a = ', 'b = '], samples=2).grade(reward))
  assert model.version == 2


def test_samples_of_another_version_of_the_weights_have_other_random_numbers(folder):
  model = sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})
  sampler = model.sampler(sampling=SETTINGS['sampling'])

  def texts(version):
    model.version = version  # the weights stay the same
    return [sample.text for sample in sampler.generate(['a = ', 'b = '], samples=4)]

  first, other, again = texts(0), texts(1), texts(0)
  assert first == again != other


def test_samplers_of_a_runs_model_read_the_time_of_the_run(folder):
  model = sprl.load(folder / 'model', task={'chat': False})
  assert model.sampler().model.tokenizer.time is None
  model.model = model.model.at('2020-01-02T03:04:05')
  assert model.sampler().model.tokenizer.time == '2020-01-02T03:04:05'


def test_caches_that_do_not_fit_are_refused_before_anything_is_sampled(folder, monkeypatch):
  sampler = sprl.load(folder / 'model', task={'chat': False}).sampler()
  monkeypatch.setattr(room, 'memory_of', lambda devices: 2**20)
  with pytest.raises(
    sprl.SettingsError, match=r'config\.sampling\.rows = None .*600 sequences side by side: expected a KV cache'
  ):
    sampler.generate(['a = '] * 200, samples=3)


@pytest.mark.slow
def test_a_sampler_takes_the_newest_weights_and_refuses_older_rollouts(folder):
  model = sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})
  sampler = model.sampler(sampling=SETTINGS['sampling'], packing=SETTINGS['packing'])
  old = sampler.generate(['a = ', 'b = '], samples=2).grade(reward)
  ledger = model.ledger(old)
  assert ledger.causes['gap'] < 1e-4  # dense, float32: rounding only
  np.testing.assert_allclose(sum(ledger.entries[name] for name in sprl.api.ledger.PARTS), ledger.entries['gap'], atol=1e-5)
  assert len(ledger.plot().axes) == 2
  model.update(old, optimizer={'learning_rate': 0.1})
  new = sampler.generate(['a = ', 'b = '], samples=2).grade(reward)
  assert (old.version, new.version) == (0, 1)
  assert not np.array_equal(old[0].logp[:1], new[0].logp[:1])
  for call in (model.update, model.ledger):
    with pytest.raises(ValueError, match='after 0 updates'):
      call(old)
  greedy = sampler.generate(['a = ', 'b = '], greedy=True)
  with pytest.raises(ValueError, match='greedy'):
    model.ledger(greedy)
  with pytest.raises(ValueError, match='grade'):
    model.update(sampler.generate(['a = '], samples=2))
  with pytest.raises(sprl.SettingsError, match=r'config.mesh = .*sprl.load'):
    model.sampler(mesh={'learner': {'fsdp': 1}})
  # A saved model is the same model.
  folder_out = model.save(folder / 'saved', dtype='float32')
  assert_same_arrays(sprl.load(folder_out, task={'chat': False}).params, model.params)


def test_ctrl_c_and_callbacks_end_a_run_that_the_same_call_resumes(folder, by_files):
  _, workdir, finished = by_files
  ours = folder / 'interrupted'
  run = fit(folder, workdir=ours, callbacks=[lambda report: os.kill(os.getpid(), signal.SIGINT)])
  assert (run.step, run.completed, run.after) == (1, False, {})
  assert 'of 2 steps' in repr(run)
  restored = restore(Model.open(run.config), run.config, ours)[0]
  assert_same_arrays(run.model.params, restored)
  run = fit(folder, workdir=ours, callbacks=[lambda report: True])  # the last step: nothing is left to end
  assert (run.step, run.completed) == (2, True)
  assert_same_metrics(ours, workdir)
  assert_same_arrays(run.model.params, finished.params)
  with pytest.raises(sprl.SettingsError, match='the rows differ'):
    sprl.fit(folder / 'model', rows(folder, 'train')[::-1], reward, test=rows(folder, 'test'), workdir=ours, **SETTINGS)


@pytest.mark.slow
def test_a_callback_that_returns_true_ends_the_run_after_its_step(folder):
  run = fit(folder, workdir=folder / 'stopped', steps=5, callbacks=[lambda report: report.step == 1])
  assert (run.step, run.completed) == (1, False)


def test_a_reward_reads_the_row_and_one_that_hangs_or_raises_is_not_known(folder):
  given = [{'prompt': f'{i} = ', 'target': i} for i in range(3)]
  seen = []

  def graded(row, completion):
    seen.append(row)
    if row['target'] == 1:
      time.sleep(30)
    if row['target'] == 2:
      raise RuntimeError('no reward')
    return 0.5

  model = sprl.load(folder / 'model', task={'chat': False, 'time_limit': 0.5})
  rollouts = model.sampler(sampling=SETTINGS['sampling']).generate(given).grade(graded)
  assert [s.trajectory.status for s in rollouts] == ['ok', 'timeout', 'error']
  np.testing.assert_array_equal(rollouts.rewards, [[0.5], [np.nan], [np.nan]])
  assert 'mean reward 0.500' in repr(rollouts)
  assert sorted(row['target'] for row in seen) == [0, 1, 2]
  with pytest.raises(sprl.SettingsError, match="wants 'one'"):
    rollouts.grade(lambda one: 1.0)


@pytest.fixture
def untyped():
  """Turn off the checks of signatures, which users do not have."""
  before = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update('jaxtyping_disable', True)
  yield
  jaxtyping.config.update('jaxtyping_disable', before)


@pytest.fixture(scope='module')
def loaded(folder):
  return sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})


@pytest.mark.usefixtures('untyped')
def test_pictures_of_samples_are_as_wide_as_the_longest():
  def sample(length):
    share = np.ones((length - 2, length), np.float32)
    return SimpleNamespace(visible=share, pieces=('x',) * length, trajectory=SimpleNamespace(prompt_length=2))

  panels = sprl.visibility_figure({'long': sample(60), 'short': sample(30)}).axes
  assert [panel.get_xlim() for panel in panels[:2]] == [(-0.5, 59.5)] * 2


TWO = [{'prompt': 'a'}, {'prompt': 'b'}]


@pytest.mark.usefixtures('untyped')
@pytest.mark.parametrize(
  ('given', 'said'),
  [
    ({'data': {'prompt': ['a', 'b']}}, r"data = \{'prompt': .*: expected a list of rows, each a dictionary"),
    ({'data': 3}, 'data = 3: expected a list of rows'),
    (
      {'data': [{'prompt': 'a'}] * 10 + [{'question': 'b'}]},
      r'rows\[10\]: expected either `prompt` or `messages`, got the keys question',
    ),
    ({'test': 'test.jsonl'}, r"test = 'test\.jsonl': expected a list of rows"),
    ({'callbacks': 3}, 'callbacks = 3: expected a list of functions'),
    ({'workdir': ''}, "workdir='': expected a folder"),
    ({'workdir': 3}, 'workdir=3: expected a folder'),
    ({'learning_rate': 1e-5}, r'config\.learning_rate: no such setting; .*; there is config\.optimizer\.learning_rate'),
    ({'trackers': 'wandb'}, r"trackers = 'wandb': expected a list of objects; names are a setting, log=\{'trackers'"),
    ({'trackers': ['wandb']}, r"trackers = \['wandb'\]: expected a list of objects"),
    ({'trackers': [RunLog]}, r'trackers = .*: expected a list of objects'),
    ({'trackers': 3}, 'trackers = 3: expected a list of objects'),
    ({'eval': 5}, r'config\.eval = 5: expected a mapping of settings'),
    ({'eval': None}, r'config\.eval = None: expected a mapping of settings'),
    ({'eval': {'problems': '4'}}, r"config\.eval\.problems = '4': expected int"),
    ({'eval': {'problems': -3}}, r'config\.eval\.problems = -3'),
    ({'model': 'bfloat16'}, r"config\.model = 'bfloat16': expected a mapping of settings"),
    ({'task': 'math'}, r"config\.task = 'math': expected a mapping of settings"),
    (
      {'reward': {'right': len}},
      r"reward = \{'right': <built-in function len>\}: expected \{function: weight\}, each weight a number",
    ),
    ({'reward': {len: '0.5'}}, r'reward = .*: expected \{function: weight\}'),
    ({'reward': {3: 1.0}}, r'reward = .*: expected \{function: weight\}'),
    ({'reward': []}, r'reward = \[\]: expected a function, the name of a grader, or at least one of these'),
    ({'reward': {}}, r'reward = \{\}: expected a function'),
    ({'reward': ''}, r"reward = '': expected a function"),
    ({'data': None, 'reward': None, 'environment': int}, r'environment = .*int.*: expected a class with reset and step'),
    (
      {'data': None, 'reward': None, 'environment': lambda: object(), 'task': {'chat': False}},
      'environment object: no method reset; expected reset, step',
    ),
    ({'reward': str}, r"reward = <class 'str'>: expected a function of Python, whose arguments have names"),
    ({'export': True}, r'config\.export = True: expected False; save the trained model with run\.save\(folder\)'),
    ({'reward': 'math', 'task': {'chat': False}}, r'the rows have no `answer` to compare with; they have prompt'),
  ],
)
def test_wrong_arguments_of_fit_are_named(folder, given, said):
  with pytest.raises(sprl.SettingsError, match=said):
    sprl.fit(folder / 'model', **{'data': TWO, 'reward': len, **given})


def test_a_metric_that_no_step_has_is_an_error_with_near_names(by_files):
  run = sprl.open_run(by_files[1])
  assert len(run.series('reward/mean')[0]) == 2
  with pytest.raises(KeyError, match=r'reward/meen.*expected reward/mean'):
    run.series('reward/meen')


def test_rollouts_without_a_known_reward_are_no_update(folder, caplog):
  model = sprl.load(folder / 'model', task={'chat': False}, model={'dtype': 'float32'})
  rollouts = model.sampler(sampling=SETTINGS['sampling']).generate(['a = ', 'b = '], samples=4)
  failed = rollouts.grade(lambda completion: None)
  assert 'no reward known' in repr(failed)
  metrics = model.update(failed)
  assert 'reward/mean' not in metrics
  assert 'no update' in caplog.text
  assert model.version == 0
  assert 'update/grad_norm' in model.update(rollouts.grade(lambda completion: len(completion) % 3))  # of the same weights


@pytest.mark.usefixtures('untyped')
@pytest.mark.parametrize(
  ('call', 'said'),
  [
    (lambda model: model.sampler(cache={1: 2}), r'config\.cache: found the key 1; expected names of settings'),
    (lambda model: model.sampler(cache=8), r'config\.cache = 8: expected a mapping of settings'),
    (lambda model: model.sampler().generate('a = '), r"prompts = 'a = ': expected a list of prompts"),
    (lambda model: model.sampler().generate(None), 'prompts = None: expected a list of prompts'),
    *[
      (lambda model, n=n: model.sampler().generate(['a = '], samples=n), f'samples = .*{n}.*: expected a whole number above 0')
      for n in (0, -1, 1.5, True, np.True_, '2')
    ],
    (lambda model: model.evaluate([], len), r'rows = \[\]: expected at least one row'),
    (lambda model: model.evaluate('gsm8k', len), r"rows = 'gsm8k': expected a list of rows"),
    (lambda model: model.evaluate(None, len), 'rows = None: expected a list of rows'),
    (lambda model: model.save('unused', dtype='float16x'), "dtype = 'float16x': expected one of bfloat16, float16, float32"),
  ],
)
def test_wrong_arguments_of_a_loaded_model_are_named(loaded, call, said):
  with pytest.raises(sprl.SettingsError, match=f'^{said}'):
    call(loaded)


def test_a_sampler_whose_budget_never_evicts_warns(loaded, caplog):
  for budget, said in ((500, ['config.cache.budget = 500 never evicts: the cache never holds more than 27 tokens']), (12, [])):
    caplog.clear()
    loaded.sampler(sampling=SETTINGS['sampling'], cache={'budget': budget, 'interval': 3, 'window': 2})
    assert [record.getMessage() for record in caplog.records if 'never evicts' in record.getMessage()] == said


def test_the_last_rows_are_held_out_but_no_more_than_eval_problems(folder, monkeypatch):
  class Begun(Exception):
    pass

  def train(run, workdir, inputs, **_):
    raise Begun(inputs.train, inputs.test)

  monkeypatch.setattr('sprl.api.training.train', train)
  given = [{'prompt': str(i)} for i in range(40)]
  for problems, held_out in ((3, 3), (128, 4)):
    with pytest.raises(Begun) as begun:
      sprl.fit(folder / 'model', iter(given), reward, eval={'problems': problems})
    assert begun.value.args == (given[:-held_out], given[-held_out:])


def test_a_model_is_loaded_with_sections_of_settings(folder):
  with pytest.raises(sprl.SettingsError, match=r"config\.model = 'bfloat16': expected a mapping of settings"):
    sprl.load(folder / 'model', model='bfloat16')


def test_prompts_may_be_a_generator_and_a_count_a_number_of_numpy(loaded):
  sampler = loaded.sampler(sampling=SETTINGS['sampling'])
  rollouts = sampler.generate((f'{i} = ' for i in range(2)), samples=np.int64(2))
  assert [sample.prompt for sample in rollouts] == ['0 = ', '0 = ', '1 = ', '1 = ']
  assert rollouts.rewards.shape == (2, 2)
  with pytest.raises(ValueError, match=r'dense: .*sampler with cache\.budget: a dense cache evicts nothing'):
    sprl.visibility_figure({'dense': sampler.generate(['a = '], evictions=True)[0]})


def test_rollouts_whose_filters_are_not_recorded_have_no_ledger(tmp_path):
  """A mask of 9,000 tokens is too large to record. Without it, the learner would score over all tokens."""
  tiny.write_inputs(tmp_path, num_hidden_layers=1, vocab_size=9000)
  model = sprl.load(tmp_path / 'model', task={'chat': False}, model={'dtype': 'float32'})
  sampling = {**SETTINGS['sampling'], 'max_tokens': 4, 'top_p': 0.8}
  rollouts = model.sampler(sampling=sampling).generate(['a = ']).grade(reward)
  for call in (model.ledger, model.update):
    with pytest.raises(sprl.SettingsError, match=r'config\.sampling\.top_p = 0\.8: expected config\.sampling\.top_k'):
      call(rollouts)


def test_layers_with_a_sliding_window_hold_the_newest_tokens_only(tmp_path):
  """Tiny Gemma 3 has two layers with a window of six tokens, and one layer without, whose slots the engine counts."""
  tiny.write_inputs(tmp_path, family='gemma3_text')
  model = sprl.load(tmp_path / 'model', task={'chat': False}, model={'dtype': 'float32'})
  assert model.model.config.sliding_windows == (6, 6, None)
  sampler = model.sampler(sampling=SETTINGS['sampling'], cache={'budget': 8, 'interval': 2, 'window': 2})
  (sample,) = sampler.generate(['abcdefghij = '], evictions=True)
  T, C = len(sample.pieces), len(sample.tokens)
  newest = np.array([[p - 6 <= j < p for j in range(T)] for p in range(T - C, T)])  # of the query at p - 1, which draws token p
  whole = 3 * sample.visible - 2 * newest  # of the layer without a window
  assert whole.min() > -1e-6
  np.testing.assert_allclose(whole.sum(axis=1), sample.attended, atol=1e-5)


@pytest.mark.usefixtures('untyped')
@pytest.mark.parametrize('ended', [True, np.True_, np.mean([0.75]) > 0.5])
def test_a_truth_of_numpy_ends_a_run_as_true_does(ended):
  session = SimpleNamespace(state=SimpleNamespace(after={}), stop=SimpleNamespace(received=None))
  _call(lambda report: ended, session, StepReport(1, [], {}, {}, 0.0))
  assert session.stop.received is not None


@pytest.mark.usefixtures('untyped')
def test_side_by_side_shows_the_line_break_before_a_difference():
  def rollouts(text):
    sample = SimpleNamespace(prompt='Q', text=text, reward=0.0)
    run = SimpleNamespace(rollout=SimpleNamespace(group=1), cache=Cache(), quant=Quant())
    return SimpleNamespace(samples=(sample,), graded=False, run=run)

  shown = SideBySide({'a': rollouts('line one\nline two'), 'b': rollouts('line one\nLINE 2')})._repr_html_()
  assert 'line one<br><mark>line two</mark>' in shown
  assert 'line one<br><mark>LINE 2</mark>' in shown


@pytest.mark.slow
def test_several_rewards_are_weighted_and_one_compares_the_samples_of_a_prompt(folder):
  def ranked(completions, target):
    assert target == [completions_of] * len(completions)
    return [float(c == max(completions, key=len)) for c in completions]

  def length(completion):
    return len(completion)

  model = sprl.load(folder / 'model', task={'chat': False})
  completions_of = 7
  drawn = model.sampler(sampling=SETTINGS['sampling']).generate([{'prompt': 'a = ', 'target': 7}] * 2, samples=3)
  texts = np.array(drawn.texts).reshape(2, 3)
  lengths = np.vectorize(len)(texts)
  best = texts == np.array([[max(row, key=len)] for row in texts])
  rollouts = drawn.grade({ranked: 2.0, length: 0.5})
  np.testing.assert_allclose(rollouts.rewards, 2.0 * best + 0.5 * lengths)
  assert [s.trajectory.parts['length'] for s in rollouts] == lengths.ravel().tolist()
  np.testing.assert_allclose(drawn.grade([ranked, length]).rewards, best + lengths)
  with pytest.raises(sprl.SettingsError, match='different names'):
    drawn.grade([lambda completion: 0, lambda completion: 1])


class Echo:
  """Rewards the answer's length, and knows training from test by `split`."""

  made: ClassVar[list[str]] = []

  def __init__(self, split, bonus=0.0):
    Echo.made.append(split)
    self.bonus = bonus

  def reset(self, seed):
    return f'seed {seed}', {}

  def step(self, action):
    return '', len(action) % 5 / 4 + self.bonus, True, False, {}


@pytest.mark.slow
def test_an_environment_is_a_class_in_memory(folder):
  settings = merged(SETTINGS, {'task.args': {'bonus': 1.0}, 'task.turn_tokens': 8, 'steps': 1})
  run = sprl.fit(folder / 'model', environment=Echo, workdir=folder / 'echo', **settings)
  (record,) = [record for record in run.metrics if record['kind'] == 'train']
  assert record['reward/mean'] >= 1.0
  assert set(Echo.made) == {'train', 'test'}
  assert len(run.model.sampler().generate(['a = '], samples=2)) == 2  # without the arguments of the environment
  with pytest.raises(sprl.SettingsError, match='no rows and no reward'):
    sprl.fit(folder / 'model', environment=Echo, reward=reward)
