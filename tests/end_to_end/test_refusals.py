"""What cannot be used is refused before any device work, by name, with status 2 and no traceback; a broken run stops with 3."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from teams import together

from sprl import command_line, hooks, model, train
from sprl import config as settings
from sprl.config import UNQUANTISED, SettingsError
from sprl.config_reader import resolve
from sprl.distributed.team import ALONE, Team
from sprl.io.checkpoint import CheckpointError
from sprl.io.huggingface import WeightsError
from sprl.io.metrics import LogError, read_metrics
from sprl.io.pretrained import PretrainedError
from sprl.io.run_folder import exclusive
from sprl.io.tokenizer import TokenizerError
from sprl.models.config import ConfigError
from sprl.rollout.scheduler import Stalled


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder)
  return folder


# --- flags: refused in a process of their own, before jax is loaded --------------------------------------------------


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    ('--config.rollout.grup=4', 'config.rollout.grup: no such setting; config.rollout has async_ratio, equal_groups'),
    ('--config.steps=many', "--config.steps=many: invalid literal for int() with base 10: 'many'"),
    ('--config.loss.variant=grpo', "config.loss.variant = 'grpo': expected one of 'ppo', 'gspo'"),
    ('--config.cache.budget=many', "config.cache.budget = 'many': expected int"),
    ('--config.task.args.terms=2', 'is not set in the config; set all of --config.task.args='),
    ('--workdirectory=x', "Unknown command line flag 'workdirectory'"),
    ('config.steps=5', 'error: config.steps=5: expected flags only, such as --config.steps=5'),
  ],
)
def test_a_flag_that_cannot_be_used(inputs, tmp_path, flag, said):
  status, out, err = tiny.run('main', f'--config={inputs / "config.py"}', f'--workdir={tmp_path / "run"}', flag)
  assert (status, out) == (2, '')
  assert said in err
  assert 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('config', 'said'),
  [
    ('nowhere.py', 'nowhere.py'),
    ('configs/qwen_gsm8k.py:qwen9', 'error: configs/qwen_gsm8k.py:qwen9: no such variant; accepted: qwen2.5-0.5b, '),
  ],
)
def test_a_config_file_that_cannot_be_used(config, said):
  status, out, err = tiny.run('main', f'--config={config}')
  assert (status, out) == (2, '')
  assert said in err
  assert 'Traceback' not in err


@pytest.mark.parametrize('command', ['evaluate', 'export'])
def test_a_folder_that_is_no_run(command, tmp_path):
  status, out, err = tiny.run(command, f'--workdir={tmp_path}', *(['--out=x'] if command == 'export' else []))
  assert (status, out) == (2, '')
  assert f'{tmp_path / "config.json"}: no such file' in err
  assert 'Traceback' not in err


def test_errors_of_input_are_one_line_and_status_2(capsys):
  kinds = SettingsError, PretrainedError, ConfigError, WeightsError, TokenizerError, CheckpointError, LogError, PermissionError
  for kind in kinds:

    def main(kind=kind):
      raise kind('what is wrong')

    assert command_line.reported(main) == 2
    assert capsys.readouterr().err == 'error: what is wrong\n'

  def stalls():
    raise Stalled('256 groups in a row were given up')

  assert command_line.reported(stalls) == 3
  assert capsys.readouterr().err == 'error: 256 groups in a row were given up\n'
  with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
    command_line.reported(lambda: 1 // 0)


# --- files: refused by `train`, before a weight is read --------------------------------------------------------------


def changed(inputs: Path, **changes) -> settings.Run:
  """The tiny run with settings changed (`task__path='x'`)."""
  scope: dict = {}
  exec((inputs / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.update_from_flattened_dict({key.replace('__', '.'): value for key, value in changes.items()})
  return resolve(config)


def refusal(run: settings.Run, workdir: Path, monkeypatch, team: Team = ALONE) -> str:
  """What `train` says of a run that it refuses, having read no weight and written nothing."""

  def load(*_):
    pytest.fail('a weight was read')

  monkeypatch.setattr(model.Model, 'load', load)
  before = sorted(workdir.rglob('*')) if workdir.exists() else []
  with pytest.raises(ValueError) as error:  # noqa: PT011  (of several kinds, all of which `reported` knows)
    train.train(run, workdir, team)
  assert command_line.reported(lambda: (_ for _ in ()).throw(error.value)) == 2
  assert (sorted(workdir.rglob('*')) if workdir.exists() else []) == before
  return str(error.value)


def test_settings_that_name_what_is_not_there(inputs, tmp_path, monkeypatch):
  for changes, said in [
    ({'model__path': '/no/folder'}, "'/no/folder': no such folder"),
    ({'task__path': 'none'}, "config.task.path = 'none': expected a folder"),
    ({'task__kind': 'reasoning_gym', 'task__name': 'chain_sums', 'task__grader': 'auto'}, "config.task.name = 'chain_sums'"),
    ({'task__kind': 'gsm8k', 'task__path': '/no/folder', 'task__grader': 'auto'}, "config.task.path = '/no/folder': no such"),
    ({'task__grader': 'mine.py:grade'}, "config.task.grader = 'mine.py:grade'"),
    ({'sampling__max_prompt': 8, 'sampling__prompt_buckets': (8,)}, 'config.sampling.max_prompt = 8: '),
    ({'sampling__stop_ids': (2, 259)}, 'config.sampling.stop_ids has 259: expected '),
    ({'mesh__learner__tensor': 3}, 'config.mesh.learner = '),
    ({'mesh__rollout__fsdp': 3}, 'config.mesh.rollout = '),
    ({'cache__window': 17, 'cache__budget': 20}, 'config.cache.window = 17: expected '),
    ({'model__router_replay': 'R3'}, "config.model.router_replay = 'R3': expected 'none'"),
    ({'loss__balance_coef': 0.01}, 'config.loss.balance_coef = 0.01: expected 0.0'),
    ({'cache__method': 'streaming', 'cache__streaming__sinks': 30}, 'config.cache.budget = 12: expected '),
    ({'quant__skip_layers': (40,)}, 'config.quant.skip_layers = (40,): expected'),
  ]:
    assert said in refusal(changed(inputs, **changes), tmp_path / 'run', monkeypatch)


def test_experts_that_the_mesh_cannot_split(inputs, tmp_path, monkeypatch):
  one = jax.devices()
  monkeypatch.setattr(jax, 'devices', lambda *_: one * 4)  # a mesh only counts them
  tiny.write_inputs(tmp_path / 'mixture', 'qwen3_moe')  # of six experts
  for folder, changes, said in [
    (inputs, {'mesh__learner__expert': 2}, 'config.mesh.learner: expert = 2'),
    (tmp_path / 'mixture', {'mesh__learner__expert': 4}, 'config.mesh.learner: expert = 4'),
    (tmp_path / 'mixture', {'mesh__rollout__expert': 4}, 'config.mesh.rollout: expert = 4'),
    (tmp_path / 'mixture', {'mesh__rollout__tensor': 2}, 'config.mesh.rollout: tensor = 2 '),
  ]:
    assert said in refusal(changed(folder, **changes), tmp_path / 'run', monkeypatch)


def test_settings_that_processes_cannot_share(inputs, tmp_path, monkeypatch):
  said = refusal(changed(inputs, devices__engines=2), tmp_path / 'run', monkeypatch, Team(processes=2))
  assert said.startswith('config.devices.engines = 2: expected 1 over SPRL_PROCESSES = 2')


def test_a_process_that_was_started_as_another_run(inputs, tmp_path, monkeypatch):
  run = changed(inputs)
  first = {**settings.to_dict(run), 'seed': 7}

  def another(team):
    return refusal(run, tmp_path / 'run', monkeypatch, team)

  _, said = together(lambda team: team.broadcast('settings', lambda: first), another)
  assert str(said).startswith('SPRL_PROCESS=0 -> SPRL_PROCESS=1: expected the same run\n')
  assert '  seed: 7 -> 0' in str(said)


def test_problems_that_one_process_alone_has_or_cannot_use(inputs, tmp_path, monkeypatch):
  lines = [json.dumps({'prompt': prompt, 'answer': '1'}) for prompt in ('1 = ', '1 + 0 + 0 + 0 + 0 + 0 = ', '0 + 1 = ')]
  (tmp_path / 'train.jsonl').write_text('\n'.join(lines))
  (tmp_path / 'test.jsonl').write_text(lines[0])
  run = changed(inputs, task__path=str(tmp_path))
  first, second = together(*[lambda team: refusal(run, tmp_path / 'run', monkeypatch, team)] * 2)
  said = (
    f'config.sampling.max_prompt = 16: 1 of 3 prompts are longer; expected at least 24, the tokens of {tmp_path}/train.jsonl:2'
  )
  assert (first, second) == (said, said)


def test_moments_on_a_host_out_of_the_devices_reach(inputs, tmp_path, monkeypatch):
  monkeypatch.setattr(model, 'HOST', 'remote')  # as on a platform without pinned memory
  said = refusal(changed(inputs, optimizer__offload=True), tmp_path / 'run', monkeypatch)
  assert re.search(r'config.optimizer.offload = True: expected False.* no remote memory', said)


def test_a_grader_that_does_not_load(inputs, tmp_path, monkeypatch):
  (tmp_path / 'grader.py').write_text('import no_such_module\ndef grade(prompt, completion, answer): pass\n')
  said = refusal(changed(inputs, task__grader=f'{tmp_path}/grader.py:grade'), tmp_path / 'run', monkeypatch)
  assert 'config.task.grader' in said
  assert 'no_such_module' in said


def copied_model(inputs: Path, folder: Path) -> Path:
  folder.mkdir()
  for path in (inputs / 'model').iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  return folder


def test_model_folders_that_cannot_be_used(inputs, tmp_path, monkeypatch):
  pickled = copied_model(inputs, tmp_path / 'pickled')
  (pickled / 'model.safetensors').rename(pickled / 'pytorch_model.bin')
  foreign = copied_model(inputs, tmp_path / 'foreign')
  raw = json.loads((foreign / 'config.json').read_text())
  (foreign / 'config.json').write_text(json.dumps(raw | {'model_type': 'mamba'}))
  wordless = copied_model(inputs, tmp_path / 'wordless')
  (wordless / 'tokenizer.json').unlink()
  torn = copied_model(inputs, tmp_path / 'torn')
  (torn / 'model.safetensors').write_bytes((inputs / 'model' / 'model.safetensors').read_bytes()[:-10])
  for folder, said in [
    (pickled, 'pytorch_model.bin'),
    (foreign, "model_type = 'mamba' is not supported"),
    (wordless, 'tokenizer.json: no such file'),
    (torn, 'model.safetensors: '),
  ]:
    assert said in refusal(changed(inputs, model__path=str(folder)), tmp_path / 'run', monkeypatch)


def test_sequences_longer_than_the_model_is_made_for_are_remarked(inputs):
  run = changed(inputs)
  opened = model.Model.open(run)
  layout = opened.cache_layout(run.sampling, run.cache, run.quant)  # of 16 and 12 tokens
  said = [hooks.remarks(run, layout, 'reference', positions) for positions in (28, 27)]
  assert [remark for remark in said[1] if remark not in said[0]] == [
    'config.sampling.max_prompt and max_tokens allow sequences of 28 tokens; the model is made for 27 '
    '(max_position_embeddings in its config.json)'
  ]


def test_two_processes_do_not_share_a_work_directory(inputs, tmp_path, monkeypatch):
  with exclusive(tmp_path / 'run'):
    assert '--workdir' in refusal(changed(inputs), tmp_path / 'run', monkeypatch)


@pytest.mark.parametrize(('reset', 'said'), [('raise RuntimeError("no lake")', 'no lake'), ('return 42', 'returned a int')])
def test_an_environment_that_cannot_begin_is_refused(inputs, tmp_path, monkeypatch, reset, said):
  (tmp_path / 'lake.py').write_text(f'class Lake:\n  def reset(self, seed):\n    {reset}\n  def step(self, action): ...\n')
  run = changed(
    inputs, task__kind='environment', task__grader='auto', task__workers=None, arm='dense', quant__sampler='none',
    task__name=f'{tmp_path / "lake.py"}:Lake', sampling__max_prompt=64, sampling__prompt_buckets=(),
  )  # fmt: skip
  message = refusal(run, tmp_path / 'run', monkeypatch)
  assert f"config.task.name = '{tmp_path / 'lake.py'}:Lake': " in message
  assert 'environment Lake: reset(' in message
  assert said in message


# --- what breaks on the way ------------------------------------------------------------------------------------------


def test_weights_that_are_not_numbers_stop_the_run_with_a_report(inputs, tmp_path):
  broken = copied_model(inputs, tmp_path / 'broken')
  weights = load_file(broken / 'model.safetensors')
  weights['model.norm.weight'] = np.full_like(weights['model.norm.weight'], np.nan)
  save_file(weights, broken / 'model.safetensors', {'format': 'pt'})
  arguments = f'--config={inputs / "config.py"}', f'--config.model.path={broken}', f'--workdir={tmp_path / "run"}'
  status, _, err = tiny.run('main', *arguments)
  assert status == 3
  assert 'stopped at step 0:' in err  # before anything is sampled
  assert 'weight is not finite' in err
  assert str(tmp_path / 'run' / 'metrics.jsonl') in err
  assert 'Traceback' not in err


def test_what_is_served_first_is_checked_before_anything_is_sampled_from_it(inputs, tmp_path, monkeypatch):
  """fp8_rollouts 7.2, 7.3: of the first sync as of every other."""
  served = model.Model.sampler_weights
  run = changed(inputs)
  assert run.quant.sampler == 'w8a8_kv8'
  monkeypatch.setattr(train, 'compile_ahead', lambda *arguments: None)
  monkeypatch.setattr(
    model.Model, 'sampler_weights', lambda self, params, quant, scales=None: served(self, params, UNQUANTISED, scales)
  )
  with pytest.raises(hooks.StopRun, match=r"stopped at step 0:\n  .*\['kernel'\]: not quantised, against config\.quant"):
    train.train(run, tmp_path / 'run')
  assert read_metrics(tmp_path / 'run') == []


@pytest.mark.slow
def test_a_sampler_that_is_another_policy_stops_the_run(inputs, tmp_path, monkeypatch):
  """fp8_rollouts 10.13: weights that were served wrong show as a spike of the mismatch, and name where the run stands."""
  served = model.Model.sampler_weights

  def too_sharp(self, params, quant, scales=None):
    return served(self, {**params, 'embed': jax.tree.map(lambda w: 30 * w, params['embed'])}, quant, scales)

  run = changed(inputs, arm='dense', quant__sampler='none', ledger__every=None, sampling__temperature=1.0)
  monkeypatch.setattr(model.Model, 'sampler_weights', too_sharp)
  with pytest.raises(hooks.StopRun, match=r'stopped at step 1:\n  rollout_corr/kl = .*different policies'):
    train.train(run, tmp_path / 'run')
  (record,) = [r for r in read_metrics(tmp_path / 'run') if r['kind'] == 'train']  # what it stopped for is in the log
  assert abs(record['rollout_corr/kl']) > 1


@pytest.mark.slow
def test_a_policy_that_never_ends_its_answers_stops_the_run(tmp_path):
  """fp8_rollouts 10.13, by a model that knows no token that ends the turn."""
  tiny.write_inputs(tmp_path)
  for file in (tmp_path / 'model').glob('*config.json'):
    known = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in known.items() if not key.startswith('eos_token')}))
  run = changed(
    tmp_path, arm='dense', quant__sampler='none', ledger__every=None, sampling__stop=(), rollout__stop_when_capped=True
  )
  with pytest.raises(hooks.StopRun, match='stopped at step 2:\n  every response hit the length limit for 2 steps in a row'):
    train.train(run, tmp_path / 'run')
  steps = [r for r in read_metrics(tmp_path / 'run') if r['kind'] == 'train']
  assert [r['completion/truncated'] for r in steps] == [1, 1]


@pytest.mark.slow
def test_a_step_too_far_stops_the_run_with_a_report(inputs, tmp_path):
  arguments = f'--config={inputs / "config.py"}', '--config.optimizer.learning_rate=1e30', f'--workdir={tmp_path / "run"}'
  status, _, err = tiny.run('main', *arguments)
  assert status == 3
  assert re.search(r'stopped at step [12]:', err)  # with FP8 weights, which no number of that size fits, the first
  assert 'Traceback' not in err
