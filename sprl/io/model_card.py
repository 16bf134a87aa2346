"""The model card of an exported checkpoint: README.md with the front matter of the Hugging Face hub.

Everything in it is from the files of the run: config.json, starts.json, metrics.jsonl, and the card of the base model.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sprl
from sprl.config import Run, to_dict
from sprl.config_reader import resolve
from sprl.io.config_file import read_config, read_located
from sprl.io.metrics import read_metrics, series
from sprl.io.metrics_reference import METRICS
from sprl.io.pretrained import on_hub, transformers_path
from sprl.io.random_model import is_random
from sprl.io.starts import read_starts

# The metrics of the mismatch section, each its mean over the steps. METRICS has their meanings.
MISMATCH = (
  'rollout_corr/kl', 'rollout_corr/k3_kl', 'sparse/agreement_mean', 'sparse/agreement_p05', 'sparse/ess',
  'sparse/veto_fraction', 'sparse/accounting_saving', 'sparse/bytes_saving',
)  # fmt: skip
TAG = 'sprl'  # of the hub, which tells sprl's exports from other models
SCORE = 'avg@k'  # the end of the name of a held-out score; `low` and `high` in its place are the ends of its interval


def model_card(workdir: Path, step: int, base: Path, name: str, adapter: bool = False) -> str:
  """Return the card of the weights after `step`.

  Args:
    workdir: the run's work directory.
    step: the step of the exported checkpoint.
    base: the folder of the base model, whose README.md may name its license.
    name: the name of the model: the exported folder, or its repository.
    adapter: whether the folder holds adapters alone.
  """
  config, located = (to_dict(resolve(read(workdir))) for read in (read_config, read_located))
  starts = read_starts(workdir)
  records = [record for record in read_metrics(workdir) if record['step'] <= step]
  parts = [
    _front_matter(located, base, adapter),
    f'# {name}',
    _introduction(config, starts, step, adapter),
    _usage(transformers_path(located['model']['path'], base) if adapter else None, name),
    _results([record for record in records if record['kind'] == 'eval']),
    _mismatch([record for record in records if record['kind'] == 'train']),
    _ledger([record for record in records if record['kind'] == 'ledger']),
    _settings(config),
    _origin(starts, records, step),
  ]
  return '\n\n'.join(part for part in parts if part) + '\n'


def _front_matter(config: Mapping[str, Any], base: Path, adapter: bool) -> str:
  path, task = config['model']['path'], config['task']
  facts: dict[str, Any] = {
    'base_model': path if on_hub(path) else None,
    'license': _license(base),
    'library_name': 'peft' if adapter else 'transformers',
    'pipeline_tag': 'text-generation',
    'tags': [TAG, 'reinforcement-learning', *(['lora'] if config['lora']['rank'] else [])],
    'datasets': _datasets(task),
  }
  lines = [f'{key}: {json.dumps(value)}' for key, value in facts.items() if value]  # JSON values are YAML
  return '\n'.join(['---', *lines, '---'])


def _license(base: Path) -> str | None:
  """Return the license in the front matter of the base model's card, if it has one."""
  card = base / 'README.md'
  text = card.read_text(encoding='utf-8', errors='replace') if card.is_file() else ''
  front = re.match(r'---\n(.*?)\n---', text, re.DOTALL)
  found = re.search(r'^license:\s*["\']?([\w.-]+)', front[1], re.MULTILINE) if front else None
  return found[1] if found else None


def _datasets(task: Mapping[str, Any]) -> list[str]:
  """Return the hub names of the data that the run trains on: those of the task, or of the sources of its mixture."""
  found = []
  for source in (task, *task.get('mixture', {}).values()):
    path = source['path'] or ('openai/gsm8k' if source['kind'] == 'gsm8k' else None)  # the default of config.task.path
    if source['kind'] in ('gsm8k', 'dataset') and path is not None and on_hub(path.partition(':')[0]):
      found.append(path.partition(':')[0])
  return list(dict.fromkeys(found))


def _introduction(config: Mapping[str, Any], starts: Mapping[str, Any], step: int, adapter: bool) -> str:
  lora, source = config['lora'], starts['from']
  what = f'LoRA adapters of rank {lora["rank"]} to' if adapter else 'A version of'
  lines = [f'{what} `{config["model"]["path"]}`, trained with reinforcement learning by sprl for {step} steps.']
  if is_random(config['model']['path']):
    lines.append('**The run began with random weights.** The model was made to measure speed and memory. It is of no other use.')
  if source is not None:
    lines.append(f'Its first weights are those of another run, `{Path(source["workdir"]).name}`, after step {source["step"]}.')
  cache, quant, correction = config['cache'], config['quant'], config['correction']
  kept = f'at most {cache["budget"]} tokens after a compression ({cache["method"]})' if cache['budget'] else 'all tokens'
  rows = [
    (
      'task',
      config['task']['name'] or config['task']['path'] or ', '.join(config['task'].get('mixture', ())) or config['task']['kind'],
    ),
    ('arm, preset', f'{config["arm"]}, {config["preset"]}'),
    ('KV cache of the rollouts', kept),
    ('FP8 in the rollouts', quant['sampler']),
    ('FP8 in the learner', quant['learner']),
    ('loss', config['loss']['variant']),
    ('correction', f'mode {correction["mode"]}, level {correction["level"]}'),
    ('steps', f'{step} of {config["steps"]}'),
  ]
  return '\n'.join([*lines, '', *_table(('', 'Setting'), rows)])


def _usage(base: str | None, name: str) -> str:
  """Return Python code that loads the model `name`; with adapters, on the weights `base`."""
  lines = ['from transformers import AutoModelForCausalLM, AutoTokenizer', '']
  if base is not None:
    lines = ['from peft import PeftModel', *lines, f'base = AutoModelForCausalLM.from_pretrained({base!r})']
    lines += [f'model = PeftModel.from_pretrained(base, {name!r})', f'tokenizer = AutoTokenizer.from_pretrained({base!r})']
  else:
    lines += [f'{part} = {cls}.from_pretrained({name!r})' for part, cls in (
      ('model', 'AutoModelForCausalLM'), ('tokenizer', 'AutoTokenizer')
    )]  # fmt: skip
  return '\n'.join(['```python', *lines, '```'])


def _results(evaluations: Sequence[Mapping[str, Any]]) -> str:
  """Return a table of the first and the last evaluation: each score with its 95 % interval."""
  if not evaluations:
    return ''
  rows = []
  for record in evaluations[:1] if len(evaluations) == 1 else (evaluations[0], evaluations[-1]):
    for score in (name for name in record if name.endswith(SCORE)):
      group = score.removesuffix(SCORE)
      bounds = [record.get(f'{group}{end}') for end in ('low', 'high')]
      interval = 'unknown' if None in bounds else ' to '.join(f'{bound:.3f}' for bound in bounds)
      problems = record.get(f'{group}problems', record.get('eval/problems'))
      rows.append((f'{record["step"]}', f'`{score}`', f'{record[score]:.3f}', interval, f'{problems:g}'))
  head = ('Step', 'Score', 'Mean', '95 % interval', 'Problems')
  return '\n'.join(['## Held-out results', '', *_table(head, rows)])


def _mismatch(steps: Sequence[Mapping[str, Any]]) -> str:
  """Return a table of how the sampler and the learner differed, as means over the steps."""
  found = [(name, series(steps, name)[1]) for name in MISMATCH]
  rows = [(f'`{name}`', f'{values.mean():.4g}', METRICS[name]) for name, values in found if len(values)]
  if not rows:
    return ''
  text = 'How the policy that draws the rollouts differs from the one that is trained. Means over the steps:'
  return '\n'.join(['## Mismatch between sampler and learner', '', text, '', *_table(('Metric', 'Mean', 'Meaning'), rows)])


def _ledger(ledgers: Sequence[Mapping[str, Any]]) -> str:
  """Return a table of the mismatch by its causes, from the last ledger."""
  if not ledgers:
    return ''
  last = ledgers[-1]
  names = [name.removeprefix('ledger/').removesuffix('_abs') for name in last if re.fullmatch(r'ledger/\w+_abs', name)]
  rows = [(name, f'{last[f"ledger/{name}_abs"]:.4g}', f'{last[f"ledger/{name}_mean"]:.4g}') for name in names]
  text = f'By its causes, in nats per token, at step {last["step"]}:'
  return '\n'.join([text, '', *_table(('Cause', 'Mean absolute value', 'Mean'), rows)])


def _settings(config: Mapping[str, Any]) -> str:
  defaults = dict(_leaves(to_dict(Run())))
  rows = [(f'`{key}`', f'`{json.dumps(value)}`') for key, value in _leaves(config) if defaults.get(key) != value]
  text = 'All other settings have the defaults of this version of sprl.'
  return '\n'.join(['## Settings', '', text, '', *_table(('Setting', 'Value'), rows)])


def _leaves(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (dotted key, value as JSON has it) of nested settings."""
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      yield from _leaves(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}', json.loads(json.dumps(value))


def _origin(starts: Mapping[str, Any], records: Sequence[Mapping[str, Any]], step: int) -> str:
  """Return the starts of the run that made the weights after `step`, the tokens they took, and the exporting version."""
  lines = ['## How it was made', '']
  for start in (start for start in starts['starts'] if start['step'] < max(step, 1)):
    how = start['command'] or 'a Python program'
    lines.append(f'* from step {start["step"]}: `{how}`, sprl {start["sprl"]}, jax {start["jax"]}, on {start["devices"]}')
  sums = [(name, series(records, f'tokens/{name}')[1]) for name in ('sampled', 'trained')]
  lines += [f'* tokens {name}: {values[-1]:,.0f}' for name, values in sums if len(values)]
  return '\n'.join([*lines, f'* exported by sprl {sprl.__version__}'])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  """Return the lines of a Markdown table. A vertical bar in a cell is escaped."""
  lines = [head, ['---'] * len(head), *rows]
  return ['| ' + ' | '.join(str(cell).replace('|', '\\|') for cell in line) + ' |' for line in lines]
