"""A run with adapters, FP8 linears in the sampler, bfloat16 moments on the host and a KL penalty: resumed, refused, exported."""

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import sprl
from sprl import config as settings
from sprl import train
from sprl.config import SettingsError
from sprl.config_reader import resolve
from sprl.io.huggingface import tensors
from sprl.io.metrics import read_metrics
from sprl.learner import restore
from sprl.model import Model

CHANGES = {
  'lora.rank': 2, 'lora.alpha': 6.0, 'lora.targets': ('q', 'v', 'down'), 'optimizer.moment_dtype': 'bfloat16',
  'optimizer.offload': True, 'optimizer.minibatches': 1, 'ledger.every': None, 'eval.every': None, 'eval.problems': 1,
  'rollout.prompts': 2, 'arm': 'dense', 'quant.sampler': 'w8a8', 'model.dtype': 'float32',
}  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
  folder = tmp_path_factory.mktemp('inputs')
  tiny.write_inputs(folder)
  return folder


def run(folder: Path, **changes) -> settings.Run:
  scope: dict = {}
  exec((folder / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.update_from_flattened_dict(CHANGES | {key.replace('__', '.'): value for key, value in changes.items()})
  return resolve(config)


@pytest.fixture(scope='module')
def workdir(folder) -> Path:
  """A run of two steps."""
  assert train.train(run(folder, steps=2), folder / 'run').completed
  return folder / 'run'


def arrays(workdir: Path) -> dict[str, np.ndarray]:
  return {
    k: np.asarray(v) for k, v in ocp.PyTreeCheckpointer().restore(workdir / 'checkpoints' / 'step_000002' / 'arrays').items()
  }


def adapter(workdir: Path, layer: int, part: str, name: str) -> list[np.ndarray]:
  """Return [A, B] of a linear, from the checkpoint."""
  held = arrays(workdir)
  return [held[f".params['layers'][{layer}]['{part}']['{name}']['{ab}']"] for ab in 'ab']


@pytest.mark.slow
def test_a_resumed_run_ends_with_equal_bits(folder, workdir):
  for steps in (1, 2):
    train.train(run(folder, steps=steps), folder / 'interrupted')
  resumed, straight = arrays(folder / 'interrupted'), arrays(workdir)
  assert {k: v.tobytes() for k, v in resumed.items()} == {k: v.tobytes() for k, v in straight.items()}


def test_a_checkpoint_holds_adapters_and_their_moments_alone(workdir):
  held = arrays(workdir)
  names = {key.rpartition('[')[2].strip("'[]") for key, value in held.items() if value.ndim}
  assert names == {'a', 'b'}
  assert {held[key].dtype.name for key in held if 'mu' in key or 'nu' in key} == {'bfloat16'}
  assert any(np.any(adapter(workdir, layer, 'mlp', 'down')[1]) for layer in (0, 1))  # B starts at 0


def test_the_kl_penalty_compares_with_the_frozen_weights(workdir):
  first, second = (r['policy/kl_ref'] for r in read_metrics(workdir) if r['kind'] == 'train')
  assert first < 1e-12 < second  # two programs: equal to rounding


def save_changed(path: Path, to: Path):
  """Save a weight file with another scale of the last norm."""
  weights = load_file(path)
  save_file(weights | {'model.norm.weight': weights['model.norm.weight'] * 1.1}, to, metadata={'format': 'pt'})


def test_adapters_of_other_weights_or_another_rank_are_refused(folder, workdir):
  with pytest.raises(SettingsError, match=r'lora\.rank: 2 -> 4'):
    train.train(run(folder, steps=3, lora__rank=4), workdir)
  path = folder / 'model' / 'model.safetensors'
  whole = path.read_bytes()
  save_changed(path, path)
  try:
    for again in (lambda: train.train(run(folder, steps=3), workdir), lambda: restored(folder, workdir)):
      with pytest.raises(SettingsError, match=r'config\.model\.path = .*fingerprint'):
        again()
  finally:
    path.write_bytes(whole)


def test_a_model_with_adapters_is_not_saved_on_weights_that_changed_since_it_was_loaded(tmp_path):
  tiny.write_inputs(tmp_path, num_hidden_layers=1)
  model = sprl.load(tmp_path / 'model', lora={'rank': 2})
  save_changed(tmp_path / 'model' / 'model.safetensors', tmp_path / 'model' / 'model.safetensors')
  with pytest.raises(SettingsError, match=r'config\.model\.path = .*fingerprint'):
    model.save(tmp_path / 'saved')
  assert not (tmp_path / 'saved').exists()


@pytest.mark.slow
def test_a_run_is_not_exported_on_weights_that_changed_since_it_began(tmp_path):
  config = tiny.write_inputs(tmp_path, num_hidden_layers=1)
  path = tmp_path / 'model' / 'model.safetensors'
  save_changed(path, tmp_path / 'changed')
  (tmp_path / 'grader.py').write_text(
    f'import shutil\n{tiny.GRADER}'.replace('  time.sleep(0.02)', f"  shutil.copyfile('{tmp_path / 'changed'}', '{path}')")
  )
  changes = CHANGES | {'steps': 1, 'export': True}
  flags = [f'--config.{key}={value}' for key, value in changes.items() if value is not None]
  status, _, err = tiny.run('main', f'--config={config}', f'--workdir={tmp_path / "run"}', *flags)
  assert (status, 'fingerprint' in err, (tmp_path / 'run' / 'export').exists()) == (2, True, False), err


def restored(folder: Path, workdir: Path):
  model = Model.open(run(folder))
  return model, *restore.restore(model, run(folder), workdir, dtype='float32')


def test_an_export_merges_the_adapters_into_the_frozen_weights(folder, workdir):
  model, params, step, _ = restored(folder, workdir)
  restore.export(model, params, folder / 'merged', 'float32')
  base, merged = (load_file(folder / name / 'model.safetensors') for name in ('model', 'merged'))
  assert step == 2
  for path, tensor in tensors(model.config).items():
    expected = base[tensor.name].astype(np.float64)
    if path[-1] == 'kernel' and path[-2] in ('q', 'v', 'down'):
      a, b = adapter(workdir, *path[1:4])
      expected = expected + 3.0 * b.astype(np.float64) @ a
    np.testing.assert_allclose(merged[tensor.name], expected, atol=1e-6, err_msg=tensor.name)


def test_adapters_are_exported_alone_in_the_format_of_peft(folder, workdir):
  status, out, err = tiny.run('export', f'--workdir={workdir}', f'--out={folder / "adapter"}', '--adapter')
  assert (status, 'the adapters after step 2, of rank 2' in out) == (0, True), err
  config = json.loads((folder / 'adapter' / 'adapter_config.json').read_text())
  assert (config['r'], config['lora_alpha'], config['target_modules']) == (2, 6, ['down_proj', 'q_proj', 'v_proj'])
  assert config['base_model_name_or_path'] == str(folder / 'model')
  weights = load_file(folder / 'adapter' / 'adapter_model.safetensors')
  assert len(weights) == 2 * 2 * 3
  for name, expected in zip('AB', adapter(workdir, 1, 'mlp', 'down')):
    np.testing.assert_array_equal(weights[f'base_model.model.model.layers.1.mlp.down_proj.lora_{name}.weight'], expected)


def test_adapters_are_not_exported_over_their_base(folder, workdir):
  status, out, err = tiny.run('export', f'--workdir={workdir}', f'--out={folder / "model"}', '--adapter')
  assert (status, out) == (2, '')
  assert 'is the model that this export is made from' in err


def test_a_run_without_adapters_refuses_to_export_them(folder, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(settings.to_dict(run(folder, lora__rank=None))))
  status, out, err = tiny.run('export', f'--workdir={tmp_path}', f'--out={tmp_path / "x"}', '--adapter')
  assert (status, out) == (2, '')
  assert 'config.lora.rank = None' in err


def test_adapters_are_not_exported_in_bfloat16(folder, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(settings.to_dict(run(folder))))
  flags = f'--workdir={tmp_path}', f'--out={tmp_path / "x"}', '--adapter', '--dtype=bfloat16'
  assert tiny.run('export', *flags)[::2] == (
    2,
    'error: --dtype=bfloat16: expected float32 with --adapter, in which adapters are written\n',
  )
