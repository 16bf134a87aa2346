"""A process of a run that does nothing but wait. Arguments: its number, whether it is the hub, the silence, the patience, peers
as FD:NUMBER.

It does what it is told on standard input: `far N` or `waits N`, how far it says it is, and whether it waits for a word;
`devices`, to wait for the next line within jax; `beside`, to wait for a thread that does so; `end STATUS`, or nothing any more.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from sprl.parallel import watchman

number, hub, silence, patience, *peers = sys.argv[1:]
connections = [(Connection(int(fd)), f'SPRL_PROCESS={k}') for fd, _, k in (peer.partition(':') for peer in peers)]
progress = (0, True)
lifeline = watchman.beside(f'SPRL_PROCESS={number}', connections, hub == 'hub', lambda: progress, float(silence), float(patience))
for connection, _ in connections:
  connection.close()
print('ready', flush=True)

within_jax = {'__name__': 'jax.somewhere', 'readline': sys.stdin.readline}
exec('def wait(): return readline()', within_jax)
wait = sys.stdin.readline


def beside():
  return ThreadPoolExecutor(1).submit(learn).result()


def learn():
  return learns()


while (told := wait().split())[0] != 'end':
  if told[0] == 'devices':
    wait = within_jax['wait']
  elif told[0] == 'beside':
    learns, wait = wait, beside
  else:
    progress = int(told[1]), told[0] == 'waits'
watchman.last_word(lifeline, int(told[1]))
os._exit(int(told[1]))
