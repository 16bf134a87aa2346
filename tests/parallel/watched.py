"""A process of a run that does nothing but wait. Arguments: its number, whether it is the hub, the silence, peers as FD:NUMBER.

It does what it is told on standard input: `end STATUS`, or nothing any more.
"""

import os
import sys
from multiprocessing.connection import Connection

from sprl.parallel import watchman

number, hub, silence, *peers = sys.argv[1:]
connections = [(Connection(int(fd)), f'SPRL_PROCESS={k}') for fd, _, k in (peer.partition(':') for peer in peers)]
lifeline = watchman.beside(f'SPRL_PROCESS={number}', connections, hub == 'hub', float(silence))
for connection, _ in connections:
  connection.close()
print('ready', flush=True)
status = int(sys.stdin.readline().removeprefix('end '))
watchman.last_word(lifeline, status)
os._exit(status)
