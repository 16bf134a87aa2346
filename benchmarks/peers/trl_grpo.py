"""Measure TRL's GRPOTrainer: seconds per step of a Hugging Face model. Runs in the environment of `make reference`.

    python trl_grpo.py --model FOLDER --problems problems.json --dtype bfloat16

A step has the same phases as sprl's: generation by transformers (no vLLM), rewards in the trainer's process, one AdamW update of
every parameter. problems.json is a list of {"prompt": text or messages, "answer": text}. The reward is 1 if the completion's last
number is the answer.

--dtype  float32; bfloat16: also for gradients and optimiser states, TRL's fastest setting; mixed: float32 weights with autocast
--micro  sequences per forward and backward pass; gradients are accumulated over a step

Other settings are TRL's defaults (gradient checkpointing on), except that nothing is logged, reported or saved.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
import warnings

import datasets
import torch
import transformers
import trl
from memory import peak_memory


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--model', required=True)
  parser.add_argument('--problems', required=True)
  parser.add_argument('--prompts', type=int, default=8)
  parser.add_argument('--group', type=int, default=8)
  parser.add_argument('--new', type=int, default=32)
  parser.add_argument('--dtype', choices=['bfloat16', 'mixed', 'float32'], default='bfloat16')
  parser.add_argument('--micro', type=int, default=64)
  parser.add_argument('--steps', type=int, default=3)
  args = parser.parse_args()

  warnings.simplefilter('ignore')
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())
  weights = torch.bfloat16 if args.dtype == 'bfloat16' else torch.float32
  model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=weights, attn_implementation='sdpa')
  tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side='left')
  problems = datasets.Dataset.from_list(json.loads(pathlib.Path(args.problems).read_text()))
  with tempfile.TemporaryDirectory() as folder:
    config = trl.GRPOConfig(
      output_dir=folder,
      per_device_train_batch_size=args.micro,
      gradient_accumulation_steps=args.prompts * args.group // args.micro,
      num_generations=args.group,
      max_completion_length=args.new,
      max_steps=1 + args.steps,
      learning_rate=1e-6,
      bf16=args.dtype == 'mixed',
      use_cpu=True,
      dataloader_pin_memory=False,
      shuffle_dataset=False,
      logging_steps=1,
      disable_tqdm=True,
      report_to='none',
      save_strategy='no',
    )
    trainer = trl.GRPOTrainer(
      model, reward_funcs=last_number_is_answer, args=config, train_dataset=problems, processing_class=tokenizer
    )
    trainer.remove_callback(transformers.PrinterCallback)
    clock = Clock()
    trainer.add_callback(clock)
    phases = {name: timed(trainer, method) for name, method in PHASES.items()}
    trainer.train()

  spans = list(itertools.pairwise(clock.ends))  # the steps after the first, which is the warm-up
  steps = [end - start for start, end in spans]
  logs = [entry for entry in trainer.state.log_history if 'completions/mean_length' in entry][1:]
  result = {
    'seconds': statistics.median(steps),
    'seconds_each': steps,
    'phases': {
      name: statistics.median(sum(seconds for when, seconds in calls if start < when <= end) for start, end in spans)
      for name, calls in phases.items()
    },
    'mean_completion_tokens': statistics.mean(entry['completions/mean_length'] for entry in logs),
    'mean_reward': statistics.mean(entry['reward'] for entry in logs),
    'peak_rss_bytes': peak_memory(),
    'dtype': args.dtype,
    'micro': args.micro,
    'threads': torch.get_num_threads(),
    'versions': {'torch': torch.__version__, 'transformers': transformers.__version__, 'trl': trl.__version__},
  }
  print(json.dumps(result))


# Phase -> method of the trainer. `rollout` contains `generate`; the rest of a step is the update.
PHASES = {'rollout': '_generate_and_score_completions', 'generate': '_generate_single_turn', 'reward': '_calculate_rewards'}


def timed(trainer, method):
  """Make `trainer.method` record its calls. Return the list of (end time, seconds), which grows while the trainer runs."""
  calls = []
  inner = getattr(trainer, method)

  def outer(*args, **kwargs):
    start = time.perf_counter()
    result = inner(*args, **kwargs)
    end = time.perf_counter()
    calls.append((end, end - start))
    return result

  setattr(trainer, method, outer)
  return calls


class Clock(transformers.TrainerCallback):
  """Records the end time of each step."""

  def __init__(self):
    self.ends = []

  def on_step_end(self, args, state, control, **kwargs):
    """Record the time; the trainer calls this after the optimiser step."""
    self.ends.append(time.perf_counter())


def last_number_is_answer(completions, answer, **kwargs):
  """Return 1.0 for each completion whose last number is the answer, else 0.0."""
  texts = [text if isinstance(text, str) else text[0]['content'] for text in completions]
  numbers = [re.findall(r'-?\d+', text) for text in texts]
  return [float(bool(found) and found[-1] == wanted) for found, wanted in zip(numbers, answer)]


if __name__ == '__main__':
  main()
