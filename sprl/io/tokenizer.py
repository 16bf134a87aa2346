"""Text to ids and back (the tokenizers library on tokenizer.json), and the chat template under jinja2's sandbox.

A chat template is a program out of a downloaded folder. It runs in jinja2's immutable sandbox with what transformers offers
templates, on plain strings, lists and dicts; loops over ranges, products and output are bounded. What it does wrong ends as a
TokenizerError.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
from jinja2.exceptions import SecurityError

from sprl.models.config import ConfigError, ModelConfig, as_ids

MAX_RENDERED = 4_000_000  # characters of a rendered conversation
_SPECIAL = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


class TokenizerError(ValueError):
  """A tokenizer or chat template that cannot be used, or a conversation its template refuses; the message says why."""


@dataclass(frozen=True)
class Tokenizer:
  """The tokenizer of a Hugging Face folder."""

  folder: Path
  backend: tokenizers.Tokenizer
  template: jinja2.Template | None
  special: Mapping[str, str]  # bos_token, eos_token ... as templates see them
  eos_ids: tuple[int, ...]  # that end a completion: generation_config.json's and the tokenizer's own
  pad_id: int  # fills rows; never attended, so any id would do where the folder names none
  vocab_size: int  # one more than the largest id, added tokens included

  @classmethod
  def load(cls, folder: str | Path) -> 'Tokenizer':
    """Reads tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja, where they are.

    Raises TokenizerError: no tokenizer.json, or files that contradict each other or are not what they should be.
    """
    folder = Path(folder)
    path = folder / 'tokenizer.json'
    if not path.is_file():
      raise TokenizerError(f'{path}: no such file; a fast (tokenizer.json) tokenizer is needed')
    try:
      backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
      raise TokenizerError(f'{path}: not a tokenizer ({error})') from None
    backend.no_truncation()
    backend.no_padding()

    settings = _json(folder / 'special_tokens_map.json') | _json(folder / 'tokenizer_config.json')
    generation = _json(folder / 'generation_config.json')
    try:
      return cls._of(folder, backend, settings, generation)
    except (AttributeError, ConfigError, TypeError, ValueError) as error:
      if isinstance(error, TokenizerError):
        raise
      raise TokenizerError(f'{folder}: tokenizer_config.json or a file beside it is not what it should be ({error})') from error

  @classmethod
  def _of(
    cls, folder: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], generation: Mapping[str, Any]
  ) -> 'Tokenizer':
    for i, added in (settings.get('added_tokens_decoder') or {}).items():
      if backend.token_to_id(_content(added)) != int(i):
        raise TokenizerError(f'{folder}: tokenizer_config.json gives {_content(added)!r} the id {i}, tokenizer.json does not')
    special = {key: _content(settings[key]) for key in _SPECIAL if settings.get(key) is not None}

    def named(key):
      i = backend.token_to_id(special.get(key, ''))
      return () if i is None else (i,)

    eos_ids = tuple(dict.fromkeys(as_ids(generation.get('eos_token_id')) + named('eos_token')))
    return cls(
      folder=folder,
      backend=backend,
      template=_template(folder, settings),
      special=special,
      eos_ids=eos_ids,
      pad_id=(named('pad_token') + as_ids(generation.get('pad_token_id')) + eos_ids + (0,))[0],
      vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
    )

  def encode(self, text: str) -> list[int]:
    """The ids of a text; special tokens written out in it are recognised, none are added."""
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int] | np.ndarray, skip_special: bool = False) -> str:
    """The text of ids; bytes that are no UTF-8 become U+FFFD."""
    return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
    """A conversation (dicts of role and content) as the chat template writes it. Raises TokenizerError."""
    if self.template is None:
      raise TokenizerError(f'{self.folder}: no chat template (tokenizer_config.json, chat_template.jinja); use plain prompts')
    plain = json.loads(json.dumps(messages))  # templates see nothing that has methods of its own
    parts, length = [], 0
    try:
      for part in self.template.generate(
        messages=plain, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self.special
      ):
        parts.append(part)
        length += len(part)
        if length > MAX_RENDERED:
          raise jinja2.TemplateError(f'more than {MAX_RENDERED} characters')
    except Exception as error:  # a template is foreign code: whatever it raises is its fault
      raise TokenizerError(f'{self.folder}: the chat template failed: {type(error).__name__}: {error}') from error
    return ''.join(parts)

  def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
    """The ids of a rendered conversation."""
    return self.encode(self.render(messages, add_generation_prompt))

  def check_against(self, config: ModelConfig) -> None:
    """Raises TokenizerError where an id, also one that ends a completion, has no row in the model's embedding."""
    largest = max(self.vocab_size - 1, *self.eos_ids, self.pad_id)
    if largest >= config.vocab_size:
      raise TokenizerError(f'{self.folder}: the tokenizer has id {largest}; config.json: vocab_size = {config.vocab_size}')


def write_tiny(folder: str | Path) -> None:
  """Writes a tokenizer for tests, that of `sprl.models.config.tiny`: <pad>, <bos>, <eos>, then one id a byte; a chat template."""
  folder = Path(folder)
  specials = ['<pad>', '<bos>', '<eos>']
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(specials)
  folder.mkdir(parents=True, exist_ok=True)
  backend.save(str(folder / 'tokenizer.json'))
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,
    'pad_token': '<pad>',
    'bos_token': '<bos>',
    'eos_token': '<eos>',
    'chat_template': "{% for m in messages %}{{ bos_token + m.role + '\\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}",
  }
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2), encoding='utf-8')


# --- files -----------------------------------------------------------------------------------------------------------


def _json(path: Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text(encoding='utf-8')) if path.is_file() else {}
  except ValueError as error:
    raise TokenizerError(f'{path}: not JSON ({error})') from None
  if not isinstance(found, dict):
    raise TokenizerError(f'{path}: not a JSON object')
  return found


def _content(token: Any) -> str:
  """The text of a token, which the files hold as text or as an object with its properties."""
  text = token['content'] if isinstance(token, Mapping) and 'content' in token else token
  if not isinstance(text, str):
    raise TypeError(f'{text!r} is no token')
  return text


def _template(folder: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
  """chat_template.jinja, else tokenizer_config.json's; of several named templates the one called `default`."""
  path = folder / 'chat_template.jinja'
  source = path.read_text(encoding='utf-8') if path.is_file() else settings.get('chat_template')
  if isinstance(source, list):
    source = next((entry['template'] for entry in source if entry['name'] == 'default'), None)
  if source is None:
    return None
  if not isinstance(source, str):
    raise TypeError(f'chat_template = {source!r} is no text')
  try:
    return _environment().from_string(source)
  except jinja2.TemplateError as error:
    raise TokenizerError(f'{folder}: the chat template is not valid: {error}') from None


# --- the sandbox -----------------------------------------------------------------------------------------------------


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """jinja2's sandbox with bounded products and powers: 'a' * 10 ** 12 would take the memory before any limit on output."""

  intercepted_binops = frozenset(['*', '**'])

  def call_binop(self, context, operator, left, right):
    if operator == '**' and (abs(left) > 1e6 or abs(right) > 64):
      raise SecurityError(f'{left} ** {right}')
    for sequence, times in ((left, right), (right, left)):
      if isinstance(sequence, str | list | tuple) and len(sequence) * times > MAX_RENDERED:
        raise SecurityError(f'a sequence of {len(sequence)} times {times}')
    return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
  """jinja2's, without names that could reach Python's internals."""

  def __setitem__(self, name, value):
    if name.startswith('_'):
      raise SecurityError(f'namespace attribute {name!r}')
    super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
  """`{% generation %} ... {% endgeneration %}` marks what the assistant wrote; here it is just its body."""

  tags = {'generation'}  # noqa: RUF012  (jinja2's interface)

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _environment() -> jinja2.Environment:
  """trim_blocks, lstrip_blocks, loop controls and the functions that transformers gives templates."""
  env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  def bounded_range(*args):
    values = range(*args)
    if len(values) > 1000:  # nested twice still ends
      raise SecurityError(f'a range of {len(values)} numbers')
    return values

  def namespace(*args, **kwargs):
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
      made[name] = value
    return made

  env.filters['tojson'] = tojson
  env.globals['namespace'] = namespace
  env.globals['range'] = bounded_range
  env.globals['raise_exception'] = raise_exception
  env.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  return env
