"""Unusable input is refused by name before any device work, with status 2 and no traceback. A broken run stops with status 3."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny
from absl import flags
from ml_collections import config_flags
from safetensors.numpy import load_file, save_file
from teams import together

from sprl import command_line, hooks, model, train
from sprl import config as settings
from sprl.config import UNQUANTISED, SettingsError
from sprl.config_reader import resolve
from sprl.distributed.team import ALONE, Team
from sprl.io.checkpoint import CheckpointError
from sprl.io.files import local_folder
from sprl.io.huggingface import WeightsError
from sprl.io.metrics import LogError, read_metrics
from sprl.io.pretrained import PretrainedError
from sprl.io.run_folder import exclusive
from sprl.io.starts import parse_source
from sprl.io.tokenizer import TokenizerError
from sprl.kernels import support
from sprl.models.config import ConfigError
from sprl.models.config import tiny as tiny_config
from sprl.planning import room
from sprl.remarks import remarks
from sprl.rollout.scheduler import Stalled


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder)
  return folder


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    ('--config.steps=1e3', "config.steps = '1e3': expected a whole number"),
    ('--config.optimizer.learning_rate=fast', "config.optimizer.learning_rate = 'fast': expected a number"),
    ('--config.export=maybe', "config.export = 'maybe': expected True or False"),
    ('--config.task.args={bad}', "config.task.args = '{bad}': expected a dictionary"),
    ('--config.task.args.terms=x', None),
    ('--config.task.mixture.easy.weight=heavy', None),
    ('--config.model.path=3', None),
  ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_is_expected(flag, said):
  name = flag.removeprefix('--').partition('=')[0]
  found = command_line._of_wrong_type(name, ['main', "--config.task.args={'a': 1}", flag])
  assert found is None if said is None else found.startswith(said)


def test_a_missing_config_file_is_named_with_the_shipped_ones(tmp_path):
  with pytest.raises(SettingsError, match=r'--config=mine\.py: no such file.* configs/quickstart\.py'):
    command_line._check_file('mine.py')
  with pytest.raises(SettingsError, match='no such file'):
    command_line._check_file(str(tmp_path))
  with pytest.raises(SettingsError, match='expected a folder, got a file'):
    local_folder('--workdir', __file__)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert local_folder('--workdir', '~/runs/x') == tmp_path / 'runs' / 'x'
  assert parse_source('~/runs/x:3') == (tmp_path / 'runs' / 'x', 3)
  assert local_folder('--workdir', '~nobody-here/x') == Path('~nobody-here/x')  # as in a shell


# --- flags: refused before jax is loaded; each test starts a process -------------------------------------------------


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    (
      "--config.optimizer={'learning_rate': 1e-3}",
      'config.optimizer: expected flags of its settings, such as --config.optimizer.',
    ),
    ('--config.rollout.grup=4', 'config.rollout.grup: no such setting; config.rollout has async_ratio, equal_groups'),
    ('--config.steps=many', "config.steps = 'many': expected a whole number"),
    ('--config.learning_rate=1e-5', 'config.learning_rate: no such setting; config has advantage, '),
    ('--config.rollout.learning_rate=1e-5', '; there is config.optimizer.learning_rate'),
    ('--config.loss.variant=grpo', "config.loss.variant = 'grpo': expected one of 'ppo', 'gspo'"),
    ('--config.cache.budget=many', "config.cache.budget = 'many': expected int"),
    ('--config.task.args.terms=2', 'config.task.args.terms: not set in the config; set all of --config.task.args='),
    ('--config.task.mixture.a.weight=2.0', 'mixture.a.weight: not set in the config; set all of --config.task.mixture='),
    ('--config.eval.sets.a.path=x', 'config.eval.sets.a.path: not set in the config; set all of --config.eval.sets='),
    ('--config.task.suffix=None', "config.task.suffix = 'None': expected text to append, or '' for none"),
    ('--workdirectory=x', "Unknown command line flag 'workdirectory'"),
    ('config.steps=5', 'error: config.steps=5: expected flags only, such as --config.steps=5'),
  ],
)
def test_an_unusable_flag_is_refused(inputs, tmp_path, flag, said):
  status, out, err = tiny.run('main', f'--config={inputs / "config.py"}', f'--workdir={tmp_path / "run"}', flag)
  assert (status, out) == (2, '')
  assert said in err
  assert 'Traceback' not in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('command', 'others'), [('report', ()), ('export', ('--out=x',)), ('main', ('--config=configs/quickstart.py',))]
)
def test_a_flag_that_is_given_twice_is_refused(command, others, tmp_path):
  status, out, err = tiny.run(command, f'--workdir={tmp_path}/a', *others, f'--workdir={tmp_path}/b')
  assert (status, out) == (2, '')
  assert err == f'error: --workdir={tmp_path}/a --workdir={tmp_path}/b: expected the flag --workdir once\n'


def test_flags_of_two_words_and_of_opposite_values_are_counted_and_settings_may_be_repeated(monkeypatch):
  values = flags.FlagValues()
  flags.DEFINE_string('out', None, '', flag_values=values)
  flags.DEFINE_bool('adapter', False, '', flag_values=values)
  flags.DEFINE_integer('config.steps', 1, '', flag_values=values)
  monkeypatch.setattr(command_line.flags, 'FLAGS', values)
  command_line._check_given_once(['main', '--out', '-1', '--config.steps', '-1', '--config.steps=2'])
  for twice in (['--out', 'a', '-out=b'], ['--adapter', '--noadapter']):
    with pytest.raises(SettingsError, match=r'expected the flag --(out|adapter) once'):
      command_line._check_given_once(['main', *twice])


@pytest.mark.parametrize(
  ('config', 'said'),
  [
    ('nowhere.py', 'nowhere.py'),
    ('configs/qwen_gsm8k.py:qwen9', 'error: configs/qwen_gsm8k.py:qwen9: no such variant; accepted: qwen2.5-0.5b, '),
  ],
)
def test_an_unusable_config_file_is_refused(config, said):
  status, out, err = tiny.run('main', f'--config={config}')
  assert (status, out) == (2, '')
  assert said in err
  assert 'Traceback' not in err


@pytest.mark.parametrize(
  ('code', 'said'),
  [
    ('x = 1', 'error: {file}: has no function get_config(); expected '),
    ('def get_config():\n  return {}["a"]', "error: {file}, line 2: KeyError: 'a'. The code of the config file raised"),
    ('def get_config():\n  raise ValueError("bad")', 'error: {file}, line 2: ValueError: bad. The code of the config file'),
    ('import nowhere_at_all', "error: {file}, line 1: ModuleNotFoundError: No module named 'nowhere_at_all'. The code"),
    ('def get_config(:', 'error: {file}, line 1: SyntaxError: invalid syntax. The code of the config file raised'),
  ],
)
def test_an_error_in_the_code_of_a_config_file_is_named(tmp_path, monkeypatch, capsys, code, said):
  file = tmp_path / 'mine.py'
  file.write_text(code)
  assert said.format(file=file) in refusal_of_flags(monkeypatch, capsys, f'--config={file}')


@pytest.mark.parametrize(
  ('code', 'said'),
  [
    ("config.sampling.stop = ';'", "error: config.sampling.stop = ';': expected a list of str\n"),
    ('config.steps = 3.0', 'error: config.steps = 3.0: expected int, got float\n'),
    ('config.mesh.rollout.data = 1.5', 'error: config.mesh.rollout.data = 1.5: expected int, got float\n'),
    ('change(config.rollout)', "error: config.rollout.group = '4': expected int, got str\n"),
    ("config.task.args = {'a': 1}\n  config.task.args.a = 'x'", "error: {file}, line 7: TypeError: Could not override field 'a'"),
  ],
)
def test_a_wrong_type_in_a_config_file_is_named_with_its_key(tmp_path, monkeypatch, capsys, code, said):
  file = tmp_path / 'mine.py'
  change = "def change(section):\n  section.group = '4'\n"
  file.write_text(
    f'import sprl.config\n{change}def get_config():\n  config = sprl.config.default_config()\n  {code}\n  return config'
  )
  assert refusal_of_flags(monkeypatch, capsys, f'--config={file}').startswith(said.format(file=file))


@pytest.mark.parametrize(('returned', 'name'), [('None', 'None'), ('3', 'int')])
def test_a_config_file_that_returns_no_config_is_refused_beside_other_flags(tmp_path, monkeypatch, capsys, returned, name):
  file = tmp_path / 'mine.py'
  file.write_text(f'def get_config():\n  return {returned}')
  said = refusal_of_flags(monkeypatch, capsys, f'--config={file}', '--config.steps=1')
  assert said == f'error: get_config() of {file} returned {name}: expected sprl.config.default_config() with changes\n'


def refusal_of_flags(monkeypatch, capsys, *arguments: str) -> str:
  """Return the error with which flags are refused."""
  values, argv = flags.FlagValues(), ['program', *arguments]
  config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
  monkeypatch.setattr(command_line.flags, 'FLAGS', values)
  with pytest.raises(SystemExit) as ended:
    command_line._parse(argv, lambda argv: None)
  assert ended.value.code == 2
  err = capsys.readouterr().err
  assert 'Traceback' not in err
  return err


def test_a_key_that_dictionaries_of_settings_cannot_have_is_refused(inputs, monkeypatch, capsys):
  flag = "--config.task.args={'__class__': 3}"
  assert refusal_of_flags(monkeypatch, capsys, f'--config={inputs / "config.py"}', flag).startswith(
    "error: '__class__' cannot be a key of a dictionary of settings, because ml_collections uses it: expected another name"
  )


@pytest.mark.parametrize(
  ('returned', 'said'), [('3', 'get_config() returned int'), ('None', 'get_config() of {file} returned None')]
)
def test_a_config_file_that_returns_no_config_is_refused(tmp_path, returned, said):
  file = tmp_path / 'mine.py'
  file.write_text(f'def get_config():\n  return {returned}')
  status, out, err = tiny.run('main', f'--config={file}')
  assert (status, out) == (2, '')
  assert err.endswith(f'error: {said.format(file=file)}: expected sprl.config.default_config() with changes\n')


@pytest.mark.parametrize('command', ['evaluate', 'export'])
def test_an_address_is_refused_as_a_work_directory(command):
  status, out, err = tiny.run(command, '--workdir=s3://bucket/run', *(['--out=x'] if command == 'export' else []))
  assert (status, out) == (2, '')
  assert err.startswith('error: --workdir=s3://bucket/run: expected a folder of this machine or of a mounted file system')


@pytest.mark.parametrize('command', ['evaluate', 'export'])
def test_a_folder_without_a_run_is_refused(command, tmp_path):
  status, out, err = tiny.run(command, f'--workdir={tmp_path}', *(['--out=x'] if command == 'export' else []))
  assert (status, out) == (2, '')
  assert f'{tmp_path / "config.json"}: no such file' in err
  assert 'Traceback' not in err


def test_input_errors_print_one_line_and_return_status_2(capsys):
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
  with pytest.raises(ZeroDivisionError):  # an unexpected error keeps its traceback
    command_line.reported(lambda: 1 // 0)


# --- files: refused by `train`, before a weight is read --------------------------------------------------------------


def run_with(inputs: Path, **changes) -> settings.Run:
  """Return the tiny run with some settings changed, for example `task__path='x'`."""
  scope: dict = {}
  exec((inputs / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.update_from_flattened_dict({key.replace('__', '.'): value for key, value in changes.items()})
  return resolve(config)


def refusal_of(run: settings.Run, workdir: Path, monkeypatch, team: Team = ALONE) -> str:
  """Return the error with which `train` refuses a run. Assert that it reads no weight and writes no file."""

  def load(*_):
    pytest.fail('a weight was read')

  monkeypatch.setattr(model.Model, 'load', load)
  before = sorted(workdir.rglob('*')) if workdir.exists() else []
  with pytest.raises(ValueError) as error:  # noqa: PT011  (several types of errors; `reported` accepts each)
    train.train(run, workdir, team)
  assert command_line.reported(lambda: (_ for _ in ()).throw(error.value)) == 2
  assert (sorted(workdir.rglob('*')) if workdir.exists() else []) == before
  return str(error.value)


def test_settings_that_do_not_fit_the_files_or_the_model_are_refused(inputs, tmp_path, monkeypatch):
  for changes, said in [
    ({'model__path': '/no/folder'}, "'/no/folder': no such folder"),
    ({'task__path': 'none'}, "config.task.path = 'none': expected a folder"),
    (
      {'task__kind': 'reasoning_gym', 'task__path': None, 'task__name': 'chain_sums', 'task__grader': 'auto'},
      "config.task.name = 'chain_sums'",
    ),
    ({'task__kind': 'gsm8k', 'task__path': '/no/folder', 'task__grader': 'auto'}, "config.task.path = '/no/folder': no such"),
    ({'task__grader': 'mine.py:grade'}, "config.task.grader = 'mine.py:grade'"),
    ({'sampling__max_prompt': 8, 'sampling__prompt_buckets': (8,)}, 'config.sampling.max_prompt = 8: '),
    ({'sampling__stop_ids': (2, 259)}, 'config.sampling.stop_ids has 259: expected '),
    ({'mesh__learner__tensor': 3}, 'config.mesh.learner = '),
    ({'mesh__rollout__fsdp': 3}, 'config.mesh.rollout = '),
    ({'cache__window': 20, 'cache__budget': 20}, 'config.cache.budget = 20: expected more than 20'),
    ({'model__router_replay': 'R3'}, "config.model.router_replay = 'R3': expected 'none'"),
    ({'loss__balance_coef': 0.01}, 'config.loss.balance_coef = 0.01: expected 0.0'),
    ({'cache__method': 'streaming', 'cache__streaming__sinks': 30}, 'config.cache.budget = 12: expected '),
    ({'quant__skip_layers': (40,)}, 'config.quant.skip_layers = (40,): expected'),
    (
      {'quant__sampler': 'kv8', 'quant__learner': 'w8a8', 'quant__skip_layers': (0, 1)},
      'config.quant.skip_layers = (0, 1): expected to leave one of the 2 layers',
    ),
  ]:
    assert said in refusal_of(run_with(inputs, **changes), tmp_path / 'run', monkeypatch)


def test_filters_whose_tokens_cannot_be_recorded_are_refused(inputs, tmp_path, monkeypatch):
  monkeypatch.setattr(support, 'MOST_WORDS', 8)  # the mask of this vocabulary of 259 tokens has 9 words
  for changes, said in [
    ({'sampling__top_p': 0.9}, 'config.sampling.top_p = 0.9: expected config.sampling.top_k of at most 8 beside it'),
    ({'sampling__min_p': 0.1}, 'config.sampling.min_p = 0.1: expected config.sampling.top_k of at most 8 beside it'),
    ({'sampling__top_p': 0.9, 'sampling__top_k': 9}, 'config.sampling.top_k = 9: expected at most 8'),
  ]:
    assert said in refusal_of(run_with(inputs, **changes), tmp_path / 'run', monkeypatch)


def test_a_mesh_that_cannot_split_the_experts_is_refused(inputs, tmp_path, monkeypatch):
  one = jax.devices()
  monkeypatch.setattr(jax, 'devices', lambda *_: one * 4)  # the check only counts devices
  tiny.write_inputs(tmp_path / 'mixture', 'qwen3_moe')  # six experts
  for folder, changes, said in [
    (inputs, {'mesh__learner__expert': 2}, 'config.mesh.learner: expert = 2'),
    (tmp_path / 'mixture', {'mesh__learner__expert': 4}, 'config.mesh.learner: expert = 4'),
    (tmp_path / 'mixture', {'mesh__rollout__expert': 4}, 'config.mesh.rollout: expert = 4'),
    (tmp_path / 'mixture', {'mesh__rollout__tensor': 2}, 'config.mesh.rollout: tensor = 2 '),
    (tmp_path / 'mixture', {'mesh__learner__tensor': 2, 'quant__learner': 'w8a8'}, 'config.mesh.learner: tensor = 2 '),
    (
      inputs,
      {'mesh__learner__tensor': 2, 'quant__learner': 'w8a8', 'quant__arithmetic': 'blockwise'},
      "config.quant.learner = 'w8a8': expected 'none', or config.quant.arithmetic = 'emulate'",
    ),
  ]:
    assert said in refusal_of(run_with(folder, **changes), tmp_path / 'run', monkeypatch)


def test_several_engines_are_refused_over_several_processes(inputs, tmp_path, monkeypatch):
  said = refusal_of(run_with(inputs, devices__engines=2), tmp_path / 'run', monkeypatch, Team(processes=2))
  assert said.startswith('config.devices.engines = 2: expected 1 over SPRL_PROCESSES = 2')


def test_a_process_with_other_settings_is_refused(inputs, tmp_path, monkeypatch):
  run = run_with(inputs)
  first = {**settings.to_dict(run), 'seed': 7}

  def another(team):
    return refusal_of(run, tmp_path / 'run', monkeypatch, team)

  _, said = together(lambda team: team.broadcast('settings', lambda: first), another)
  assert str(said).startswith('SPRL_PROCESS=0 -> SPRL_PROCESS=1: expected the same run\n')
  assert '  seed: 7 -> 0' in str(said)


def test_all_processes_name_the_prompt_that_is_too_long(inputs, tmp_path, monkeypatch):
  lines = [json.dumps({'prompt': prompt, 'answer': '1'}) for prompt in ('1 = ', '1 + 0 + 0 + 0 + 0 + 0 = ', '0 + 1 = ')]
  (tmp_path / 'train.jsonl').write_text('\n'.join(lines))
  (tmp_path / 'test.jsonl').write_text(lines[0])
  run = run_with(inputs, task__path=str(tmp_path))
  first, second = together(*[lambda team: refusal_of(run, tmp_path / 'run', monkeypatch, team)] * 2)
  said = (
    f'config.sampling.max_prompt = 16: 1 of 3 prompts are longer; expected at least 24, the tokens of {tmp_path}/train.jsonl:2'
  )
  assert (first, second) == (said, said)


def test_offloaded_moments_without_host_memory_are_refused(inputs, tmp_path, monkeypatch):
  monkeypatch.setattr(model, 'HOST', 'remote')  # as on a platform without pinned memory
  said = refusal_of(run_with(inputs, optimizer__offload=True), tmp_path / 'run', monkeypatch)
  assert re.search(r'config.optimizer.offload = True: expected False.* no remote memory', said)


def test_a_grader_that_does_not_load_is_refused(inputs, tmp_path, monkeypatch):
  (tmp_path / 'grader.py').write_text('import no_such_module\ndef grade(prompt, completion, answer): pass\n')
  said = refusal_of(run_with(inputs, task__grader=f'{tmp_path}/grader.py:grade'), tmp_path / 'run', monkeypatch)
  assert 'config.task.grader' in said
  assert 'no_such_module' in said


def copied_model(inputs: Path, folder: Path) -> Path:
  folder.mkdir()
  for path in (inputs / 'model').iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  return folder


def test_unusable_model_folders_are_refused(inputs, tmp_path, monkeypatch):
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
    assert said in refusal_of(run_with(inputs, model__path=str(folder)), tmp_path / 'run', monkeypatch)


def test_a_cache_larger_than_the_memory_is_refused(inputs, tmp_path, monkeypatch):
  """A row has 28 positions of 2 layers, each a key and a value of 2 heads of 16 numbers of 4 bytes: see tiny('qwen2')."""
  monkeypatch.setattr(room, 'memory_of', lambda devices: 10 * 2**30)
  dense = {'arm': 'dense', 'cache__budget': None, 'quant__sampler': 'none', 'model__dtype': 'float32', 'ledger__every': None}
  said = refusal_of(run_with(inputs, sampling__rows=100_000_000, **dense), tmp_path / 'run', monkeypatch)
  config = tiny_config('qwen2')
  row = 28 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
  assert said.startswith('config.sampling.rows = 100000000: expected a KV cache of at most 10 GiB, the memory of its 1 devices')
  found = float(re.search(r'found ([\d,]+) GiB', said)[1].replace(',', ''))
  assert 1e8 * row / 2**30 <= found < 1.3 * 1e8 * row / 2**30  # beside keys and values: positions, ...
  said = refusal_of(run_with(inputs, rollout__prompts=10_000_000, **dense), tmp_path / 'run', monkeypatch)
  assert said.startswith('config.sampling.rows = None and config.rollout.prompts, group: 40000000 sequences side by side: ')


def test_a_dense_evaluation_larger_than_the_memory_is_refused_though_the_sparse_rollouts_fit(inputs, tmp_path, monkeypatch):
  monkeypatch.setattr(room, 'memory_of', lambda devices: 2**30)
  long = {'eval__max_tokens': 10_000_000, 'quant__sampler': 'none', 'model__dtype': 'float32'}
  said = refusal_of(run_with(inputs, **long), tmp_path / 'run', monkeypatch)
  assert said.startswith(
    "config.eval.memory = 'dense': the evaluation has 3 sequences side by side: expected a KV cache of at most 1 GiB"
  )
  assert "config.eval.memory = 'sampler'" in said


def test_the_memory_of_devices_is_that_which_they_report(tmp_path, monkeypatch):
  def gpu(process, limit):
    return SimpleNamespace(platform='gpu', process_index=process, memory_stats=lambda: {'bytes_limit': limit})

  assert room.memory_of([gpu(0, 5), gpu(0, 7), gpu(1, None)]) == 3 * 7  # those of another process do not answer
  assert room.memory_of([SimpleNamespace(platform='gpu', process_index=0, memory_stats=lambda: None)]) is None
  total = int(re.search(r'MemTotal:\s+(\d+) kB', Path('/proc/meminfo').read_text())[1]) * 1024
  monkeypatch.setattr(room, 'GROUP_LIMITS', [])
  assert room.memory_of(jax.devices()) == pytest.approx(total, rel=0.01)
  files = [tmp_path / name for name in ('limit', 'unlimited', 'absent')]
  files[0].write_text(f'{2**20}\n')
  files[1].write_text('max\n')
  monkeypatch.setattr(room, 'GROUP_LIMITS', files)
  assert room.memory_of(jax.devices()) == 2**20  # of a container


def test_a_run_of_no_steps_is_remarked(inputs):
  run = run_with(inputs, steps=0)
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  said = remarks(run, layout, 'reference', 100)
  assert 'config.steps = 0: the run evaluates and saves its first weights, and trains on nothing' in said


def test_a_warm_up_longer_than_the_run_is_remarked(inputs):
  for warm, expected in ((12, True), (11, False)):  # six steps of two updates
    run = run_with(inputs, optimizer__warmup_steps=warm)
    layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
    said = [remark for remark in remarks(run, layout, 'reference', 100) if 'warmup_steps' in remark]
    assert bool(said) == expected
    assert all('the run has 12 updates' in remark for remark in said)


def test_sequences_beyond_the_positions_of_the_model_are_remarked(inputs):
  run = run_with(inputs)
  opened = model.Model.open(run)
  layout = opened.cache_layout(run.sampling, run.cache, run.quant)  # prompts of 16 tokens, completions of 12
  said = [remarks(run, layout, 'reference', positions) for positions in (28, 27)]
  assert [remark for remark in said[1] if remark not in said[0]] == [
    'config.sampling.max_prompt and max_tokens allow sequences of 28 tokens; the model is made for 27 '
    '(max_position_embeddings in its config.json)'
  ]


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'sampler': 'none', 'format': 'mxfp8', 'kv_scale': 'unit'}, {'format', 'kv_scale'}),
    ({'sampler': 'kv8', 'arithmetic': 'blockwise', 'kv_scale': 'unit'}, {'arithmetic'}),
    ({'sampler': 'w8a8', 'skip_layers': (0,), 'kv_scale': 'unit'}, {'kv_scale'}),
    ({'sampler': 'none', 'learner': 'w8a8', 'skip_names': ('q',), 'kv_scale': 'learner'}, set()),
    ({'sampler': 'w8a8_kv8', 'format': 'pow2', 'kv_scale': 'unit'}, set()),
  ],
)
def test_settings_of_fp8_without_effect_are_remarked(inputs, changes, expected):
  run = run_with(inputs, **{f'quant__{key}': value for key, value in changes.items()})
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  said = remarks(run, layout, 'reference', 512)
  assert {remark.split(' = ')[0].removeprefix('config.quant.') for remark in said if 'has no effect' in remark} == expected


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'loss__tis__low': 0.5, 'loss__topr__level': 'sequence'}, {'loss.tis.low', 'loss.topr.level'}),
    ({'loss__variant': 'tis', 'loss__tis__low': 0.5, 'correction__mode': 'bypass', 'correction__level': None}, set()),
    ({'cache__gkv__decay': 0.5, 'cache__rkv__mix': 0.5}, {'cache.gkv.decay'}),
    (
      {'optimizer__name': 'sgd', 'optimizer__b1': 0.5, 'optimizer__weight_decay': 0.3},
      {'optimizer.b1', 'optimizer.weight_decay'},
    ),
    ({'optimizer__name': 'lion', 'optimizer__b1': 0.5, 'optimizer__weight_decay': 0.3}, set()),
    ({'correction__floor': 0.1}, {'correction.floor'}),
    ({'lora__alpha': 8.0, 'lora__targets': ('q',)}, {'lora.alpha', 'lora.targets'}),
    ({'lora__alpha': 8.0, 'lora__targets': ('q',), 'lora__rank': 2}, set()),
    ({'eval__top_p': 0.9, 'log__project': 'mine', 'task__turns': 3}, {'eval.top_p', 'log.project', 'task.turns'}),
    ({'eval__top_p': 0.9, 'eval__temperature': 0.7}, set()),
    ({'correction__floor': 0.1, 'correction__weight': 'clip'}, set()),
    (
      {'cache__budget': None, 'cache__method': 'gkv', 'cache__interval': 4, 'cache__window': 2, 'cache__gkv__decay': 0.5},
      {'cache.method', 'cache.interval', 'cache.window', 'cache.gkv.decay'},
    ),
    ({'arm': 'dense', 'cache__interval': 4}, set()),
    ({'preset': 'areal', 'cache__interval': 4}, set()),
  ],
)
def test_settings_of_what_is_not_selected_are_remarked(inputs, changes, expected):
  plain = {'arm': None, 'cache__interval': 128, 'cache__window': None, 'quant__sampler': 'none', 'quant__kv_scale': 'learner'}
  run = run_with(inputs, **(plain | changes))
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  said = [remark for remark in remarks(run, layout, 'reference', 512) if 'has no effect' in remark]
  assert {remark.split(' = ')[0].removeprefix('config.') for remark in said} == expected
  assert len(said) == len(expected)


def test_no_setting_of_the_cache_is_remarked_with_a_method_of_a_user(inputs, tmp_path):
  """Its function gets all of them."""
  (tmp_path / 'mine.py').write_text('def newest(view, cache): return None\n')
  changes = {'arm': None, 'cache__method': f'{tmp_path}/mine.py:newest', 'cache__rkv__mix': 0.5, 'quant__kv_scale': 'learner'}
  run = run_with(inputs, **changes, quant__sampler='none')
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  assert not [remark for remark in remarks(run, layout, 'reference', 512) if 'has no effect' in remark]


@pytest.mark.parametrize(('estimator', 'remarked'), [('reinforce', True), ('grpo', False)])
def test_groups_that_are_left_out_though_they_teach_are_remarked(inputs, estimator, remarked):
  run = run_with(inputs, arm=None, rollout__equal_groups='skip', advantage__estimator=estimator)
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  assert any('leaves out groups' in remark for remark in remarks(run, layout, 'reference', 512)) == remarked


@pytest.mark.parametrize(
  ('mode', 'minibatches', 'remarked'), [('decoupled', 2, True), ('decoupled', 1, False), ('bypass', 2, False)]
)
def test_reinforce_without_a_ratio_in_several_updates_is_remarked(inputs, mode, minibatches, remarked):
  changes = {'loss__variant': 'reinforce', 'correction__mode': mode, 'optimizer__minibatches': minibatches}
  run = run_with(inputs, arm=None, **changes)
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  assert any('does not correct for the drift' in remark for remark in remarks(run, layout, 'reference', 512)) == remarked


@pytest.mark.parametrize(
  ('mode', 'minibatches', 'remarked'), [('decoupled', 1, True), ('decoupled', 2, False), ('bypass', 1, False)]
)
def test_a_loss_of_ones_own_whose_ratio_is_1_is_remarked(inputs, mode, minibatches, remarked):
  changes = {'loss__variant': 'mine/losses.py:bounded', 'correction__mode': mode, 'optimizer__minibatches': minibatches}
  changes['correction__level'] = None if mode == 'bypass' else 'token'
  run = run_with(inputs, arm=None, **changes)
  layout = model.Model.open(run).cache_layout(run.sampling, run.cache, run.quant)
  assert any('the ratio is 1 for every token' in remark for remark in remarks(run, layout, 'reference', 512)) == remarked


def test_an_fp8_learner_of_a_sampler_without_fp8_is_remarked(inputs):
  for sampler, learner, expected in (
    ('none', 'w8a8', True),
    ('kv8', 'w8a8', True),
    ('w8a8', 'w8a8', False),
    ('w8a8', 'none', False),
  ):
    run = run_with(inputs, quant__sampler=sampler, quant__learner=learner)
    opened = model.Model.open(run)
    layout = opened.cache_layout(run.sampling, run.cache, run.quant)
    said = remarks(run, layout, 'reference', 512)
    assert any('config.quant.learner' in remark for remark in said) == expected
    assert any(remark.startswith('FP8 linears are emulated') for remark in said)


def test_a_work_directory_in_use_is_refused(inputs, tmp_path, monkeypatch):
  with exclusive(tmp_path / 'run'):
    assert '--workdir' in refusal_of(run_with(inputs), tmp_path / 'run', monkeypatch)


def test_files_in_the_way_of_the_export_are_found_before_the_first_step(inputs, tmp_path, monkeypatch):
  (tmp_path / 'run' / 'export').mkdir(parents=True)
  (tmp_path / 'run' / 'export' / 'notes.txt').write_text('mine')
  said = refusal_of(run_with(inputs, export=True), tmp_path / 'run', monkeypatch)
  assert 'config.export' in said
  assert 'run/export' in said


@pytest.mark.parametrize(('reset', 'said'), [('raise RuntimeError("no lake")', 'no lake'), ('return 42', 'returned a int')])
def test_an_environment_with_a_faulty_reset_is_refused(inputs, tmp_path, monkeypatch, reset, said):
  (tmp_path / 'lake.py').write_text(f'class Lake:\n  def reset(self, seed):\n    {reset}\n  def step(self, action): ...\n')
  run = run_with(
    inputs, task__kind='environment', task__path=None, task__grader='auto', task__workers=None, arm='dense',
    quant__sampler='none', task__name=f'{tmp_path / "lake.py"}:Lake', sampling__max_prompt=64, sampling__prompt_buckets=(),
  )  # fmt: skip
  message = refusal_of(run, tmp_path / 'run', monkeypatch)
  assert f"config.task.name = '{tmp_path / 'lake.py'}:Lake': " in message
  assert 'environment Lake: reset(' in message
  assert said in message


# --- runs that stop --------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_stop_the_run_before_sampling(inputs, tmp_path, monkeypatch):
  broken = copied_model(inputs, tmp_path / 'broken')
  weights = load_file(broken / 'model.safetensors')
  weights['model.norm.weight'] = np.full_like(weights['model.norm.weight'], np.nan)
  save_file(weights, broken / 'model.safetensors', {'format': 'pt'})
  monkeypatch.setattr(train, 'compile_programs', lambda *arguments: None)
  with pytest.raises(hooks.StopRun, match=r'stopped at step 0:\n  .*weight is not finite') as stop:
    train.train(run_with(inputs, model__path=str(broken)), tmp_path / 'run')
  assert str(tmp_path / 'run' / 'metrics.jsonl') in str(stop.value)


def test_first_sampler_weights_are_checked_before_sampling(inputs, tmp_path, monkeypatch):
  """The self-check runs after the first sync too (docs/methods/fp8.md, Self-checks)."""
  sampler_weights = model.Model.sampler_weights
  run = run_with(inputs)
  assert run.quant.sampler == 'w8a8_kv8'
  monkeypatch.setattr(train, 'compile_programs', lambda *arguments: None)
  monkeypatch.setattr(
    model.Model, 'sampler_weights', lambda self, params, quant, scales=None: sampler_weights(self, params, UNQUANTISED, scales)
  )
  with pytest.raises(hooks.StopRun, match=r"stopped at step 0:\n  .*\['kernel'\]: not quantised, against config\.quant"):
    train.train(run, tmp_path / 'run')
  assert read_metrics(tmp_path / 'run') == []


@pytest.mark.slow
def test_a_sampler_with_another_policy_stops_the_run(inputs, tmp_path, monkeypatch):
  """Wrong sampler weights raise the KL of the mismatch above 1 (docs/methods/losses.md, Stop conditions, 2)."""
  sampler_weights = model.Model.sampler_weights

  def too_sharp(self, params, quant, scales=None):
    return sampler_weights(self, {**params, 'embed': jax.tree.map(lambda w: 30 * w, params['embed'])}, quant, scales)

  run = run_with(inputs, arm='dense', quant__sampler='none', ledger__every=None, sampling__temperature=1.0)
  monkeypatch.setattr(model.Model, 'sampler_weights', too_sharp)
  with pytest.raises(hooks.StopRun, match=r'stopped at step 2:\n  rollout_corr/kl = .*2 steps in a row.*different policies'):
    train.train(run, tmp_path / 'run')
  records = [r for r in read_metrics(tmp_path / 'run') if r['kind'] == 'train']  # the log has the step that stops the run
  assert [abs(record['rollout_corr/kl']) > 1 for record in records] == [True, True]


@pytest.mark.slow
def test_responses_that_all_hit_the_length_limit_stop_the_run(tmp_path):
  """The model has no end-of-turn token, so every response is truncated (docs/methods/losses.md, Stop conditions, 5)."""
  tiny.write_inputs(tmp_path)
  for file in (tmp_path / 'model').glob('*config.json'):
    known = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in known.items() if not key.startswith('eos_token')}))
  run = run_with(
    tmp_path, arm='dense', quant__sampler='none', ledger__every=None, sampling__stop=(), rollout__stop_when_capped=True
  )
  with pytest.raises(hooks.StopRun, match='stopped at step 2:\n  every response hit the length limit for 2 steps in a row'):
    train.train(run, tmp_path / 'run')
  steps = [r for r in read_metrics(tmp_path / 'run') if r['kind'] == 'train']
  assert [r['completion/truncated'] for r in steps] == [1, 1]


@pytest.mark.slow
def test_diverging_weights_stop_the_run(inputs, tmp_path):
  arguments = f'--config={inputs / "config.py"}', '--config.optimizer.learning_rate=1e30', f'--workdir={tmp_path / "run"}'
  status, _, err = tiny.run('main', *arguments)
  assert status == 3
  assert re.search(r'stopped at step [12]:', err)  # step 1 if the FP8 weights cannot hold numbers of that size
  assert 'Traceback' not in err
