"""Tokenizer and chat template of a Hugging Face folder.

The tokenizers library reads tokenizer.json. A chat template is a program from a downloaded folder. It runs in a sandbox in
another process, with limits of time and memory (sprl/io/templates.py). Every failure of either raises TokenizerError.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from sprl.io import templates
from sprl.models.config import ConfigError, ModelConfig, as_ids

_OURS = ('messages', 'tools', 'add_generation_prompt')  # variables of a template that are not its arguments
_SPECIAL = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')


class TokenizerError(ValueError):
  """A tokenizer or chat template is unusable, or a template refuses a conversation. The message gives the cause."""


class TemplateArgsError(TokenizerError):
  """A chat template does not read a variable, or its value is none of JSON."""


@dataclass(frozen=True)
class Tokenizer:
  """The tokenizer of a Hugging Face folder."""

  folder: Path
  backend: tokenizers.Tokenizer
  template: str | None  # the source of the chat template
  special: Mapping[str, str]  # bos_token, eos_token, ...: variables of the template
  eos_ids: tuple[int, ...]  # ids that end a completion: from generation_config.json, then the tokenizer's own
  pad_id: int  # fills rows. It is never attended, so any id serves if the folder names none
  vocab_size: int  # the largest id plus one, including added tokens
  variables: frozenset[str] = frozenset()  # names that the template reads
  tool_template: str | None = None  # the source for conversations with tools, if it is another one
  template_args: Mapping[str, Any] = field(default_factory=dict)  # variables that every rendering sets, such as enable_thinking
  time: str | None = None  # for templates that read the clock, in ISO 8601; None: the time of each rendering

  @classmethod
  def load(cls, folder: str | Path, template_args: Mapping[str, Any] | None = None) -> 'Tokenizer':
    """Read tokenizer.json and, if they exist, tokenizer_config.json, generation_config.json and chat_template.jinja.

    Every rendering of the chat template sets `template_args`.

    Raises TokenizerError if tokenizer.json is missing, if files are invalid or contradict each other, or if the template does not
    read one of `template_args`.
    """
    folder = Path(folder)
    path = folder / 'tokenizer.json'
    if not path.is_file():
      raise TokenizerError(f'{path}: no such file; expected a fast tokenizer, which has tokenizer.json')
    _check_merges(path)
    with _named(f'{path}: not a tokenizer'):
      backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()

    settings = _json(folder / 'special_tokens_map.json') | _json(folder / 'tokenizer_config.json')
    generation = _json(folder / 'generation_config.json')
    try:
      loaded = cls._of(folder, backend, settings, generation)
    except (AttributeError, ConfigError, LookupError, TypeError, ValueError) as error:
      if isinstance(error, TokenizerError):
        raise
      raise TokenizerError(f'{folder}: invalid value in tokenizer_config.json or generation_config.json ({error})') from error
    try:
      loaded._check_args(template_args or {})
    except TemplateArgsError as error:
      raise TemplateArgsError(f'{folder}: config.task.template_args: {error}') from None
    return dataclasses.replace(loaded, template_args=dict(template_args or {}))

  @classmethod
  def _of(
    cls, folder: Path, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], generation: Mapping[str, Any]
  ) -> 'Tokenizer':
    for i, added in (settings.get('added_tokens_decoder') or {}).items():
      if backend.token_to_id(_content(added)) != int(i):
        raise TokenizerError(f'{folder}: tokenizer_config.json gives {_content(added)!r} the id {i}, but tokenizer.json does not')
    special = {key: _content(settings[key]) for key in _SPECIAL if settings.get(key) is not None}

    def named(key):
      i = backend.token_to_id(special.get(key, ''))
      return () if i is None else (i,)

    eos_ids = tuple(dict.fromkeys(as_ids(generation.get('eos_token_id')) + named('eos_token')))
    template, variables = _template(folder, settings, 'default')
    tool_template, tool_variables = _template(folder, settings, 'tool_use')
    return cls(
      folder=folder,
      backend=backend,
      template=template,
      variables=variables | tool_variables,
      tool_template=tool_template,
      special=special,
      eos_ids=eos_ids,
      pad_id=(named('pad_token') + as_ids(generation.get('pad_token_id')) + eos_ids + (0,))[0],
      vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
    )

  def encode(self, text: str) -> list[int]:
    """Return the ids of a text. Special tokens that are written in the text become their ids; none are added.

    Raises TokenizerError if the tokenizer has no ids for a part of the text, or if UTF-8 cannot encode the text.
    """
    with _named(f'{self.folder}: the tokenizer cannot encode {text[:60]!r}'):
      return self.backend.encode(text, add_special_tokens=False).ids

  def prompt(self, text: str) -> list[int]:
    """Return the ids of a text that no chat template wraps, as a base model reads it.

    They begin with the tokens that the post-processor of tokenizer.json puts before a text, such as BOS. A text that begins with
    these tokens gets no second ones. No end token is added. Raises TokenizerError as `encode` does.
    """
    ids, added = self.encode(text), self.backend.encode(text)
    count = next((i for i, special in enumerate(added.special_tokens_mask) if not special), 0)  # of the tokens before the text
    begin = added.ids[:count]
    return ids if ids[:count] == begin else begin + ids

  def decode(self, ids: Iterable[int] | np.ndarray, skip_special: bool = False) -> str:
    """Return the text of ids. Bytes that are not valid UTF-8 become U+FFFD."""
    with _named(f'{self.folder}: the tokenizer cannot decode its ids'):
      return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
  ) -> str:
    """Render a conversation with the chat template.

    Args:
      messages: dicts with role and content, and where the template reads them, tool_calls, tool_call_id and name.
      add_generation_prompt: whether the text ends with the beginning of the model's answer.
      tools: JSON schemas of the functions that the model may call, as in OpenAI's API.
      template_args: further variables of the template. They take precedence over those of the tokenizer.

    Raises:
      TokenizerError: there is no template, the template raises, or it does not read `tools` or one of the arguments.
    """
    if self.template is None:
      raise TokenizerError(
        f'{self.folder}: no chat_template.jinja and no template in tokenizer_config.json; set config.task.chat = False'
      )
    self._check_args(template_args or {})
    if tools and 'tools' not in self.variables:
      raise TokenizerError(f'{self.folder}: the chat template does not read `tools`: this model cannot be offered functions')
    given = {'documents': None, **self.special, **self.template_args, **(template_args or {})}
    try:
      values = {**given, 'messages': messages, 'tools': tools or None}
      source = self.tool_template if tools and self.tool_template is not None else self.template
      return templates.render(source, values, add_generation_prompt, self.time)
    except templates.TemplateError as error:
      raise TokenizerError(f'{self.folder}: the chat template failed: {error}') from None

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Render a conversation (see `render`) and return its ids. Raises TokenizerError."""
    return self.encode(self.render(messages, add_generation_prompt, tools, template_args))

  def _check_args(self, template_args: Mapping[str, Any]) -> None:
    for name, value in template_args.items():
      accepted = self.variables - {*_OURS, *_SPECIAL}
      if self.template is not None and name not in accepted:
        read = ', '.join(sorted(accepted)) or 'no argument'
        raise TemplateArgsError(f'the chat template does not read {name!r}; it reads {read}')
      try:
        json.dumps(value)
      except (TypeError, ValueError, RecursionError) as error:
        raise TemplateArgsError(f'{name} = {value!r:.60}: expected a value of JSON ({error})') from None

  def within(self, config: ModelConfig) -> 'Tokenizer':
    """Return the tokenizer without the added tokens that have no row in the model's embedding. Their text is then ordinary text.

    The text models of Gemma 3 have such a token, which stands for an image. Raises TokenizerError if any other id of the
    tokenizer, or an end or pad id, has no row.
    """
    size = config.vocab_size
    if max(self.vocab_size - 1, *self.eos_ids, self.pad_id) < size:
      return self
    largest = max(*self.backend.get_vocab(with_added_tokens=False).values(), *self.eos_ids, self.pad_id)
    if largest >= size:
      raise TokenizerError(f'{self.folder}: the tokenizer has id {largest}, but config.json has vocab_size = {size}')
    parts = json.loads(self.backend.to_str())
    parts['added_tokens'] = [token for token in parts['added_tokens'] if token['id'] < size]
    return dataclasses.replace(self, backend=tokenizers.Tokenizer.from_str(json.dumps(parts)), vocab_size=size)


def write_tiny(folder: str | Path) -> None:
  """Write the tokenizer of `sprl.models.config.tiny`: <pad>, <bos>, <eos>, one id for each byte, and a chat template."""
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


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
  """Turn errors of the tokenizers library into TokenizerError. It raises bare Exception, and its panics are no Exception."""
  try:
    yield
  except KeyboardInterrupt:
    raise
  except BaseException as error:
    raise TokenizerError(f'{what} ({error})') from None


# --- files -----------------------------------------------------------------------------------------------------------


def _json(path: Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text(encoding='utf-8')) if path.is_file() else {}
  except (ValueError, RecursionError) as error:
    raise TokenizerError(f'{path}: not JSON ({error})') from None
  if not isinstance(found, dict):
    raise TokenizerError(f'{path}: not a JSON object')
  return found


def _check_merges(path: Path) -> None:
  """Raise TokenizerError if a merge of a BPE adds a piece without the model's prefix of continued pieces.

  The library cuts the prefix off unseen. A cut inside a character gives text that is not UTF-8, on which it aborts the process.
  """
  model = _json(path).get('model')
  model = model if isinstance(model, dict) else {}
  prefix, merges = model.get('continuing_subword_prefix'), model.get('merges')
  if not isinstance(prefix, str) or not isinstance(merges, list):
    return  # none, or a form that the library refuses
  for merge in merges:
    pieces = merge.split(' ') if isinstance(merge, str) else merge
    if isinstance(pieces, list) and len(pieces) == 2 and isinstance(pieces[1], str) and not pieces[1].startswith(prefix):
      raise TokenizerError(f'{path}: the merge {merge!r} does not continue with the continuing_subword_prefix {prefix!r}')


def _content(token: Any) -> str:
  """Return the text of a token, which the files hold as text or as an object with properties."""
  text = token['content'] if isinstance(token, Mapping) and 'content' in token else token
  if not isinstance(text, str):
    raise TypeError(f'{text!r} is not a token')
  return text


def _template(folder: Path, settings: Mapping[str, Any], name: str) -> tuple[str | None, frozenset[str]]:
  """Return a chat template and the names of the variables that it reads; None if there is no template of this name.

  `default` is in chat_template.jinja, or else in tokenizer_config.json. There may be several with their names in the second file.
  """
  path = folder / 'chat_template.jinja'
  source = path.read_text(encoding='utf-8') if path.is_file() else settings.get('chat_template')
  if isinstance(source, list):
    source = next((entry['template'] for entry in source if entry['name'] == name), None)
  elif name != 'default':
    source = None
  if source is None:
    return None, frozenset()
  if not isinstance(source, str):
    raise TypeError(f'chat_template = {source!r} is not text')
  try:
    return source, templates.variables(source)
  except templates.TemplateError as error:
    raise TokenizerError(f'{folder}: the chat template is not valid: {error}') from None
