"""Agents of the tests, for the standard library only: one process of the host imports this file, then forks."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
import urllib.error
import urllib.request


def ask(base_url, messages, **options):
  """Return the message of the model's answer."""
  body = json.dumps({'model': 'tiny', 'messages': messages, **options}).encode()
  request = urllib.request.Request(f'{base_url}/chat/completions', body, {'content-type': 'application/json'})
  with urllib.request.urlopen(request, timeout=60) as response:
    return json.load(response)['choices'][0]['message']


def user(text):
  return {'role': 'user', 'content': text}


def talk(base_url, row, turns=2):
  """A conversation that only grows. The reward is the length of the last answer."""
  messages, answer = [user(f'seed {row["seed"]}')], {}
  for turn in range(turns):
    answer = ask(base_url, messages)
    messages += [answer, user(f'turn {turn}')]
  return {'reward': len(answer['content'] or '') / 100, 'metrics': {'length': len(messages)}}


def edits(base_url, row):
  """Goes on, goes back to the first answer, and starts another conversation."""
  first = [user('a')]
  one = [*first, ask(base_url, first), user('b')]
  ask(base_url, one)
  ask(base_url, [*one[:2], user('c')])
  ask(base_url, [user('summary')])
  return 1.0


def lengthy(base_url, row):
  """Talks until it is refused."""
  messages = [user('on')]
  while True:
    messages += [ask(base_url, messages), user('on')]


def prints(base_url, row):
  """Prints a line, and may end its process."""
  print(row['exits'])
  if row['exits']:
    os._exit(0)
  return 0.0


def draws(base_url, row, **temperatures):
  """Asks with the temperature of its split."""
  ask(base_url, [user('x')], temperature=temperatures[row['split']])


def stubborn(base_url, row):
  """Talks, and tries again whenever it is refused."""
  while True:
    with contextlib.suppress(urllib.error.HTTPError):
      lengthy(base_url, row)


def catches(base_url, row):
  """Talks until it is refused, and returns a reward."""
  try:
    lengthy(base_url, row)
  except urllib.error.HTTPError as error:
    return {'reward': 0.5, 'metrics': {'status': error.code}}


def dies_after_a_refusal(base_url, row):
  """Talks until it is refused, and dies."""
  with contextlib.suppress(urllib.error.HTTPError):
    lengthy(base_url, row)
  os.kill(os.getpid(), signal.SIGKILL)


def goes_back(base_url, row):
  """Starts a second conversation, and goes back to the first one with a message for which there is no room."""
  first = [user('a')]
  one = [*first, ask(base_url, first), user('on ' * 200)]
  ask(base_url, [user('summary')])
  try:
    ask(base_url, one)
  except urllib.error.HTTPError:
    return 1.0


def odd(base_url, row, how='hang'):
  """Talks if its seed is a multiple of 4; otherwise hangs, dies, raises or says nothing."""
  if row['seed'] % 4 == 0:
    return talk(base_url, row)
  if how == 'hang':
    time.sleep(600)
  if how == 'die':
    ask(base_url, [user('last words')])
    os.kill(os.getpid(), signal.SIGKILL)
  if how == 'raise':
    raise ValueError('no')
  if how == 'exit':
    os._exit(3)
  return 1.0


def files(base_url, row):
  """The reward is the limit of open files."""
  return float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def children(base_url, row, pids=''):
  """Starts a process that would outlive it, and hangs."""
  child = subprocess.Popen(['sleep', '300'])
  with open(os.path.join(pids, str(os.getpid())), 'w') as file:
    file.write(str(child.pid))
  time.sleep(600)


async def impatient(base_url, row):
  """Closes a connection before the answer, asks again, and uses two conversations at once."""
  import asyncio

  host, port = base_url.removeprefix('http://').split('/')[0].split(':')
  body = json.dumps({'messages': [user('x')]}).encode()
  head = f'POST /{base_url.split("/", 3)[3]}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n'
  _, writer = await asyncio.open_connection(host, int(port))
  writer.write(head.encode() + body)
  await writer.drain()
  await asyncio.sleep(0.02)
  writer.close()
  await asyncio.sleep(0.02)
  both = await asyncio.gather(*(asyncio.to_thread(ask, base_url, [user(text)]) for text in 'xy'))
  return float(len(both))
