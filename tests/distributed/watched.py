"""A process with a watchdog and no work. Arguments: its number, 'hub' or '', the patience, and its peers as FD:NUMBER.

It reads commands from standard input. `at N` and `waits N` set its progress to N broadcasts; `waits` means that it waits for the
last one. `end STATUS` ends it.
"""

import os
import sys
from multiprocessing.connection import Connection

from sprl.distributed.watchdog import Watchdog

number, hub, patience, *peers = sys.argv[1:]
connections = [(Connection(int(fd)), f'SPRL_PROCESS={k}') for fd, _, k in (peer.partition(':') for peer in peers)]
progress = (0, True)
watchdog = Watchdog(f'SPRL_PROCESS={number}', connections, hub=hub == 'hub', progress=lambda: progress, patience=float(patience))
print('ready', flush=True)

while (words := sys.stdin.readline().split())[0] != 'end':
  progress = int(words[1]), words[0] == 'waits'
watchdog.leave(int(words[1]))
os._exit(int(words[1]))
