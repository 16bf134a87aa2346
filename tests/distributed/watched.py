"""A process of a run that only waits. Arguments: its number, 'hub' or '', the patience, and its peers as FD:NUMBER.

It obeys lines on standard input: `at N` and `waits N` set its progress (N broadcasts begun; waiting for the last one or not);
`end STATUS` ends it.
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
