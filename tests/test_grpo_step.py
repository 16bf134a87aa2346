"""benchmarks/grpo_step.py: both sides are asked the same."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / 'benchmarks'))
from grpo_step import questions

from sprl.acting import Asked
from sprl.io.tokenizer import Tokenizer, write_tiny
from sprl.rollout.sources import Problems
from sprl.settings import Evaluation, Model, Run, Sampling, Task


def test_the_peer_is_asked_what_the_run_asks_and_in_the_same_form(tmp_path):
  write_tiny(tmp_path)
  tokenizer = Tokenizer.load(tmp_path)
  task = Task(kind='reasoning_gym', name='chain_sum', args={'min_terms': 2, 'max_terms': 2}, suffix=' Be brief.')
  run = Run(3, 1, model=Model(str(tmp_path)), task=task, sampling=Sampling(max_prompt=256), eval=Evaluation(problems=1))
  asked = Asked.open(run, tokenizer)
  assert asked.stream is not None
  source = Problems(asked.stream.at, tokenizer, 8)
  for group, question in enumerate(questions(run, 6)):
    np.testing.assert_array_equal(tokenizer.chat(question['prompt']), source.prompt(group))
    assert question['answer'] == source.answer(group)
