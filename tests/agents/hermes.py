"""A tokenizer of bytes whose chat template offers functions, in the form of Qwen's templates (ChatML, Hermes tool calls)."""

from pathlib import Path

from sprl.io.tokenizer import write_tiny

TEMPLATE = """
{%- if tools %}
{{- '<bos>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<eos>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<bos>system\\n' + messages[0].content + '<eos>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<bos>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<eos>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<bos>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><eos>\\n' }}
{%- elif message.role == 'user' %}
{{- '<bos>user\\n' + message.content + '<eos>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<bos>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
ADD = {
  'type': 'function',
  'function': {
    'name': 'add',
    'description': 'Add two numbers.',
    'parameters': {'type': 'object', 'properties': {'a': {'type': 'number'}, 'b': {'type': 'number'}}},
  },
}


def write_tokenizer(folder: Path) -> None:
  """Write the tokenizer of `sprl.models.config.tiny` with this template."""
  write_tiny(folder)
  (folder / 'chat_template.jinja').write_text(TEMPLATE, encoding='utf-8')
