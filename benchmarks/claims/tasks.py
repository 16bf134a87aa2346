"""The tasks of the experiments, with the models that all their runs start from."""

from functools import partial

from claims import dictation
from claims.experiment import HERE, Task
from claims.totals import LONGEST_PROMPT, LONGEST_SOLUTION, write_problems

from sprl.models.config import tiny

TRAIN, TEST, SLIPS = 20_000, 400, 0.6  # problems; share of the solutions for fine-tuning that have a wrong total

SETTINGS = {
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
  'packing.rows': 1,  # 1.4 times as fast as 8 rows on one core, because its caches hold more of them
  'packing.share_prefix': False,
  'packing.score_chunk': 2048,
  'optimizer.learning_rate': 5e-5,
  'optimizer.weight_decay': 0.0,
  'eval.problems': 100,
  'eval.samples': 2,
  'eval.temperature': 1.0,
  'checkpoint.every': 100,
  'checkpoint.keep_last': 1,
  'log.samples_every': None,
  'log.trackers': (),
}
FINAL = {'eval.problems': TEST, 'sampling.rows': 64}  # for this many answers, more rows than in rollouts are faster


def _sizes(layers: int, width: int) -> dict[str, int]:
  heads = {'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': width // 4}
  return {'num_hidden_layers': layers, 'hidden_size': width, 'intermediate_size': 3 * width} | heads


EXPERTS = {'num_experts': 8, 'num_experts_per_tok': 2, 'moe_intermediate_size': 112}
MODELS = {  # task -> the model that is warm-started for it
  'totals': tiny('llama', **_sizes(4, 144)),
  'totals_larger': tiny('llama', **_sizes(5, 192)),
  'totals_biased': tiny('qwen2', **_sizes(4, 144)),
  'totals_more_biased': tiny('qwen2', **_sizes(4, 144)),
  'totals_mixture': tiny('qwen3_moe', **_sizes(4, 144), **EXPERTS),
  'dictation': tiny('llama', **_sizes(2, 96)),
}


def _warm(name: str) -> tuple[str, ...]:
  return tuple(str(HERE / 'warm' / f'{name}-{i}') for i in range(2))


def _totals(name: str, model: str) -> Task:
  """Return a task of running totals (totals.py). `model` describes the model in pictures."""
  return Task(
    name=name,
    sentence=f'{model} on running totals: answers of 103 to 203 tokens',
    write=partial(write_problems, train=TRAIN, test=TEST, seed=0, slips=SLIPS),
    warm=_warm(name),
    settings=SETTINGS,
    chance=0.1,
    final=FINAL,
  )


TOTALS = _totals('totals', 'Llama of 1.0 M parameters')
LARGER = _totals('totals_larger', 'Llama of 2.3 M parameters')
# Size of the key biases, and the number of rotations of a head that have them: those that turn slowest with the position. In
# Qwen2.5 the sizes are up to some hundreds.
KEY_BIASES = {'totals_biased': (100.0, 4), 'totals_more_biased': (40.0, 8)}
BIASED = _totals('totals_biased', 'Qwen2 of 1.0 M parameters, with large key biases,')
MORE_BIASED = _totals('totals_more_biased', 'Qwen2 of 1.0 M parameters, with more key biases,')
MIXTURE = _totals('totals_mixture', 'Mixture of experts, 0.7 M of 1.9 M parameters active,')
DICTATION = Task(
  name='dictation',
  sentence='Llama of 0.3 M parameters on dictated digits: 16 turns with a slow environment',
  write=partial(dictation.write, train=TRAIN, test=TEST, seed=0, slips=SLIPS),
  warm=_warm('dictation'),
  settings=SETTINGS
  | {
    'task.kind': 'environment',
    'task.name': '{folder}/dictation.py:Dictation',
    'task.turns': dictation.TURNS,
    'task.turn_tokens': dictation.ANSWER,
    'task.grader': 'auto',
    'task.path': None,
    'task.workers': None,
    'rollout.group': 8,
    'sampling.max_prompt': 8,
    'sampling.max_tokens': 96,
    'sampling.prompt_buckets': (8,),
    'sampling.chunk': 2,
    'packing.row_tokens': 208,
    'eval.samples': 1,
  },
  chance=0.1,
  final=FINAL,
)
TASKS = (TOTALS, LARGER, BIASED, MORE_BIASED, MIXTURE, DICTATION)
