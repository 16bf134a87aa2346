"""Tokenizers: mutations of tokenizer.json of several kinds, and of the files beside it.

A folder is refused with a TokenizerError, or it loads. Then texts become ids of the vocabulary, ids become text that UTF-8 can
encode, and a conversation becomes ids, each unless a TokenizerError says why not.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hermes
import tokenizers
import values
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from sprl.io.tokenizer import Tokenizer, TokenizerError, write_tiny

SECONDS = 20.0
CORPUS = [
  'The quick brown fox jumps over the lazy dog.',
  'Ein Text mit Umlauten: ä, ö, ü.',
  '1 + 2 = 3',
  'def f(x): return x',
] * 8
SPECIAL = ['<unk>', '<s>', '</s>', '<pad>']
CONVERSATION = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'What is 2 + 3? 🙂'}]
TEMPLATE = "{% for m in messages %}{{ bos_token + m['role'] + m['content'] }}{% endfor %}"
ALTERED = ('tokenizer.json', 'tokenizer.json', 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json')
ALTERED += ('special_tokens_map.json',)


@contextlib.contextmanager
def prepare(folder: Path) -> Iterator[Any]:
  """Write tokenizers of the kinds that models have: bytes, GPT-2's BPE, SentencePiece's BPE and Unigram, WordPiece, words."""
  write_tiny(folder / 'bytes')
  hermes.write_tokenizer(folder / 'tools')
  special = {'special_tokens': SPECIAL, 'show_progress': False}
  initial = pre_tokenizers.ByteLevel.alphabet()
  gpt = tokenizers.Tokenizer(models.BPE())
  split = pre_tokenizers.Split(tokenizers.Regex(r'\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+'), 'isolated')
  gpt.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  gpt.decoder, gpt.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
  gpt.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=initial, **special))
  llama = tokenizers.Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True))
  llama.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
  llama.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
  )
  bytes_ = {**special, 'special_tokens': [*SPECIAL, *(f'<0x{i:02X}>' for i in range(256))]}
  llama.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, **bytes_))
  llama.post_processor = processors.TemplateProcessing('<s> $A', '<s> $A $B', [('<s>', 1)])
  unigram = tokenizers.Tokenizer(models.Unigram())
  unigram.normalizer, unigram.pre_tokenizer, unigram.decoder = (
    normalizers.NFKC(),
    pre_tokenizers.Metaspace(),
    decoders.Metaspace(),
  )
  unigram.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=80, unk_token='<unk>', **special))
  pieces = tokenizers.Tokenizer(models.WordPiece(unk_token='<unk>'))
  pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
  pieces.decoder = decoders.WordPiece()
  pieces.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, **special))
  words = tokenizers.Tokenizer(models.WordLevel(unk_token='<unk>'))
  words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])
  words.train_from_iterator(CORPUS, trainers.WordLevelTrainer(**special))
  settings = {
    'bos_token': '<s>', 'eos_token': {'content': '</s>', 'special': True}, 'pad_token': '<pad>', 'unk_token': '<unk>',
    'added_tokens_decoder': {str(i): {'content': token, 'special': True} for i, token in enumerate(SPECIAL)},
    'chat_template': [{'name': 'default', 'template': TEMPLATE}],
  }  # fmt: skip
  for name, made in {'gpt': gpt, 'llama': llama, 'unigram': unigram, 'pieces': pieces, 'words': words}.items():
    (folder / name).mkdir()
    made.save(str(folder / name / 'tokenizer.json'))
    (folder / name / 'tokenizer_config.json').write_text(json.dumps(settings))
  originals = {}
  for each in sorted(folder.iterdir()):
    (each / 'generation_config.json').write_text('{"eos_token_id": [2, 1], "pad_token_id": 0}')
    (each / 'special_tokens_map.json').write_text('{"eos_token": {"content": "</s>"}, "additional_special_tokens": ["<s>"]}')
    originals[each.name] = {path.name: path.read_bytes() for path in each.iterdir()}
  yield SimpleNamespace(originals=originals, scratch=folder / 'scratch')


def case(rng: random.Random, world: Any) -> dict[str, Any]:
  """Return {'of': a folder, 'files': the files that differ from it, 'texts', 'ids', 'args': what is then asked}."""
  name = rng.choice(list(world.originals))
  changed: dict[str, bytes | None] = {}
  for _ in range(rng.choice((1, 1, 2))):
    file = rng.choice(ALTERED)
    original = world.originals[name][file]
    how = rng.random()
    if how < 0.8:
      tree = json.loads(original)
      key = rng.choice(list(tree)) if rng.random() < 0.5 else None  # else most changes are in the vocabulary
      changed[file] = values.as_json(
        {**tree, key: values.changed_json(rng, tree[key])} if key else values.changed_json(rng, tree)
      )
    elif how < 0.95:
      changed[file] = values.changed_bytes(rng, original)
    else:
      changed[file] = None
  if rng.random() < 0.1:
    changed['chat_template.jinja'] = values.changed_bytes(rng, hermes.TEMPLATE.encode())
  return {
    'of': name,
    'files': changed,
    'texts': [values.text(rng, lone=True) for _ in range(3)],
    'ids': [rng.choice((0, 1, 2, rng.randrange(500), 2**31, 2**32 - 1)) for _ in range(4)],
    'args': {} if rng.random() < 0.9 else {rng.choice(('enable_thinking', 'bos_token', 'x')): values.value(rng, 1)},
  }


def check(world: Any, case: dict[str, Any]) -> str:
  folder = world.scratch
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  for file, data in {**world.originals[case['of']], **case['files']}.items():
    if data is not None:
      (folder / file).write_bytes(data)
  try:
    tokenizer = Tokenizer.load(folder, case['args'])
  except TokenizerError:
    return 'refused'
  failed = 0
  for text in (*case['texts'], *CORPUS[:4]):
    try:
      ids = tokenizer.encode(text)
    except TokenizerError:
      failed += 1
      continue
    assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids), ids
    tokenizer.decode(ids).encode()
  tokenizer.decode(case['ids']).encode()
  assert all(i >= 0 for i in (*tokenizer.eos_ids, tokenizer.pad_id))
  try:
    tokenizer.chat(CONVERSATION)
  except TokenizerError:
    return 'loaded, no chat'
  return 'loaded, some texts refused' if failed else 'loaded'
