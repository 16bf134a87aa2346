"""The tasks of the experiments, with the models that all their runs start from."""

from claims.experiment import HERE, Task
from claims.totals import LONGEST_PROMPT, LONGEST_SOLUTION, write_problems

TRAIN, TEST, SLIPS = 20_000, 100, 0.6  # problems, and the share of the fine-tuning's solutions with a wrong total

TOTALS = Task(
  name='totals',
  sentence='Llama of 1.0 M parameters on running totals: answers of 103 to 203 tokens',
  write=lambda folder: write_problems(folder, TRAIN, TEST, seed=0, slips=SLIPS),
  warm=tuple(HERE / 'warm' / f'totals-{i}' for i in range(2)),
  settings={
    'model.dtype': 'float32',
    'model.remat': 'none',
    'task.kind': 'jsonl',
    'task.chat': False,
    'task.path': '{folder}',
    'task.grader': '{folder}/grader.py:grade',
    'task.workers': 1,
    'rollout.prompts': 4,
    'rollout.group': 4,
    'rollout.stop_when_capped': False,  # a collapse is a result
    'sampling.max_prompt': LONGEST_PROMPT,
    'sampling.max_tokens': LONGEST_SOLUTION,
    'sampling.prompt_buckets': (LONGEST_PROMPT,),
    'sampling.chunk': 16,
    'packing.row_tokens': 288,
    'packing.rows': 8,
    'packing.share_prefix': False,
    'packing.score_chunk': 2048,
    'optimizer.learning_rate': 5e-5,
    'optimizer.weight_decay': 0.0,
    'eval.problems': TEST,
    'eval.samples': 2,
    'eval.temperature': 1.0,
    'checkpoint.every': 100,
    'checkpoint.keep_last': 1,
    'log.samples_every': None,
    'log.trackers': (),
  },
)
