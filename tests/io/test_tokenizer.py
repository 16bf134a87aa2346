"""Tokenizers: ids, text, special tokens, and chat templates, which are not trusted."""

import bisect
import contextlib
import datetime
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import tokenizers

from sprl.io import templates
from sprl.io import tokenizer as tokenizer_module
from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny
from sprl.models.config import tiny

HELLO = [{'role': 'user', 'content': 'Hello'}]


@pytest.fixture
def folder(tmp_path):
  write_tiny(tmp_path)
  return tmp_path


def with_template(folder, template):
  (folder / 'chat_template.jinja').write_text(template, encoding='utf-8')
  return Tokenizer.load(folder)


def settings_of(folder, **changes):
  path = folder / 'tokenizer_config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_byte_has_an_id_and_comes_back(folder):
  tokenizer = Tokenizer.load(folder)
  text = 'a1 é 🙂\n\x00'
  ids = tokenizer.encode(text)
  assert len(ids) == len(text.encode())
  assert min(ids) >= 3
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(ids[:4]) == 'a1 \ufffd'  # half of é


def test_special_tokens_in_a_text_are_recognised_and_none_added(folder):
  tokenizer = Tokenizer.load(folder)
  ids = tokenizer.encode('a<eos>')
  assert ids == [*tokenizer.encode('a'), 2]
  assert tokenizer.decode(ids) == 'a<eos>'
  assert tokenizer.decode(ids, skip_special=True) == 'a'


def test_a_prompt_without_a_chat_template_begins_with_the_tokens_of_the_post_processor(folder):
  assert Tokenizer.load(folder).prompt('hi') == [74, 75]
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='<bos> $A <eos>', special_tokens=[('<bos>', 1), ('<eos>', 2)]
  )
  backend.save(str(folder / 'tokenizer.json'))
  tokenizer = Tokenizer.load(folder)
  assert tokenizer.prompt('hi') == [1, 74, 75]
  assert tokenizer.prompt('<bos>hi<eos>') == [1, 74, 75, 2]  # BOS not twice
  assert tokenizer.prompt('') == []
  assert tokenizer.encode('hi') == [74, 75]


def test_truncation_and_padding_of_the_file_are_ignored(folder):
  raw = json.loads((folder / 'tokenizer.json').read_text())
  raw['truncation'] = {'direction': 'Right', 'max_length': 4, 'strategy': 'LongestFirst', 'stride': 0}
  raw['padding'] = {
    'strategy': {'Fixed': 16},
    'direction': 'Right',
    'pad_to_multiple_of': None,
    'pad_id': 0,
    'pad_type_id': 0,
    'pad_token': '<pad>',
  }
  (folder / 'tokenizer.json').write_text(json.dumps(raw))
  assert len(Tokenizer.load(folder).encode('abcdefgh')) == 8


def test_end_and_pad_ids_come_from_all_files(folder):
  tokenizer = Tokenizer.load(folder)
  assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((2,), 0, 259)
  (folder / 'generation_config.json').write_text('{"eos_token_id": [7, 2], "pad_token_id": 9}')
  assert Tokenizer.load(folder).eos_ids == (7, 2)
  assert Tokenizer.load(folder).pad_id == 0  # the tokenizer's own id takes precedence
  settings_of(folder, pad_token=None, eos_token={'content': '<bos>', 'special': True})
  assert Tokenizer.load(folder).pad_id == 9
  assert Tokenizer.load(folder).eos_ids == (7, 2, 1)


def test_a_conversation_is_rendered_and_encoded(folder):
  tokenizer = Tokenizer.load(folder)
  text = '<bos>user\nHello<eos><bos>assistant\n'
  assert tokenizer.render(HELLO) == text
  assert tokenizer.chat(HELLO) == tokenizer.encode(text)
  assert tokenizer.render(HELLO, add_generation_prompt=False) == '<bos>user\nHello<eos>'


def test_the_template_file_precedes_tokenizer_config(folder):
  settings_of(folder, chat_template=[{'name': 'tool', 'template': 'T'}, {'name': 'default', 'template': 'D'}])
  assert Tokenizer.load(folder).render(HELLO) == 'D'
  assert with_template(folder, 'J').render(HELLO) == 'J'


def test_a_template_of_its_own_serves_conversations_with_tools(folder):
  named = [{'name': 'default', 'template': 'D'}, {'name': 'tool_use', 'template': '{{ tools | length }}{{ style }}'}]
  settings_of(folder, chat_template=named)
  loaded = Tokenizer.load(folder, {'style': 'x'})
  assert loaded.render(HELLO) == 'D'
  assert loaded.render(HELLO, tools=[{}, {}]) == '2x'


def test_templates_get_the_functions_of_transformers(folder):
  template = """{% set ns = namespace(n=0) %}
  {% for m in messages %}
{% set ns.n = ns.n + 1 %}
{% if loop.index > 1 %}{% break %}{% endif %}
{% generation %}{{ m | tojson }}{% endgeneration %}
  {% endfor %}
{{ ns.n }}{{ tools is none }}{{ strftime_now('%Y') | length }}"""
  rendered = with_template(folder, template).render([{'role': 'user', 'content': '<é>'}] * 3)
  assert rendered == '{"role": "user", "content": "<é>"}2True4'


def test_a_template_that_reads_the_clock_gets_the_time_of_the_tokenizer(folder):
  clock = """{% macro now(form) %}{{ strftime_now(form) }}{% endmacro %}{{ now('%Y') }} {{ strftime_now('%d %b %Y %H:%M:%S') }}"""
  tokenizer = with_template(folder, clock)
  for _ in range(2):
    assert replace(tokenizer, time='2024-07-26T13:04:05').render(HELLO) == '2024 26 Jul 2024 13:04:05'
  assert tokenizer.render(HELLO) >= f'{datetime.date.today().year - 1}'  # of the clock


def test_a_template_may_refuse_a_conversation(folder):
  tokenizer = with_template(folder, "{{ raise_exception('roles must alternate') }}")
  with pytest.raises(TokenizerError, match='TemplateError: roles must alternate'):
    tokenizer.render(HELLO)


@pytest.mark.parametrize(
  'template',
  [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__['os'].system('true') }}",
    '{{ cycler.__init__.__globals__ }}',
    "{{ messages.append('x') }}",
    '{{ raise_exception.__globals__.keys() }}',
    '{% set ns = namespace() %}{% set ns.__class__ = 1 %}',
    '{% for i in range(10 ** 12) %}x{% endfor %}',
    "{{ 'a' * 10 ** 9 }}",
    '{% for i in range(900) %}{% for j in range(900) %}{{ i }}-{{ j }}-------------{% endfor %}{% endfor %}',
    '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}',
    '{{ undefined_thing.attribute }}',
    '{{ messages[0].content + 1 }}',
    "{% include '/etc/passwd' %}",
  ],
)
def test_hostile_and_broken_templates_raise_tokenizer_error(folder, template):
  with pytest.raises(TokenizerError, match='chat template'):
    with_template(folder, template).render(HELLO)


@pytest.fixture
def limits(monkeypatch):
  """Lower the limits of time and memory."""
  monkeypatch.setattr(templates, 'SECONDS', 0.2)
  monkeypatch.setattr(templates, 'MEMORY', 1 << 27)
  templates.restart()
  yield
  templates.restart()


@pytest.mark.parametrize(
  ('template', 'said'),
  [
    ('{{ 10 ** (10 ** 10) }}', 'more than 0.2 s'),
    ('{% for i in range(9999) %}{% for j in range(9999) %}{% set x = i %}{% endfor %}{% endfor %}', 'more than 0.2 s'),
    ('{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}', 'more than 0.2 s'),
    ('{% set ns = namespace(x="ab") %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}', 'MemoryError'),
    ('{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}', ''),
    ("{{ messages[0].role | center(10 ** 10) }}", 'MemoryError'),
    ("{{ '%9999999999d' % messages | length }}", 'MemoryError'),
  ],
)  # fmt: skip
def test_a_template_that_takes_too_much_time_or_memory_fails_and_the_next_one_is_rendered(folder, limits, template, said):
  with pytest.raises(TokenizerError, match=f'chat template (failed|is not valid): .*{said}'):
    with_template(folder, template).render(HELLO)
  assert with_template(folder, 'J').render(HELLO) == 'J'


def test_a_conversation_is_rendered_again_after_the_renderer_was_killed(folder):
  tokenizer = with_template(folder, '{{ messages | length }}')
  assert tokenizer.render(HELLO) == '1'
  templates._renderer._process.kill()
  templates._renderer._process.wait()
  assert tokenizer.render(HELLO) == '1'


def test_a_request_whose_process_is_killed_is_asked_again(folder):
  tokenizer = with_template(folder, '{{ messages | length }}')
  tokenizer.render(HELLO)
  process = templates._renderer._process
  process.send_signal(signal.SIGSTOP)  # it reads the request, and cannot answer
  with ThreadPoolExecutor(1) as pool:
    answer = pool.submit(tokenizer.render, HELLO)
    while not templates._renderer._lock.locked():
      time.sleep(0.001)
    process.kill()
    assert answer.result(30) == '1'
  assert templates._renderer._process is not process


def test_a_stopped_renderer_is_killed_and_the_request_asked_again(folder, monkeypatch):
  monkeypatch.setattr(templates, 'PATIENCE', 5.0)  # includes the start of the second process
  tokenizer = with_template(folder, '{{ messages | length }}')
  tokenizer.render(HELLO)
  process = templates._renderer._process
  process.send_signal(signal.SIGSTOP)
  assert tokenizer.render([{'role': 'user', 'content': 'x' * 200_000}] * 2) == '2'  # more than a pipe holds
  assert process.wait() == -signal.SIGKILL


def test_two_renderers_that_give_no_answer_are_an_error(folder, monkeypatch):
  tokenizer, start, started = with_template(folder, '{{ messages | length }}'), templates._renderer._start, []

  def stopped():
    started.append(start())
    started[-1].send_signal(signal.SIGSTOP)
    return started[-1]

  templates.restart()
  with monkeypatch.context() as patch:
    patch.setattr(templates, 'PATIENCE', 0.2)
    patch.setattr(templates._renderer, '_start', stopped)
    with pytest.raises(TokenizerError, match=r'gives no answer within 0\.2 s'):
      tokenizer.render(HELLO)
  assert [process.wait() for process in started] == [-signal.SIGKILL] * 2
  assert tokenizer.render(HELLO) == '1'


def test_values_nested_about_as_deep_as_the_parser_accepts_are_rendered_or_refused(folder):
  """Values that the parser accepts here can be too deep for a function that is called deeper in the stack."""
  tokenizer = with_template(folder, '{{ messages | length }}')

  def nested(depth):
    with contextlib.suppress(RecursionError):
      return json.loads('[' * depth + ']' * depth)

  assert tokenizer.render([{'role': 'user', 'content': nested(50)}]) == '1'
  deepest = bisect.bisect_left(range(1_000_000), True, lo=1, key=lambda depth: nested(depth) is None) - 1
  rendered = []
  for value in map(nested, range(deepest - 30, deepest + 30)):  # the search above called the parser deeper in the stack
    if value is None:
      break
    try:
      rendered.append(tokenizer.render([{'role': 'user', 'content': value}]) == '1')
    except TokenizerError:
      rendered.append(False)
  assert rendered == sorted(rendered, reverse=True)  # once refused, no deeper value is rendered
  assert rendered[0]


def test_an_invalid_template_is_refused_at_load(folder):
  with pytest.raises(TokenizerError, match='chat template'):
    with_template(folder, '{% for m in messages %}')


def test_text_of_a_conversation_is_not_rendered(folder):
  assert '{{ 7 * 7 }}' in Tokenizer.load(folder).render([{'role': 'user', 'content': '{{ 7 * 7 }}'}])


def test_a_missing_template_is_named(folder):
  settings_of(folder, chat_template=None)
  with pytest.raises(TokenizerError, match='chat_template'):
    Tokenizer.load(folder).render(HELLO)


def test_a_text_that_the_tokenizer_cannot_encode_is_named(folder):
  with pytest.raises(TokenizerError, match=r"cannot encode 'a\\ud800'"):
    Tokenizer.load(folder).encode('a\ud800')
  words = {'type': 'WordLevel', 'vocab': {'a': 0}, 'unk_token': '<unk>'}
  raw = json.loads((folder / 'tokenizer.json').read_text())
  (folder / 'tokenizer.json').write_text(json.dumps(raw | {'model': words, 'added_tokens': [], 'pre_tokenizer': None}))
  tokenizer = Tokenizer.load(folder)
  assert tokenizer.encode('a') == [0]
  with pytest.raises(TokenizerError, match=r"cannot encode 'b' .*\[UNK\]"):
    tokenizer.encode('b')


def test_a_panic_of_the_library_is_an_error_that_names_the_file(folder, monkeypatch):
  monkeypatch.setattr(tokenizer_module, '_check_merges', lambda path: None)
  _write_bpe(folder, ['a', 'b'], '###')
  with pytest.raises(TokenizerError, match=r'tokenizer\.json: not a tokenizer \(range'):
    Tokenizer.load(folder)


@pytest.mark.parametrize('merge', [['a', 'é'], 'a é'], ids=['pair', 'text'])
def test_a_merge_without_the_prefix_of_continued_pieces_is_refused(folder, merge):
  """The library aborts the process when it cuts a prefix of one byte off the two bytes of é."""
  _write_bpe(folder, merge, '=')
  with pytest.raises(TokenizerError, match=r'tokenizer\.json: the merge .*a.*é.* does not continue with'):
    Tokenizer.load(folder)
  _write_bpe(folder, ['a', '=b'], '=')
  assert Tokenizer.load(folder).encode('ab') == [4]


def _write_bpe(folder, merge, prefix):
  """Write a BPE with one merge and a prefix of continued pieces."""
  vocab = {'a': 0, 'b': 1, '=b': 2, 'é': 3, 'ab': 4}
  model = {'type': 'BPE', 'vocab': vocab, 'merges': [merge], 'continuing_subword_prefix': prefix}
  raw = json.loads((folder / 'tokenizer.json').read_text())
  (folder / 'tokenizer.json').write_text(json.dumps(raw | {'model': model, 'added_tokens': [], 'pre_tokenizer': None}))


def test_an_argument_of_a_template_that_json_cannot_hold_is_named(folder):
  (folder / 'chat_template.jinja').write_text('{{ level }}')
  with pytest.raises(TokenizerError, match=r'config\.task\.template_args: level = \{3\}: expected a value of JSON'):
    Tokenizer.load(folder, {'level': {3}})


def test_missing_and_invalid_files_are_named(tmp_path):
  with pytest.raises(TokenizerError, match=r'tokenizer\.json: no'):
    Tokenizer.load(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"model": 3}')
  with pytest.raises(TokenizerError, match=r'tokenizer\.json: not a tokenizer'):
    Tokenizer.load(tmp_path)
  write_tiny(tmp_path)
  for text in ('{', '[' * 100_000):
    (tmp_path / 'generation_config.json').write_text(text)
    with pytest.raises(TokenizerError, match=r'generation_config\.json: not JSON'):
      Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
  ('name', 'content', 'said'),
  [
    ('tokenizer_config.json', [], r'tokenizer_config\.json: not a JSON object'),
    ('generation_config.json', [1], r'generation_config\.json: not a JSON object'),
    ('generation_config.json', {'eos_token_id': '2'}, "eos_token_id or pad_token_id = '2'"),
    ('tokenizer_config.json', {'eos_token': 2}, '2 is not a token'),
    ('tokenizer_config.json', {'eos_token': {'id': 2}}, 'is not a token'),
    ('tokenizer_config.json', {'added_tokens_decoder': [1]}, "'list' object has no attribute 'items'"),
    ('tokenizer_config.json', {'added_tokens_decoder': {'x': {'content': '<eos>'}}}, "invalid literal .* 'x'"),
    ('tokenizer_config.json', {'chat_template': 2}, 'chat_template = 2'),
    ('tokenizer_config.json', {'chat_template': [1]}, 'tokenizer_config'),
    ('tokenizer_config.json', {'chat_template': [{'template': 'x'}]}, "tokenizer_config.*'name'"),
    ('tokenizer_config.json', {'chat_template': [{'name': 'default'}]}, "tokenizer_config.*'template'"),
  ],
)
def test_invalid_contents_of_files_are_refused(folder, name, content, said):
  (folder / name).write_text(json.dumps(content))
  with pytest.raises(TokenizerError, match=said):
    Tokenizer.load(folder)


def test_files_that_contradict_each_other_are_refused(folder):
  settings_of(folder, added_tokens_decoder={'2': {'content': '<eos>'}, '300': {'content': '<think>'}})
  with pytest.raises(TokenizerError, match="'<think>' the id 300"):
    Tokenizer.load(folder)


def test_a_vocabulary_beyond_the_embedding_is_refused(folder):
  tokenizer = Tokenizer.load(folder)
  assert tokenizer.within(tiny('llama')) is tokenizer
  assert tokenizer.within(tiny('llama', vocab_size=512)) is tokenizer  # embeddings are often padded
  with pytest.raises(TokenizerError, match=r'id 258.*vocab_size = 258'):
    tokenizer.within(tiny('llama', vocab_size=258))
  (folder / 'generation_config.json').write_text('{"eos_token_id": 600}')
  with pytest.raises(TokenizerError, match='has id 600'):
    Tokenizer.load(folder).within(tiny('llama'))


def test_an_added_token_beyond_the_embedding_is_ordinary_text(folder):
  """The text models of Gemma 3 have 262,144 rows, and their tokenizer has the id 262,144 for an image."""
  backend = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  backend.add_special_tokens(['<image>'])
  backend.save(str(folder / 'tokenizer.json'))
  loaded = Tokenizer.load(folder)
  assert loaded.encode('a<image>')[1:] == [259]
  fitted = loaded.within(tiny('llama'))
  assert fitted.decode(fitted.encode('a<image>')) == 'a<image>'
  assert max(fitted.encode('a<image>')) < 259 == fitted.vocab_size
  assert fitted.encode('<bos>b') == loaded.encode('<bos>b')
