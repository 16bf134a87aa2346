"""Settings: what resolves, what is refused, and that each refusal names its key."""

import dataclasses
import json
import sys
import typing

import pytest
from absl import flags
from ml_collections import config_flags

from sprl.command_line import FREE
from sprl.settings import ARMS, Arm, Run, Sampling, SettingsError, default_config, resolve, to_dict


def config(**changes):
  """The defaults with a model, and `section__key=value` changed."""
  made = default_config().to_dict()
  made['model']['path'] = 'some/model'
  for key, value in changes.items():
    *sections, name = key.split('__')
    section = made
    for each in sections:
      section = section[each]
    section[name] = value
  return made


def refusal(**changes):
  with pytest.raises(SettingsError) as error:
    resolve(config(**changes))
  return str(error.value)


def leaves(section, prefix='config'):
  """(`config.rollout.group`, its value) of every setting."""
  for key, value in section.items():
    name = f'{prefix}.{key}'
    yield from leaves(value, name) if isinstance(value, dict) and name not in FREE else [(name, value)]


# --- values become settings ------------------------------------------------------------------------------------------


def test_the_defaults_need_a_model_and_nothing_else():
  run = resolve(config())
  assert run == dataclasses.replace(Run(), model=dataclasses.replace(Run().model, path='some/model'))
  with pytest.raises(SettingsError, match=r"config\.model\.path = '': expected a Hugging Face folder"):
    resolve(default_config())


def test_a_config_dict_as_the_command_line_leaves_it():
  given = default_config()
  given.model.path, given.sampling.temperature, given.steps = 'some/model', 0.5, 7
  run = resolve(given)
  assert (run.sampling.temperature, run.steps) == (0.5, 7)


def test_every_value_may_be_given_on_the_command_line(monkeypatch):
  wanted = {name: value for name, value in leaves(to_dict(Run())) if name not in FREE}
  wanted |= {name: 'text' for name, value in wanted.items() if value is None or isinstance(value, str)}
  monkeypatch.setattr('sys.argv', ['main', *(f'--{name}={value}' for name, value in wanted.items())])
  given = flags.FlagValues()
  config_flags.DEFINE_config_dict('config', default_config(), flag_values=given)
  given(sys.argv)
  assert {name: value for name, value in leaves(given['config'].value.to_dict()) if name not in FREE} == wanted


def test_sections_may_be_left_out():
  assert resolve({'model': {'path': 'x'}, 'sampling': {'max_tokens': 3}}).sampling == Sampling(max_tokens=3)


def test_an_int_is_taken_for_a_float_and_a_list_for_a_tuple():
  run = resolve(config(sampling__temperature=2, sampling__stop=['a', 'b'], sampling__prompt_buckets=[16, 256]))
  assert run.sampling.temperature == 2.0
  assert isinstance(run.sampling.temperature, float)
  assert run.sampling.stop == ('a', 'b')
  assert run.sampling.prompt_buckets == (16, 256)


def test_none_where_a_setting_may_be_none():
  assert resolve(config(task__system=None)).task.system is None
  assert resolve(config(task__system='be brief')).task.system == 'be brief'


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'temperature': 1.0}, ('config.temperature', 'no such setting', 'sampling')),
    ({'mesh__tensor': 2}, ('config.mesh.tensor', 'no such setting', 'config.mesh.learner.tensor now', 'rollout')),
    ({'sampling__temprature': 1.0}, ('config.sampling.temprature', 'no such setting', 'temperature')),
    ({'steps': 1.5}, ('config.steps = 1.5', 'expected int', 'float')),
    ({'steps': '10'}, ("config.steps = '10'", 'expected int')),
    ({'steps': True}, ('config.steps = True', 'expected int', 'bool')),
    ({'export': 1}, ('config.export = 1', 'expected bool')),
    ({'sampling__temperature': True}, ('config.sampling.temperature = True', 'expected float')),
    ({'sampling__temperature': None}, ('config.sampling.temperature = None', 'expected float')),
    ({'sampling__stop': 'ab'}, ("config.sampling.stop = 'ab'", 'list of str')),
    ({'sampling__stop': ['a', 1]}, ('config.sampling.stop[1] = 1', 'expected str')),
    ({'sampling__prompt_buckets': [32.0]}, ('config.sampling.prompt_buckets[0] = 32.0', 'expected int')),
    ({'sampling': 3}, ('config.sampling = 3', 'section')),
    ({'loss__variant': 'pppo'}, ("config.loss.variant = 'pppo'", "'ppo'", "'gspo'")),
    ({'model__dtype': 'float16'}, ("config.model.dtype = 'float16'", "'bfloat16'")),
    ({'task__args': [1]}, ('config.task.args = [1]', 'dictionary')),
    ({'task__system': 5}, ('config.task.system = 5', 'expected str')),
  ],
)
def test_unknown_keys_and_wrong_types_are_refused_by_name(change, words):
  message = refusal(**change)
  assert all(word in message for word in words), message


# --- config.json -----------------------------------------------------------------------------------------------------

CHANGED = config(
  steps=7,
  sampling__stop=('\n', 'x'),
  sampling__prompt_buckets=(64, 256),
  task__kind='reasoning_gym',
  task__name='chain_sum',
  task__args={'min_terms': 2, 'choices': [1, 2], 'nested': {'a': None}},
  correction__reject=('token_k1',),
  correction__reject_bounds=('0.5_2.0',),
  optimizer__learning_rate=1,
)


@pytest.mark.parametrize('given', [config(), CHANGED])
def test_config_json_reads_back_to_an_equal_run(given):
  run = resolve(given)
  assert resolve(to_dict(run)) == run
  assert resolve(json.loads(json.dumps(to_dict(run)))) == run


# --- values out of range ---------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
  ('steps', -1), ('rollout.prompts', 0), ('rollout.group', 0), ('sampling.temperature', -0.1), ('sampling.temperature', 0.0),
  ('sampling.top_k', -1), ('sampling.top_p', 0.0), ('sampling.top_p', 1.1), ('sampling.min_p', 1.0), ('sampling.min_p', -0.1),
  ('sampling.max_tokens', 0), ('sampling.max_prompt', 0), ('sampling.rows', -1), ('sampling.chunk', 0),
  ('sampling.temperature', float('nan')), ('packing.row_tokens', -1), ('packing.rows', 0), ('packing.score_chunk', 0),
  ('optimizer.learning_rate', -1e-6), ('optimizer.minibatches', 0), ('optimizer.epochs', 0), ('optimizer.warmup_steps', -1),
  ('optimizer.clip_norm', -1.0), ('optimizer.max_bad_steps', 0), ('optimizer.weight_decay', -0.1), ('optimizer.b1', 1.0),
  ('optimizer.b2', -0.1), ('optimizer.final_fraction', 1.5), ('eval.every', -1), ('eval.problems', 0), ('eval.samples', 0),
  ('eval.temperature', -1.0), ('eval.top_p', 0.0), ('eval.max_tokens', -1), ('checkpoint.every', -1),
  ('checkpoint.keep_last', 0), ('checkpoint.keep_best', -1), ('log.samples_every', -1), ('log.samples', 0),
  ('seed', -1), ('seed', 2**32), ('sampling.temperature', float('inf')), ('eval.temperature', float('inf')),
  ('optimizer.learning_rate', float('inf')), ('optimizer.weight_decay', float('inf')), ('optimizer.eps', float('nan')),
  ('optimizer.eps', -1e-8), ('sampling.stop', ('\n', '')),
  ('lora.rank', -1), ('lora.alpha', 0.0), ('lora.alpha', float('inf')), ('lora.targets', ()),
]  # fmt: skip


@pytest.mark.parametrize(('key', 'value'), OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name(key, value):
  message = refusal(**{key.replace('.', '__'): value})
  assert message.startswith(f'config.{key} = '), message
  assert 'expected' in message


@pytest.mark.parametrize(
  ('key', 'value'),
  [('steps', 0), ('sampling.top_p', 1.0), ('sampling.rows', 0), ('eval.every', 0), ('optimizer.clip_norm', 0.0),
   ('optimizer.final_fraction', 1.0), ('optimizer.b1', 0.0), ('checkpoint.keep_best', 0), ('eval.temperature', 0.0)],
)  # fmt: skip
def test_the_edges_of_the_ranges_are_accepted(key, value):
  resolve(config(**{key.replace('.', '__'): value}))


# --- impossible combinations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('buckets', [(256, 64), (64, 64, 256), (0, 256), (64, 128), (64, 300)])
def test_prompt_buckets_ascend_to_the_longest_prompt(buckets):
  message = refusal(sampling__prompt_buckets=buckets)
  assert message.startswith('config.sampling.prompt_buckets = ')
  assert 'max_prompt = 256' in message


def test_greedy_evaluation_takes_one_sample():
  message = refusal(eval__samples=4)
  assert message.startswith('config.eval.samples = 4')
  assert 'config.eval.temperature' in message
  resolve(config(eval__samples=4, eval__temperature=0.6))


def test_minibatches_divide_the_prompts():
  message = refusal(optimizer__minibatches=3)
  assert message.startswith('config.optimizer.minibatches = 3')
  assert 'config.rollout.prompts = 16' in message
  resolve(config(optimizer__minibatches=4))


# --- arms and memory (sparse_rollouts 3.1) ---------------------------------------------------------------------------

TABLE = {  # arm: compressed, weighted, veto, token mask, learner masked
  'naive': (True, False, False, False, False),
  'veto_only': (True, False, True, False, False),
  'reweight_only': (True, True, False, False, False),
  'sparse_rl': (True, True, True, False, False),
  'sparse_rl_code': (True, True, True, True, False),
  'learner_mask': (True, False, False, False, True),
}


@pytest.mark.parametrize('arm', TABLE)
def test_an_arm_is_one_setting(arm):
  run = resolve(config(arm=arm, cache__budget=64))
  c = run.correction
  assert (run.cache.budget > 0, c.level != 'off', c.veto > 0, c.token_mask, run.cache.masked_learner) == TABLE[arm]
  if c.level != 'off':
    assert (c.level, c.weight, c.cap, c.normalise) == ('token', 'truncate', 1.5, True)
  if c.veto:
    assert c.veto == 1e-4
  if c.token_mask:
    assert (c.mask_low, c.mask_high) == (0.5, 1.5)
  assert run.packing.share_prefix == (arm != 'learner_mask')
  assert resolve(to_dict(run)) == run


def test_the_dense_arm_evicts_nothing_and_leaves_the_correction_alone():
  run = resolve(config(arm='dense', cache__budget=64, correction__veto=1e-3))
  assert (run.cache.budget, run.correction.veto) == (0, 1e-3)


def test_an_arm_of_every_name_is_known():
  assert {'', 'dense', *TABLE} == set(typing.get_args(Arm))
  assert {'dense', *TABLE} == set(ARMS)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'arm': 'sparse'}, ("config.arm = 'sparse'", "'sparse_rl'", "'learner_mask'")),
    ({'arm': 'naive'}, ('config.cache.budget = 0', 'above 0', "config.arm = 'naive'")),
    ({'arm': 'naive', 'cache__budget': 64, 'correction__veto': 1e-3}, ('config.correction.veto = 0.001', "'naive'", '0.0')),
    ({'arm': 'naive', 'cache__budget': -5}, ('config.cache.budget = -5', '0 or more')),
    ({'arm': 'sparse_rl', 'cache__budget': 64, 'correction__cap': 3.0}, ('config.correction.cap = 3.0', "'sparse_rl'", '1.5')),
    ({'quant__kv_scale': 'trainr'}, ("config.quant.kv_scale = 'trainr'", "'trainer'", "'running_max'")),
    ({'quant__arithmetic': 'native'}, ("config.quant.arithmetic = 'native'", "'emulate'", "'blockwise'")),
    ({'cache__method': 'h3o'}, ("config.cache.method = 'h3o'", "'rkv'", "'h2o'", "'tova_like'")),
    ({'cache__interval': 0}, ('config.cache.interval = 0', '1 or more')),
    ({'cache__budget': -1}, ('config.cache.budget = -1', '0 or more')),
    ({'cache__window': -1}, ('config.cache.window = -1', '0 or more')),
    ({'cache__pool': 4}, ('config.cache.pool = 4', 'odd')),
    ({'cache__mix': 1.5}, ('config.cache.mix = 1.5', '[0, 1]')),
    ({'cache__positions': 'in_cache'}, ("config.cache.positions = 'in_cache'", "'rkv'")),
    ({'cache__masked_learner': True}, ('config.cache.budget = 0', 'masked_learner')),
    ({'cache__masked_learner': True, 'cache__budget': 64}, ('config.packing.share_prefix = True', 'masked_learner')),
    ({'quant__sampler': 'fp8'}, ("config.quant.sampler = 'fp8'", "'w8a8_kv8'")),
    ({'quant__kv_margin': 0.5}, ('config.quant.kv_margin = 0.5', '1 or more')),
    ({'quant__skip_names': ['lm_head']}, ('config.quant.skip_names', 'down')),
    (
      {'ledger__every': 1, 'cache__budget': 64, 'cache__trigger_scope': 'batch'},
      ("config.cache.trigger_scope = 'batch'", 'ledger'),
    ),
    ({'ledger__every': 1, 'sampling__top_p': 0.9}, ('config.sampling.top_p = 0.9', 'config.ledger.every')),
    ({'cache__positions': 'in_cache', 'cache__method': 'streaming', 'cache__sort_kept': False}, ('config.cache.sort_kept',)),
    ({'ledger__every': 1, 'ledger__groups': 17}, ('config.ledger.groups = 17', 'config.rollout.prompts = 16')),
  ],
)
def test_a_memory_that_cannot_be_is_refused_by_name(change, words):
  message = refusal(**change)
  assert all(word in message for word in words), message


def test_an_unknown_target_of_adapters_is_told_the_known():
  assert refusal(lora__targets=('q', 'lm_head')) == (
    "config.lora.targets = ('q', 'lm_head'): expected one or more of q, k, v, o, gate, up, down"
  )


# --- the scheduler, devices and environments (async_rollouts 2, 3, 6) ------------------------------------------------


def environment(**changes):
  return {'task__kind': 'environment', 'environment__name': 'frozen_lake', **changes}


@pytest.mark.parametrize(
  ('key', 'value', 'expected'),
  [
    ('rollout.async_ratio', -1.0, 'a finite number, 0 or more'),
    ('rollout.async_ratio', -0.5, 'a finite number, 0 or more'),
    ('rollout.async_ratio', float('inf'), 'a finite number, 0 or more'),
    ('rollout.async_ratio', float('nan'), 'a finite number, 0 or more'),
    ('rollout.async_ratio', 0.3, 'a whole number or one that makes whole groups of config.rollout.prompts = 16'),
    ('rollout.max_running', -1, '0 or more'),
    ('rollout.extra_prompts', -1, '0 or more'),
    ('rollout.extra_members', -1, '0 or more'),
    ('rollout.retries', -1, '0 or more'),
    ('rollout.order', 'age', "one of 'start', 'deadline', 'completion'"),
    ('rollout.sync', 'abort', "one of 'recompute', 'keep', 'drain'"),
    ('rollout.replica_routing', 'random', "one of 'affinity', 'spread'"),
    ('rollout.query_filter', 'equal', "one of 'none', 'std', 'mean'"),
    ('rollout.filter_low', 1.0, 'below config.rollout.filter_high = 1.0'),
    ('rollout.filter_low', float('nan'), 'below config.rollout.filter_high = 1.0'),
    ('rollout.filter_std', -0.1, 'a finite number, 0 or more'),
    ('rollout.filter_std', float('nan'), 'a finite number, 0 or more'),
    ('devices.engines', 0, '1 or more'),
    ('mesh.learner.fsdp', 0, '1 or more, or -1 once: all devices that remain'),
    ('mesh.rollout.expert', -2, '1 or more, or -1 once: all devices that remain'),
    ('devices.rollout', 'all', "'', or numbers such as '0-3' or '4,5,6'"),
    ('devices.rollout', '3-0', "'', or numbers such as '0-3' or '4,5,6'"),
    ('devices.learner', '0,,1', "'', or numbers such as '0-3' or '4,5,6'"),
    ('devices.learner', '0,0-1', 'each once'),
    ('devices.rollout', '0-99999999999', 'below 1000000'),
    ('environment.turns', 0, '1 or more'),
    ('environment.turn_tokens', 0, '1 or more'),
    ('environment.workers', -1, '0 or more'),
    ('environment.executor', 'dask', "one of 'threads', 'processes', 'ray'"),
    ('environment.time_limit', 0.0, 'seconds, above 0'),
    ('environment.time_limit', float('nan'), 'seconds, above 0'),
    ('environment.time_limit', float('inf'), 'at most 2147483'),
    ('environment.time_limit', 1e12, 'at most 2147483'),
    ('task.grader_timeout', float('inf'), 'at most 2147483'),
    ('task.grader_timeout', 2147484.0, 'at most 2147483'),  # which poll(2) overflows at
    ('environment.latency_mean', -0.1, 'seconds, 0 to 2147483'),
    ('environment.latency_std', 1e300, 'seconds, 0 to 2147483'),
  ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(key, value, expected):
  message = refusal(**{key.replace('.', '__'): value})
  assert message.startswith(f'config.{key} = {value!r}: expected '), message
  assert expected in message


@pytest.mark.parametrize(
  ('change', 'start', 'words'),
  [
    (environment(rollout__async_ratio=0.5), 'config.rollout.async_ratio = 0.5: ', ('a whole number for an environment',)),
    (
      {'rollout__async_ratio': 0.5, 'rollout__order': 'completion'},
      'config.rollout.async_ratio = 0.5: ',
      ("a whole number with config.rollout.order = 'completion'",),
    ),
    ({'rollout__extra_prompts': 2}, 'config.rollout.extra_prompts = 2: expected 0 ', ("order = 'start'", "'completion'")),
    (
      {'rollout__extra_prompts': 2, 'rollout__order': 'deadline'},
      'config.rollout.extra_prompts = 2: expected 0 ',
      ("order = 'deadline'",),
    ),
    (
      {'rollout__replicate_prompts': False, 'rollout__async_ratio': 1.0},
      'config.rollout.replicate_prompts = False: expected True ',
      ('config.rollout.async_ratio > 0',),
    ),
    (
      {'rollout__query_filter': 'std', 'rollout__group': 1, 'advantage__estimator': 'reinforce'},
      "config.rollout.query_filter = 'std': expected 'none' ",
      ('config.rollout.group = 1',),
    ),
    (
      {'task__kind': 'environment'},
      "config.task.kind = 'environment' and config.environment.name = '': ",
      ('an environment by name',),
    ),
    (
      {'environment__name': 'sokoban'},
      "config.task.kind = 'gsm8k' and config.environment.name = 'sokoban': ",
      ("with kind 'environment', and '' with others",),
    ),
  ],
)
def test_settings_of_the_schedule_that_contradict_each_other_are_refused_by_name(change, start, words):
  message = refusal(**change)
  assert message.startswith(start), message
  assert all(word in message for word in words), message


@pytest.mark.parametrize(
  ('places', 'change'),
  [
    (7, {'sampling__rows': 7}),
    (7, {'rollout__max_running': 7}),
    (7, {'sampling__rows': 7, 'rollout__max_running': 9}),
    (7, {'sampling__rows': 14, 'devices__engines': 2}),
    (4, {'rollout__prompts': 1, 'devices__engines': 2}),
    (8, {'sampling__rows': 8, 'rollout__extra_members': 1}),
  ],
)
def test_a_group_that_is_one_task_fits_into_one_engine(places, change):
  """Else it would wait for ever."""
  message = refusal(rollout__replicate_prompts=False, **change)
  assert message.startswith(f'config.rollout.group = 8 and extra_members = {change.get("rollout__extra_members", 0)}: '), message
  assert f'at most {places} together' in message
  assert 'config.rollout.replicate_prompts = False' in message
  resolve(config(**change))  # tasks of their own fit in anywhere


MASKED = {'cache__masked_learner': True, 'cache__budget': 64, 'packing__share_prefix': False}


@pytest.mark.parametrize(
  ('change', 'start'),
  [
    ({'rollout__async_ratio': 1.0}, 'config.rollout.async_ratio = 1.0: expected 0 with '),
    (environment(), "config.task.kind = 'environment': expected another with "),
  ],
)
def test_a_masked_learner_takes_no_sequences_that_go_on_in_another_row(change, start):
  message = refusal(**MASKED, **change)
  assert message.startswith(start), message
  assert 'config.cache.masked_learner' in message
  resolve(config(**MASKED))
  resolve(config(**change))


@pytest.mark.parametrize(
  'change',
  [
    {'rollout__async_ratio': 0.5},
    {'rollout__async_ratio': 1.0625},  # 17 of 16 groups
    {'rollout__async_ratio': 2.0, 'rollout__order': 'completion', 'rollout__extra_prompts': 4},
    {'rollout__replicate_prompts': False},
    {'rollout__replicate_prompts': False, 'sampling__rows': 16, 'devices__engines': 2},
    {'rollout__replicate_prompts': False, 'rollout__async_ratio': 1.0, 'rollout__group': 1, 'advantage__estimator': 'reinforce'},
    {'rollout__query_filter': 'mean', 'rollout__filter_low': 0.1, 'rollout__filter_high': 0.95},
    {'devices__rollout': '0-3', 'devices__learner': '4,5,6,7', 'devices__engines': 2},
    environment(rollout__async_ratio=2.0, environment__executor='processes', environment__latency_std=1.0),
    environment(environment__time_limit=0.5, rollout__retries=0),
  ],
)
def test_schedules_that_can_be(change):
  resolve(config(**change))
