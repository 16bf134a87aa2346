"""A program that prints `ready`, and `saved` a while after a signal."""

SAVES = """
import time
from sprl.distributed.signals import ECHO, signals
with signals() as stop:
  print('ready', flush=True)
  for _ in range(10_000):
    if stop.received:
      break
    time.sleep(0.01)
  time.sleep(4 * ECHO)
  print('saved', flush=True)
"""
