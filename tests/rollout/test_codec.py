"""Codecs: the ids of the turns equal those of the whole conversation, and no answer is encoded twice."""

import json

import pytest

from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny
from sprl.rollout.codec import ChatCodec, PlainCodec
from sprl.rollout.episodes import Codec

# Like ChatML: a token ends each turn, and a newline follows the token.
CHATML = (
  "{% for m in messages %}{{ '<bos>' + m.role + '\\n' + m.content + '<eos>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<bos>assistant\\n' }}{% endif %}"
)
NO_SPECIAL = (
  "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TALK = [
  [{'role': 'user', 'content': 'Where is the goal?'}],
  'Left of me ✓',
  [{'role': 'user', 'content': 'It is not.'}, {'role': 'user', 'content': 'Once more!'}],
  ' right?\n',
  [{'role': 'user', 'content': ''}],
  'yes',
]


def tokenizer(folder, template=None):
  write_tiny(folder)
  if template is not None:
    file = folder / 'tokenizer_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {'chat_template': template}))
  return Tokenizer.load(folder)


def conversation(codec, tokens, end):
  """Return the ids of TALK as an engine reads them. `end` follows each answer except the last."""
  ids, answer = codec.opening(TALK[0]), []
  for i, part in enumerate(TALK[1:], 1):
    if isinstance(part, str):
      answer = tokens.encode(part + (end if i < len(TALK) - 1 else ''))
      ids += answer
    else:
      ids += codec.reply(part, answer)
  return ids


def messages(system):
  flat = [] if system is None else [{'role': 'system', 'content': system}]
  for part in TALK:
    flat += [{'role': 'assistant', 'content': part}] if isinstance(part, str) else part
  return flat


@pytest.mark.parametrize('end', ['<eos>', ''], ids=['its turn ended', 'cut short'])
@pytest.mark.parametrize('system', [None, 'Be brief.'])
@pytest.mark.parametrize('template', [None, CHATML], ids=['tiny', 'chatml'])
def test_the_ids_of_the_turns_equal_those_of_the_whole_conversation(tmp_path, template, system, end):
  tokens = tokenizer(tmp_path, template)
  whole = tokens.render(messages(system), add_generation_prompt=False)
  closing = '<eos>\n' if template else '<eos>'
  assert whole.endswith('yes' + closing)
  ids = conversation(ChatCodec(tokens, system), tokens, end)
  assert tokens.decode(ids) == whole[: -len(closing)]
  assert ids == tokens.encode(whole[: -len(closing)])


def test_a_conversation_by_hand(tmp_path):
  """The template of the tiny tokenizer, written out."""
  tokens = tokenizer(tmp_path)
  codec = ChatCodec(tokens, 'S')
  user = [{'role': 'user', 'content': 'u'}]
  assert tokens.decode(codec.opening(user)) == '<bos>system\nS<eos><bos>user\nu<eos><bos>assistant\n'
  ended, short = tokens.encode('a<eos>'), tokens.encode('a')
  assert tokens.decode(codec.reply(user, ended)) == '<bos>user\nu<eos><bos>assistant\n'
  assert tokens.decode(codec.reply(user, short)) == '<eos><bos>user\nu<eos><bos>assistant\n'
  assert codec.reply(user, []) == codec.reply(user, short)
  assert codec.text(ended) == codec.text(short) == 'a'


def test_the_ids_between_answers_do_not_depend_on_their_text(tmp_path):
  """No answer is rendered or encoded again."""
  tokens = tokenizer(tmp_path)
  codec = ChatCodec(tokens)
  said = [tokens.encode(text) for text in ('a', 'long ' * 50, '{{ messages }}', 'answer')]
  assert len({tuple(codec.reply(TALK[2], answer)) for answer in said}) == 1


def test_a_template_without_end_of_turn_tokens_can_be_continued(tmp_path):
  tokens = tokenizer(tmp_path, NO_SPECIAL)
  codec = ChatCodec(tokens)
  user = [{'role': 'user', 'content': 'u'}]
  for answer in ('a', 'a\n'):  # an answer that ends with a newline gets no second one
    ids = codec.opening(user) + tokens.encode(answer) + codec.reply(user, tokens.encode(answer))
    assert tokens.decode(ids) == 'user: u\nassistant: a\nuser: u\nassistant: '


def test_a_template_may_repeat_the_system_message(tmp_path):
  again = "{% if m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}"
  tokens = tokenizer(tmp_path, CHATML.replace('{{', again + '{{', 1))
  user, answer = [{'role': 'user', 'content': 'u'}], tokens.encode('a<eos>')
  assert tokens.decode(ChatCodec(tokens, 'S').reply(user, answer)) == '\nS <bos>user\nu<eos>\n<bos>assistant\n'
  assert tokens.decode(ChatCodec(tokens).reply(user, answer)) == '\n<bos>user\nu<eos>\n<bos>assistant\n'


@pytest.mark.parametrize(
  ('template', 'times'),
  [
    (CHATML.replace('in messages', 'in messages[-1:]'), 0),
    (CHATML.replace('in messages', "in messages if m.role != 'assistant'"), 0),
    (CHATML.replace('m.content', "(m.content if m.role == 'user' else m.content[:-1])"), 0),
    (CHATML.replace('m.content', 'm.content + m.content'), 2),
  ],
)
def test_a_template_that_changes_earlier_answers_is_refused(tmp_path, template, times):
  tokens = tokenizer(tmp_path, template)
  with pytest.raises(TokenizerError, match=f'writes an earlier answer {times} times, expected once') as error:
    ChatCodec(tokens)
  assert str(tmp_path) in str(error.value)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
  write_tiny(tmp_path)
  file = tmp_path / 'tokenizer_config.json'
  settings = json.loads(file.read_text())
  del settings['chat_template']
  file.write_text(json.dumps(settings))
  with pytest.raises(TokenizerError, match=r'no chat_template\.jinja.*config\.task\.chat'):
    ChatCodec(Tokenizer.load(tmp_path))


def test_each_plain_message_is_a_line(tmp_path):
  tokens = tokenizer(tmp_path)
  codec = PlainCodec(tokens)
  ids = conversation(codec, tokens, '')
  assert tokens.decode(ids) == 'Where is the goal?\nLeft of me ✓\nIt is not.\nOnce more!\n right?\n\n\nyes'
  assert ids == tokens.encode(tokens.decode(ids))
  assert codec.text(tokens.encode('yes<eos>')) == 'yes'


def test_both_classes_have_the_interface_of_a_codec(tmp_path):
  tokens = tokenizer(tmp_path)
  assert isinstance(ChatCodec(tokens), Codec)
  assert isinstance(PlainCodec(tokens), Codec)
