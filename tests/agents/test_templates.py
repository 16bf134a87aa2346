"""Functions, tool messages and template arguments reach the chat template, as transformers renders them."""

import json
import os
import subprocess

import hermes
import pytest

from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny
from sprl.rollout.codec import ChatCodec

CALL = {'id': 'call_1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1, 'b': 2}}}
CHAT = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': '1 + 2 < 4?'},
  {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
  {'role': 'tool', 'tool_call_id': 'call_1', 'name': 'add', 'content': '3'},
]
WRITTEN = """<bos>system
Be brief.
{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object", \
"properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}
<eos>
<bos>user
1 + 2 < 4?<eos>
<bos>assistant
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call><eos>
<bos>user
<tool_response>
3
</tool_response><eos>
<bos>assistant
<think>

</think>

"""
TRANSFORMERS = """
import json, sys
from transformers import PreTrainedTokenizerFast
folder, chat, tools = sys.argv[1], *map(json.loads, sys.argv[2:])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
text = tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False, enable_thinking=False)
print(json.dumps(text))
"""


@pytest.fixture
def folder(tmp_path):
  hermes.write_tokenizer(tmp_path)
  return tmp_path


def test_tools_tool_messages_and_arguments_are_rendered(folder):
  tokenizer = Tokenizer.load(folder)
  assert tokenizer.render(CHAT, tools=[hermes.ADD], template_args={'enable_thinking': False}) == WRITTEN
  assert tokenizer.chat(CHAT, tools=[hermes.ADD], template_args={'enable_thinking': False}) == tokenizer.encode(WRITTEN)


def test_the_arguments_of_a_tokenizer_are_set_in_every_rendering_and_those_of_a_call_precede(folder):
  tokenizer = Tokenizer.load(folder, {'enable_thinking': False})
  assert tokenizer.render(CHAT[:2]).endswith('</think>\n\n')
  assert not tokenizer.render(CHAT[:2], template_args={'enable_thinking': True}).endswith('</think>\n\n')


def test_an_argument_that_the_template_does_not_read_is_refused(folder, tmp_path):
  with pytest.raises(TokenizerError, match=r"config\.task\.template_args: .* 'enable_thinkng'; it reads enable_thinking"):
    Tokenizer.load(folder, {'enable_thinkng': False})
  for name in ('add_generation_prompt', 'messages', 'self'):
    with pytest.raises(TokenizerError, match=f"does not read '{name}'"):
      Tokenizer.load(folder, {name: False})
    with pytest.raises(TokenizerError, match=f"does not read '{name}'"):
      Tokenizer.load(folder).chat(CHAT, template_args={name: False})


def test_a_template_without_tools_is_refused_where_tools_are_offered(tmp_path):
  write_tiny(tmp_path)
  with pytest.raises(TokenizerError, match='does not read `tools`'):
    Tokenizer.load(tmp_path).render(CHAT[1:2], tools=[hermes.ADD])


def test_the_ids_of_the_turns_equal_those_of_the_whole_conversation(folder):
  tokenizer = Tokenizer.load(folder)
  codec = ChatCodec(tokenizer)
  ids = codec.opening(CHAT[:2], tools=[hermes.ADD])
  answer = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><eos>')
  ids += answer + codec.reply(CHAT[3:], answer, tools=[hermes.ADD])
  assert tokenizer.decode(ids) == WRITTEN.removesuffix('<think>\n\n</think>\n\n')


@pytest.mark.skipif('SPRL_AGENTS_PYTHON' not in os.environ, reason='needs SPRL_AGENTS_PYTHON, an interpreter with transformers')
def test_the_text_equals_that_of_transformers(folder):
  command = [os.environ['SPRL_AGENTS_PYTHON'], '-c', TRANSFORMERS, folder, json.dumps(CHAT), json.dumps([hermes.ADD])]
  rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
  assert json.loads(rendered.splitlines()[-1]) == WRITTEN
