"""The grader `judge`: a language model behind an OpenAI-compatible endpoint reads the completion and gives it a score.

A request is one chat completion. It is tried again, after a growing pause, if the endpoint is busy (429), fails (5xx), is too
slow, or cannot be reached. If all attempts fail, the sample has no score and the status `error`. If the reply has no score, the
status is `invalid`.

The completion is part of the judge's prompt, so a completion can try to persuade the judge to give a high score. Compare the
judge with other rewards, and read samples.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from sprl.config import SettingsError
from sprl.config_reader import coerce
from sprl.tasks.rewards import Sample

COSTS = ('judge/requests', 'judge/retries', 'judge/tokens', 'judge/cost')
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds before a request is tried again
TEMPLATE = """Question:
{prompt}

Correct answer:
{answer}

Response:
{completion}

Is the final answer of the response correct? Reply with yes or no."""


@dataclass(frozen=True)
class Settings:
  """The entries of task.judge."""

  url: str = ''  # of the endpoint, such as http://localhost:8000/v1; /chat/completions is added
  model: str = ''  # the model's name at the endpoint
  template: str = TEMPLATE  # the user message; {prompt}, {completion}, {answer} and columns of the row are filled in
  score: str = 'yes_no'  # how the reply is read: yes_no, number (the last one), or a regular expression with one group
  best: float = 1.0  # the number that scores 1; the score is the number of the reply divided by it
  key: str | None = None  # the environment variable with the API key; None: the endpoint needs none
  retries: int = 4  # further attempts at a request
  timeout: float = 30.0  # seconds for one request
  max_tokens: int = 256  # of a reply
  temperature: float = 0.0  # of a reply
  input_price: float | None = None  # dollars for a million tokens that the judge reads; None: no cost is counted
  output_price: float = 0.0  # dollars for a million tokens that the judge writes


@dataclass(frozen=True)
class Judgement:
  """The score of a sample, and what it cost."""

  score: float
  status: Literal['ok', 'error', 'invalid']
  reason: str = ''  # why the status is not ok
  costs: Mapping[str, float] = field(default_factory=dict)  # an amount for each name of COSTS


def settings(given: Mapping[str, Any]) -> Settings:
  """Return the checked entries of task.judge. Raises SettingsError, also if the API key is missing in the environment."""
  found: Settings = coerce(Settings, given, 'config.task.judge')

  def require(name: str, accepted: bool, expected: str) -> None:
    if not accepted:
      raise SettingsError(f'config.task.judge: {name} = {getattr(found, name)!r}: expected {expected}')

  require('url', found.url.startswith(('http://', 'https://')), 'the address of an endpoint, such as http://localhost:8000/v1')
  require('model', bool(found.model), "the model's name at the endpoint")
  require('template', '{completion}' in found.template, 'a text with {completion}')
  require('score', _reader(found) is not None, 'yes_no, number, or a regular expression with one group')
  require('best', found.best > 0, 'a number above 0')
  require('key', found.key is None or bool(os.environ.get(found.key)), 'the name of an environment variable that is set, or None')
  for name in ('retries', 'temperature', 'output_price'):
    require(name, getattr(found, name) >= 0, 'a number of at least 0')
  for name in ('timeout', 'max_tokens'):
    require(name, getattr(found, name) > 0, 'a number above 0')
  require('input_price', found.input_price is None or found.input_price >= 0, 'None or a number of at least 0')
  return found


def load(args: Mapping[str, Any]) -> Callable[[Sample], Awaitable[Judgement]]:
  """Return the async grader. `args` are the entries of task.judge, and `seconds`, the time limit for all attempts of a sample."""
  import httpx2

  given = {name: value for name, value in args.items() if name != 'seconds'}
  return partial(_judge, settings(given), httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None)), args['seconds'])


async def _judge(settings: Settings, client: Any, seconds: float, sample: Sample) -> Judgement:
  """Send the request until a reply arrives, or until the attempts or the time are used up."""
  import httpx2

  deadline, why = time.monotonic() + seconds, ''
  used: dict[str, float] = dict.fromkeys(COSTS[:3], 0.0)
  if settings.input_price is not None:
    used['judge/cost'] = 0.0
  for attempt in range(settings.retries + 1):
    used['judge/requests'] += 1
    used['judge/retries'] += attempt > 0
    try:
      left = max(0.1, deadline - time.monotonic())
      status, headers, reply = await asyncio.wait_for(_ask(settings, client, sample), min(settings.timeout, left))
    except (TimeoutError, OSError, httpx2.HTTPError) as error:
      status, headers, reply = 0, {}, f'{type(error).__name__} {error}'.strip()
    if status == 200:
      return _read(settings, reply, used)
    why = f'{settings.url}: {f"status {status}" if status else "no reply"}: {reply!s:.200}'
    if status not in (0, 408, 409, 429) and status < 500:
      break
    pause = _pause(attempt, headers)
    if time.monotonic() + pause >= deadline:
      break
    if attempt < settings.retries:
      await asyncio.sleep(pause)
  return Judgement(0.0, 'error', f'{why} ({used["judge/requests"]:g} requests)', used)


async def _ask(settings: Settings, client: Any, sample: Sample) -> tuple[int, Mapping[str, str], Any]:
  """Send a request and return (status, headers, body). The body is parsed JSON if the status is 200, else text."""
  key = os.environ.get(settings.key, '') if settings.key else ''
  body = {
    'model': settings.model,
    'messages': [{'role': 'user', 'content': filled(settings.template, sample)}],
    'max_tokens': settings.max_tokens,
    'temperature': settings.temperature,
  }
  address = settings.url.rstrip('/') + '/chat/completions'
  answer = await client.post(address, json=body, headers={'Authorization': f'Bearer {key}'} if key else {}, timeout=None)
  return answer.status_code, answer.headers, _json(answer.text) if answer.status_code == 200 else answer.text


def _json(text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return text


def _pause(attempt: int, headers: Mapping[str, str]) -> float:
  """Return the seconds before the next attempt: those of `retry-after` if sent, else a pause that doubles each time."""
  try:
    return max(0.0, float(headers.get('retry-after', '')))
  except ValueError:
    return min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE)


def filled(template: str, sample: Sample) -> str:
  """Return the template with {name} replaced by the values of the sample. Other braces stay as they are."""
  values = sample.values
  return re.sub(r'\{(\w+)\}', lambda match: str(values[match[1]]) if match[1] in values else match[0], template)


def _read(settings: Settings, reply: Any, used: dict[str, float]) -> Judgement:
  try:
    choice = reply['choices'][0]
    text, cut = str(choice['message']['content']), choice.get('finish_reason') == 'length'
  except (KeyError, IndexError, TypeError):
    return Judgement(0.0, 'error', f'{settings.url}: the reply is no chat completion: {reply!s:.200}', used)
  counts = reply.get('usage') or {}
  read, written = (float(counts.get(name) or 0) for name in ('prompt_tokens', 'completion_tokens'))
  used['judge/tokens'] += read + written
  if settings.input_price is not None:
    used['judge/cost'] += (read * settings.input_price + written * settings.output_price) / 1e6
  reader = _reader(settings)
  assert reader is not None, 'checked with the settings'
  score = reader(text, cut)
  if score is None:
    of = 'reply, which max_tokens cut off,' if cut else 'reply'
    return Judgement(0.0, 'invalid', f'no score ({settings.score}) in the {of} {text!r:.200}', used)
  return Judgement(score, 'ok', '', used)


def _reader(settings: Settings) -> Callable[[str, bool], float | None] | None:
  """Return the function (reply, whether it was cut off) -> score or None; None if `settings.score` is not valid."""
  if settings.score == 'yes_no':
    return _yes_or_no
  if settings.score == 'number':
    return partial(_number, settings.best)
  try:
    if re.compile(settings.score).groups != 1:
      return None
  except re.error:
    return None
  return partial(_matched, settings.score, settings.best)


def _yes_or_no(text: str, cut: bool) -> float | None:
  """Return 1 or 0 for a reply that begins with yes or no, else for its last one. The thinking before the reply does not count."""
  said = _said(text).lower()
  first = re.match(r'[\W_]*(?:(yes)\b|(no)\b(?=[\s*_"]*(?:[.,:;!(—–\n]|-\s|$)))', said)  # not `no doubt: yes`
  verdict = first[1] or first[2] if first else None if cut else _last(r'\b(yes|no)\b', said)
  return {'yes': 1.0, 'no': 0.0, None: None}[verdict]


def _number(best: float, text: str, cut: bool) -> float | None:
  """Return the last number of a reply, from 0 to `best`, as a share of it.

  If 10 is the best, `7/10` and `7 out of 10` are 7, and `1-10` and `1 to 10` are a scale, which does not count.
  """

  def without_best(match: re.Match[str]) -> str:
    if float(match[3]) != best:
      return match[0]
    return match[1] if match[2] in ('/', 'out of', 'of') else ''

  number = r'(\d+(?:\.\d+)?)'
  said = re.sub(rf'{number}\s*(/|out of|of|-|–|to)\s*{number}(?![\d.]*\d)', without_best, re.sub('[*_`]', '', _said(text)))
  return None if cut else _share(_last(r'((?:(?<![\w)])-)?\d+(?:\.\d+)?)', said), best)


def _matched(pattern: str, best: float, text: str, cut: bool) -> float | None:
  """Return the number of the last match of a pattern in a reply, from 0 to `best`, as a share of it."""
  return None if cut else _share(_last(pattern, _said(text)), best)


def _said(text: str) -> str:
  """Return what a reply says after its thinking; '' if it was cut off in it."""
  return '' if '<think>' in text and '</think>' not in text else text.rpartition('</think>')[2]


def _share(number: str | None, best: float) -> float | None:
  try:
    score = float(number or '') / best
  except ValueError:
    return None
  return score if 0 <= score <= 1 else None


def _last(pattern: str, text: str) -> str | None:
  *_, last = [None, *re.findall(pattern, text)]
  return last
