"""python -m sprl.evaluate --workdir=runs/quickstart [--step=N] [--config.eval.samples=8 --config.eval.temperature=0.8 ...]

Evaluates a checkpoint on held-out problems. Prints scores with 95 % intervals, a few samples, and one line of JSON at the end.
The run may be in progress. Its settings come from its config.json; `config.eval.*` and the cost of grading
(`config.task.workers`, `executor`, `time_limit`) may be overridden. A run in progress leaves little memory on
its accelerator: JAX_PLATFORMS=cpu evaluates on the host. Exit status: 2 where the run, checkpoint or setting does not exist;
3 where the environment always fails.
"""

import json
import math
import textwrap
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from sprl import command_line
from sprl.config import Run, SettingsError, to_dict
from sprl.config_checks import GRADING_COSTS
from sprl.config_reader import resolve
from sprl.io.config_file import config_differences, read_config

MAY_CHANGE = ('eval', *GRADING_COSTS)

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run to evaluate.', required=True)
_STEP = flags.DEFINE_integer('step', None, 'The step of the checkpoint. Default: the newest.')


def define_config(argv: list[str]) -> None:
  """Define the flags --config.*, with the values of the run that `argv` names as defaults."""
  flags.FLAGS(argv, known_only=True)
  config_flags.DEFINE_config_dict('config', ConfigDict(to_dict(resolve(read_config(_WORKDIR.value)))))


def overridden(saved: Mapping[str, Any], given: Run) -> Run:
  """Return `given`. Raises SettingsError if it differs from the saved settings in more than an evaluation may change."""
  allowed = tuple(f'{key}{end}' for key in MAY_CHANGE for end in (':', '.'))
  differences = config_differences(saved, to_dict(given), to_dict(Run()))
  if refused := [change for change in differences if not change.startswith(allowed)]:
    raise SettingsError(
      'an evaluation uses the settings of the run. It may change ' + ', '.join(f'config.{key}' for key in MAY_CHANGE)
      + '; it may not change\n  ' + '\n  '.join(f'config.{change}' for change in refused)
    )  # fmt: skip
  return given


def table(result: Mapping[str, Any]) -> str:
  """Return the scores as a text table."""
  lines = ['            score   95 % interval']
  for name, (mean, low, high) in result['intervals'].items():
    bounds = f'{low:.3f} to {high:.3f}' if math.isfinite(low) else 'unknown: one problem'
    lines.append(f'  {name:9s} {mean:.3f}   {bounds}')
  metrics = result['metrics']
  prefix = 'eval/reward/'
  if parts := [f'{name.removeprefix(prefix)} {value:.3f}' for name, value in metrics.items() if name.startswith(prefix)]:
    lines.append(f'  mean rewards: {", ".join(parts)}; the scores above count the first')
  lines.append(f'  mean length {metrics["eval/length_mean"]:.1f} tokens; {metrics["eval/truncated"]:.1%} cut at the limit')
  if metrics['eval/ungraded']:
    lines.append(f'  {metrics["eval/ungraded"]:.0f} completions scored 0 because their grader failed')
  return '\n'.join(lines)


def main() -> int:
  """Run the command and return its exit status."""
  workdir = Path(_WORKDIR.value)
  saved = to_dict(resolve(read_config(workdir)))
  config: Any = flags.FLAGS['config'].value
  run = overridden(saved, resolve(config))
  from sprl.distributed.process_group import require_single_process
  from sprl.learner.restore import restore
  from sprl.model import Model
  from sprl.rollout.evaluate import evaluate
  from sprl.rollout.setup import RolloutSetup  # imported late: an error in the settings is reported before jax loads

  require_single_process('sprl.evaluate')
  model = Model.open(run)
  with ExitStack() as stack:
    _, _, held_out = RolloutSetup.open(run, model.tokenizer).begin(stack.enter_context)
    params, step, scales = restore(model, run, workdir, _STEP.value)
    start = time.perf_counter()
    result = evaluate(run, model, params, held_out, shown=3, scales=scales)
    seconds = time.perf_counter() - start

  e, task = run.eval, run.task
  how = 'greedy' if e.temperature == 0 else f'{e.samples} samples each at temperature {e.temperature:g}, top-p {e.top_p:g}'
  what = task.path or task.name or task.kind
  memory = 'dense' if e.memory == 'dense' else "the rollouts' sampler"
  print(f'{workdir}, step {step}: {result["metrics"]["eval/problems"]:.0f} held-out problems of {what}, {how}, {memory}\n')
  print(table(result))
  for row in result['samples']:
    prompt, completion = (textwrap.indent(row[key].strip(), '    ') for key in ('prompt', 'completion'))
    print(f'\n  Prompt\n{prompt}\n  Completion, {row["tokens"]} tokens\n{completion}')
    parts = ''.join(f'   {name} {score:g}' for name, score in row.items() if name.startswith('reward/'))
    print(f'  Answer {row["answer"]!r}   reward {row["reward"]:g}{parts}')
  settings = {key: value for key, value in to_dict(run)['eval'].items() if key != 'every'}
  facts = {'workdir': str(workdir), 'step': step, 'seconds': round(seconds, 2), 'settings': settings}
  print(json.dumps(_json({**facts, **result['metrics'], 'intervals': result['intervals']}), allow_nan=False))
  return 0


def _json(value: Any) -> Any:
  """Replace non-finite numbers, such as the bounds of an interval over one problem, by null."""
  if isinstance(value, Mapping):
    return {name: _json(v) for name, v in value.items()}
  if isinstance(value, list | tuple):
    return [_json(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == '__main__':
  command_line.start(main, define_config)
