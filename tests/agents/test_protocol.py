"""Requests and tool calls: what is read, what is refused, and how a model's text becomes a message."""

import json

import pytest

from sprl.agents.protocol import ChatRequest, Distribution, Refused, canonical, message_of, read
from sprl.agents.tool_calls import ToolCall, before, tool_calls, visible
from sprl.config import Run, Sampling

TRAINING = Distribution(Sampling())
HELLO = [{'role': 'user', 'content': 'Hello'}]
LONE = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('no call', ('no call', [])),
    (f'I add.\n{CALL}', ('I add.', [ToolCall('add', {'a': 1})])),
    (f'{CALL}\n{CALL}', ('', [ToolCall('add', {'a': 1})] * 2)),
    ('<tool_call>{"name": "add"', ('<tool_call>{"name": "add"', [])),
    (f'{CALL}<tool_call>{{"name": 1}}</tool_call>', (f'{CALL}<tool_call>{{"name": 1}}</tool_call>', [])),
    *((text, (text, [])) for text in (f'<tool_call>{"[" * 100_000}</tool_call>', LONE)),
  ],
  ids=['none', 'after text', 'two', 'cut short', 'one malformed', 'too deep', 'half a surrogate pair'],
)
def test_tool_calls(text, expected):
  assert tool_calls(text) == expected


@pytest.mark.parametrize('text', ['I add.\n' + CALL, 'a <tool_x>', 'ends in space ', 'a<tool_call>{}</tool_call>'])
def test_what_a_stream_shows_early_begins_the_content(text):
  content = message_of(text, None, 'x')['content'] or ''
  for n in range(len(text) + 1):
    assert content.startswith(visible(text[:n]))


@pytest.mark.parametrize(
  ('text', 'content'),
  [
    ('so\nEND', 'so\n'),
    ('a </b> END', 'a '),
    ('EN', 'EN'),
    ('all', 'all'),
    ('x<tool_call>{"nam</tool_call>', 'x<tool_call>{"nam'),
  ],
)
def test_the_content_ends_before_the_stop_string_and_a_stream_shows_no_part_of_one(text, content):
  stop = ('END', '</b>', '</tool_call>')
  assert message_of(text, 0, 'x', stop)['content'] == content
  assert all(content.startswith(before(text[:n], stop)) for n in range(len(text) + 1))


def test_a_stop_string_may_end_a_tool_call():
  assert message_of(CALL, None, 'x', ['</tool_call>'])['tool_calls'][0]['function']['name'] == 'add'


def test_a_message_has_the_calls_of_its_text():
  message = message_of('Wait. ' + CALL, None, '7')
  call = {'id': 'call_7_0', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
  assert message == {'role': 'assistant', 'content': 'Wait.', 'tool_calls': [call]}
  assert message_of(CALL, 0, '7') == {'role': 'assistant', 'content': CALL}


def test_a_message_equals_itself_after_a_client_has_returned_it():
  sent = message_of(CALL, None, '7')
  returned = {
    **sent, 'refusal': None, 'annotations': [], 'audio': None, 'function_call': None,
    'tool_calls': [{**sent['tool_calls'][0], 'index': 0}],
  }  # fmt: skip
  returned['tool_calls'][0]['function'] = {'name': 'add', 'arguments': '{"a":1}'}
  assert canonical(returned, '') == canonical(sent, '')
  assert canonical({'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]}, '') == {
    'role': 'user',
    'content': 'ab',
  }


def test_all_fields_of_a_request_are_read():
  tools = [{'type': 'function', 'function': {'name': 'add'}}]
  body = {
    'model': 'any', 'messages': HELLO, 'tools': tools, 'max_completion_tokens': 5, 'temperature': 1, 'stream': True, 'user': 'me',
    'stream_options': {'include_usage': True}, 'logprobs': True, 'return_token_ids': True, 'n': 1, 'stop': None,
    'chat_template_kwargs': {'enable_thinking': False},
  }  # fmt: skip
  expected = ChatRequest(tuple(HELLO), tuple(tools), None, 5, {'enable_thinking': False}, True, True, True, True)
  assert read(body, TRAINING) == expected
  assert read({**body, 'tool_choice': 'none'}, TRAINING).calls == 0
  assert read({**body, 'parallel_tool_calls': False}, TRAINING).calls == 1


@pytest.mark.parametrize(
  ('shorter', 'longer'), [('max_tokens', 'max_completion_tokens'), ('max_completion_tokens', 'max_tokens')]
)
def test_the_smaller_of_two_limits_counts(shorter, longer):
  assert read({'messages': HELLO, shorter: 5, longer: 500}, TRAINING).max_tokens == 5


def test_without_parallel_calls_a_message_has_the_first_call_only():
  (call,) = message_of(f'Wait. {CALL}{CALL}', 1, '7')['tool_calls']
  assert call['id'] == 'call_7_0'


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'temperature': 0.5}, r'temperature = 0\.5.*1\.0 \(config\.sampling\.temperature\)'),
    ({'top_p': 0.5}, r'config\.sampling\.top_p'),
    ({'n': 2}, 'n = 2: this endpoint accepts 1 only'),
    *(({'stop': stop}, r'config\.sampling\.stop = \(\)') for stop in (['x'], 'x', 3, True, {'a': 1})),
    ({'seed': 1}, r'config\.seed'),
    ({'tool_choice': 'required'}, "'none' or 'auto'"),
    ({'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'messages': []}, 'at least one message'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, r'messages\[0\]\.content: expected text'),
    ({'messages': [{'role': 'bot', 'content': ''}]}, 'role of system'),
    ({'messages': [{'role': 'assistant', 'tool_calls': 3}]}, r'messages\[0\]\.tool_calls: expected a list'),
    ({'max_tokens': 0}, 'max_tokens = 0'),
    ({'max_tokens': True}, 'max_tokens = True'),
    ({'max_completion_tokens': 0}, 'max_completion_tokens = 0'),
    ({'max_completion_tokens': 5, 'max_tokens': 'x'}, "max_tokens = 'x'"),
    ({'messages': [{'role': 'assistant', 'function_call': {'name': 'f'}}]}, r'\[0\]\.function_call.*tool_calls'),
    ({'stream': 'false'}, "stream = 'false': expected true or false"),
    ({'logprobs': 'no'}, "logprobs = 'no'"),
    ({'return_token_ids': [0]}, r'return_token_ids = \[0\]'),
    ({'parallel_tool_calls': 0}, 'parallel_tool_calls = 0'),
    ({'stream_options': {'include_usage': 'false'}}, r"stream_options\.include_usage = 'false'"),
    ({'guided_json': {}}, 'guided_json: this endpoint has no such field'),
  ],
)
def test_what_the_engine_cannot_do_is_refused(changes, said):
  with pytest.raises(Refused, match=said) as error:
    read({'messages': HELLO, **changes}, TRAINING)
  assert error.value.status == 400
  assert json.dumps(error.value.body())


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'temperature': 1.0}, r'requests of an evaluation .* 0\.0 \(config\.eval\.temperature\)'),
    ({'top_p': 0.5}, r'config\.eval\.top_p'),
    ({'top_k': 20}, r'top_k is -1 \(evaluation sets none\)'),
  ],
)
def test_requests_of_an_evaluation_are_compared_with_its_own_settings(changes, said):
  run = Run(sampling=Sampling(top_k=20))
  evaluation = Distribution(run.eval_sampling, evaluation=True)
  assert read({'messages': HELLO, 'temperature': 0.0, 'top_p': 1}, evaluation)
  with pytest.raises(Refused, match=said):
    read({'messages': HELLO, **changes}, evaluation)


def test_arguments_of_a_call_that_are_no_json_stay_text():
  for written in ('{"a"', '[' * 100_000):
    call = {'id': 'x', 'type': 'function', 'function': {'name': 'add', 'arguments': written}}
    (read_back,) = canonical({'role': 'assistant', 'tool_calls': [call]}, '')['tool_calls']
    assert read_back['function']['arguments'] == written
