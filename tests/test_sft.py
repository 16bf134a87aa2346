"""Supervised fine-tuning: the written model, the tokens that carry loss, and skipped or refused problems."""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import typing
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from sprl import config as settings
from sprl import sft
from sprl.config import Optimizer, Run, SettingsError, TaskKind
from sprl.config_reader import resolve
from sprl.guards import checks
from sprl.learner.batch import Shape, pack
from sprl.learner.logprobs import ForwardConfig
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.model import Model
from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.rollout import collect
from sprl.sft import SolutionStream, check_finite, end_of_turn, fine_tune, make_update, solution_of, solution_trajectory
from sprl.tasks import problems
from sprl.tasks.problems import Problem

ROOT = Path(__file__).parents[1]
BOS, EOS = 1, 2  # of the tiny tokenizer
CONFIG = """
from sprl.config import default_config


def get_config():
  config = default_config()
  config.model.path, config.model.dtype = {folder!r} + '/model', 'float32'
  config.task.kind, config.task.chat = 'jsonl', False
  config.task.path = {folder!r}
  config.sampling.max_prompt, config.sampling.max_tokens = 8, 8
  config.packing.rows, config.packing.score_chunk = 4, 64
  return config
"""


@pytest.fixture(scope='module')
def progressions():
  """benchmarks/progressions.py, which is not in a package."""
  spec = importlib.util.spec_from_file_location('progressions', ROOT / 'benchmarks' / 'progressions.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope='module')
def inputs(progressions, tmp_path_factory) -> Path:
  """A folder with a small random model and a task that teaches it to repeat digits: `7=` is answered `7 #7`."""
  folder = tmp_path_factory.mktemp('inputs')
  lines = [json.dumps({'prompt': f'{d}=', 'answer': str(d), 'solution': f'{d} #{d}'}) + '\n' for d in range(1, 10)]
  (folder / 'train.jsonl').write_text(''.join(lines[:8] * 16))  # the order of very few problems takes long to compute
  (folder / 'test.jsonl').write_text(lines[8])
  (folder / 'grader.py').write_text(progressions.GRADER)
  progressions.write_model(folder / 'model', layers=1, hidden=64)
  (folder / 'config.py').write_text(CONFIG.format(folder=str(folder)))
  return folder


def run_with(inputs, **changes) -> settings.Run:
  """Return the run of `inputs` with changes such as `sampling__max_prompt=4`."""
  scope: dict = {}
  exec((inputs / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.update_from_flattened_dict({key.replace('__', '.'): value for key, value in changes.items()})
  return resolve(config)


# --- from start to end -----------------------------------------------------------------------------------------------


def command(*arguments):
  line = [sys.executable, '-m', 'sprl.sft', *map(str, arguments)]
  return subprocess.run(line, cwd=ROOT, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True)


def greedy(model, params, prompt, tokens) -> list[int]:
  """Return the likeliest continuation up to the end of the turn, from the logits of all tokens."""
  ids = [int(i) for i in prompt]
  for _ in range(tokens):
    padded = jnp.asarray(np.pad(ids, (0, 16 - len(ids)))[None])
    memory = PackedAttention.of(jnp.ones(padded.shape, jnp.int32))
    hidden = forward(model.graphdef, params, padded, jnp.arange(16)[None], memory).hidden
    ids.append(int(jnp.argmax(hidden[0, len(ids) - 1] @ transformer.head_weight(params).T)))
    if ids[-1] == EOS:
      break
  return ids[len(prompt) :]


forward = partial(jax.jit, static_argnums=0)(transformer.forward)


def check_taught(inputs, out):
  """Assert that the model answers every training problem as taught."""
  run = run_with(inputs, model__path=str(out))
  model = Model.open(run)
  params = model.load()
  for problem in problems.load(run.task, 'train'):
    ids = greedy(model, params, collect.encode(problem, model.tokenizer), 8)
    assert model.tokenizer.decode(ids) == f'{problem.answer} #{problem.answer}<eos>'


def check_facts(facts, out):
  assert {**facts, 'seconds': 0} == {
    'out': str(out), 'steps': 30, 'loss_first': facts['loss_first'], 'loss_last': facts['loss_last'], 'skipped': 0, 'seconds': 0,
  }  # fmt: skip
  assert facts['loss_first'] > 4
  assert facts['loss_last'] < 0.1


LINES = [f'step {step:2d}/30' for step in (1, 10, 20, 30)]


def test_fine_tuning_writes_a_model_that_answers_as_taught(inputs, tmp_path):
  """Equal settings give equal weights. The weights are float32 for every dtype of the run."""
  weights = []
  for param_dtype in ('float32', 'bfloat16'):
    lines: list[str] = []
    out = tmp_path / param_dtype / 'new'
    run = run_with(inputs, model__param_dtype=param_dtype)
    facts = fine_tune(run, out, steps=30, batch=8, learning_rate=1e-2, show=lines.append)
    check_facts(facts, out)
    assert [line.split('  loss')[0] for line in lines] == LINES
    assert sorted(path.name for path in out.parent.iterdir()) == ['new']
    weights.append((out / 'model.safetensors').read_bytes())
  check_taught(inputs, out)
  assert weights[0] == weights[1] != (inputs / 'model' / 'model.safetensors').read_bytes()
  assert b'"F32"' in weights[0]
  assert b'"BF16"' not in weights[0]


@pytest.mark.slow
def test_the_command_fine_tunes(inputs, tmp_path):
  out = tmp_path / 'new' / 'out'
  done = command(f'--config={inputs / "config.py"}', f'--out={out}', '--steps=30', '--batch=8', '--learning_rate=1e-2')
  assert done.returncode == 0
  kernels, remat = done.stderr.splitlines()
  assert kernels.startswith('INFO: reference implementations run')
  assert remat.startswith('INFO: model.remat = ')
  *progress, last = done.stdout.splitlines()
  check_facts(json.loads(last), out)
  assert [line.split('  loss')[0] for line in progress] == LINES
  check_taught(inputs, out)

  again = command(f'--config={inputs / "config.py"}', f'--out={out}')
  assert (again.returncode, again.stdout) == (2, '')
  assert again.stderr.startswith(f'error: --out = {out}: ')


def test_a_folder_that_is_not_empty_is_refused(inputs):
  with pytest.raises(SettingsError, match=f'--out = {inputs}: '):
    fine_tune(run_with(inputs), inputs, steps=1, batch=1, learning_rate=1e-3)


@pytest.mark.parametrize('kind', typing.get_args(TaskKind))
def test_fine_tuning_takes_the_kinds_of_task_with_solutions_and_is_advised_for_these_only(inputs, tmp_path, monkeypatch, kind):
  monkeypatch.setattr(problems, 'load', lambda *_: 1 / 0)  # the first call after the check
  with_solutions = kind in ('gsm8k', 'dataset', 'jsonl', 'reasoning_gym', 'mixture')
  expected = ZeroDivisionError if with_solutions else SettingsError
  run = run_with(inputs)
  run = dataclasses.replace(run, task=dataclasses.replace(run.task, kind=kind))
  with pytest.raises(expected) as error:
    fine_tune(run, tmp_path / 'out', steps=1, batch=1, learning_rate=1e-3)
  if not with_solutions:
    assert str(error.value).startswith(f'config.task.kind = {kind!r}: expected one of dataset, gsm8k, jsonl, ')
  assert checks.FINE_TUNING.helps(run) == with_solutions


def test_the_memory_of_fine_tuning_is_that_of_adamw_in_float32_without_a_reference(inputs, tmp_path, monkeypatch):
  """The run's optimiser, KL term and dtype of master weights are those of reinforcement learning."""
  asked = []

  def decided(run, *_):
    asked.append(run)
    raise InterruptedError

  monkeypatch.setattr(sft, 'decided', decided)
  run = run_with(inputs, model__param_dtype='bfloat16', optimizer__name='adafactor', loss__kl_coef=0.1)
  with pytest.raises(InterruptedError):
    fine_tune(run, tmp_path / 'out', steps=20, batch=8, learning_rate=1e-3)
  assert [(run.optimizer.name, run.loss.kl_coef, run.model.param_dtype) for run in asked] == [('adamw', 0.0, 'float32')]


def test_a_loss_that_is_not_finite_is_reported_and_nothing_written(inputs, tmp_path, monkeypatch):
  of_the_model, of_training = r'^config\.model\.path = .* not finite', r'^--learning_rate = 1e\+30: .* at step 2;'
  for losses, said in (([np.nan], of_the_model), ([1.0, np.nan], of_training)):
    found = itertools.chain(losses, itertools.repeat(np.nan))
    monkeypatch.setattr(sft, 'make_update', lambda *_, found=found: lambda state, batch: (state, jnp.float32(next(found))))
    with pytest.raises(SettingsError, match=said):
      fine_tune(run_with(inputs), tmp_path / 'out', steps=20, batch=8, learning_rate=1e30, show=lambda line: None)
    assert not (tmp_path / 'out').exists()


def test_gradients_that_are_not_finite_several_times_in_a_row_are_reported():
  check_finite([1.0, 0.9, 0.8], 2, 0.1, Run())
  with pytest.raises(SettingsError, match=r'--learning_rate = 0\.1: the gradients of the 3 updates up to step 4 are not finite'):
    check_finite([1.0, 0.9, 0.9, 0.9], 3, 0.1, Run())
  with pytest.raises(SettingsError, match=r'^config\.model\.path = '):  # the weights are still those of the model
    check_finite([1.0, 1.0], 2, 0.1, Run())


# --- tokens that carry loss ------------------------------------------------------------------------------------------


SIZES = Shape(micros=2, rows=1, tokens=8, sequences=3, columns=4)


def pack_solutions(pairs):
  trajectories = [solution_trajectory(np.array(prompt), solution) for prompt, solution in pairs]
  return trajectories, pack(trajectories, np.ones(3, np.float32), SIZES, share_prefix=False)[0]


PAIRS = [([5, 6, 7], [8, 9, 2]), ([10], [11, 2]), ([3, 4], [2])]


def sgd(rate):
  return make_optimizer(Optimizer(name='sgd', learning_rate=rate, clip_norm=None), 1)


def test_only_the_solution_carries_loss(monkeypatch):
  """A table of log-probs of the cells replaces the network. The gradient of a log-prob is minus its share of the loss."""

  def of_table(graphdef, params, batch, i, config, remat):
    return jnp.where(batch.mask & (batch.micro == i)[:, None], params['logp'], 0), None, None

  monkeypatch.setattr(sft, 'micro_logprobs', of_table)
  _, batch = pack_solutions(PAIRS)
  assert batch.used == 2  # accumulated over microbatches
  targets = np.concatenate([batch.target[a, 0, : batch.scored[a, 0]] for a in range(2)])
  assert sorted(targets) == sorted([8, 9, 2, 11, 2, 2])  # no token of a prompt
  logp = -np.arange(1, 13, dtype=np.float32).reshape(3, 4)
  graph = transformer.graph(tiny('llama'))
  update = make_update(graph, sgd(6.0), ForwardConfig(1.0, jnp.dtype('float32'), 8), 'none')
  state, loss = update(TrainState.create({'logp': jnp.array(logp)}, sgd(6.0)), jax.device_put(batch))
  assert float(loss) == pytest.approx((1 + 2 + 3 + 5 + 6 + 9) / 6)
  np.testing.assert_allclose(state.params['logp'] - logp, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]], rtol=1e-6)
  shorter = pack_solutions(PAIRS[:2] + PAIRS[1:2])[1]
  update(state, jax.device_put(shorter))
  assert update._cache_size() == 1  # other lengths use the same program


@pytest.mark.slow
def test_the_step_follows_the_gradient_of_the_solutions():
  config, params = small.model(num_hidden_layers=1)
  taught, batch = pack_solutions(PAIRS)
  longest = max(len(t.tokens) for t in taught)
  tokens = jnp.array([np.pad(t.tokens, (0, longest - len(t.tokens))) for t in taught])
  ours = jnp.array([np.pad(t.mask, (0, longest - len(t.mask))) for t in taught])

  def plain(params):
    memory = PackedAttention.of(jnp.ones(tokens.shape, jnp.int32))
    positions = jnp.arange(longest)[None].repeat(3, 0)
    hidden = transformer.forward(transformer.graph(config), params, tokens, positions, memory).hidden
    logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T)
    return -jnp.sum(jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0] * ours[:, 1:]) / 6

  loss, grads = jax.jit(jax.value_and_grad(plain))(params)
  rate = 100.0  # so large that the step shows the gradient to many digits
  update = make_update(transformer.graph(config), sgd(rate), ForwardConfig(1.0, jnp.dtype('float32'), 8), 'none')
  state, got = update(TrainState.create(jax.tree.map(jnp.copy, params), sgd(rate)), jax.device_put(batch))
  np.testing.assert_allclose(got, loss, rtol=1e-5)
  for before, after, grad in zip(*map(jax.tree.leaves, (params, state.params, grads))):
    np.testing.assert_allclose((before - after) / rate, grad, rtol=1e-3, atol=1e-6)


# --- problems to trajectories ----------------------------------------------------------------------------------------


def test_the_worked_solution_is_taught_if_there_is_one():
  problem = Problem('id', 'prompt', (), '5')
  assert solution_of(problem) == '5'
  assert solution_of(dataclasses.replace(problem, extra={'solution': '2 + 3 = 5'})) == '2 + 3 = 5'


def test_trajectories_are_prompt_solution_and_end_of_turn(inputs):
  run = run_with(inputs)
  model = Model.open(run)
  train_set = problems.load(run.task, 'train')
  taken = SolutionStream(run, model, train_set).take(len(train_set))
  decode = model.tokenizer.decode
  found = {decode(t.tokens[: t.prompt_length]): decode(t.completion) for t in taken}
  assert found == {p.prompt: p.extra['solution'] + '<eos>' for p in train_set}  # every problem once an epoch
  for t in taken:
    np.testing.assert_array_equal(t.mask, np.arange(len(t.tokens)) >= t.prompt_length)


def test_the_chat_template_ends_a_turn_if_the_sampler_stops_there(inputs):
  run = run_with(inputs)
  model = Model.open(run)
  chat = dataclasses.replace(run, task=dataclasses.replace(run.task, chat=True))
  assert end_of_turn(run, model) == end_of_turn(chat, model) == EOS

  template = '{% for m in messages %}{{ m.content + bos_token }}{% endfor %}'
  model = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, template=template))
  assert end_of_turn(chat, model) == EOS  # the sampler does not stop at the template's token
  for sampling in {'stop_ids': (BOS,)}, {'stop': ('<bos>',)}:
    assert end_of_turn(dataclasses.replace(chat, sampling=dataclasses.replace(run.sampling, **sampling)), model) == BOS

  endless = dataclasses.replace(
    model,
    tokenizer=dataclasses.replace(model.tokenizer, eos_ids=()),
    config=dataclasses.replace(model.config, eos_token_ids=()),
  )
  with pytest.raises(SettingsError, match=r'config\.sampling\.stop_ids = \(\)'):
    end_of_turn(run, endless)


def test_problems_that_are_too_long_or_lack_an_answer_are_skipped_and_counted(inputs, tmp_path, caplog):
  path = tmp_path / 'train.jsonl'
  lines = [('1=', '1'), ('2=', '12345678'), ('123456789', '3'), ('4=', ''), ('5=', '1234567')]  # the last just fits
  path.write_text('\n'.join(json.dumps({'prompt': p, 'answer': p, 'solution': s}) for p, s in lines))
  run = run_with(inputs, task__path=str(tmp_path))
  model = Model.open(run)
  solutions = SolutionStream(run, model, problems.load(run.task, 'train'))
  taken = solutions.take(4)
  assert sorted(model.tokenizer.decode(t.tokens[:1]) for t in taken) == ['1', '1', '5', '5']
  assert 3 <= solutions.skipped <= 6  # two epochs, the second perhaps not to its end
  [warning] = caplog.messages
  assert 'skipped' in warning


def test_one_solution_that_fits_is_taught_whatever_its_place_in_an_epoch(inputs, tmp_path):
  lines = [{'prompt': f'{i}=', 'answer': '1', 'solution': '1' if i == 0 else '12345678'} for i in range(3)]
  (tmp_path / 'train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  run = run_with(inputs, task__path=str(tmp_path))
  model, train_set = Model.open(run), problems.load(run.task, 'train')
  skipped = []  # in a row
  for seed in range(6):
    solutions = SolutionStream(dataclasses.replace(run, seed=seed), model, train_set)
    for _ in range(6):
      before = solutions.skipped
      [t] = solutions.take(1)
      assert model.tokenizer.decode(t.completion) == '1<eos>'
      skipped.append(solutions.skipped - before)
  assert max(skipped) == 4  # first in one epoch and last in the next
  (tmp_path / 'train.jsonl').write_text('\n'.join(map(json.dumps, lines[1:])))
  with pytest.raises(SettingsError, match=r'max_tokens = 8: .* None of 3 training problems in a row can be used'):
    SolutionStream(run, model, problems.load(run.task, 'train')).take(1)


def test_a_mixture_of_conversations_and_columns_is_taught_by_the_weights_of_its_steps(inputs, tmp_path):
  spoken = [{'role': 'user', 'content': '1='}, {'role': 'assistant', 'content': 'one'}]
  (tmp_path / 'chats.jsonl').write_text(json.dumps({'messages': spoken}))
  (tmp_path / 'rows.jsonl').write_text(json.dumps({'q': '2', 'a': 'two'}))
  mixture = {
    'chats': {'path': str(tmp_path / 'chats.jsonl'), 'splits': ('train', 'train'), 'weight': {'0': 1.0, '2': 0.0}},
    'rows': {'path': str(tmp_path / 'rows.jsonl'), 'columns': {'prompt': '{q}=', 'answer': 'a'}, 'splits': ('train', ''),
             'weight': {'0': 0.0, '2': 1.0}},
  }  # fmt: skip
  changes = {'kind': 'mixture', 'path': None, 'chat': True, 'grader': 'auto', 'mixture': mixture}
  lengths = {'sampling__max_prompt': 32, 'sampling__prompt_buckets': (32,), 'sampling__max_tokens': 32, 'packing__row_tokens': 64}
  run = run_with(inputs, **{f'task__{name}': value for name, value in changes.items()}, **lengths)
  model = Model.open(run)
  taken = SolutionStream(run, model, problems.load(run.task, 'train'), batch=3).take(12)
  assert [model.tokenizer.decode(t.completion) for t in taken] == ['one<eos>'] * 6 + ['two<eos>'] * 6


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'sampling__max_prompt': 1}, r'config\.sampling\.max_prompt = 1: expected at least 2, .*train\.jsonl:\d'),
    ({'sampling__max_tokens': 4}, r'config\.sampling\.max_tokens = 4: expected at least 5'),
    ({'packing__row_tokens': 15}, r'config\.packing\.row_tokens = 15: expected at least 16'),
    ({'model__path': '/no/folder'}, '/no/folder'),
    ({'task__path': 'none'}, r"config\.task\.path = 'none'"),
  ],
)
def test_unusable_settings_are_refused_before_weights_are_read(inputs, tmp_path, monkeypatch, changes, said):
  monkeypatch.setattr(Model, 'load', lambda *_: pytest.fail('a weight was read'))
  with pytest.raises(ValueError, match=said):
    fine_tune(run_with(inputs, **changes), tmp_path / 'out', steps=2, batch=2, learning_rate=1e-3)


# --- the task of the benchmark ---------------------------------------------------------------------------------------


def test_a_slip_changes_the_rest_of_a_solution_but_not_its_answer(progressions, tmp_path):
  assert progressions.problem(14, 7, 4, slip=(2, -1)) == {
    'prompt': '14+7*4=',
    'solution': '1=14 2=21 3=27 4=34 #34',
    'answer': '35',
  }
  progressions.write_problems(tmp_path, train=500, test=200, seed=1, slips=0.6)
  lines = [json.loads(line) for line in (tmp_path / 'train.jsonl').read_text().splitlines()]
  wrong = sum(not each['solution'].endswith(' #' + each['answer']) for each in lines)
  assert 250 < wrong < 350


def test_progressions_spell_every_term_and_are_graded_by_the_last(progressions, tmp_path):
  assert progressions.problem(14, 7, 9) == {
    'prompt': '14+7*9=', 'answer': '70', 'solution': '1=14 2=21 3=28 4=35 5=42 6=49 7=56 8=63 9=70 #70',
  }  # fmt: skip
  progressions.write_problems(tmp_path, train=500, test=200, seed=1)
  train, test = ((tmp_path / f'{name}.jsonl').read_text().splitlines() for name in ('train', 'test'))
  assert (len(train), len(test), len({*train, *test})) == (500, 200, 700)

  scope: dict = {}
  exec((tmp_path / 'grader.py').read_text(), scope)
  marks = {'3 8 #8': 1.0, '#7 #8': 1.0, '8': 0.0, '3 8 #18': 0.0, '#8 #': 0.0, '#8 ': 0.0, '': 0.0}
  assert {text: scope['grade']('3+5=', text, '8') for text in marks} == marks
