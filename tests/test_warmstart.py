"""The supervised warm start: what is learned, what carries no loss, and what is left out or refused."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from sprl import settings
from sprl.learner.packing import Shape, pack
from sprl.learner.state import TrainState
from sprl.models import transformer
from sprl.models.memory import CausalMemory
from sprl.policy import Policy
from sprl.rollout import collect
from sprl.settings import SettingsError
from sprl.tasks import problems
from sprl.tasks.problems import Problem
from sprl.warmstart import Lessons, end_of_turn, lesson, make_update, solution_of, warm_start

pytestmark = pytest.mark.usefixtures('compiled_fast')

ROOT = Path(__file__).parents[1]
BOS, EOS = 1, 2  # of the tiny tokenizer
CONFIG = """
from sprl.settings import default_config


def get_config():
  config = default_config()
  config.model.path, config.model.dtype = {folder!r} + '/model', 'float32'
  config.task.kind, config.task.chat = 'jsonl', False
  config.task.path, config.task.eval_path = {folder!r} + '/train.jsonl', {folder!r} + '/test.jsonl'
  config.sampling.max_prompt, config.sampling.max_tokens = 8, 8
  config.packing.rows, config.packing.score_chunk = 4, 64
  return config
"""


@pytest.fixture(scope='module')
def progressions():
  """benchmarks/progressions.py, which is no module of a package."""
  spec = importlib.util.spec_from_file_location('progressions', ROOT / 'benchmarks' / 'progressions.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope='module')
def inputs(progressions, tmp_path_factory) -> Path:
  """A small model of random weights, and digits to repeat to teach it: `7=` is answered `7 #7`."""
  folder = tmp_path_factory.mktemp('inputs')
  lines = [json.dumps({'prompt': f'{d}=', 'answer': str(d), 'solution': f'{d} #{d}'}) + '\n' for d in range(1, 10)]
  (folder / 'train.jsonl').write_text(''.join(lines[:8]))
  (folder / 'test.jsonl').write_text(lines[8])
  (folder / 'grader.py').write_text(progressions.GRADER)
  progressions.write_model(folder / 'model', layers=2, hidden=64)
  (folder / 'config.py').write_text(CONFIG.format(folder=str(folder)))
  return folder


def changed(inputs, **changes) -> settings.Run:
  """The settings of `inputs` with some changed (`sampling__max_prompt=4`)."""
  scope: dict = {}
  exec((inputs / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.update_from_flattened_dict({key.replace('__', '.'): value for key, value in changes.items()})
  return settings.resolve(config)


# --- from start to end -----------------------------------------------------------------------------------------------


def command(*arguments):
  line = [sys.executable, '-m', 'sprl.warmstart', *map(str, arguments)]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
  return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)


def greedy(policy, params, prompt, tokens) -> list[int]:
  """The likeliest continuation up to the end of the turn, from whole logits."""
  ids = [int(i) for i in prompt]
  for _ in range(tokens):
    padded = jnp.asarray(np.pad(ids, (0, 16 - len(ids)))[None])
    memory = CausalMemory.of(jnp.ones(padded.shape, jnp.int32))
    hidden, _ = forward(policy.graphdef, params, padded, jnp.arange(16)[None], memory)
    ids.append(int(jnp.argmax(hidden[0, len(ids) - 1] @ transformer.head_weight(params).T)))
    if ids[-1] == EOS:
      break
  return ids[len(prompt) :]


forward = partial(jax.jit, static_argnums=0)(transformer.forward)


def test_the_command_writes_a_model_that_answers_as_taught(inputs, tmp_path):
  out = tmp_path / 'new' / 'out'
  done = command(f'--config={inputs / "config.py"}', f'--out={out}', '--steps=60', '--batch=8', '--learning_rate=5e-3')
  assert done.returncode == 0
  assert done.stderr == 'INFO: the references run where there are kernels for GPUs: this device is a cpu\n'
  *progress, last = done.stdout.splitlines()
  facts = json.loads(last)
  assert {**facts, 'seconds': 0} == {
    'out': str(out), 'steps': 60, 'loss_first': facts['loss_first'], 'loss_last': facts['loss_last'], 'skipped': 0, 'seconds': 0,
  }  # fmt: skip
  assert facts['loss_first'] > 4
  assert facts['loss_last'] < 0.1
  assert [line.split('/')[0] for line in progress] == [f'step {step:2d}' for step in (1, 10, 20, 30, 40, 50, 60)]
  assert sorted(path.name for path in out.parent.iterdir()) == ['out']

  run = changed(inputs, model__path=str(out))
  policy = Policy.open(run)
  params = policy.load()
  for problem in problems.load(run.task, 'train'):
    ids = greedy(policy, params, collect.encode(problem, policy.tokenizer), 8)
    assert policy.tokenizer.decode(ids) == f'{problem.answer} #{problem.answer}<eos>'

  again = command(f'--config={inputs / "config.py"}', f'--out={out}')
  assert (again.returncode, again.stdout) == (2, '')
  assert again.stderr == f'error: --out = {out}: exists and is not empty; expected a new folder\n'


def test_equal_settings_give_equal_weights_in_float32_whatever_the_config_trains_in(inputs, tmp_path):
  run = changed(inputs, model__param_dtype='bfloat16')
  lines: list[str] = []
  for name in ('a', 'b'):
    warm_start(run, tmp_path / name, 2, 3, 1e-3, lines.append)
  a, b = ((tmp_path / name / 'model.safetensors').read_bytes() for name in ('a', 'b'))
  assert a == b
  assert a != (inputs / 'model' / 'model.safetensors').read_bytes()
  assert b'"F32"' in a
  assert b'"BF16"' not in a


def test_a_loss_that_is_not_finite_is_reported_and_nothing_written(inputs, tmp_path):
  with pytest.raises(SettingsError, match=r'--learning_rate = 1e\+30: the loss is no longer finite at step 10'):
    warm_start(changed(inputs), tmp_path / 'out', 20, 2, 1e30, lambda line: None)
  assert not (tmp_path / 'out').exists()


# --- what carries loss -----------------------------------------------------------------------------------------------


def test_only_the_solution_carries_loss_and_the_step_follows_its_gradient():
  config, params = small.model(num_hidden_layers=1)
  lessons = [lesson(np.array(prompt), solution) for prompt, solution in [([5, 6, 7], [8, 9, 2]), ([10], [11, 2]), ([3, 4], [2])]]
  batch, _ = pack(lessons, np.ones(3, np.float32), Shape(micros=2, rows=1, tokens=8, sequences=3, columns=4), share_prefix=False)
  assert batch.used == 2  # accumulated over microbatches
  assert batch.mask.sum() == 6
  taught = np.concatenate([batch.target[a, 0, : batch.scored[a, 0]] for a in range(2)])
  assert sorted(taught) == sorted([8, 9, 2, 11, 2, 2])  # no token of a prompt

  longest = max(len(t.tokens) for t in lessons)
  tokens = jnp.array([np.pad(t.tokens, (0, longest - len(t.tokens))) for t in lessons])
  ours = jnp.array([np.pad(t.mask, (0, longest - len(t.mask))) for t in lessons])

  def plain(params):
    memory = CausalMemory.of(jnp.ones(tokens.shape, jnp.int32))
    positions = jnp.arange(longest)[None].repeat(3, 0)
    hidden, _ = transformer.forward(transformer.graph(config), params, tokens, positions, memory)
    logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T)
    return -jnp.sum(jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0] * ours[:, 1:]) / 6

  loss, grads = jax.jit(jax.value_and_grad(plain))(params)
  optimizer = optax.sgd(100.0)  # so large that the step shows the gradient to many digits
  update = make_update(transformer.graph(config), optimizer, jnp.dtype('float32'), 8, remat='none')
  state, got = update(TrainState.create(jax.tree.map(jnp.copy, params), optimizer), jax.device_put(batch))
  np.testing.assert_allclose(got, loss, rtol=1e-5)
  for before, after, grad in zip(*map(jax.tree.leaves, (params, state.params, grads))):
    np.testing.assert_allclose((before - after) / 100, grad, rtol=1e-3, atol=1e-6)

  shorter, _ = pack(lessons[:2] + lessons[1:2], np.ones(3, np.float32), Shape(2, 1, 8, 3, 4), share_prefix=False)
  update(state, jax.device_put(shorter))
  assert update._cache_size() == 1  # other lengths, and the same program


# --- what is taught --------------------------------------------------------------------------------------------------


def test_the_worked_solution_is_taught_where_there_is_one():
  problem = Problem('id', 'prompt', (), '5')
  assert solution_of(problem) == '5'
  assert solution_of(dataclasses.replace(problem, extra={'solution': '2 + 3 = 5'})) == '2 + 3 = 5'


def test_lessons_are_prompt_solution_and_end_of_turn(inputs):
  run = changed(inputs)
  policy = Policy.open(run)
  train_set = problems.load(run.task, 'train')
  taken = Lessons(run, policy, train_set).take(len(train_set))
  asked = {policy.tokenizer.decode(t.tokens[: t.prompt_length]): policy.tokenizer.decode(t.completion) for t in taken}
  assert asked == {p.prompt: p.extra['solution'] + '<eos>' for p in train_set}  # every problem once an epoch
  for t in taken:
    np.testing.assert_array_equal(t.mask, np.arange(len(t.tokens)) >= t.prompt_length)


def test_the_end_of_a_turn_is_the_chat_templates_where_the_sampler_stops_at_it(inputs):
  run = changed(inputs)
  policy = Policy.open(run)
  chat = dataclasses.replace(run, task=dataclasses.replace(run.task, chat=True))
  assert end_of_turn(run, policy) == end_of_turn(chat, policy) == EOS

  template = policy.tokenizer.template.environment.from_string('{% for m in messages %}{{ m.content + bos_token }}{% endfor %}')
  policy = dataclasses.replace(policy, tokenizer=dataclasses.replace(policy.tokenizer, template=template))
  assert end_of_turn(chat, policy) == EOS  # the template's token is nothing that the sampler stops at
  for sampling in {'stop_ids': (BOS,)}, {'stop': ('<bos>',)}:
    assert end_of_turn(dataclasses.replace(chat, sampling=dataclasses.replace(run.sampling, **sampling)), policy) == BOS

  endless = dataclasses.replace(
    policy,
    tokenizer=dataclasses.replace(policy.tokenizer, eos_ids=()),
    config=dataclasses.replace(policy.config, eos_token_ids=()),
  )
  with pytest.raises(SettingsError, match=r'config\.sampling\.stop_ids = \(\)'):
    end_of_turn(run, endless)


# --- what is left out or refused -------------------------------------------------------------------------------------


def test_what_is_too_long_or_empty_is_left_out_and_counted(inputs, tmp_path, caplog):
  path = tmp_path / 'train.jsonl'
  lines = [('1=', '1'), ('2=', '12345678'), ('123456789', '3'), ('4=', ''), ('5=', '1234567')]  # the last just fits
  path.write_text('\n'.join(json.dumps({'prompt': p, 'answer': p, 'solution': s}) for p, s in lines))
  run = changed(inputs, task__path=str(path))
  policy = Policy.open(run)
  lessons = Lessons(run, policy, problems.load(run.task, 'train'))
  taken = lessons.take(4)
  assert sorted(policy.tokenizer.decode(t.tokens[:1]) for t in taken) == ['1', '1', '5', '5']
  assert 3 <= lessons.skipped <= 6  # two epochs, the second perhaps not to its end
  [warning] = caplog.messages
  assert 'left out' in warning


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'sampling__max_prompt': 1}, r'config\.sampling\.max_prompt = 1: the prompt of .*train\.jsonl:\d has 2 tokens'),
    ({'sampling__max_tokens': 4}, r'config\.sampling\.max_tokens = 4: the solution, its end included, of .* has 5 tokens'),
    ({'packing__row_tokens': 15}, r'config\.packing\.row_tokens = 15: expected at least 16'),
    ({'model__path': '/no/folder'}, "'/no/folder': no such folder"),
    ({'task__path': 'none.jsonl'}, r"config\.task\.path = 'none\.jsonl'"),
  ],
)
def test_settings_that_leave_nothing_to_learn_are_refused_before_the_weights_are_read(
  inputs, tmp_path, monkeypatch, changes, said
):
  monkeypatch.setattr(Policy, 'load', lambda *_: pytest.fail('a weight was read'))
  with pytest.raises(ValueError, match=said):
    warm_start(changed(inputs, **changes), tmp_path / 'out', 2, 2, 1e-3)


# --- the task of the benchmark ---------------------------------------------------------------------------------------


def test_a_teachers_slip_spoils_the_rest_of_a_solution_and_not_its_answer(progressions, tmp_path):
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
