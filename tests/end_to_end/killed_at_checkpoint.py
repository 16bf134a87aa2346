"""Run sprl.main and kill it while it writes the second checkpoint: its arrays are written, its record is not.

Arguments: those of sprl.main.
"""

import os
import signal

from sprl import command_line, main
from sprl.io import files

write_text = files.write_text


def killed(path, text):
  if path.match('tmp-step_000002/record.json'):
    os.kill(os.getpid(), signal.SIGKILL)
  write_text(path, text)


files.write_text = killed
command_line.start(main.main)
