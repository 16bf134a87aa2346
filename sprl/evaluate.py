"""python -m sprl.evaluate --workdir=runs/quickstart [--step=N] [--config.eval.samples=8 --config.eval.temperature=0.8 ...]

Evaluates a checkpoint of a run, which may be in progress, on held-out problems, and prints scores with their 95 % intervals, a
few samples, and as its last line all of it as JSON. The settings are the run's own (config.json); config.eval.* may be given
anew, and what grading may cost (config.task.grader_workers, _timeout, _memory_gb). A run in progress on an accelerator leaves
little memory beside it: JAX_PLATFORMS=cpu evaluates on the host. The exit status is 2, with a line that says why, where there
is no such run, checkpoint or setting, and 3 where its environment always fails.
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
from sprl.io.config_file import config_differences, read_config
from sprl.settings import GRADING_COSTS, Run, SettingsError, resolve, to_dict

MAY_CHANGE = ('eval', *GRADING_COSTS)

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run to evaluate.', required=True)
_STEP = flags.DEFINE_integer('step', None, 'The checkpoint; default: the newest.')


def define_config(argv: list[str]) -> None:
  """Defines --config.* with the values of the run that `argv` names."""
  flags.FLAGS(argv, known_only=True)
  config_flags.DEFINE_config_dict('config', ConfigDict(to_dict(resolve(read_config(_WORKDIR.value)))))


def overridden(saved: Mapping[str, Any], given: Run) -> Run:
  """The settings given, if they are the saved ones but for what an evaluation may change.

  Raises SettingsError, naming the others.
  """
  allowed = tuple(f'{key}{end}' for key in MAY_CHANGE for end in (':', '.'))
  differences = config_differences(saved, to_dict(given), to_dict(Run()))
  if refused := [change for change in differences if not change.startswith(allowed)]:
    raise SettingsError(
      'an evaluation is of the run as it was trained; it may change ' + ', '.join(f'config.{key}' for key in MAY_CHANGE)
      + ', but not\n  ' + '\n  '.join(f'config.{change}' for change in refused)
    )  # fmt: skip
  return given


def table(result: Mapping[str, Any]) -> str:
  """The scores as people read them."""
  lines = ['            score   95 % interval']
  for name, (mean, low, high) in result['intervals'].items():
    bounds = f'{low:.3f} to {high:.3f}' if math.isfinite(low) else 'unknown: one problem'
    lines.append(f'  {name:9s} {mean:.3f}   {bounds}')
  metrics = result['metrics']
  lines.append(f'  completions of {metrics["eval/length_mean"]:.1f} tokens; {metrics["eval/truncated"]:.1%} cut at the limit')
  if metrics['eval/ungraded']:
    lines.append(f'  {metrics["eval/ungraded"]:.0f} completions scored 0 because grading them failed')
  return '\n'.join(lines)


def main() -> int:
  """Flags to an evaluation."""
  workdir = Path(_WORKDIR.value)
  saved = to_dict(resolve(read_config(workdir)))
  config: Any = flags.FLAGS['config'].value
  run = overridden(saved, resolve(config))
  from sprl.acting import Asked  # after the settings: an error in them is told without waiting for jax to load
  from sprl.evaluation import evaluate
  from sprl.parallel.processes import only_one
  from sprl.policy import Policy
  from sprl.saved import restore

  only_one('sprl.evaluate')
  policy = Policy.open(run)
  with ExitStack() as stack:
    _, _, held_out = Asked.open(run, policy.tokenizer).begin(stack.enter_context)
    params, step, scales = restore(policy, run, workdir, _STEP.value)
    start = time.perf_counter()
    result = evaluate(run, policy, params, held_out, shown=3, scales=scales)
    seconds = time.perf_counter() - start

  e, task = run.eval, run.task
  how = 'greedy' if e.temperature == 0 else f'{e.samples} samples each at temperature {e.temperature:g}, top-p {e.top_p:g}'
  what = task.path or task.name or run.environment.name or task.kind
  memory = 'dense' if e.memory == 'dense' else "the rollouts' sampler"
  print(f'{workdir}, step {step}: {result["metrics"]["eval/problems"]:.0f} held-out problems of {what}, {how}, {memory}\n')
  print(table(result))
  for row in result['samples']:
    prompt, completion = (textwrap.indent(row[key].strip(), '    ') for key in ('prompt', 'completion'))
    print(f'\n  Prompt\n{prompt}\n  Completion, {row["tokens"]} tokens\n{completion}')
    print(f'  Answer {row["answer"]!r}   reward {row["reward"]:g}')
  settings = {key: value for key, value in to_dict(run)['eval'].items() if key != 'every'}
  facts = {'workdir': str(workdir), 'step': step, 'seconds': round(seconds, 2), 'settings': settings}
  print(json.dumps(_json({**facts, **result['metrics'], 'intervals': result['intervals']}), allow_nan=False))
  return 0


def _json(value: Any) -> Any:
  """With null for what JSON has no number: the bounds of an interval that one problem leaves open."""
  if isinstance(value, Mapping):
    return {name: _json(v) for name, v in value.items()}
  if isinstance(value, list | tuple):
    return [_json(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == '__main__':
  command_line.start(main, define_config)
