"""The stream of prompts: a new permutation for each epoch, and exact resumption."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprl.config import Task
from sprl.tasks.problems import Problems
from sprl.tasks.prompts import PromptStream


def problems(n):
  return Problems(Task(), [{'id': str(i), 'prompt': f'{i}?', 'answer': str(i)} for i in range(n)])


def ids(found):
  return [int(problem.id) for problem in found]


def test_each_epoch_is_another_permutation_of_all():
  stream = PromptStream(problems(50), seed=0)
  epochs = [ids(stream.next(50)) for _ in range(4)]
  assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs} | {tuple(range(50))}) == 5  # five different orders, none as in the file


def test_the_seed_decides_the_order():
  a, b, c = (ids(PromptStream(problems(50), seed=seed).next(120)) for seed in (7, 7, 8))
  assert a == b
  assert a != c
  assert a[50:100] != c[:50]  # epoch 1 of a seed is not epoch 0 of the next seed


def test_batches_do_not_change_the_order():
  whole, parts = PromptStream(problems(7), seed=1), PromptStream(problems(7), seed=1)
  assert ids(whole.next(30)) == [i for n in (1, 4, 0, 9, 16) for i in ids(parts.next(n))]


@settings(max_examples=30)
@given(size=st.integers(20, 60), before=st.integers(0, 200), after=st.integers(1, 70), seed=st.integers(0, 2**31 - 1))
def test_a_restored_stream_continues_at_the_exact_next_problem(size, before, after, seed):
  """The position is any, also the border of two epochs. The state passes through JSON."""
  stream = PromptStream(problems(size), seed)
  stream.next(before)
  state = json.loads(json.dumps(stream.state()))
  expected = ids(stream.next(after))

  resumed = PromptStream(problems(size), seed)
  resumed.next(3)
  resumed.restore(state)
  assert ids(resumed.next(after)) == expected
  assert resumed.state() == stream.state()


def test_no_problems_are_an_error():
  with pytest.raises(ValueError, match='no problems'):
    PromptStream(problems(0), 0)


@pytest.mark.parametrize(('name', 'size', 'seed'), [('problems', 9, 0), ('seed', 8, 1)])
def test_another_streams_state_is_refused(name, size, seed):
  state = PromptStream(problems(8), 0).state()
  with pytest.raises(ValueError, match=f'the saved prompt stream has {name} = '):
    PromptStream(problems(size), seed).restore(state)


def test_a_state_from_an_older_checkpoint_is_restored():
  """An older state also has the index and the number of the processes: always one process with all problems."""
  whole, resumed = PromptStream(problems(8), 3), PromptStream(problems(8), 3)
  resumed.restore({'problems': 8, 'seed': 3, 'process_index': 0, 'process_count': 1, 'position': 11})
  assert ids(resumed.next(9)) == ids(whole.next(20))[11:]


def test_problems_are_generated_on_demand_and_no_thread_remains():
  asked = []

  class DecodeState(list):
    def __getitem__(self, index):
      asked.append(index)
      return super().__getitem__(index)

  rows = DecodeState({'id': str(i), 'prompt': '?', 'answer': ''} for i in range(1000))
  threads = threading.active_count()
  stream = PromptStream(Problems(Task(), rows), seed=0)
  asked.clear()
  assert ids(stream.next(5)) == asked
  assert threading.active_count() == threads
