"""What a run asks, where each of several processes has looked at its share of it alone."""

import json

from teams import together

from sprl.acting import Asked
from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny
from sprl.settings import Evaluation, Model, Run, Sampling, SettingsError, Task


def a_run(folder, questions):
  """A run that asks these for training, and the first of them for evaluation."""
  for name, some in (('train', questions), ('test', questions[:1])):
    lines = [json.dumps({'prompt': question, 'answer': ''}) for question in some]
    (folder / f'{name}.jsonl').write_text('\n'.join(lines))
  task = Task(kind='jsonl', path=str(folder / 'train.jsonl'), eval_path=str(folder / 'test.jsonl'))
  return Run(100, 1, model=Model(str(folder)), task=task, sampling=Sampling(max_prompt=256), eval=Evaluation(problems=1))


def opened(run, tokenizer, processes):
  """What each process of a team says of a run."""
  return together(*[lambda team: Asked.open(run, tokenizer, team)] * processes)


TEMPLATE = "{% if 'Sesame' in messages[0].content %}{{ raise_exception('closed') }}{% endif %}{{ messages[0].content }}"


def test_a_problem_that_the_chat_template_refuses_ends_all_processes(tmp_path):
  write_tiny(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(TEMPLATE)
  said = opened(a_run(tmp_path, ['How?', 'Open Sesame!', 'Why?']), Tokenizer.load(tmp_path), 3)
  assert [type(error) for error in said] == [SettingsError, TokenizerError, SettingsError]
  assert all('the chat template failed' in str(error) and 'closed' in str(error) for error in said)


def test_too_long_prompts_are_counted_over_all_processes(tmp_path):
  """As one process counts them, which holds all problems."""
  write_tiny(tmp_path)
  run, tokenizer = a_run(tmp_path, ['?' * n for n in (20, 400, 30, 600, 10, 500, 280)]), Tokenizer.load(tmp_path)
  (alone,) = opened(run, tokenizer, 1)
  longest = len(tokenizer.chat([{'role': 'user', 'content': '?' * 600}]))
  assert f'4 of 7 prompts are longer; expected at least {longest}, the tokens of {tmp_path}/train.jsonl:4' in str(alone)
  for processes in (2, 3):
    said = opened(run, tokenizer, processes)
    assert [(type(error), str(error)) for error in said] == [(SettingsError, str(alone))] * processes
