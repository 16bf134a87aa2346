"""The program of a worker process with an event loop: `python -m sprl.tasks.async_worker_process CONNECTION LIFELINE`.

As sprl/tasks/worker_process.py, but calls have numbers and run at the same time: a call (number, what) is answered by
[number, answer, ''] or [number, null, the reason], in any order. (number, None) cancels a call.
"""

import asyncio
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from sprl.foreign import attempt
from sprl.tasks.async_workers import Service, attempt_async
from sprl.tasks.lifeline import hold
from sprl.tasks.worker_process import loaded, send


def main(connection: int, lifeline: int) -> None:
  """Answer calls until the connection closes."""
  hold(lifeline)
  pool = Connection(connection)
  if (service := loaded(pool)) is None:
    return
  asyncio.run(_serve(pool, service))


async def _serve(pool: Connection, service: Service) -> None:
  loop, running, closed = asyncio.get_running_loop(), {}, asyncio.Event()

  def answer(number: int, task: asyncio.Task) -> None:
    del running[number]
    send(pool, [number, *((None, 'cancelled') if task.cancelled() else task.result())])  # cancelled before it began

  def received(number: int, call: Any) -> None:
    if call is not None:
      running[number] = loop.create_task(attempt_async(service, call))
      running[number].add_done_callback(partial(answer, number))
    elif number in running:
      running[number].cancel()

  def read() -> None:
    while (message := attempt(pool.recv)) and not message[1]:
      loop.call_soon_threadsafe(received, *message[0])
    loop.call_soon_threadsafe(closed.set)

  threading.Thread(target=read, daemon=True, name='reader').start()
  await closed.wait()


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
