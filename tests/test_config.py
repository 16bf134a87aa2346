"""Settings: values that resolve, and refusals that begin with the setting's name and value."""

import ast
import dataclasses
import inspect
import io
import json
import sys
import tokenize
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from sprl import config as settings
from sprl.command_line import FREE
from sprl.config import Arm, Run, Sampling, SettingsError, as_config, default_config, to_dict
from sprl.config_checks import RANGES, device_numbers, in_interval
from sprl.config_reader import coerce, resolve
from sprl.foreign import split_reference
from sprl.presets import ARMS
from sprl.rollout.setup import problem_sources
from sprl.tasks import graders

MOST_SETTINGS = 147  # every setting needs a user


def config(**changes):
  """Return the defaults with a model and with the changes `section__key=value`."""
  made = to_dict(Run())
  for key, value in {'model__path': 'some/model', **changes}.items():
    *sections, name = key.split('__')
    section = made
    for each in sections:
      section = section[each]
    section[name] = value
  return made


def refuses(key, value, **changes):
  """Assert that `value` is refused by name and value. Return the rest of the error, which names the accepted values."""
  with pytest.raises(SettingsError) as error:
    resolve(config(**changes))
  start = f'config.{key} = {value!r}: expected '
  assert str(error.value).startswith(start), error.value
  return str(error.value).removeprefix(start)


def accepts(**changes):
  return resolve(config(**changes))


def leaves(section, prefix='config'):
  """Yield (name, value) of every setting, with names such as `config.rollout.group`."""
  for key, value in section.items():
    name = f'{prefix}.{key}'
    yield from leaves(value, name) if isinstance(value, dict) and name not in FREE else [(name, value)]


# --- the settings as a whole ------------------------------------------------------------------------------------------


def test_the_number_of_settings_is_limited():
  count = len(list(leaves(to_dict(Run()))))
  print(f'{count} settings')
  assert count <= MOST_SETTINGS


def test_every_setting_has_a_comment_on_its_line_or_above():
  source = inspect.getsource(settings)
  commented = {t.start[0] for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}
  lines = source.splitlines()
  for node in ast.parse(source).body:
    for field in node.body if isinstance(node, ast.ClassDef) else []:
      if isinstance(field, ast.AnnAssign) and 'default_factory' not in ast.unparse(field):
        above = field.lineno - 1 in commented and lines[field.lineno - 2].lstrip().startswith('#')
        assert field.lineno in commented or above, ast.unparse(field)


def test_every_number_has_a_range_that_holds_its_default():
  def numbers(hints, prefix=''):
    for name, hint in hints.items():
      inner = settings.unless_none(hint)
      if dataclasses.is_dataclass(inner):
        yield from numbers(typing.get_type_hints(inner), f'{prefix}{name}.')
      elif inner in (int, float):
        yield f'{prefix}{name}'

  assert set(RANGES) == set(numbers(typing.get_type_hints(Run)))
  accepts()


@pytest.mark.parametrize(
  ('interval', 'inside', 'outside'),
  [
    ('[0, 1)', (0, 0.5), (-0.1, 1, float('nan'))),
    ('(0, 1]', (1e-9, 1), (0, 1.1)),
    ('[1, inf)', (1, 10**12), (0, float('inf'), float('nan'))),
  ],
)
def test_within_checks_both_ends_of_an_interval(interval, inside, outside):
  assert all(in_interval(value, interval) for value in inside)
  assert not any(in_interval(value, interval) for value in outside)


@pytest.mark.parametrize(
  ('key', 'value', 'changes'),
  [
    ('task.path', None, {'kind': 'dataset'}),
    ('task.columns', {'question': 'x'}, {'kind': 'dataset', 'path': 'x', 'columns': {'question': 'x'}}),
    (
      'task.columns',
      {'prompt': 'x', 'messages': 'y'},
      {'kind': 'dataset', 'path': 'x', 'columns': {'prompt': 'x', 'messages': 'y'}},
    ),
    ('task.columns', {'prompt': 'x'}, {'kind': 'jsonl', 'path': 'x', 'columns': {'prompt': 'x'}}),
    ('task.filters', ('x>1',), {'kind': 'reasoning_gym', 'name': 'x', 'filters': ('x>1',)}),
    ('task.splits', ('train',), {'splits': ('train',)}),
    ('task.splits', ('train', ''), {'splits': ('train', '')}),
    ('task.splits', ('a', 'b'), {'kind': 'reasoning_gym', 'name': 'x', 'splits': ('a', 'b')}),
    ('task.mixture', {}, {'kind': 'mixture'}),
    ('task.mixture.a.weight', -1.0, {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'weight': -1}}}),
    ('task.mixture.a.weight', {'5': 1.0}, {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'weight': {5: 1}}}}),
    ('task.mixture.a.weight', {'x': 1.0}, {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'weight': {'x': 1}}}}),
    ('task.mixture.a.path', None, {'kind': 'mixture', 'mixture': {'a': {}}}),
    ('task.mixture.a.grader', 'good', {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'grader': 'good'}}}),
    ('task.mixture.a.splits', ('x',), {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'splits': ['x']}}}),
    ('task.mixture.a.weight', 'x', {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'weight': 'x'}}}),
    ('task.mixture.a', 3, {'kind': 'mixture', 'mixture': {'a': 3}}),
    ('task.mixture', ['a'], {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'weight': 0}}}),
    ('task.mixture', ['a'], {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'weight': {0: 1, 4: 0}}}}),
    ('task.mixture', ['a'], {'kind': 'mixture', 'mixture': {'a': {'path': 'x', 'splits': ('train', '')}}}),
    ('task.grader', 'exact', {'kind': 'mixture', 'mixture': {'a': {'path': 'x'}}, 'grader': 'exact'}),
  ],
)
def test_a_source_of_problems_is_checked(key, value, changes):
  refuses(key, value, **{f'task__{name}': given for name, given in changes.items()})


@pytest.mark.parametrize(
  ('key', 'value', 'given'),
  [
    ('eval.sets.a.samples', 2, {'path': 'x', 'samples': 2}),
    ('eval.sets.a.problems', 0, {'path': 'x', 'problems': 0}),
    ('eval.sets.a.path', None, {}),
    ('eval.sets.a.split', '', {'path': 'x', 'split': ''}),
    ('eval.sets.a.kind', 'environment', {'kind': 'environment'}),
  ],
)
def test_a_held_out_set_is_checked(key, value, given):
  refuses(key, value, eval__sets={'a': given})


def test_names_and_keys_of_sources_are_checked():
  with pytest.raises(
    SettingsError, match=r'config\.task\.mixture\.a\.pathh: no such setting; config\.task\.mixture\.a has args, '
  ):
    accepts(task__kind='mixture', task__mixture={'a': {'pathh': 'x'}})
  refuses('eval.sets.a/b', '{...}', eval__sets={'a/b': {'path': 'x'}})
  refuses('eval.sets.reward', '{...}', eval__sets={'reward': {'path': 'x'}})


def test_sources_survive_config_json():
  given = {'a': {'path': 'x', 'weight': {0: 1, 20: 0.5}}, 'b': {'kind': 'gsm8k', 'weight': 2, 'splits': ('train', '')}}
  run = accepts(task__kind='mixture', task__mixture=given, eval__sets={'c': {'path': 'y', 'split': 'train[:9]', 'problems': 3}})
  assert run.task.mixture['a'].stages == {0: 1.0, 20: 0.5}
  assert [run.task.mixture['a'].weight_at(step) for step in (0, 19, 20, 21)] == [1.0, 1.0, 0.5, 0.5]
  assert run.task.mixture['b'].stages == {0: 2.0}
  assert resolve(json.loads(json.dumps(to_dict(run)))) == run


# --- values become settings -------------------------------------------------------------------------------------------


def test_defaults_need_only_a_model():
  assert accepts() == dataclasses.replace(Run(), model=dataclasses.replace(Run().model, path='some/model'))
  refuses('model.path', '', model__path='')


def test_a_changed_config_dict_resolves():
  given = default_config()
  given.model.path, given.sampling.temperature, given.steps, given.cache.budget = 'some/model', 0.5, 7, 64
  given.eval.every = None
  run = resolve(given)
  assert (run.sampling.temperature, run.steps, run.cache.budget, run.eval.every) == (0.5, 7, 64, None)


def parsed(monkeypatch, *arguments, config=None):
  """Return the config after `arguments` on the command line. `config`: before them; None: the defaults."""
  monkeypatch.setattr('sys.argv', ['main', *arguments])
  given = flags.FlagValues()
  config_flags.DEFINE_config_dict('config', config or default_config(), flag_values=given)
  given(sys.argv)
  return given['config'].value


def test_the_settings_of_a_run_are_its_config_and_the_command_line_changes_those_that_are_none(monkeypatch):
  given = {'a': {'path': 'x', 'weight': {0: 1, 20: 0.5}}, 'b': {'kind': 'gsm8k'}}
  run = accepts(
    task__kind='mixture', task__mixture=given, eval__sets={'c': {'path': 'y'}}, cache__budget=64, devices__learner='0'
  )
  assert resolve(as_config(run)) == run
  changes = {'eval.max_tokens': 7, 'task.time_limit': 1.5, 'cache.budget': None, 'devices.learner': '0', 'eval.sets.c.samples': 2}
  flags = [f'--config.{key}={value}' for key, value in {**changes, 'eval.temperature': 1.0}.items()]
  changed = resolve(parsed(monkeypatch, *flags, config=as_config(run)))
  found = dict(leaves(to_dict(changed)))
  assert {key: found[f'config.{key}'] for key in list(changes)[:4]} == {key: changes[key] for key in list(changes)[:4]}
  assert changed.eval.sets['c'].samples == 2


def test_every_setting_has_a_flag(monkeypatch):
  wanted = {name: value for name, value in leaves(to_dict(Run())) if name not in FREE}
  wanted['config.model.path'] = 'text'
  config = parsed(monkeypatch, *(f'--{name}={value}' for name, value in wanted.items()))
  assert dict(leaves(to_dict(resolve(config)))) == {**wanted, **{name: {} for name in FREE}}


@pytest.mark.parametrize(
  ('flag', 'section', 'value'),
  [
    ('--config.cache.budget=64', 'cache.budget', 64),
    ('--config.optimizer.clip_norm=None', 'optimizer.clip_norm', None),
    ('--config.optimizer.clip_norm=2', 'optimizer.clip_norm', 2.0),
    ('--config.correction.level=None', 'correction.level', None),
    ('--config.correction.veto=1e-4', 'correction.veto', 1e-4),
    ('--config.eval.every=None', 'eval.every', None),
    ('--config.devices.learner=4', 'devices.learner', '4'),
    ('--config.devices.learner=4,5', 'devices.learner', '4,5'),
    ("--config.correction.reject=('token_k1=2.0',)", 'correction.reject', ('token_k1=2.0',)),
    ("--config.log.trackers=('wandb', 'mlflow')", 'log.trackers', ('wandb', 'mlflow')),
    ('--config.log.trackers=()', 'log.trackers', ()),
    ('--config.log.project=sums', 'log.project', 'sums'),
  ],
)
def test_optional_settings_on_the_command_line(monkeypatch, flag, section, value):
  found = resolve(parsed(monkeypatch, '--config.model.path=x', flag))
  for part in section.split('.'):
    found = getattr(found, part)
  assert (found, type(found)) == (value, type(value))


def test_sections_may_be_left_out():
  assert resolve({'model': {'path': 'x'}, 'sampling': {'max_tokens': 3}}).sampling == Sampling(max_tokens=3)


def test_ints_become_floats_and_lists_tuples():
  sampling = accepts(sampling__temperature=2, sampling__stop=['a', 'b'], sampling__prompt_buckets=[16, 256]).sampling
  assert (sampling.temperature, type(sampling.temperature)) == (2.0, float)
  assert (sampling.stop, sampling.prompt_buckets) == (('a', 'b'), (16, 256))


def test_numbers_of_numpy_become_numbers_of_python():
  run = accepts(
    steps=np.int64(24), sampling__temperature=np.float32(0.75), cache__budget=np.int32(64), eval__temperature=np.int8(1)
  )
  found = run.steps, run.sampling.temperature, run.cache.budget, run.eval.temperature
  assert found == (24, 0.75, 64, 1.0)
  assert [type(number) for number in found] == [int, float, int, float]
  assert accepts(sampling__stop_ids=[np.int64(7)]).sampling.stop_ids == (7,)
  with pytest.raises(SettingsError, match=r'config\.steps = 3\.0: expected int, got float'):
    accepts(steps=np.float32(3.0))


@pytest.mark.parametrize(
  ('key', 'value', 'expected'),
  [
    ('steps', 1.5, 'int'),
    ('steps', '10', 'int'),
    ('steps', True, 'int'),
    ('steps', None, 'int'),
    ('cache.budget', 'many', 'int'),
    ('export', 1, 'bool'),
    ('sampling.temperature', True, 'float'),
    ('sampling.temperature', None, 'float'),
    ('sampling.stop', 'ab', 'a list of str'),
    ('sampling', 3, 'a section'),
    ('loss.tis', 0.5, 'a section'),
    ('loss.variant', 'pppo', "one of 'ppo', 'gspo'"),
    ('model.dtype', 'float16', "one of 'auto', 'float32'"),
    ('arm', 'sparse', "one of 'dense', 'naive'"),
    ('quant.sampler', 'fp8', "one of 'none', 'w8a8'"),
    ('cache.method', 'h3o', "one of 'rkv', 'snapkv'"),
    ('rollout.order', 'age', "one of 'start', 'deadline'"),
    ('task.executor', 'dask', "one of 'threads', 'processes'"),
    ('task.args', [1], 'a dictionary'),
    ('task.system', 5, 'str'),
    ('log.trackers', 'wandb', "a list of 'tensorboard', 'wandb', 'mlflow'"),
  ],
)
def test_a_wrong_type_is_refused(key, value, expected):
  assert refuses(key, value, **{key.replace('.', '__'): value}).startswith(expected)


def test_free_settings_hold_what_json_can_hold():
  numbers = coerce(Mapping[str, typing.Any], {'terms': np.int64(4), 'more': [{'x': np.float32(0.5)}]}, 'config.task.args')
  assert json.dumps(numbers) == '{"terms": 4, "more": [{"x": 0.5}]}'
  with pytest.raises(SettingsError, match=r'config\.task\.args\.more\[0\]\.x = .*: expected a text, a number, .*, got PosixPath'):
    accepts(task__args={'more': [{'x': Path('a')}]})


@pytest.mark.parametrize(
  ('key', 'given', 'value'), [('sampling.stop[1]', ['a', 1], 1), ('sampling.prompt_buckets[0]', [32.0], 32.0)]
)
def test_a_wrong_element_is_refused_by_index(key, given, value):
  refuses(key, value, **{key.partition('[')[0].replace('.', '__'): given})


@pytest.mark.parametrize('key', ['temperature', 'sampling.temprature', 'mesh.tensor', 'loss.tis_low', 'cache.rkv.decay'])
def test_an_unknown_key_is_refused_with_the_known_keys(key):
  with pytest.raises(SettingsError) as error:
    accepts(**{key.replace('.', '__'): 1.0})
  section = f'config.{key}'.rpartition('.')[0]
  assert str(error.value).startswith(f'config.{key}: no such setting; {section} has ')


# --- config.json ------------------------------------------------------------------------------------------------------

CHANGED = config(
  steps=7,
  sampling__stop=('\n', 'x'),
  sampling__prompt_buckets=(64, 256),
  task__kind='reasoning_gym',
  task__name='chain_sum',
  task__args={'min_terms': 2, 'choices': [1, 2], 'nested': {'a': None}},
  correction__reject=('token_k1=0.5:2.0',),
  optimizer__learning_rate=1,
)


@pytest.mark.parametrize('given', [config(), CHANGED])
def test_config_json_reads_back_to_an_equal_run(given):
  run = resolve(given)
  assert resolve(to_dict(run)) == run
  assert resolve(json.loads(json.dumps(to_dict(run)))) == run


# --- values out of range ----------------------------------------------------------------------------------------------

INF, NAN = float('inf'), float('nan')

OUT_OF_RANGE = [
  ('seed', -1), ('seed', 2**32), ('steps', -1), ('patience', 0.0), ('patience', INF),
  ('task.workers', 0), ('task.time_limit', 0.0), ('task.time_limit', NAN), ('task.time_limit', 2147484.0),  # poll(2) overflows
  ('task.turns', 0), ('task.turn_tokens', 0), ('sampling.temperature', 0.0), ('sampling.temperature', NAN),
  ('sampling.temperature', INF), ('sampling.top_k', 0), ('sampling.top_p', 0.0), ('sampling.top_p', 1.1),
  ('sampling.min_p', 1.0), ('sampling.max_tokens', 0), ('sampling.rows', 0), ('cache.budget', 0), ('cache.interval', 0),
  ('cache.window', 0), ('cache.rkv.mix', 1.5), ('cache.gkv.decay', -0.1), ('rollout.prompts', 0), ('rollout.async_ratio', -0.5),
  ('rollout.async_ratio', INF), ('rollout.extra_members', -1), ('devices.engines', 0), ('correction.cap', 0.0),
  ('correction.cap', INF), ('correction.veto', 0.0), ('correction.veto', 1.0), ('loss.dual_clip', 1.0),
  ('loss.kl_coef', -1.0), ('loss.dppo_kl.delta', 0.0), ('loss.topr.positive_weight', NAN), ('optimizer.learning_rate', INF),
  ('optimizer.b1', 1.0), ('optimizer.clip_norm', 0.0), ('optimizer.minibatches', 0), ('lora.rank', 0), ('lora.alpha', 0.0),
  ('packing.row_tokens', 0), ('mesh.rollout.expert', -2), ('mesh.learner.fsdp', 0), ('eval.every', 0), ('eval.top_p', 0.0),
  ('checkpoint.every', 0), ('checkpoint.keep_last', 0), ('ledger.every', 0), ('log.samples_every', 0),
]  # fmt: skip


@pytest.mark.parametrize(('key', 'value'), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(key, value):
  refuses(key, value, **{key.replace('.', '__'): value})


@pytest.mark.parametrize(
  ('key', 'value'),
  [('steps', 0), ('sampling.top_p', 1.0), ('sampling.rows', None), ('eval.every', None), ('optimizer.clip_norm', None),
   ('optimizer.b1', 0.0), ('eval.temperature', 0.0), ('patience', 2147483.0)],
)  # fmt: skip
def test_the_edges_of_the_ranges_are_accepted(key, value):
  accepts(**{key.replace('.', '__'): value})


# --- combinations -----------------------------------------------------------------------------------------------------

ENVIRONMENT = {'task__kind': 'environment', 'task__name': 'frozen_lake'}
MASKED = {'arm': 'learner_mask', 'cache__budget': 64}
ALONE = {'rollout__group': 1, 'advantage__estimator': 'reinforce'}
ONE_TASK = {'rollout__replicate_prompts': False}

ALL_MEMBERS = {'rollout__members': 'all', 'rollout__extra_members': 1, 'rollout__order': 'completion'}
REFUSED = [  # key, refused value, text that the error contains, other changes
  ('sampling.stop', ('\n', ''), '', {}),
  *(('sampling.prompt_buckets', b, 'sampling.max_prompt = 256', {})
    for b in ((256, 64), (64, 64, 256), (0, 256), (64, 128), (64, 300))),
  ('eval.samples', 4, 'eval.temperature = 0', {}),
  ('log.trackers', ('wandb', 'wandb'), 'once', {}),
  ('log.project', '', 'None', {}),
  ('optimizer.minibatches', 3, 'rollout.prompts = 16', {}),
  ('optimizer.moment_dtype', 'bfloat16', "optimizer.name = 'sgd'", {'optimizer__name': 'sgd'}),
  ('optimizer.offload', True, "optimizer.name = 'adafactor'", {'optimizer__name': 'adafactor'}),
  ('lora.targets', (), '', {}),
  ('lora.targets', ('q', 'lm_head'), '', {}),
  ('quant.skip_names', ('lm_head',), '', {}),
  ('quant.softmax', 'fp8', "quant.sampler = 'none'", {}),
  ('quant.kv_scale', 'frozen', "quant.sampler = 'w8a8'", {'quant__sampler': 'w8a8'}),
  ('rollout.extra_members', 0, "rollout.members = 'all'", {'rollout__members': 'all'}),
  ('rollout.extra_prompts', 2, "rollout.members = 'all'", ALL_MEMBERS),
  ('quant.softmax', 'fp8', "quant.sampler = 'w8a8'", {'quant__sampler': 'w8a8'}),
  ('cache.budget', None, "arm = 'naive'", {'arm': 'naive'}),
  ('cache.budget', 255, 'sampling.max_prompt = 256', {'arm': 'sparse_rl_code'}),
  ('cache.scope', 'layer', "'global'", {'arm': 'sparse_rl_code', 'cache__budget': 256}),
  ('ledger.every', 1, "arm = 'learner_mask'", MASKED),
  ('rollout.async_ratio', 1.0, "arm = 'learner_mask'", MASKED),
  ('task.kind', 'environment', "arm = 'learner_mask'", {**MASKED, **ENVIRONMENT}),
  ('rollout.async_ratio', 0.3, 'rollout.prompts = 16', {}),
  ('rollout.async_ratio', 0.5, "task.kind = 'environment'", ENVIRONMENT),
  ('rollout.async_ratio', 0.5, "rollout.order = 'completion'", {'rollout__order': 'completion'}),
  ('rollout.extra_prompts', 2, "rollout.order = 'start'", {}),
  ('rollout.extra_prompts', 2, "rollout.order = 'deadline'", {'rollout__order': 'deadline'}),
  ('rollout.replicate_prompts', False, 'rollout.async_ratio > 0', {'rollout__async_ratio': 1.0}),
  ('rollout.group', 1, "advantage.estimator = 'grpo'", {}),
  ('rollout.equal_groups', 'replace', 'rollout.group = 1', ALONE),
  ('rollout.group', 8, 'rollout.replicate_prompts = False', {**ONE_TASK, 'sampling__rows': 7}),
  ('rollout.group', 8, '7 rows', {**ONE_TASK, 'sampling__rows': 14, 'devices__engines': 2}),
  ('rollout.group', 8, '4 rows', {**ONE_TASK, 'rollout__prompts': 1, 'devices__engines': 2}),
  ('rollout.extra_members', 1, '8 rows', {**ONE_TASK, 'sampling__rows': 8}),
  *(('devices.rollout', text, '', {}) for text in ('', 'all', '3-0', '0,,1', '0,0-1', '0-99999999999')),
  ('task.name', None, "task.kind = 'environment'", {'task__kind': 'environment'}),
  ('task.name', None, "task.kind = 'reasoning_gym'", {'task__kind': 'reasoning_gym'}),
  ('task.name', 'sokoban', "task.kind = 'gsm8k'", {}),
  ('task.args', {'seed': 1}, '', {'task__kind': 'reasoning_gym', 'task__name': 'chain_sum'}),
  ('task.args', {'size': 1}, '', {'task__kind': 'reasoning_gym', 'task__name': 'chain_sum'}),
  ('task.path', None, "task.kind = 'jsonl'", {'task__kind': 'jsonl'}),
  ('task.path', 'x', "task.kind = 'environment'", {'task__kind': 'environment', 'task__name': 'calculator'}),
  ('task.path', 'x', "task.kind = 'reasoning_gym'", {'task__kind': 'reasoning_gym', 'task__name': 'chain_sum'}),
  ('task.suffix', 'x', "task.kind = 'environment'", {'task__kind': 'environment', 'task__name': 'frozen_lake'}),
  ('task.args', {'size': 3}, "task.kind = 'gsm8k'", {}),
  ('task.columns', {'prompt': ''}, '', {'task__kind': 'dataset', 'task__path': 'x'}),
  ('task.system', 'Be brief.', 'task.chat = False', {'task__chat': False}),
  ('task.executor', 'threads', "task.kind = 'gsm8k'", {}),
  *(('task.grader', grader, '', {}) for grader in ('maths', 'mine.py', 'mine.py:not a name', 'mine.txt:grade', 'python:a b')),
  *(('task.rewards', (r,), f'got {r!r}', {}) for r in ('maths', 'math=x', 'math=inf', 'math=', '=1', 'mine.py:f=1=2')),
  ('task.rewards', ('math', 'exact', 'math=2'), 'got math, exact, math', {}),
  ('task.rewards', ('a.py:f', 'b.py:f'), 'got f, f', {}),
  ('task.rewards', ('mine.py:std',), 'mean, std', {}),
  ('task.rewards', ('mine.py:f=0', 'math=0.0'), 'a weight other than 0', {}),
  ('task.rewards', ('math',), "task.kind = 'environment'", ENVIRONMENT),
  ('task.grader', 'exact', 'config.task.rewards', {'task__rewards': ('math',)}),
  ('task.judge', {}, "'judge'", {'task__grader': 'judge'}),
  ('task.judge', {'url': 'http://x', 'model': 'm'}, "'judge'", {}),
]  # fmt: skip


@pytest.mark.parametrize('source', [{'arm': 'naive', 'cache__budget': 128}, {'preset': 'disabled'}])
def test_a_refused_value_of_an_arm_or_preset_names_it(source):
  """Without the name a user would look for the setting in the config, and another value of it is refused, too."""
  name, value = next(iter(source.items()))
  said = refuses('correction.level', None, rollout__async_ratio=1.0, **source)
  assert said.endswith(f'. config.{name} = {value!r} sets config.correction.level')


def test_the_split_of_a_generated_held_out_set_and_the_splits_of_a_source_are_named():
  made = {'kind': 'reasoning_gym', 'name': 'chain_sum', 'split': 'train'}
  with pytest.raises(
    SettingsError, match=r"^config\.eval\.sets\.a\.split = 'train': expected 'test' with config\.eval\.sets\.a\.kind"
  ):
    resolve(config(eval__sets={'a': made}))
  with pytest.raises(SettingsError, match=r'^config\.task\.mixture\.a\.splits = .*: expected two splits'):
    resolve(config(task__kind='mixture', task__mixture={'a': {'kind': 'gsm8k', 'splits': ('train', 'test', 'y')}}))


@pytest.mark.parametrize(('key', 'value', 'other', 'changes'), REFUSED)
def test_contradicting_settings_are_refused(key, value, other, changes):
  assert other in refuses(key, value, **{**changes, key.replace('.', '__'): value})


@pytest.mark.parametrize(
  'changes',
  [
    {'eval__samples': 4, 'eval__temperature': 0.6},
    {'optimizer__minibatches': 4},
    {'rollout__async_ratio': 0.5},
    {'rollout__async_ratio': 1.0625},  # 1.0625 x 16 prompts: 17 groups
    {'rollout__async_ratio': 2.0, 'rollout__order': 'completion', 'rollout__extra_prompts': 4},
    ONE_TASK,
    {**ONE_TASK, 'sampling__rows': 16, 'devices__engines': 2},
    {**ONE_TASK, 'rollout__async_ratio': 1.0, **ALONE},
    {'rollout__equal_groups': 'replace'},
    {'sampling__rows': 7},  # samples that are scheduled one by one fit anywhere
    {'devices__rollout': '0-3', 'devices__learner': '4,5,6,7', 'devices__engines': 2},
    {**ENVIRONMENT, 'rollout__async_ratio': 2.0, 'task__executor': 'threads', 'task__time_limit': 0.5},
    {'task__kind': 'jsonl', 'task__path': 'data', 'task__grader': '../mine.py:grade'},
    {'task__kind': 'reasoning_gym', 'task__name': 'chain_sum', 'task__args': {'max_terms': 2}},
    {'task__rewards': ('judge=0.1', 'code'), 'task__judge': {'url': 'http://x', 'model': 'm'}},
    {'task__rewards': ('auto', 'exact=0.5', 'a=b/mine.py:brief=-2e-1', 'python:calm')},
    {'task__chat': False},
    {'task__system': 'Be brief.', 'task__grader': 'exact'},
    MASKED,
  ],
)
def test_settings_that_go_together_are_accepted(changes):
  accepts(**changes)


def test_a_reference_splits_at_the_last_colon():
  assert split_reference('a:b/mine.py:grade') == ('a:b/mine.py', 'grade')
  assert split_reference('math') is None


def test_device_numbers_are_read_from_text():
  assert device_numbers('0-2,5') == (0, 1, 2, 5)
  assert device_numbers('4') == (4,)
  assert device_numbers('1,0-1') is None


# --- arms of Sparse-RL ------------------------------------------------------------------------------------------------

TABLE = {  # arm: weighted, veto, token mask, masked learner
  'naive': (False, False, False, False),
  'veto_only': (False, True, False, False),
  'reweight_only': (True, False, False, False),
  'sparse_rl': (True, True, False, False),
  'sparse_rl_code': (True, True, True, False),
  'learner_mask': (False, False, False, True),
}


@pytest.mark.parametrize('arm', TABLE)
def test_an_arm_sets_the_correction(arm):
  run = accepts(arm=arm, cache__budget=512)
  c = run.correction
  assert (c.level is not None, c.veto is not None, bool(c.reject), run.masked_learner) == TABLE[arm]
  assert run.cache.budget == 512
  if c.level is not None:
    released = arm == 'sparse_rl_code'  # tests/sampler/test_released_arm.py
    assert (c.level, c.weight, c.cap, c.normalise) == ('token', 'truncate', 1.5, 'micro' if released else 'global')
  assert c.veto in (None, 1e-4)
  assert c.reject in ((), ('token_k1=0.5:1.5',))
  assert run.packing.share_prefix == (arm != 'learner_mask')
  assert resolve(to_dict(run)) == run


def test_the_dense_arm_evicts_nothing_and_keeps_the_correction():
  run = accepts(arm='dense', cache__budget=64, correction__veto=1e-3)
  assert (run.cache.budget, run.correction.veto) == (None, 1e-3)


def test_all_lists_of_arms_have_the_same_names():
  assert {'dense', *TABLE} == set(typing.get_args(Arm)) == set(ARMS)


@pytest.mark.parametrize(
  ('key', 'value', 'arm', 'correction_of_arm'),
  [('correction.veto', 1e-3, 'naive', 'None'), ('correction.cap', 3.0, 'sparse_rl', '1.5')],
)
def test_a_correction_that_contradicts_the_arm_is_refused(key, value, arm, correction_of_arm):
  expected = refuses(key, value, arm=arm, cache__budget=64, **{key.replace('.', '__'): value})
  assert expected.startswith(correction_of_arm)
  assert f'config.arm = {arm!r}' in expected


JUDGE = {'url': 'http://127.0.0.1:1/v1', 'model': 'm'}


@pytest.mark.parametrize(
  'changes',
  [
    {'task__judge': JUDGE, 'task__grader': 'judge', 'eval__sets': {'m': {'path': 'x', 'grader': 'math'}}},
    {'task__judge': JUDGE, 'eval__sets': {'m': {'path': 'x', 'grader': 'judge'}}},
    {'task__judge': JUDGE, 'task__kind': 'mixture', 'task__mixture': {'a': {'path': 'x', 'grader': 'judge'}, 'b': {'path': 'x'}}},
    {'task__rewards': ('math', 'exact=0.1'), 'eval__sets': {'m': {'path': 'x', 'grader': 'math'}}},
  ],
  ids=['judge of the task', 'judge of a set', 'judge of a source', 'rewards and a grader of a set'],
)
def test_graders_of_sources_stand_beside_those_of_the_task(changes):
  run = resolve(config(**changes))
  rewards = graders.of_sources(problem_sources(run))
  assert {(reward.source, reward.grader.kind) for reward in rewards} >= {
    (f'{prefix}{name}', some.grader)
    for prefix, sources in (('', run.task.mixture), ('eval/', run.eval.sets))
    for name, some in sources.items()
    if some.grader != 'auto'
  }


def test_a_judge_that_nobody_asks_is_refused():
  with pytest.raises(SettingsError, match=r"config\.task\.judge = .*: expected \{\} without the grader 'judge'"):
    resolve(config(task__judge=JUDGE, eval__sets={'m': {'path': 'x', 'grader': 'math'}}))
