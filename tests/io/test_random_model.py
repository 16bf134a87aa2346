"""Models with random weights: the table of architectures, and the folder of one."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import jax
import pytest

from sprl.io.huggingface import tensors
from sprl.io.pretrained import config_folder, locate
from sprl.io.random_model import NAMED
from sprl.io.tokenizer import Tokenizer
from sprl.models.config import ConfigError, ModelConfig
from sprl.models.transformer import abstract_params

CONFIGS = Path(__file__).parents[2] / 'benchmarks' / 'models'
# From the models' cards and the headers of their weights.
PARAMETERS = {
  'qwen2.5-0.5b': 494_032_768,
  'qwen2.5-1.5b': 1_543_714_304,
  'qwen2.5-7b': 7_615_616_512,
  'qwen3-0.6b': 596_049_920,
  'qwen3-1.7b': 1_720_574_976,
  'qwen3-8b': 8_190_735_360,
  'qwen3-30b-a3b': 30_532_122_624,
  'smollm2-135m': 134_515_008,
}


@pytest.mark.parametrize('name', sorted(PARAMETERS))
def test_an_architecture_has_the_parameters_of_the_published_model(name, tmp_path):
  config = ModelConfig.read(locate(f'random:{name}', tmp_path))
  assert sum(math.prod(tensor.shape) for tensor in tensors(config).values()) == PARAMETERS[name]
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config))) == PARAMETERS[name]


def test_every_architecture_has_a_known_number_of_parameters():
  assert set(NAMED) == {*PARAMETERS, 'tiny'}


@pytest.mark.parametrize('folder', ['Qwen2.5-0.5B', 'Qwen2.5-1.5B', 'Qwen2.5-7B', 'Qwen3-8B', 'Qwen3-30B-A3B'])
def test_an_architecture_has_the_published_config_except_for_special_tokens(folder, tmp_path):
  found, published = (ModelConfig.read(path) for path in (locate(f'random:{folder.lower()}', tmp_path), CONFIGS / folder))
  own = partial(dataclasses.replace, bos_token_id=None, eos_token_ids=(), pad_token_id=None)
  assert own(found) == own(published)


def test_the_folder_has_a_tokenizer_of_bytes_that_fits_the_model(tmp_path):
  folder = locate('random:qwen2.5-1.5b', tmp_path)
  config, tokenizer = ModelConfig.read(folder), Tokenizer.load(folder)
  assert tokenizer.within(config) is tokenizer
  assert set(config.eos_token_ids) == set(tokenizer.eos_ids)
  text = 'Größe: 3 + 4 = 7'
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.chat([{'role': 'user', 'content': 'a'}])
  assert tokenizer.decode([151_935, *tokenizer.encode('b'), 300]) == 'b'  # ids that no byte has
  assert not list(folder.glob('*.safetensors'))


def test_the_folder_is_made_once_and_the_planner_reads_it(tmp_path, monkeypatch):
  monkeypatch.setenv('SPRL_CACHE', str(tmp_path))
  folder = locate('random:tiny')
  (folder / 'mark').touch()
  assert config_folder('random:tiny') == folder
  assert (folder / 'mark').exists()
  assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # no draft is left


def test_a_folder_with_a_config_is_an_architecture_too(tmp_path):
  given = json.loads((CONFIGS / 'Qwen3-8B' / 'config.json').read_text()) | {'num_hidden_layers': 2}
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'config.json').write_text(json.dumps(given))
  config = ModelConfig.read(locate(f'random:{tmp_path / "mine"}', tmp_path / 'cache'))
  assert (config.num_layers, config.hidden_size, config.eos_token_ids) == (2, 4096, (2,))


@pytest.mark.parametrize('name', ['', 'qwen', 'Qwen2.5-1.5B'])
def test_the_error_for_another_name_has_the_accepted_ones(name, tmp_path):
  with pytest.raises(
    ConfigError, match=rf'config.model.path = random:{name}: expected one of qwen2.5-0.5b, .*, tiny, or a folder'
  ):
    locate(f'random:{name}', tmp_path)


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path):
  given = json.loads((CONFIGS / 'Qwen3-8B' / 'config.json').read_text()) | {'vocab_size': 200}
  (tmp_path / 'config.json').write_text(json.dumps(given))
  with pytest.raises(ConfigError, match='vocab_size = 200; expected at least 259'):
    locate(f'random:{tmp_path}', tmp_path / 'cache')
