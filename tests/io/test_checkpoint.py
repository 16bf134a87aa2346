"""Checkpoints are exact, complete or absent, and a restore finds damage."""

import errno
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sprl.config import SettingsError
from sprl.io.checkpoint import CheckpointError, Checkpoints, best_step, committed, step_named

# --- helpers ---------------------------------------------------------------------------------------------------------


def abstract_of(arrays):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def assert_same_bits(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    assert a.dtype == e.dtype
    assert a.shape == e.shape
    assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def tiny(step: int):
  return {'w': jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + step, 'n': jnp.int32(step)}


def saved(folder: Path, *steps: int, scores=None, keep_last=5) -> Checkpoints:
  checkpoints = Checkpoints(folder, keep_last)
  for step in steps:
    checkpoints.save(step, tiny(step), {'step': step}, (scores or {}).get(step))
  checkpoints.wait()
  return checkpoints


@pytest.fixture
def folder(tmp_path):
  return tmp_path / 'checkpoints'


# --- round trip ------------------------------------------------------------------------------------------------------


def test_every_dtype_and_container_comes_back_bit_for_bit(folder):
  bits = np.random.default_rng(0).integers(0, 2**32, (3, 4), dtype=np.uint32)
  bits[0, :3] = [0x7FC00001, 0xFF800000, 0x80000000]  # a NaN with payload, -inf, -0.0
  params = {'layers': {0: {'kernel/x.y': jnp.asarray(bits.view(np.float32))}, 11: [jnp.ones((2,), jnp.bfloat16) / 3, None]}}
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.bfloat16))
  state = optimizer.init({'a': jnp.ones((4,)), 'b': {2: jnp.zeros((2, 2))}})
  arrays = {'params': params, 'optimizer': state, 'ints': (jnp.int32(-7), jnp.asarray(bits)), 'flags': jnp.array([True, False])}
  checkpoints = Checkpoints(folder, 1)
  checkpoints.save(3, arrays, {'prompts': {'next': 12}, 'note': 'é', 'rate': 0.1}, 0.25)
  restored = checkpoints.restore(abstract_of(arrays))
  checkpoints.close()
  assert restored is not None
  assert_same_bits(restored.arrays, arrays)
  assert restored.arrays['params']['layers'].keys() == {0, 11}
  assert type(restored.arrays['optimizer']) is type(state)
  assert (restored.step, restored.extra, restored.score) == (3, {'prompts': {'next': 12}, 'note': 'é', 'rate': 0.1}, 0.25)


def test_arrays_in_host_memory_come_back_to_host_memory(folder):
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind='pinned_host')
  arrays = {'moment': jax.device_put(jnp.arange(8, dtype=jnp.bfloat16) / 3, host), 'weight': jnp.arange(8.0)}
  checkpoints = Checkpoints(folder, 1)
  checkpoints.save(1, arrays, {})
  restored = checkpoints.restore(abstract_of(arrays))
  checkpoints.close()
  assert restored is not None
  assert_same_bits(restored.arrays, arrays)
  assert [a.sharding.memory_kind for a in restored.arrays.values()] == ['pinned_host', 'device']


def test_an_empty_folder_restores_nothing(folder):
  checkpoints = Checkpoints(folder, 1)
  assert checkpoints.restore(abstract_of(tiny(0))) is None
  assert checkpoints.steps() == []


def test_arrays_may_be_donated_as_soon_as_save_returns(folder):
  update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
  expected = [np.arange(2_000_000, dtype=np.float32) + i for i in range(6)]
  control = [jnp.array(x) for x in expected]
  places = {x.unsafe_buffer_pointer() for x in control}
  assert {x.unsafe_buffer_pointer() for x in jax.block_until_ready(update(control))} == places  # donated buffers are overwritten
  arrays = [jnp.array(x) for x in expected]
  checkpoints = Checkpoints(folder, 1)
  checkpoints.save(1, arrays, {})
  changed = jax.block_until_ready(update(arrays))
  restored = checkpoints.restore(abstract_of(changed))
  assert restored is not None
  assert_same_bits(restored.arrays, [jnp.array(x) for x in expected])


def test_partial_restore_reads_the_arrays_it_names(folder):
  checkpoints = saved(folder, 4)
  restored = checkpoints.restore({'w': jax.ShapeDtypeStruct((2, 3), jnp.float32)}, partial=True)
  assert restored is not None
  assert_same_bits(restored.arrays, {'w': tiny(4)['w']})


# --- other arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'w': jax.ShapeDtypeStruct((3, 2), jnp.float32)}, r"\['w'\] .*float32\[2,3\].* float32\[3,2\]"),
    ({'w': jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}, r"\['w'\] .*float32\[2,3\].* bfloat16\[2,3\]"),
    ({'mu': {0: jax.ShapeDtypeStruct((), jnp.int32)}}, r"\['mu'\]\[0\] is missing.* int32\[\]"),
  ],
)
def test_other_arrays_are_refused_with_the_first_path_that_differs(folder, change, message):
  checkpoints = saved(folder, 1, 2)
  with pytest.raises(CheckpointError, match='step_000002.*' + message):
    checkpoints.restore(abstract_of(tiny(0)) | change)


def test_arrays_that_are_not_requested_are_refused_unless_partial(folder):
  checkpoints = saved(folder, 1)
  with pytest.raises(CheckpointError, match=r"\['w'\] is float32\[2,3\]"):
    checkpoints.restore({'n': jax.ShapeDtypeStruct((), jnp.int32)})


@pytest.mark.parametrize('kept', ['tmp-old-step_000001', 'tmp-step_000001'])
def test_a_file_that_cannot_be_deleted_yet_does_not_end_the_run(folder, monkeypatch, caplog, kept):
  """On network disks a file stays as long as a process has it open, for example an evaluation beside the run."""
  checkpoints = saved(folder, 1, keep_last=1)
  (folder / 'tmp-step_000001').mkdir()  # of a killed process
  remove = shutil.rmtree

  def busy(path):
    if path.name == kept:
      raise OSError(errno.ENOTEMPTY, 'Directory not empty', str(path / '.nfs1'))
    remove(path)

  monkeypatch.setattr(shutil, 'rmtree', busy)
  checkpoints.save(2, tiny(2), {'step': 2})
  checkpoints.save(3, tiny(3), {'step': 3})
  checkpoints.wait()
  assert sorted(os.listdir(folder)) == ['step_000003', kept]
  assert f'{kept}: cannot be deleted now' in caplog.text
  monkeypatch.undo()
  checkpoints.save(4, tiny(4), {'step': 4})
  checkpoints.wait()
  assert os.listdir(folder) == ['step_000004']


# --- retention -------------------------------------------------------------------------------------------------------


def test_the_last_and_the_best_checkpoints_are_kept(folder):
  checkpoints = saved(folder, 1, 2, 3, 4, 5, 6, scores={1: 0.1, 2: 0.9, 3: 0.8, 4: 0.2}, keep_last=2)
  assert checkpoints.steps() == [2, 5, 6]
  assert sorted(os.listdir(folder)) == ['step_000002', 'step_000005', 'step_000006']


def test_scores_of_different_measures_do_not_compete(folder):
  checkpoints = Checkpoints(folder, 1)
  for step, score, measure in [(1, 0.9, 'easy'), (2, 0.2, 'hard'), (3, 0.3, 'hard'), (4, 0.1, 'hard'), (5, None, '')]:
    checkpoints.save(step, tiny(step), {}, score, measure)
  checkpoints.close()
  assert checkpoints.steps() == [1, 3, 5]  # the best of each measure, and the newest
  assert best_step(folder) == step_named(folder, 'best') == 3
  assert (step_named(folder, None), step_named(folder, '7')) == (None, 7)
  with pytest.raises(SettingsError, match=r"--step = 'last': expected the step of a checkpoint, or best"):
    step_named(folder, 'last')


def test_scores_of_an_older_version_count_as_measured_like_the_newest(folder):
  checkpoints = Checkpoints(folder, 5)
  for step, score, measure in [(1, 0.9, ''), (2, 0.8, 'now'), (3, None, '')]:
    checkpoints.save(step, tiny(step), {}, score, measure)
  checkpoints.close()
  assert best_step(folder) == 1


def test_without_a_score_no_checkpoint_is_best(folder):
  saved(folder, 1)
  with pytest.raises(CheckpointError, match=r'no checkpoint has a score; config\.eval\.every'):
    best_step(folder)


def test_equal_scores_keep_the_later_and_nan_is_no_score(folder):
  checkpoints = saved(folder, 1, 2, 3, 4, scores={1: 0.5, 2: 0.5, 3: float('nan'), 4: 0.1}, keep_last=1)
  assert checkpoints.steps() == [2, 4]


def test_a_save_after_restoring_a_step_deletes_later_steps(folder):
  checkpoints = saved(folder, 10, 20, 30)
  restored = checkpoints.restore(abstract_of(tiny(0)), step=10)
  assert restored is not None
  assert_same_bits(restored.arrays, tiny(10))
  checkpoints.save(20, tiny(7), {})
  restored = checkpoints.restore(abstract_of(tiny(0)))
  assert restored is not None
  assert checkpoints.steps() == [10, 20]
  assert_same_bits(restored.arrays, tiny(7))


def test_the_restored_step_is_not_written_again(folder):
  saved(folder, 10).close()
  checkpoints = Checkpoints(folder, 1)
  checkpoints.restore(abstract_of(tiny(0)))
  before = (folder / 'step_000010' / 'record.json').stat()
  checkpoints.save(10, tiny(10), {})
  checkpoints.wait()
  assert (folder / 'step_000010' / 'record.json').stat() == before


def test_the_score_of_a_later_evaluation_is_added_to_a_checkpoint_that_has_none(folder):
  checkpoints = saved(folder, 10, 20, keep_last=1)
  checkpoints.save(20, tiny(20), {'after': 'evaluated'}, 0.75)
  checkpoints.save(20, tiny(20), {'after': 'again'}, 0.5)  # it has a score
  checkpoints.save(30, tiny(30), {}, 0.25)
  checkpoints.wait()
  assert checkpoints.steps() == [20, 30]  # the newest and the best
  restored = Checkpoints(folder, 1).restore(abstract_of(tiny(0)), 20)
  assert restored is not None
  assert (restored.score, restored.extra) == (0.75, {'after': 'evaluated'})
  assert_same_bits(restored.arrays, tiny(20))


def test_a_missing_step_is_refused_with_the_existing_ones(folder):
  with pytest.raises(CheckpointError, match=r'step 7; .*\[1, 2\]'):
    saved(folder, 1, 2).restore(abstract_of(tiny(0)), step=7)


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), ValueError("DATA_LOSS: ... [os_error_code='28'] ...")])
def test_a_full_disk_is_named_whoever_notices_it(folder, monkeypatch, error):
  """Tensorstore raises errors of the system as ValueErrors."""
  checkpoints = saved(folder, 1)
  monkeypatch.setattr(checkpoints._orbax, 'wait_until_finished', lambda: (_ for _ in ()).throw(error))
  with pytest.raises(CheckpointError, match=r'step_000002: cannot be written: .*No space left on device;'):
    checkpoints.save(2, tiny(2), {})
  assert checkpoints.steps() == [1]


def test_other_errors_of_a_save_are_not_renamed(folder, monkeypatch):
  checkpoints = Checkpoints(folder, 1)
  monkeypatch.setattr(checkpoints._orbax, 'wait_until_finished', lambda: (_ for _ in ()).throw(ValueError('a bug')))
  with pytest.raises(ValueError, match='a bug'):
    checkpoints.save(1, tiny(1), {})


def test_wait_raises_a_failed_write_which_can_be_repeated(folder, monkeypatch):
  checkpoints = Checkpoints(folder, 1)
  with monkeypatch.context() as patch:
    patch.setattr('sprl.io.files.write_text', lambda *_: (_ for _ in ()).throw(OSError('disk full')))
    checkpoints.save(1, tiny(1), {})
    with pytest.raises(CheckpointError, match=r'tmp-step_000001: cannot be written: disk full'):
      checkpoints.wait()
  assert checkpoints.steps() == []
  checkpoints.save(1, tiny(1), {})
  checkpoints.wait()
  assert sorted(os.listdir(folder)) == ['step_000001']


def test_the_save_after_a_failed_one_is_made_and_waited_for(folder, monkeypatch, caplog):
  checkpoints = Checkpoints(folder, 1)

  def fails(step):
    with monkeypatch.context() as patch:
      patch.setattr('sprl.io.files.write_text', lambda *_: (_ for _ in ()).throw(OSError('disk full')))
      checkpoints.save(step, tiny(step), {})
      futures.wait([checkpoints._pending])

  fails(1)
  assert list(folder.iterdir()) == []  # the draft is deleted
  checkpoints.save(2, tiny(2), {})
  assert checkpoints.steps() == [2]
  assert 'tmp-step_000001: cannot be written: disk full' in caplog.text
  fails(3)
  with pytest.raises(CheckpointError, match=r'tmp-step_000004: cannot be written: disk full'):
    fails(4)
  assert checkpoints.steps() == [2]


def test_over_several_processes_the_error_of_a_save_is_raised_by_the_next_one(folder, monkeypatch):
  """The other processes do not know of it, and a save needs all of them."""
  checkpoints = Checkpoints(folder, 1)
  monkeypatch.setattr(checkpoints, '_team', SimpleNamespace(leads=True, processes=2))
  with monkeypatch.context() as patch:
    patch.setattr('sprl.io.files.write_text', lambda *_: (_ for _ in ()).throw(OSError('disk full')))
    checkpoints.save(1, tiny(1), {})
    futures.wait([checkpoints._pending])
  with pytest.raises(CheckpointError, match=r'tmp-step_000001: cannot be written: disk full'):
    checkpoints.save(2, tiny(2), {})


# --- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path):
  os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 0x10
  path.write_bytes(data)


@pytest.mark.parametrize('harm', [truncate, flip_a_byte, os.remove], ids=['truncated', 'flipped', 'deleted'])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(folder, harm, caplog):
  checkpoints = saved(folder, 1, 2)
  newest, spare = folder / 'step_000002', folder / 'spare'
  shutil.copytree(newest, spare)
  names = [str(path.relative_to(spare)) for path in sorted(spare.rglob('*')) if path.is_file() and path.stat().st_size > 0]
  assert len(names) > 5
  for name in names:
    harm(newest / name)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
      restored = checkpoints.restore(abstract_of(tiny(0)))
    assert restored is not None
    assert restored.step == 1
    assert_same_bits(restored.arrays, tiny(1))
    assert 'step_000002' in caplog.text
    assert name in caplog.text
    shutil.rmtree(newest)
    shutil.copytree(spare, newest)


def test_if_all_checkpoints_are_damaged_all_are_named(folder):
  checkpoints = saved(folder, 1, 2)
  truncate(folder / 'step_000001' / 'record.json')
  truncate(folder / 'step_000002' / 'arrays' / '_METADATA')
  with pytest.raises(CheckpointError, match=r'step_000002: arrays/_METADATA .*step_000001: record.json '):
    checkpoints.restore(abstract_of(tiny(0)))


def test_a_damaged_checkpoint_that_is_asked_for_is_named_alone(folder):
  checkpoints = saved(folder, 1, 2)
  truncate(folder / 'step_000001' / 'record.json')
  with pytest.raises(CheckpointError, match=r'^the checkpoint of step 1 is damaged: .*step_000001: record.json'):
    checkpoints.restore(abstract_of(tiny(0)), 1)


def test_a_copy_of_a_checkpoint_under_another_name_is_no_checkpoint(folder):
  checkpoints = saved(folder, 1, 2)
  shutil.copytree(folder / 'step_000001', folder / 'step_000001.bak')
  (folder / 'step_000050.tar').write_bytes(b'')
  assert committed(folder) == [1, 2]
  for step in (3, 4):
    checkpoints.save(step, tiny(step), {})
  checkpoints.wait()
  assert committed(folder)[-1] == 4
  assert (folder / 'step_000001.bak' / 'record.json').exists()


def test_a_damaged_checkpoint_is_replaced_at_its_step(folder):
  checkpoints = saved(folder, 1, 2)
  flip_a_byte(folder / 'step_000002' / 'arrays' / '_METADATA')
  assert checkpoints.restore(abstract_of(tiny(0))).step == 1
  checkpoints.save(2, tiny(2), {})
  assert checkpoints.restore(abstract_of(tiny(0))).step == 2


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def big(step: int):
  """Return arrays that take a while to write, with other bits at every step."""
  bits = np.random.default_rng(step).integers(0, 2**32, (4, 500_000), dtype=np.uint32)
  return {'params': {i: jnp.asarray(row) for i, row in enumerate(bits)}, 'count': jnp.int32(step)}


def continue_run(folder: Path, first_event: int, progress):
  """Resume, then save step after step; kill the process at file operation number `first_event` (0: never)."""
  left = first_event

  def count_down(event, args):
    nonlocal left
    if event == 'os.remove' or (event in ('open', 'os.rename', 'os.rmdir', 'os.mkdir') and str(folder) in str(args[0])):
      left -= 1
      if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

  checkpoints = Checkpoints(folder, 1)
  restored = checkpoints.restore(abstract_of(big(0)))
  step = restored.step if restored else 0
  sys.addaudithook(count_down)
  while True:
    step += 1
    checkpoints.save(step, big(step), {'step': step})
    progress.send(step)
    checkpoints.wait()
    progress.send(-step)  # committed


def killed_run(folder: Path, events: int, seconds: float) -> int:
  """Run `continue_run` until it is killed. Return the last step that it reported as committed (0: none)."""
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['jax', 'optax', 'pytest', 'orbax.checkpoint'])
  ours, theirs = context.Pipe(duplex=False)
  process = context.Process(target=continue_run, args=(folder, events, theirs))
  process.start()
  theirs.close()
  committed = 0
  try:
    ours.recv()
    time.sleep(seconds)
    if not events:
      os.kill(process.pid, signal.SIGKILL)
    while True:
      committed = max(committed, -ours.recv())
  except EOFError:
    process.join()
  assert process.exitcode == -signal.SIGKILL
  return committed


def newest_whole(folder: Path) -> int:
  """Return the step that a restore finds (0: none), after a check of every bit of all committed checkpoints."""
  checkpoints = Checkpoints(folder, 1)
  for step in checkpoints.steps():
    restored = checkpoints.restore(abstract_of(big(0)), step)  # raises if damaged
    assert restored is not None
    assert restored.extra == {'step': step}
    assert_same_bits(restored.arrays, big(step))
  return max(checkpoints.steps(), default=0)


@pytest.mark.parametrize('operations', [(5, 36, 70), pytest.param((20, *range(31, 41)), marks=pytest.mark.slow)])
def test_a_kill_at_a_file_operation_leaves_a_complete_checkpoint(folder, operations):
  """One checkpoint is kept, so writing, committing and deleting the old one could each lose it."""
  checkpoints = Checkpoints(folder, 1)
  checkpoints.save(1, big(1), {'step': 1})
  checkpoints.close()
  outcomes = []
  for operation in operations:
    copy = folder.with_name(f'killed_at_{operation}')
    shutil.copytree(folder, copy)
    committed = killed_run(copy, operation, 0.0)
    outcomes.append(newest_whole(copy))
    assert outcomes[-1] >= max(1, committed)
  if operations[0] == 5:  # in between, orbax's threads decide which operation commits
    assert outcomes[0] == 1
    assert outcomes[-1] >= 2


@pytest.mark.slow
def test_a_run_killed_at_random_moments_resumes_from_a_complete_checkpoint(folder):
  moments, step = random.Random(0), 0
  for _ in range(6):
    committed = killed_run(folder, 0, moments.uniform(0.0, 0.4))
    before, step = step, newest_whole(folder)
    assert step >= max(before, committed)
  assert step > 0


def test_every_file_is_on_disk_before_the_checkpoint_appears(folder, monkeypatch):
  """After a power cut, a file that was not synced may be empty although the rename is on disk."""
  synced, at_commit, fsync, replace = set(), [], os.fsync, os.replace

  def noted_fsync(fd):
    synced.add(os.stat(fd).st_ino)
    fsync(fd)

  def noted_replace(old, new):
    if Path(new).name == 'step_000001':
      at_commit.append({str(f.relative_to(old)): f.stat().st_ino in synced for f in Path(old).rglob('*') if f.is_file()})
    replace(old, new)

  monkeypatch.setattr(os, 'fsync', noted_fsync)
  monkeypatch.setattr(os, 'replace', noted_replace)
  saved(folder, 1)
  (found,) = at_commit
  assert 'record.json' in found
  assert len(found) > 2
  assert [name for name, on_disk in found.items() if not on_disk] == []
