"""The notebook runs on the work directory of a run, and is stored without outputs."""

import math
from pathlib import Path

import nbclient
import nbformat

from sprl.io.config_file import write_config
from sprl.io.metrics import RunLog

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / 'notebooks' / 'reading_a_run.ipynb'


def write_run(workdir: Path, steps: int) -> Path:
  """Write the metrics of a short run to `workdir`. Return `workdir`."""
  write_config(workdir, {'seed': 7, 'steps': steps})
  log = RunLog(workdir, None)
  for step in range(1, steps + 1):
    scalars = {
      'reward/mean': step / (steps + 1),
      'reward/groups_equal': 0.25,
      'completion/length_mean': 10.0 - step,
      'completion/truncated': 0.0,
      'policy/entropy': math.exp(-step),
      'update/grad_norm': 1.0,
      'rollout_corr/k3_kl': 1e-5,
      'rollout_corr/kl': 0.5,
      'rollout_corr/abs_dlogp_mean': 1e-3,
      'rollout_corr/abs_dlogp_max': 1e-2,
      'rollout_corr/rollout_is_eff_sample_size': 0.999,
    }
    log.write(step, scalars, {'rollout': 1.5, 'grade': 0.1, 'update': 0.5, 'total': 2.1})
  counts = {'edges': [-1.0, 0.0, 1.0], 'histograms': {'gap': [0, 3, 4, 1], 'kv': [0, 4, 4, 0], 'staleness': [0, 0, 8, 0]}}
  log.ledger(steps, {'ledger/gap_abs': 0.2, 'ledger/kv_abs': 0.1, 'ledger/staleness_abs': 0.0}, counts, {})
  log.evaluation(steps, {'eval/pass@1': 0.5, 'eval/low': 0.4, 'eval/high': 0.6})
  log.samples(steps, [{'prompt': 'What is 2 + 3?', 'completion': 'It is 5.', 'answer': '5', 'reward': 1.0, 'finish': 'stop'}])
  log.close()
  return workdir


def execute(workdir: Path, monkeypatch, folder: Path = ROOT) -> tuple[str, int]:
  """Run the notebook on `workdir`, in `folder`. Return (text of its outputs, number of its pictures)."""
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('IPYTHONDIR', str(workdir.parent / 'ipython'))
  monkeypatch.setenv('JUPYTER_RUNTIME_DIR', str(workdir.parent / 'jupyter'))
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  nbclient.NotebookClient(notebook, timeout=120, resources={'metadata': {'path': str(folder)}}).execute()
  outputs = [output for cell in notebook.cells for output in cell.get('outputs', [])]
  shown = [output.get('text') or output.data.get('text/markdown', '') for output in outputs]
  return '\n'.join(shown), sum('image/png' in output.get('data', {}) for output in outputs)


def test_the_notebook_shows_rewards_lengths_mismatch_times_and_samples(tmp_path, monkeypatch):
  monkeypatch.setenv('SPRL_WORKDIR', str(tmp_path / 'run'))
  text, pictures = execute(write_run(tmp_path / 'run', 4), monkeypatch)
  assert pictures == 6
  assert '4 steps of 4, seed 7' in text
  assert 'after step    4: eval/high 0.600  eval/low 0.400  eval/pass@1 0.500' in text
  assert '| `rollout_corr/kl` | 0.5 | -0.1 to 0.1 | **look closer** |' in text
  assert 'steps with samples: [4]' in text
  assert 'It is 5.' in text


def test_a_quickstart_without_steps_can_be_read_from_the_folder_of_the_notebook(tmp_path, monkeypatch):
  workdir = tmp_path / 'runs' / 'quickstart'
  write_config(workdir, {'seed': 0, 'steps': 10})
  RunLog(workdir, None).close()
  monkeypatch.delenv('SPRL_WORKDIR', raising=False)
  (tmp_path / 'notebooks').mkdir()
  text, _ = execute(workdir, monkeypatch, tmp_path / 'notebooks')
  assert 'No samples are written yet.' in text
  assert 'No ledger was kept' in text


def test_the_notebook_is_stored_without_outputs():
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  nbformat.validate(notebook)
  assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == 'code')
