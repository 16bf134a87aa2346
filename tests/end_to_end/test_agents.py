"""A run whose episodes are agents: it trains, evaluates, resumes and ends with no process left."""

import json
import os

import pytest
import tiny

AGENT = """
import json
import urllib.request


def ask(base_url, messages):
  body = json.dumps({'model': 'tiny', 'messages': messages}).encode()
  request = urllib.request.Request(base_url + '/chat/completions', body, {'content-type': 'application/json'})
  with urllib.request.urlopen(request, timeout=60) as response:
    return json.load(response)['choices'][0]['message']


def agent(base_url, row, word='and'):
  messages = [{'role': 'user', 'content': row['prompt'][:6]}]
  messages += [ask(base_url, messages), {'role': 'user', 'content': word}]
  first = ask(base_url, messages)
  second = ask(base_url, [{'role': 'user', 'content': 'z'}]) if row['seed'] % 4 == 0 else first
  text = first['content'] + second['content']
  return {'reward': (len(text.encode()) * 7 + sum(text.encode())) % 5 / 4, 'metrics': {'letters': len(text)}}
"""
CHANGES = """
  config.task.kind, config.task.chat, config.task.name = 'agent', True, {folder!r} + '/agent.py:agent'
  config.task.grader, config.task.turn_tokens, config.task.branches = 'auto', 6, 2
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.prompt_buckets = 32, 64, (32,)
  config.packing.row_tokens, config.sampling.stop, config.ledger.every = 96, (), None
  return config
"""


@pytest.mark.slow
def test_a_run_of_agents_trains_and_resumes(tmp_path):
  config = tiny.write_inputs(tmp_path)
  (tmp_path / 'agent.py').write_text(AGENT)
  config.write_text(config.read_text().replace('  return config\n', CHANGES.format(folder=str(tmp_path))))
  for steps in (2, 3):
    status, _, err = tiny.run('main', f'--config={config}', f'--workdir={tmp_path}/run', f'--config.steps={steps}')
    assert status == 0, err
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  steps = [line for line in lines if 'reward/mean' in line]
  assert [line['step'] for line in steps] == [1, 2, 3]
  for line in steps:
    assert 1 <= line['agent/branches'] <= 2
    assert 2 <= line['agent/turns'] <= 3
    assert line['env/letters'] > 0
    assert line['agent/tokens_dropped'] == 0
  assert any(line.get('eval/problems') == 3 for line in lines)
  assert not [pid for pid in os.listdir('/proc') if pid.isdigit() and host_of(pid, tmp_path)]


def host_of(pid, folder):
  try:
    with open(f'/proc/{pid}/cmdline') as file:
      return 'agents/host.py' in file.read() and str(folder) in os.readlink(f'/proc/{pid}/cwd')
  except OSError:
    return False
