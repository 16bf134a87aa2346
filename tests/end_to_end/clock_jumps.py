"""Run sprl.main with a wall clock that jumps at every look. Arguments: the unit of the jumps in seconds; those of sprl.main."""

import itertools
import sys
import time

from sprl import command_line, main

unit = int(sys.argv.pop(1))
shown = time.time, time.time_ns
jumps = itertools.cycle((0, 3, -5, 1, -1, 0, 2))

time.time = lambda: shown[0]() + unit * next(jumps)
time.time_ns = lambda: shown[1]() + 10**9 * unit * next(jumps)
command_line.start(main.main)
