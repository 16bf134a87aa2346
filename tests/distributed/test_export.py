"""Two processes export a checkpoint: the same files, bit for bit, as one process writes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sprl.config import Lora, ModelSettings, Run, Task, to_dict
from sprl.io.checkpoint import Checkpoints
from sprl.io.config_file import write_config
from sprl.io.huggingface import export_folder
from sprl.io.run_state import RunState
from sprl.io.tokenizer import write_tiny
from sprl.learner import restore
from sprl.learner.optimizer import make_optimizer
from sprl.learner.state import TrainState
from sprl.model import Model, abstract_params
from sprl.models import transformer
from sprl.models.config import tiny

ROOT = Path(__file__).parents[2]


def checkpoint(folder: Path, lora: Lora) -> tuple[Run, Model]:
  """Write a work directory with a checkpoint of random weights, or of random adapters."""
  rng = np.random.default_rng(0)

  def random(tree):
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), tree)

  config = tiny('qwen2', num_hidden_layers=1)
  write_tiny(folder / 'tokenizer')
  weights = random(transformer.abstract_params(config))
  export_folder(folder / 'model', weights, config, folder / 'tokenizer', dtype=jnp.float32)
  run = Run(model=ModelSettings(path=str(folder / 'model')), task=Task(kind='jsonl', path=str(folder)), lora=lora, steps=3)
  model = Model.open(run)
  base = model.base()
  state = TrainState.create(random(abstract_params(model)), make_optimizer(run.optimizer, 3))
  saved = Checkpoints(folder / 'checkpoints', keep_last=1)
  saved.save(3, state, RunState(base=base and base.fingerprint).to_json())
  saved.close()
  write_config(folder, to_dict(run))
  return run, model


def export_by_two(folder: Path, *flags: str) -> str:
  """Export over two processes with two devices each, so that every matrix is in four parts. Return the output."""
  environment = {
    'PATH': os.environ['PATH'], 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
  }  # fmt: skip
  command = [sys.executable, '-m', 'sprl.export', f'--workdir={folder}', f'--out={folder / "two"}', '--dtype=float32', *flags]
  done = subprocess.run(
    ['bash', str(ROOT / 'launch' / 'local.sh'), '2', *command], cwd=ROOT, env=environment, capture_output=True, text=True,
    timeout=1200, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_two_processes_export_the_bits_of_one(tmp_path):
  run, model = checkpoint(tmp_path, Lora())
  assert 'the weights after step 3, in float32' in export_by_two(tmp_path)
  params, step, _ = restore.restore(model, run, tmp_path, dtype='float32')
  restore.export(model, params, tmp_path / 'one', 'float32')
  assert step == 3
  one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ('one', 'two'))
  assert two.pop('README.md').startswith(b'---\nlibrary_name: "transformers"')
  assert two == one


@pytest.mark.slow
@pytest.mark.parametrize('alone', [True, False])
def test_two_processes_export_adapters(tmp_path, alone):
  """Adapters alone are equal in all bits. Merged, each weight is a sum of two products, whose order may differ."""
  from safetensors.numpy import load_file

  run, model = checkpoint(tmp_path, Lora(rank=2, alpha=6.0, targets=('q', 'down')))
  export_by_two(tmp_path, *(['--adapter'] if alone else []))
  if alone:
    adapters = restore.restore_trained(model, tmp_path).arrays.params
    restore.export_adapter(model, adapters, tmp_path / 'one', run.model.path)
    files = [(tmp_path / name / 'adapter_model.safetensors').read_bytes() for name in ('one', 'two')]
    assert files[0] == files[1]
    return
  params, _, _ = restore.restore(model, run, tmp_path, dtype='float32')
  restore.export(model, params, tmp_path / 'one', 'float32')
  one, two = (load_file(tmp_path / name / 'model.safetensors') for name in ('one', 'two'))
  assert one.keys() == two.keys()
  for name, array in one.items():
    np.testing.assert_allclose(two[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
