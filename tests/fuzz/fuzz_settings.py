"""Settings: one to three random values, as Python values or as flags of a command line.

Every case is accepted, or refused by a SettingsError that names a setting or by a flag's error with status 2. An accepted case is
a fixed point of `resolve`. A case on top of the tiny run of the end-to-end tests is also opened as a run would open it, up to its
first device work, or planned for a random mesh.
"""

import contextlib
import dataclasses
import io
import json
import math
import random
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny
import values
from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.config import LINEARS, UNIONS, HeldOutSet, MixtureSource, Run, SettingsError, to_dict
from sprl.config_checks import GRADERS, RANGES, REJECTIONS
from sprl.config_reader import resolve
from sprl.io.pretrained import config_folder
from sprl.kernels.support import record_format
from sprl.model import Model
from sprl.models.config import ModelConfig
from sprl.planning import show
from sprl.planning.devices import device
from sprl.planning.estimate import plan
from sprl.planning.mesh_axes import run_axes
from sprl.planning.room import check_caches_fit
from sprl.presets import CORRECTIONS, RECIPES
from sprl.remarks import remarks
from sprl.rollout.setup import RolloutSetup, place_engines
from sprl.tasks import judge

SECONDS = 30.0


def leaves(section: type, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (key, type) of every setting of a section."""
  for name, hint in typing.get_type_hints(section).items():
    if dataclasses.is_dataclass(hint):
      yield from leaves(typing.cast(type, hint), f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', hint


LEAVES = dict(leaves(Run))


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  config = tiny.write_inputs(folder)
  scope: dict = {}
  exec(config.read_text(), scope)
  yield SimpleNamespace(folder=folder, config=config, tiny=scope['get_config'])


# --- values ------------------------------------------------------------------------------------------------------------


def plausible(rng: random.Random, key: str, hint: Any, folder: Path) -> Any:
  """Return a value of the setting's type, often one that the setting accepts."""
  args = typing.get_args(hint)
  if typing.get_origin(hint) in UNIONS:
    return plausible(rng, key, rng.choice(args), folder)
  if hint is type(None):
    return None
  if typing.get_origin(hint) is typing.Literal:
    return rng.choice(args)
  if typing.get_origin(hint) is tuple:
    return tuple(plausible(rng, key, args[0], folder) for _ in range(rng.choice((0, 1, 1, 2, 3))))
  if typing.get_origin(hint) is Mapping:
    return dictionary(rng, key, folder)
  if hint is bool:
    return rng.random() < 0.5
  if hint is int:
    return rng.choice((1, 2, 3, 4, 8, 16, rng.randint(0, 64), edge(rng, key, int), values.integer(rng)))
  if hint is float:
    return rng.choice((0.5, 1.0, rng.random(), rng.uniform(0, 8), edge(rng, key, float), values.number(rng)))
  if hint is str:
    return name(rng, key, folder)
  raise TypeError(f'{key}: no values of type {hint}')


def edge(rng: random.Random, key: str, kind: type) -> Any:
  """Return a number at an end of the setting's range, or just beside it."""
  ends = [float(end) for end in RANGES.get(key, '[0, 1]')[1:-1].split(',')]
  end = rng.choice([end for end in ends if math.isfinite(end)])
  return (
    int(end) + rng.choice((-1, 0, 1)) if kind is int else rng.choice((end, math.nextafter(end, -9e9), math.nextafter(end, 9e9)))
  )


def name(rng: random.Random, key: str, folder: Path) -> str:
  """Return a text that the setting may accept."""
  file = f'{folder}/grader.py'
  graders = (*GRADERS, f'{file}:grade', f'{file}:no', f'{file}:', 'mine.py:f', 'python:f', f'{folder}:f')
  known: dict[str, tuple] = {
    'model.path': (f'{folder}/model', f'{folder}/tokenizer', str(folder), 'random:tiny', 'random:no', 'wheel:no'),
    'task.path': (str(folder), f'{folder}/train.jsonl', f'{folder}/grader.py', f'{folder}/model', f'{folder}/no'),
    'task.name': (
      'chain_sum',
      'frozen_lake',
      'sokoban',
      'guess_number',
      'calculator',
      'chat',
      'gem',
      'verifiers',
      f'{file}:grade',
    ),
    'task.filters': ('answer>=3', 'answer!=null', 'answer~1', 'no==1', 'answer~(', 'prompt>3', 'answer<1e999', "answer=='4'"),
    'task.splits': ('train', 'test', 'train[:50%]', 'train[2:]', 'test[-1:]', 'train[:0]', 'train[:101%]', 'train[9:2]', 'no'),
    'task.grader': graders,
    'task.rewards': tuple(f'{grader}{end}' for grader in graders for end in ('', '=0.5', '=-1', '=nan', '=', '=x')),
    'devices.rollout': ('0', '1', '0-3', '3-0', '0,0', '0-999999', '0-9999999999', '-1', '0-', ' 0 '),
    'correction.reject': tuple(
      f'{rule}={b}' for rule in (*REJECTIONS, 'no') for b in ('0.5:2', '2', '0', 'nan', '-1:1', '1:2:3', 'inf')
    ),
    'quant.skip_names': LINEARS,
    'lora.targets': LINEARS,
    'preset': (*RECIPES, *CORRECTIONS),
  }
  known['devices.learner'] = known['devices.rollout']
  return values.text(rng) if rng.random() < 0.3 or key not in known else rng.choice(known[key])


def dictionary(rng: random.Random, key: str, folder: Path) -> dict[Any, Any]:
  """Return a dictionary that the setting may accept."""
  section = {'task.mixture': MixtureSource, 'eval.sets': HeldOutSet}.get(key)
  if section is not None:
    return {rng.choice(('a', 'b', 'a b', '', '1', 'é')): source(rng, section, folder) for _ in range(rng.choice((0, 1, 1, 2)))}
  if key == 'weight':
    return {rng.choice((0, '0', 5, 'x', -1, 2**70)): values.number(rng) for _ in range(rng.choice((0, 1, 2, 3)))}
  if key.endswith('columns'):
    texts = ('prompt', 'answer', '', '{prompt}', 'answer ~ (.)', 'answer ~ (', '{no}', 'no', 'a.b', '{')
    return {
      rng.choice(('prompt', 'messages', 'answer', 'solution', 'no')): rng.choice(texts) for _ in range(rng.choice((0, 1, 2)))
    }
  known = {
    'task.args': ('max_terms', 'min_terms', 'size', 'seed', 'map', 'is_slippery', 'max_actions', 'port', 'taskset'),
    'task.template_args': ('bos_token', 'messages', 'tools', 'enable_thinking', 'add_generation_prompt'),
    'task.judge': tuple(judge.Settings.__dataclass_fields__),
  }.get(key, ('a',))
  made = {rng.choice(known): values.value(rng, 2) for _ in range(rng.choice((0, 1, 2, 3)))}
  if key == 'task.judge' and rng.random() < 0.8:
    made |= {'url': 'http://127.0.0.1:9/v1', 'model': 'm'}
  return made


def source(rng: random.Random, section: type, folder: Path) -> Any:
  """Return the settings of a source, a few of them random."""
  if rng.random() < 0.05:
    return values.value(rng, 1)
  made: dict[str, Any] = {'kind': 'jsonl', 'path': str(folder)}
  hints = typing.get_type_hints(section)
  for field in rng.sample(sorted(hints), rng.choice((0, 1, 1, 2))):
    key = field if field == 'weight' else f'task.{field.removesuffix("s") + "s" if field == "split" else field}'
    made[field] = plausible(rng, key, hints[field], folder) if rng.random() < 0.8 else values.value(rng, 1)
  return made


def setting(rng: random.Random, folder: Path) -> tuple[str, Any]:
  """Return (key, value) of a random setting."""
  key = rng.choice(list(LEAVES))
  if rng.random() < 0.2:
    return key, rng.choice(
      (values.value(rng, 2), {values.text(rng): values.scalar(rng)}, (values.scalar(rng),), {1, 2}, b'x', 1j)
    )
  return key, plausible(rng, key, LEAVES[key], folder)


def as_flag(rng: random.Random, value: Any) -> str:
  """Return a value as people write it on a command line, or a text that is none."""
  if rng.random() < 0.15:
    return rng.choice(
      (values.text(rng).replace('\0', ''), '(1,', "{'a'", '[1, 2', '(,)', 'a,b', '1_0', '0x1F', '1e5', 'true', 'no', '{1:2}')
    )
  return str(value).replace('\0', '')


# --- cases -------------------------------------------------------------------------------------------------------------


def mesh(rng: random.Random) -> str | None:
  """Return the text of a mesh."""
  if rng.random() < 0.1:
    return rng.choice((None, values.text(rng), '9' * 5000))
  sizes = (1, 2, 2, 4, 4, 8) if rng.random() < 0.9 else (3, 64, 1000, 0, -1, values.integer(rng), 'x', '9' * 5000)
  axes = rng.sample(('data', 'fsdp', 'tensor', 'expert', 'sequence'), rng.choice((1, 1, 2, 3)))
  return ','.join(f'{axis}={rng.choice(sizes)}' for axis in axes)


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  how = rng.choice(('values', 'values', 'flags', 'run', 'run', 'run', 'plan'))
  changes = dict(setting(rng, world.folder) for _ in range(rng.choice((1, 1, 2, 3))))
  if how == 'flags':
    return {'how': how, 'flags': [f'--config.{key}={as_flag(rng, value)}' for key, value in changes.items()]}
  if how == 'plan':
    names = ('memory', 'bandwidth', 'bfloat16', 'float32', 'link', 'network')
    ceilings = {rng.choice(names): values.number(rng) for _ in range(rng.choice((0, 0, 1)))}
    usable = rng.choice((0.9, 0.9, 0.9, 0.9, values.number(rng)))
    asked = {
      'mesh': mesh(rng),
      'rollout': mesh(rng) if rng.random() < 0.2 else None,
      'device': rng.choice(('h200', 'v5e', 'v5e', 'x')),
      'usable': usable,
    }
    return {'how': how, 'changes': changes, 'asked': asked, 'ceilings': ceilings}
  return {'how': how, 'changes': changes}


def check(world: Any, case: dict[str, Any]) -> str:
  if case['how'] == 'flags':
    given = parsed(world, case['flags'])
    if given is None:
      return 'flags: refused'
  else:
    given = to_dict(Run())
    given['model']['path'] = f'{world.folder}/model'
    if case['how'] in ('run', 'plan'):
      given = world.tiny().to_dict()
    for key, value in case['changes'].items():
      *sections, last = key.split('.')
      inner = given
      for each in sections:
        inner = inner[each]
      inner[last] = value
  try:
    run = resolve(given)
  except SettingsError as error:
    assert re.match(r'config\.[\w.]+', str(error)), f'no setting is named: {error}'
    return f'{case["how"]}: refused by the settings'
  assert resolve(to_dict(run)) == run, 'resolve is not idempotent'
  if case['how'] == 'run':
    return f'run: {ended(lambda: open_as_a_run(run))}'
  if case['how'] == 'plan':
    return f'plan: {ended(lambda: planned(run, case))}'
  return f'{case["how"]}: accepted'


def parsed(world: Any, arguments: list[str]) -> Any:
  """Return the config that a command gets from its flags; None if the flags are refused."""
  before, flags.FLAGS = flags.FLAGS, flags.FlagValues()
  command_line.flags.FLAGS = flags.FLAGS
  try:
    argv = ['program', f'--config={world.config}', *arguments]
    config_flags.DEFINE_config_file('config', flag_values=flags.FLAGS, sys_argv=argv)
    with contextlib.redirect_stderr(io.StringIO()) as said:
      command_line._parse(argv, lambda argv: None)
    return flags.FLAGS['config'].value
  except SystemExit as ended:
    assert ended.code == 2, ended.code
    assert said.getvalue().startswith('error: '), said.getvalue()
    assert 'Traceback' not in said.getvalue(), said.getvalue()
    return None
  finally:
    flags.FLAGS = command_line.flags.FLAGS = before


def ended(use: Callable[[], Any]) -> str:
  """Call a function. Return whether it refuses the settings by an error that a command reports."""
  try:
    use()
  except Exception as error:
    if not isinstance(error, SettingsError | OSError) and command_line._status(error) is None:
      raise
    return 'refused when used'
  return 'accepted'


def open_as_a_run(run: Run) -> None:
  """Open a run as sprl.train does, before its first device work."""
  model = Model.open(run)
  record_format(run.sampling, model.config.vocab_size)
  layout = model.cache_layout(run.sampling, run.cache, run.quant, run.masked_learner, run.model.router_replay == 'R3')
  check_caches_fit(run, layout, model.engine_meshes)
  RolloutSetup.open(run, model.tokenizer)
  remarks(run, layout, model.linears(run.quant), model.config.max_positions)
  place_engines(run, model, layout)


def planned(run: Run, case: dict[str, Any]) -> None:
  """Plan a run as sprl.plan does."""
  asked = case['asked']
  learner, rollout = run_axes(run, asked['mesh'], asked['rollout'])
  ceilings = device(asked['device'], **{name: float(value) for name, value in case['ceilings'].items()})
  config = ModelConfig.read(config_folder(run.model.path))
  found = plan(config, run, learner, rollout, ceilings, float(asked['usable']))
  assert show.as_text(found)
  assert json.dumps(show.as_json(found))
