"""Whole runs, synchronous and asynchronous: equality with a plain loop, overlap, resumption, staleness."""

import dataclasses
import importlib.util
import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from sprl.config_reader import resolve
from sprl.io.metrics import read_metrics
from sprl.learner.batch import pack, shape
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.learner.update import UpdateConfig, make_update
from sprl.model import Model
from sprl.objective.advantages import advantages
from sprl.rollout.collect import encode
from sprl.sampler.engine import generate
from sprl.tasks import problems
from sprl.tasks.prompts import PromptStream
from sprl.train import train
from sprl.types import LogProbs, Request

TWO_DEVICES = '--xla_force_host_platform_device_count=2'


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder)
  return folder


def load_module(path: Path, name: str):
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def dense_run(inputs: Path, steps: int, **changes):
  """Return the settings of the tiny run: dense, unquantised, one update a step, no ledger, no reference model."""
  config = load_module(inputs / 'config.py', 'tiny_config').get_config()
  config.steps, config.arm, config.quant.sampler, config.ledger.every = steps, 'dense', 'none', None
  config.loss.kl_coef, config.optimizer.minibatches, config.model.dtype = 0.0, 1, 'float32'
  config.checkpoint.every = None
  config.update_from_flattened_dict(changes)
  return resolve(config)


def plain_loop(run, grade):
  """Train synchronously in a plain loop: prompts, rollouts, rewards, advantages, update. Return (params, rewards, losses).

  Of the n samples of a prompt, a draw fixed by the group's number trains. The rewards of all count.
  """
  model = Model.open(run)
  n = run.rollout.group + run.rollout.extra_members
  engine = model.engine_config(
    run.sampling, model.cache_layout(run.sampling, run.cache, run.quant), run.rollout.prompts * n, 4, run.seed
  )
  optimizer = make_optimizer(run.optimizer, run.steps * run.optimizer.updates)
  state = TrainState.create(model.load(), optimizer)
  update = make_update(model.graphdef, optimizer, UpdateConfig.of(run, model.dtype))
  stream = PromptStream(problems.load(run.task, 'train'), run.seed)
  rewards, losses = [], []
  for step in range(run.steps):
    asked = stream.next(run.rollout.prompts)
    requests = [
      Request((step * run.rollout.prompts + i) * n + k, i, encode(problem, model.tokenizer), run.sampling.max_tokens)
      for i, problem in enumerate(asked)
      for k in range(n)
    ]
    trajectories = generate(engine, model.sampler_weights(state.params, run.quant), requests, step)
    reward = [grade('', model.tokenizer.decode(t.completion, skip_special=True), '') for t in trajectories]
    trajectories = [dataclasses.replace(t, reward=float(r)) for t, r in zip(trajectories, reward)]
    group = np.array([t.group for t in trajectories], np.int32)
    advantage = advantages(np.array(reward, np.float32), group, np.ones(len(reward), bool), run.advantage)
    sizes = shape(run.sampling, run.rollout, run.packing, run.optimizer.minibatches)
    numbers = range(step * run.rollout.prompts, (step + 1) * run.rollout.prompts)
    draws = [np.random.default_rng(number).permutation(n)[: run.rollout.group] for number in numbers]
    taken = np.concatenate([i * n + np.sort(draw) for i, draw in enumerate(draws)])
    batch, _ = pack([trajectories[i] for i in taken], advantage[taken], sizes, run.packing.share_prefix)
    state, metrics = update(state, batch, LogProbs(sampler=batch.sampler_logp))  # its forward pass gives the old log-probs
    rewards.append(float(np.mean(reward)))
    losses.append(float(metrics['update/loss']))
  return state.params, rewards, losses


@pytest.mark.parametrize(
  'members',
  [
    pytest.param({}, id='group'),
    pytest.param({'rollout.extra_members': 2, 'rollout.members': 'all'}, id='all', marks=pytest.mark.slow),
  ],
)
def test_a_synchronous_run_equals_the_plain_loop_bit_for_bit(inputs, tmp_path, caplog, members):
  """Rewards, losses and weights are equal. The ratio to the old policy is exactly 1, because a step has one update."""
  run = dense_run(inputs, 3, **members)
  expected, rewards, losses = plain_loop(run, load_module(inputs / 'grader.py', 'tiny_grader').grade)
  with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
    finished = train(run, tmp_path / 'run')
  compiled = [r.getMessage() for r in caplog.records if 'Finished XLA compilation of jit(update)' in r.getMessage()]
  assert len(compiled) == 1  # before the weights are loaded, and never again
  jax.tree.map(np.testing.assert_array_equal, finished.params, expected)
  records = [r for r in read_metrics(tmp_path / 'run') if r['kind'] == 'train']
  np.testing.assert_allclose([r['reward/mean'] for r in records], rewards, rtol=1e-6)
  assert [r['update/loss'] for r in records] == losses
  assert all((r['policy/ratio_mean'], r['policy/ratio_deviation']) == (1, 0) for r in records)
  assert all(r['async/token_lag_max'] == 0 for r in records)


def test_the_ledger_runs_when_the_engines_have_freed_their_weights(inputs, tmp_path, monkeypatch):
  held = []

  def ledger(session, step, trajectories, scales):
    held.extend([session.weights, *(engine.weights for engine in session.engines)])

  monkeypatch.setattr('sprl.train.LedgerHook', lambda: ledger)
  train(dense_run(inputs, 1), tmp_path / 'run')
  assert held == [None, None]


def asynchronous(*changes: str) -> list[str]:
  return ['--config.rollout.async_ratio=1.0', '--config.steps=8', *changes]


def check_all_groups(workdir: Path, steps: int) -> dict:
  """Assert that the scheduler's last state accounts for every group, and that every step is logged once. Return the state."""
  record = json.loads((workdir / 'checkpoints' / f'step_{steps:06d}' / 'record.json').read_text())['record']
  state = record['extra']['scheduler']
  assert state['version'] == steps
  assert state['consumed'] == steps * 4
  assert state['live'] == []  # the run starts no more groups than it needs
  assert state['next'] == steps * 4
  steps_logged = [r['step'] for r in read_metrics(workdir) if r['kind'] == 'train']
  assert steps_logged == list(range(1, steps + 1))
  return state


@pytest.mark.slow
def test_an_asynchronous_run_overlaps_and_resumes_after_a_kill(inputs, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', TWO_DEVICES)
  workdir = inputs / 'asynchronous'
  flags = asynchronous('--config.devices.learner=0', '--config.devices.rollout=1')
  line = f'--config={inputs / "config.py"}', f'--workdir={workdir}', *flags
  process = tiny.start('main', *line)
  while not (workdir / 'checkpoints' / 'step_000003').exists():
    assert process.poll() is None, process.communicate()
  process.send_signal(signal.SIGKILL)
  tiny.finish(process)
  status, _, err = tiny.run('main', *line)
  assert status == 0, err
  assert 'resuming after step' in err
  check_all_groups(workdir, 8)
  records = [r for r in read_metrics(workdir) if r['kind'] == 'train']
  assert max(r['async/age_max'] for r in records) == 1
  assert all(0 <= round(r['time'][idle], 6) <= 1 for r in records for idle in ('learner_idle', 'rollout_idle'))
  for r in records:
    tokens = np.array(r['async/token_lag_counts'])
    assert np.average(np.arange(len(tokens)), weights=tokens) == pytest.approx(r['async/token_lag_mean'])
  assert all(r['policy/ratio_deviation'] > 0 for r in records if r['async/stale_tokens'])
  entries = {r['step']: r for r in read_metrics(workdir) if r['kind'] == 'ledger'}
  assert set(entries) == {2, 4, 6, 8}
  ages = {r['step']: r['async/token_lag_mean'] for r in records}
  assert all((entries[step]['ledger/staleness_abs'] > 0) == (ages[step] == 1) for step in entries if ages[step] in (0, 1))

  (until,) = workdir.glob('trace_until_*.json')  # the trace before the kill
  assert json.loads(until.read_text())['traceEvents']
  events = json.loads((workdir / 'trace.json').read_text())['traceEvents']
  tracks = {e['tid']: e['args']['name'] for e in events if e['ph'] == 'M'}
  spans: dict[str, list[tuple[float, float]]] = {}
  for e in events:
    if e['ph'] == 'X':
      spans.setdefault(tracks[e['tid']], []).append((e['ts'], e['ts'] + e['dur']))
  both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans['learner'] for c, d in spans['engine 0'])
  assert both > 0  # the engine decodes during updates


@pytest.mark.slow
def test_rollouts_on_their_own_devices_continue_while_weights_are_sent(inputs, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', TWO_DEVICES)
  workdir = inputs / 'synced-meanwhile'
  flags = asynchronous(
    '--config.devices.learner=0', '--config.devices.rollout=1', '--config.steps=3', '--config.ledger.every=None',
    '--config.arm=dense', '--config.quant.sampler=none', '--config.loss.kl_coef=0',
  )  # fmt: skip
  status, out, err = tiny.run(
    Path(__file__).with_name('synced_meanwhile.py'), f'--config={inputs / "config.py"}', f'--workdir={workdir}', *flags,
  )  # fmt: skip
  assert status == 0, err
  assert any(json.loads(out.splitlines()[-1]))  # not all: the engine is idle after a slow update and after the last step
  check_all_groups(workdir, 3)


@pytest.mark.slow
@pytest.mark.parametrize('sync', ['recompute', 'keep', 'drain'])
def test_on_one_device_rollouts_and_updates_take_turns(inputs, sync):
  workdir = inputs / f'shared-{sync}'
  flags = asynchronous(f'--config.rollout.sync={sync}', '--config.sampling.rows=8')
  status, _, err = tiny.run('main', f'--config={inputs / "config.py"}', f'--workdir={workdir}', *flags)
  assert status == 0, err
  check_all_groups(workdir, 8)


@pytest.mark.slow
def test_uncorrected_staleness_stops_the_run(inputs):
  workdir = inputs / 'uncorrected'
  flags = asynchronous(
    '--config.arm=None',
    '--config.cache.budget=None',
    '--config.optimizer.minibatches=2',
    '--config.correction.weight=clip',
    '--config.correction.floor=1.0',
    '--config.correction.cap=1.0',
  )
  status, _, err = tiny.run('main', f'--config={inputs / "config.py"}', f'--workdir={workdir}', *flags)
  assert status == 3
  assert 'every weight is exactly 1' in err
  assert 'Traceback' not in err


@pytest.mark.slow
def test_a_run_trains_on_conversations(inputs):
  """Two steps of FrozenLake with a random model: the run ends, and logs turns, lengths and successes."""
  workdir = inputs / 'lake'
  flags = [
    '--config.task.kind=environment', '--config.task.path=None', '--config.task.workers=None', '--config.task.grader=auto',
    '--config.task.name=frozen_lake', '--config.task.turns=3', '--config.task.turn_tokens=6',
    '--config.sampling.max_prompt=1024', '--config.sampling.prompt_buckets=()', '--config.sampling.max_tokens=512',
    '--config.packing.row_tokens=1536', '--config.arm=dense', '--config.quant.sampler=none', '--config.eval.max_tokens=None',
    '--config.rollout.async_ratio=1.0', '--config.ledger.every=None', '--config.steps=2', '--config.loss.kl_coef=0',
  ]  # fmt: skip
  status, _, err = tiny.run('main', f'--config={inputs / "config.py"}', f'--workdir={workdir}', *flags)
  assert status == 0, err
  records = [r for r in read_metrics(workdir) if r['kind'] == 'train']
  assert len(records) == 2
  for r in records:
    assert 1 <= r['completion/turns'] <= 3
    assert r['completion/length_mean'] <= 6 * r['completion/turns']  # tokens of the model, without observations
    assert r['env/success'] >= 0
