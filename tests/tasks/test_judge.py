"""The grader `judge` with a local endpoint that answers, is busy, fails, hangs, or sends malformed replies."""

import asyncio
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pools import answers

from sprl.config import SettingsError, Task
from sprl.tasks import graders, judge
from sprl.tasks.grader_pool import Grade, grader_pool
from sprl.tasks.rewards import Sample


class Endpoint(BaseHTTPRequestHandler):
  """The first word of the judged text selects what the endpoint does. `seen` has the requests."""

  seen: list[dict]
  attempts: Counter[str]

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['content-length'])))
    text = body['messages'][-1]['content']
    self.seen.append({**body, 'path': self.path, 'key': self.headers['authorization']})
    self.attempts[text] += 1
    first = self.attempts[text] == 1
    what = text.partition(' ')[0]
    if what == 'slow':
      time.sleep(0.5)
    if (what == 'busy' and first) or what == 'always-busy':
      return self.say(429, 'wait', {'retry-after': '0.05'})
    if (what == 'broken' and first) or what == 'always-broken':
      return self.say(500 + 3 * first, 'oops')
    if what == 'hang' and first:
      time.sleep(1.5)
    if what == 'hangup' and first:
      return self.connection.close()
    if what == 'refused':
      return self.say(401, 'no such key')
    if what == 'malformed':
      return self.say(200, '{"choices": [')
    if what == 'other':
      return self.say(200, '{"error": "none"}')
    reply = 'I cannot say.' if what == 'undecided' else text.partition('=')[2] or 'Yes.'
    usage = {'prompt_tokens': 100, 'completion_tokens': 10}
    finish = 'length' if what.startswith('cut') else 'stop'
    return self.say(200, json.dumps({'choices': [{'message': {'content': reply}, 'finish_reason': finish}], 'usage': usage}))

  def say(self, status, text, headers=None):
    self.send_response(status)
    for name, value in {'content-length': str(len(text)), **(headers or {})}.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(text.encode())

  def log_message(self, *_):
    pass


class Server(ThreadingHTTPServer):
  """A server for many clients at a time."""

  request_queue_size = 128
  daemon_threads = True

  def handle_error(self, *_):
    """Clients that gave up are no error."""


@pytest.fixture
def endpoint(monkeypatch):
  for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY'):
    monkeypatch.delenv(name, raising=False)
  Endpoint.seen, Endpoint.attempts = [], Counter()
  with Server(('127.0.0.1', 0), Endpoint) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/v1'
    server.shutdown()


def samples(texts):
  return [Sample('2 + 3?', text, '5', {'hint': 'add'}) for text in texts]


def task(url, **settings):
  return Task(grader='judge', judge={'url': url, 'model': 'wise', 'template': '{completion}', **settings})


def judged(url, *texts, seconds=20.0, **settings):
  """Return the judgements of these completions."""

  async def ask():
    grade = judge.load({**task(url, **settings).judge, 'seconds': seconds})
    return await asyncio.gather(*map(grade, samples(texts)))

  return asyncio.run(ask())


def costs(requests, retries, tokens):
  return {'judge/requests': float(requests), 'judge/retries': float(retries), 'judge/tokens': float(tokens)}


def test_a_completion_is_judged_by_the_reply(endpoint, monkeypatch):
  monkeypatch.setenv('JUDGE_KEY', 'sk-1')
  template = 'Q: {prompt} A: {answer} {hint} {{completion}} {unknown} {completion}'
  (grade,) = judged(endpoint, 'It is five.', template=template, key='JUDGE_KEY', max_tokens=9, temperature=0.5)
  assert (grade.score, grade.status, grade.costs) == (1.0, 'ok', costs(1, 0, 110))
  (request,) = Endpoint.seen
  assert request['path'] == '/v1/chat/completions'
  assert request['key'] == 'Bearer sk-1'
  assert (request['model'], request['max_tokens'], request['temperature']) == ('wise', 9, 0.5)
  assert request['messages'] == [{'role': 'user', 'content': 'Q: 2 + 3? A: 5 add {It is five.} {unknown} It is five.'}]


@pytest.mark.parametrize(
  ('settings', 'reply', 'score'),
  [
    ({}, 'Yes', 1.0),
    ({}, 'Not yes but no.', 0.0),
    ({}, 'The answer is: **YES**', 1.0),
    ({'score': 'number'}, 'I give 3 of 4, so 0.75', 0.75),
    ({}, 'Yes. The final answer is correct and there is no error.', 1.0),
    ({}, '**No**, although yes would be nice.', 0.0),
    *(({}, text, 1.0) for text in ('No doubt about it: yes', 'Yes — no error', 'Yes (no error)', '**Yes** there is no error')),
    ({}, '<think>There is no error.</think>\nYes', 1.0),
    ({'score': 'number', 'best': 10.0}, 'Rating: 7', 0.7),
    ({'score': 'number', 'best': 10.0}, 'Score: 7/10', 0.7),
    ({'score': 'number', 'best': 10.0}, '3 out of 10.', 0.3),
    ({'score': 'number', 'best': 10.0}, 'Score: **7**/10', 0.7),
    ({'score': 'number', 'best': 10.0}, '9 (scale 1–10)', 0.9),
    ({'score': 'number', 'best': 10.0}, 'Rating: 8 (scale 1-10)', 0.8),
    ({'score': 'number', 'best': 4.0}, 'between 1 and 3: 2.5', 0.625),
    ({'score': r'score: (\d+)', 'best': 5.0}, 'score: 1, no, score: 4 (of 9)', 0.8),
    ({'score': r'score: (\d+)', 'best': 5.0}, '<think>score: 5?</think>score: 2', 0.4),
  ],
)
def test_the_score_is_read_from_the_reply(endpoint, settings, reply, score):
  (grade,) = judged(endpoint, f'say ={reply}', **settings)
  assert (grade.score, grade.status) == (pytest.approx(score), 'ok')


@pytest.mark.parametrize(
  ('settings', 'reply', 'cut'),
  [
    ({}, 'It is right, there is no', True),
    ({}, '<think>There is no error', True),
    ({'score': 'number', 'best': 10.0}, 'I think of 8', True),
    ({'score': 'number'}, '85', False),  # `best` is not set
    ({'score': 'number', 'best': 10.0}, 'Score: -3', False),
    ({'score': r'Score: (\d+)', 'best': 10.0}, '<think>Score: 9?</think> I cannot judge this.', False),
    ({'score': r'Score: (\d+)', 'best': 10.0}, 'Score: 1', True),  # perhaps of 10
    ({'score': r'Score: (\d+)', 'best': 10.0}, 'Score: 250', False),
  ],
)
def test_a_reply_without_a_verdict_has_no_score(settings, reply, cut):
  reader = judge._reader(judge.settings({'url': 'http://x/v1', 'model': 'm', **settings}))
  assert reader(reply, cut) is None


def test_a_verdict_at_the_beginning_counts_though_the_reply_is_cut_off(endpoint):
  found = judged(endpoint, 'cut=Yes. It has no', 'cut=It is right, there is no')
  assert [(grade.score, grade.status) for grade in found] == [(1.0, 'ok'), (0.0, 'invalid')]
  assert 'in the reply, which max_tokens cut off,' in found[1].reason


@pytest.mark.parametrize('what', ['busy', 'broken', 'hangup', 'hang'])
def test_a_request_that_fails_temporarily_is_tried_again(endpoint, what):
  (grade,) = judged(endpoint, what, timeout=1.0 if what == 'hang' else 10.0)
  assert (grade.score, grade.status, grade.costs) == (1.0, 'ok', costs(2, 1, 110))


def test_failures_that_remain_score_0_and_say_why(endpoint):
  found = judged(endpoint, 'always-busy', 'always-broken', 'refused', 'malformed', 'other', 'undecided', 'fine', retries=1)
  assert [(g.score, g.status) for g in found] == [(0.0, 'error')] * 5 + [(0.0, 'invalid'), (1.0, 'ok')]
  reasons = [
    'status 429: wait (2 req',
    'status 500: oops (2 req',
    'status 401: no such key (1 req',
    'no chat completion',
    'no chat',
  ]
  assert all(reason in grade.reason for reason, grade in zip(reasons, found))
  assert "no score (yes_no) in the reply 'I cannot say.'" in found[5].reason
  assert [g.costs['judge/requests'] for g in found] == [2, 2, 1, 1, 1, 1, 1]


def test_an_endpoint_that_is_not_there_is_an_error(endpoint):
  (grade,) = judged('http://127.0.0.1:9/v1', 'x', retries=0)
  assert grade.status == 'error'
  assert 'http://127.0.0.1:9/v1: no reply: ConnectError' in grade.reason


def test_attempts_end_when_the_time_is_over(endpoint):
  (grade,) = judged(endpoint, 'always-broken', retries=1000, seconds=2.0)
  assert grade.status == 'error'
  assert grade.costs['judge/requests'] >= 2


def test_costs_are_counted_with_prices(endpoint):
  (grade,) = judged(endpoint, 'busy', input_price=2.0, output_price=30.0)
  assert grade.costs['judge/cost'] == pytest.approx((100 * 2 + 10 * 30) / 1e6)


def test_64_samples_are_judged_at_the_same_time_in_the_pool(endpoint):
  with grader_pool(graders.rewards(task(endpoint)), None, None, 4.0) as pool:
    start = time.monotonic()
    found = answers(pool, *samples(f'slow {i}' for i in range(64)))
    assert time.monotonic() - start < 16  # one after the other they would take 32 seconds
  assert found == [Grade(1.0, 'ok', costs=costs(1, 0, 110))] * 64


def test_several_rewards_count_what_the_judge_used(endpoint):
  given = Task(kind='jsonl', rewards=('exact', 'judge=0.5'), judge=task(endpoint).judge)
  with grader_pool(graders.rewards(given), 1, 20.0, 4.0) as pool:
    (right, refused) = answers(pool, *samples(['5', 'refused']))
  assert right == Grade(1.5, 'ok', parts={'exact': 1.0, 'judge': 1.0}, costs=costs(1, 0, 110))
  assert (refused.score, refused.status, refused.failed, refused.costs) == (0.0, 'error', ('judge',), costs(1, 0, 0))


def test_the_key_is_in_no_setting_and_no_reason(endpoint, monkeypatch):
  monkeypatch.setenv('JUDGE_KEY', 'sk-secret')
  assert 'sk-secret' not in repr(graders.rewards(task(endpoint, key='JUDGE_KEY')))
  (grade,) = judged(endpoint, 'refused', key='JUDGE_KEY')
  assert 'sk-secret' not in grade.reason


@pytest.mark.parametrize(
  ('settings', 'complaint'),
  [
    ({'url': 'localhost'}, r"config\.task\.judge: url = 'localhost': expected the address"),
    ({'model': ''}, r"config\.task\.judge: model = '': expected"),
    ({'modle': 'x'}, r'config\.task\.judge\.modle: no such setting; config\.task\.judge has best, input_price, key'),
    ({'template': 'Grade {prompt}'}, r'template = .*: expected a text with \{completion\}'),
    ({'score': 'maybe'}, r"score = 'maybe': expected yes_no, number, or a regular expression with one group"),
    ({'score': '(a'}, 'score = '),
    ({'best': 0}, 'best = 0.0: expected a number above 0'),
    ({'retries': -1}, 'retries = -1'),
    ({'timeout': 'x'}, r"config\.task\.judge\.timeout = 'x': expected float"),
    ({'key': 'NO_SUCH_KEY'}, r"key = 'NO_SUCH_KEY': expected the name of an environment variable that is set, or None"),
    ({'input_price': -1}, 'input_price = -1'),
  ],
)
def test_wrong_settings_are_named(settings, complaint):
  with pytest.raises(SettingsError, match=complaint):
    judge.settings({'url': 'http://localhost:1/v1', 'model': 'm', **settings})
