"""What the process asks of its allocator."""

import subprocess
import sys

import pytest

ARENAS = """
import ctypes, re, tempfile, threading
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
{before}
together = threading.Barrier(8)
def allocate():
  together.wait()
  libc.malloc(1000)
threads = [threading.Thread(target=allocate) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
with tempfile.NamedTemporaryFile() as report:
  stream = ctypes.c_void_p(libc.fopen(report.name.encode(), b'w'))
  libc.malloc_info(0, stream)
  libc.fclose(stream)
  print(len(re.findall('<heap nr=', report.read().decode())))
"""


def arenas(before: str) -> int:
  """How many arenas the allocator has after eight threads have allocated."""
  done = subprocess.run([sys.executable, '-c', ARENAS.format(before=before)], capture_output=True, text=True, check=True)
  return int(done.stdout)


@pytest.mark.skipif(sys.platform != 'linux', reason='arenas are glibc')
def test_all_threads_allocate_from_one_arena():
  if arenas('') == 1:
    pytest.skip('this allocator keeps one arena in any case')
  assert arenas('from sprl.process import hold_little_memory; hold_little_memory()') == 1
