"""Graders in a pool of workers. An answer that breaks its grader costs only its own grade.

A sample scores 0, with a status that is counted, if its grader takes too long (`timeout`), ends its process or reaches its memory
limit (`crash`), raises (`error`), or returns anything but a finite number (`invalid`). The pool kills graders from outside,
because an alarm inside the worker does not interrupt C code that hangs.
"""

import logging
import math
import numbers
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sprl.tasks import graders
from sprl.tasks.graders import GraderSpec
from sprl.tasks.worker_pool import Failure, WorkerPool
from sprl.tasks.workers import starter

Sample = tuple[str, str, str, Mapping[str, Any]]  # prompt, completion, answer, a Problem's extra


@dataclass(frozen=True)
class Grade:
  """The score of a sample, and how it came about."""

  score: float
  status: Literal['ok', 'timeout', 'crash', 'error', 'invalid']
  reason: str = ''  # why the status is not ok


def grader_pool(
  spec: GraderSpec,
  workers: int,
  timeout: float,
  memory_gb: float,
  executor: str = 'processes',
  now: Callable[[], float] = time.monotonic,
) -> WorkerPool:
  """Return the pool that grades samples: its calls are Samples, its results Grades.

  Args:
    spec: the grader.
    workers: samples that are graded at the same time.
    timeout: seconds that a sample may take.
    memory_gb: GiB of address space that a grading process may add after its grader is loaded.
    executor: processes; ray, which limits memory itself; or threads, for a grader that is a Python object. A thread has no limit
      of memory, and one that hangs is left behind: its sample counts as a timeout, and another thread takes its place.
    now: the clock, in seconds.
  """
  return WorkerPool(
    starter(executor, partial(load_service, spec), memory_gb),
    workers,
    limit=timeout,
    limit_setting='config.task.time_limit',
    blame=f'config.task.grader = {spec.label!r}',
    read=_grade,
    now=now,
  )


def load_service(spec: GraderSpec) -> Callable[[Sample], tuple[float, str, str]]:
  """Return the service of a grading worker. Raises any error of a user's file."""
  logging.getLogger('math_verify').setLevel(logging.ERROR)  # it warns at every call that its own time limit is off
  return partial(_score, graders.load(spec))


def _score(grader: graders.Grader, sample: Sample) -> tuple[float, str, str]:
  """(score, status, reason) of a sample."""
  score = grader(*sample)
  if not isinstance(score, numbers.Real):
    return 0.0, 'invalid', f'returned a {type(score).__name__}'
  if not math.isfinite(score):
    return 0.0, 'invalid', f'returned {score!r:.100}'
  return float(score), 'ok', ''


def _grade(answer: Any) -> Grade:
  match answer:
    case Failure(kind, why):
      return Grade(0.0, kind, why)
    case (int() | float() as score, 'ok' | 'invalid' as status, str() as why):
      return Grade(score, status, why)
  return Grade(0.0, 'crash', 'malformed answer')
