"""Compilations of a run: each program compiles once. After two steps only a new bucket or a first stop string compiles one."""

import json
import re
from collections import Counter
from pathlib import Path

import jax
import tiny

from sprl import config as settings
from sprl import session, train
from sprl.config_reader import resolve
from sprl.io.progress import Progress

BUCKETS = (4, 8, 16)


def ragged(inputs: Path) -> settings.Run:
  """Return a run on prompts of 1 to 16 tokens. The 16 samples of a step share eight rows, which become free one by one."""
  tiny.write_inputs(inputs)
  for name in ('train', 'test'):
    lines = [json.dumps({'prompt': 'x' * (1 + 7 * i % 16), 'answer': '1'}) for i in range(16)]
    (inputs / f'{name}.jsonl').write_text('\n'.join(lines))
  scope: dict = {}
  exec((inputs / 'config.py').read_text(), scope)
  config = scope['get_config']()
  config.sampling.prompt_buckets, config.sampling.rows = BUCKETS, 8
  config.arm, config.quant.sampler, config.model.dtype, config.loss.kl_coef = 'dense', 'none', 'float32', 0.0
  config.eval.every, config.checkpoint.every, config.ledger.every, config.optimizer.minibatches = None, None, None, 1
  return resolve(config)


def test_a_run_of_ragged_prompts_compiles_each_program_once(tmp_path, monkeypatch, caplog):
  # The log cannot tell the programs of an evaluation from those of the rollouts.
  monkeypatch.setattr(session, 'evaluate', lambda *_, **__: {'metrics': {'eval/avg@k': 0.0}, 'samples': []})
  compiled_ahead = train.compile_programs
  monkeypatch.setattr(train, 'compile_programs', lambda *given: compiled_ahead(*given[:6], None, *given[7:]))
  ends = []  # number of log records at the end of each step
  monkeypatch.setattr(Progress, 'step', lambda *_: ends.append(len(caplog.records)))
  jax.config.update('jax_log_compiles', True)  # of all threads: the rollouts compile in another
  try:
    caplog.set_level('WARNING', logger='jax')
    train.train(ragged(tmp_path / 'inputs'), tmp_path / 'run')
  finally:
    jax.config.update('jax_log_compiles', False)
  compiled = [re.match(r'Compiling jit\((\w+)\) with .* types (.*)', record.getMessage(), re.DOTALL) for record in caplog.records]
  times = Counter(found.groups() for found in compiled if found)
  assert {'update', 'prefill', 'insert', 'decode'} <= {name for name, _ in times}
  assert {program for program, n in times.items() if n > 1} == set()
  late = Counter(found[1] for found in compiled[ends[1] :] if found)
  assert set(late) <= {'prefill', 'insert', 'release'}  # first use of a bucket, for one or several prompts; first stop string
  assert late['prefill'] < 2 * len(BUCKETS)
