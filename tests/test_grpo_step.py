"""benchmarks/grpo_step.py gives sprl and its peer the same problems."""

import json

import numpy as np
from grpo_step import first_problems

from sprl.config import Evaluation, ModelSettings, Run, Sampling, Task
from sprl.io.tokenizer import Tokenizer, write_tiny
from sprl.rollout.prompts import ProblemSource
from sprl.rollout.setup import RolloutSetup


def test_the_peer_gets_the_same_problems_as_the_run(tmp_path):
  write_tiny(tmp_path)
  for split in ('train', 'test'):
    lines = [json.dumps({'prompt': f'{i} + 1 = ?', 'answer': str(i + 1)}) for i in range(4)]
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines))
  tokenizer = Tokenizer.load(tmp_path)
  task = Task(kind='jsonl', path=str(tmp_path), system='You add.', suffix=' Be brief.')
  run = Run(
    seed=3, steps=1, model=ModelSettings(str(tmp_path)), task=task, sampling=Sampling(max_prompt=256), eval=Evaluation(problems=1)
  )
  setup = RolloutSetup.open(run, tokenizer)
  assert setup.stream is not None
  source = ProblemSource(setup.stream.at, tokenizer, max_prompt=256, max_tokens=8)
  for group, problem in enumerate(first_problems(run, 6)):
    np.testing.assert_array_equal(tokenizer.chat(problem['prompt']), source.prompt(group))
    assert problem['answer'] == source.answer(group)
