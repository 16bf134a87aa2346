"""Agents that are trained: their conversations token for token, branches, limits, failures, and what is left behind."""

import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import hermes
import numpy as np
import pytest
from checks import drawn, trained
from fake_engine import FakeEngine
from pools import ManualClock, alive, results, until

from sprl.agents import host
from sprl.agents.pool import AgentPool, Asked, Call, Ended, Program
from sprl.agents.protocol import Answer, Refused
from sprl.config import Rollout, Sampling, SettingsError
from sprl.io.tokenizer import Tokenizer
from sprl.rollout.agent_setup import AgentSource, rows
from sprl.rollout.codec import ChatCodec
from sprl.rollout.episodes import TURNS_CUT, Limits
from sprl.rollout.scheduler import Scheduler
from sprl.tasks.worker_pool import Failure
from sprl.tasks.workers import with_time_limit
from sprl.types import sequences

PROGRAMS = Path(__file__).parent / 'agent_programs.py'
EOS = 2
ANSWER = Answer({'role': 'assistant', 'content': 'x'}, 'stop', [1], [2], [-1.0], [])


@contextmanager
def running(folder, name, groups=2, group=2, most=4, limits=None, time_limit=30.0, workers=None, engine=None, stop=(), **args):
  """Yield (scheduler, pool, engine) of agents called `name`."""
  hermes.write_tokenizer(folder)
  tokenizer = Tokenizer.load(folder)
  engine = engine or FakeEngine()
  program = Program(f'{PROGRAMS}:{name}', args)
  sampling = Sampling(stop=stop)
  with AgentPool(program, sampling, sampling, 'tiny', time_limit, workers) as pool:
    limits = limits or Limits(turns=10, turn_tokens=16, max_prompt=100, max_tokens=400)
    row = lambda number: rows([], 'train', lambda n: 2 * n, 0, number)  # noqa: E731
    source = AgentSource(row, limits, most, ChatCodec(tokenizer), pool.release)
    settings = Rollout(prompts=groups, group=group)
    yield Scheduler([engine], pool, source, settings, time.monotonic, groups=groups), pool, engine
    assert engine.load == 0
    assert not pool._episodes


def batch(folder, name, **options):
  """Return the trajectories of one batch, and the engine."""
  with running(folder, name, **options) as (scheduler, _, engine):
    groups = scheduler.batch()
  return [t for group in groups for t in group.trajectories], engine


def test_what_was_generated_is_trained_token_for_token(tmp_path):
  trajectories, engine = batch(tmp_path, 'talk', turns=3)
  tokenizer = Tokenizer.load(tmp_path)
  assert len(trajectories) == 4
  for t in trajectories:
    assert t.branches == ()
    assert trained(t) == drawn(engine, t.uid)
    messages = [{'role': 'user', 'content': f'seed {2 * t.group}'}]
    answers = [c for c in engine.completions if c.request.uid == t.uid]
    for turn, completion in enumerate(answers):
      text = tokenizer.decode(completion.tokens, skip_special=True)
      messages += [{'role': 'assistant', 'content': text}, {'role': 'user', 'content': f'turn {turn}'}]
    whole = tokenizer.render(messages[:-1], add_generation_prompt=False)
    end = '<eos>\n' if t.tokens[-1] != EOS else '\n'
    assert tokenizer.decode(t.tokens) + end == whole
    last = messages[-2]['content']
    assert t.reward == pytest.approx(len(last) / 100)
    assert (t.metrics['length'], t.metrics['agent/branches'], t.metrics['agent/turns']) == (7, 1, 3)
    assert t.metrics[TURNS_CUT] == np.mean([c.finish == 'length' for c in answers])


def test_a_message_without_its_stop_string_goes_on_from_the_tokens_that_have_it(tmp_path):
  trajectories, engine = batch(tmp_path, 'talk', turns=3, stop=tuple('aeiou'))
  for t in trajectories:
    assert t.branches == ()
    assert trained(t) == drawn(engine, t.uid)
    *_, last = [completion for completion in engine.completions if completion.request.uid == t.uid]
    seen = re.split('[aeiou]', Tokenizer.load(tmp_path).decode(last.tokens, skip_special=True))[0]
    assert t.reward == pytest.approx(len(seen) / 100)


def test_an_edited_history_is_another_branch_and_no_token_is_trained_twice(tmp_path):
  (t, *_), engine = batch(tmp_path, 'edits')
  assert trained(t) == drawn(engine, t.uid)
  assert t.metrics['agent/branches'] == 3
  assert len(t.branches) == 2
  summary, first, second = sequences(t)
  begin = lambda sequence: Tokenizer.load(tmp_path).decode(sequence.tokens)[:15]  # noqa: E731
  assert begin(summary) == '<bos>user\nsumma'
  assert begin(first) == begin(second) == '<bos>user\na<eos'
  shared = np.flatnonzero(first.mask)[0]
  assert not second.mask[shared]  # the answer that both go on from
  assert first.tokens[shared] == second.tokens[shared]
  assert (summary.reward, first.reward, second.reward) == (1, 1, 1)
  assert len({(c.request.attempt, c.request.start) for c in engine.completions if c.request.uid == t.uid}) == 4


def test_a_request_that_is_refused_does_not_change_which_branch_was_answered_last(tmp_path):
  (t, *_), _ = batch(tmp_path, 'goes_back', most=1)
  assert Tokenizer.load(tmp_path).decode(t.tokens)[:15] == '<bos>user\nsumma'
  assert (t.reward, t.branches) == (1, ())


def test_the_sequences_of_an_episode_are_limited_and_what_is_left_out_is_counted(tmp_path):
  (t, *_), engine = batch(tmp_path, 'edits', most=2)
  assert len(t.branches) == 1
  total = sum(len(c.tokens) for c in engine.completions if c.request.uid == t.uid)
  kept = sum(int(s.mask.sum()) for s in sequences(t))
  assert t.metrics['agent/tokens_dropped'] == total - kept > 0


@pytest.mark.parametrize(
  ('limits', 'answers'),
  [(Limits(3, 16, 100, 400), 3), (Limits(50, 16, 20, 100), None)],
  ids=['turns', 'tokens'],
)
def test_an_agent_that_is_refused_over_a_limit_ends_with_reward_0(tmp_path, limits, answers):
  trajectories, _ = batch(tmp_path, 'lengthy', limits=limits)
  for t in trajectories:
    assert (t.reward, t.finish, t.metrics['agent/cut']) == (0, 'length', 1)
    assert len(t.completion) <= limits.max_tokens
    assert answers is None or t.metrics['agent/turns'] == answers


def test_an_agent_may_catch_the_refusal_and_return_its_own_reward(tmp_path):
  (t, *_), _ = batch(tmp_path, 'catches', limits=Limits(3, 16, 100, 400))
  assert (t.reward, t.metrics['status'], t.finish) == (0.5, 400, 'length')


def test_an_agent_that_dies_after_a_refusal_is_tried_again(tmp_path):
  """Its reward would say nothing about the answers of the model."""
  with AgentPool(Program(f'{PROGRAMS}:dies_after_a_refusal', {}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    ticket = pool.submit(Call((0, 0), 'run', {}))
    (asked,) = results(pool, ticket)
    assert isinstance(asked, Asked)
    ended = pool.submit(Call((0, 0), 'answer', Refused(400, 'no', code='turn_limit_exceeded')))
    (failure,) = results(pool, ended)
    assert isinstance(failure, Failure)
    assert failure.kind == 'crash'


def test_the_run_may_hold_as_many_connections_as_the_system_allows_and_agents_keep_its_first_limit():
  usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
  try:
    with AgentPool(Program(f'{PROGRAMS}:files', {}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
      assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
      (ended,) = results(pool, pool.submit(Call((0, 0), 'run', {})))
      assert ended.reward == 200
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))


def test_an_agent_that_repeats_a_refused_request_is_ended_after_the_time_limit(tmp_path):
  (t, *_), _ = batch(tmp_path, 'stubborn', groups=1, time_limit=1.0, limits=Limits(3, 16, 100, 400))
  assert (t.reward, t.finish, t.metrics['agent/cut'], t.metrics['agent/turns']) == (0, 'length', 1, 3)


def test_an_agent_may_go_on_after_a_refusal_and_then_has_its_time_again(tmp_path):
  clock = ManualClock()
  with AgentPool(Program(f'{PROGRAMS}:stubborn', {}), Sampling(), Sampling(), 'tiny', 10.0, now=clock) as pool:
    ticket = pool.submit(Call((0, 0), 'run', {}))
    refused = Refused(400, 'no', code='turn_limit_exceeded')
    # The pool needs 6 s for each reply. The second of two refusals in a row does not start the time again.
    for reply in (refused, ANSWER, refused, refused):
      (asked,) = results(pool, ticket)
      assert isinstance(asked, Asked)
      clock.time += 6
      ticket = pool.submit(Call((0, 0), 'answer', reply))
    (asked,) = results(pool, ticket)
    clock.time += 6
    ended = pool.submit(Call((0, 0), 'answer', refused))
    assert results(pool, ended) == [Ended(0.0, {}, cut=True)]


@pytest.mark.usefixtures('no_pauses')
@pytest.mark.parametrize(
  ('how', 'why'), [('die', 'SIGKILL'), ('raise', 'ValueError: no'), ('exit', 'it exited'), ('mute', 'no answer')]
)
def test_an_agent_that_fails_costs_its_own_group_only(tmp_path, caplog, how, why):
  with running(tmp_path, 'odd', groups=2, how=how) as (scheduler, _, engine):
    scheduler._needed = None
    groups = scheduler.batch()
    scheduler_counts = scheduler.counts
    for number in [*scheduler._groups]:
      scheduler._drop(number, 'expired')
    engine.collect()
  assert [group.number % 2 for group in groups] == [0, 0]
  assert scheduler_counts['failed'] >= 1
  assert why in caplog.text


@pytest.mark.usefixtures('no_pauses')
def test_an_agent_that_hangs_is_ended_after_the_time_limit(tmp_path):
  start = time.monotonic()
  with running(tmp_path, 'odd', groups=2, time_limit=1.0, how='hang') as (scheduler, _, engine):
    scheduler._needed = None
    groups = scheduler.batch()
    counts = scheduler.counts
    for number in [*scheduler._groups]:
      scheduler._drop(number, 'expired')
    engine.collect()
  assert [group.number % 2 for group in groups] == [0, 0]
  assert counts['hung'] >= 1
  assert time.monotonic() - start < 20


def test_a_request_whose_client_disconnects_is_not_trained_and_others_are_answered_in_turn(tmp_path):
  trajectories, engine = batch(tmp_path, 'impatient', engine=FakeEngine(chunk=1, stop=0.01))
  for t in trajectories:
    assert t.reward == 2
    total = sum(len(c.tokens) for c in engine.completions if c.request.uid == t.uid)
    assert int(sum(s.mask.sum() for s in sequences(t))) + t.metrics['agent/tokens_dropped'] == total
  assert any(t.metrics['agent/tokens_dropped'] > 0 for t in trajectories)


def test_no_more_agents_run_than_asked(tmp_path):
  trajectories, engine = batch(tmp_path, 'talk', groups=4, workers=2)
  assert len(trajectories) == 8
  assert engine.most <= 2


def test_agents_of_training_that_wait_for_an_answer_leave_room_for_those_of_evaluation(tmp_path):
  with AgentPool(Program(f'{PROGRAMS}:talk', {}), Sampling(), Sampling(), 'tiny', 30.0, most=1) as pool:
    for uid, split in enumerate(('train', 'test')):
      ticket = pool.submit(Call((uid, 0), 'run', {'seed': 0, 'split': split}))
      until(lambda ticket=ticket: isinstance(pool.poll({ticket}).get(ticket), Asked))  # nothing answers it
    pool.submit(Call((2, 0), 'run', {'seed': 0, 'split': 'test'}))
    assert [episode.started for episode in pool._episodes.values()] == [True, True, False]


def test_agents_draw_with_the_temperature_of_their_split(tmp_path):
  given = {'train': 1.0, 'test': 0.0}
  program = Program(f'{PROGRAMS}:draws', given)
  with AgentPool(program, *(Sampling(temperature=each) for each in given.values()), 'tiny', 30.0) as pool:
    tickets = [pool.submit(Call((uid, 0), 'run', {'split': split})) for uid, split in enumerate(given)]
    assert [type(result) for result in results(pool, *tickets)] == [Asked, Asked]


def test_another_attempt_at_an_agent_begins_after_a_pause(tmp_path):
  clock = ManualClock()
  with AgentPool(Program(f'{PROGRAMS}:talk', {}), Sampling(), Sampling(), 'tiny', 30.0, now=clock) as pool:
    first, again = (pool.submit(Call((0, attempt), 'run', {'seed': 0})) for attempt in (0, 1))
    assert isinstance(results(pool, first)[0], Asked)
    clock.time = 0.99
    assert pool.poll({again}) == {}
    assert not pool._episodes[0, 1].started
    clock.time = 1.0
    assert isinstance(results(pool, again)[0], Asked)


def test_agents_of_training_that_ask_or_hang_do_not_end_the_waits_of_an_evaluation(tmp_path):
  clock = ManualClock()
  with AgentPool(Program(f'{PROGRAMS}:odd', {}), Sampling(), Sampling(), 'tiny', 30.0, now=clock) as pool:
    asks, hangs = (pool.submit(Call((seed, 0), 'run', {'seed': seed, 'split': 'train'})) for seed in (0, 2))
    until(lambda: any(episode.asking for episode in pool._episodes.values()))
    clock.time = 60.0  # the agent with seed 2 exceeds the limit
    evaluation = pool.submit(Call((6, 0), 'run', {'seed': 6, 'split': 'test'}))
    assert pool.poll({evaluation}) == {}
    start = time.monotonic()
    pool.wait(0.5)
    assert time.monotonic() - start >= 0.5
    asked, hung = results(pool, asks, hangs)
    assert isinstance(asked, Asked)
    assert isinstance(hung, Failure)


def test_a_request_sent_during_another_ends_the_wait_for_it(tmp_path):
  with AgentPool(Program(f'{PROGRAMS}:impatient', {}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    ticket = pool.submit(Call((0, 0), 'run', {}))
    results(pool, ticket)
    until(lambda: any(not each.gone for each in pool._episodes[0, 0].asking))
    assert pool.poll({ticket}) == {}
    ticket = pool.submit(Call((0, 0), 'answer', ANSWER))
    start = time.monotonic()
    pool.wait(20.0)
    assert time.monotonic() - start < 10
    assert isinstance(pool.poll({ticket})[ticket], Asked)


def test_what_an_agent_prints_is_not_lost_with_its_process(monkeypatch):
  monkeypatch.delenv('PYTHONUNBUFFERED', raising=False)
  script = f"""
import sys
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:3]]!r}
from pools import results
from sprl.agents.pool import AgentPool, Call, Program
from sprl.config import Sampling
with AgentPool(Program({str(PROGRAMS)!r} + ':prints', {{}}), Sampling(), Sampling(), 'm', 30.0) as pool:
  for uid in range(2):  # one after the other: the lines of both could mix
    results(pool, pool.submit(Call((uid, 0), 'run', {{'exits': bool(uid)}})))
"""
  run = subprocess.run([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True, check=True)
  assert run.stdout == 'False\nTrue\n'


def test_processes_of_an_agent_end_with_it(tmp_path):
  folder = tmp_path / 'pids'
  folder.mkdir()
  with running(tmp_path, 'children', groups=1, group=2, pids=str(folder)) as (scheduler, *_):
    scheduler.pump()
    until(lambda: len([f for f in folder.iterdir() if f.read_text()]) == 2)
    pids = [int(text) for file in folder.iterdir() for text in (file.name, file.read_text())]
    assert all(alive(pid) for pid in pids)
    scheduler._drop(0, 'expired')
    until(lambda: not any(alive(pid) for pid in pids))


def test_agents_and_their_processes_end_when_the_run_is_killed(tmp_path):
  folder = tmp_path / 'pids'
  folder.mkdir()
  script = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
from sprl.agents.pool import AgentPool, Call, Program
from sprl.config import Sampling
program = Program({str(PROGRAMS)!r} + ':children', {{'pids': {str(folder)!r}}})
pool = AgentPool(program, Sampling(), Sampling(), 'm', 600.0).__enter__()
pool.submit(Call((0, 0), 'run', {{}}))
time.sleep(600)
"""
  run = subprocess.Popen([sys.executable, '-c', script])
  until(lambda: any(f.read_text() for f in folder.iterdir()), seconds=60)
  pids = [int(text) for file in folder.iterdir() for text in (file.name, file.read_text())]
  run.kill()
  run.wait()
  until(lambda: not any(alive(pid) for pid in pids))


def test_a_host_that_is_killed_is_replaced_and_its_agents_are_tried_again(tmp_path):
  with running(tmp_path, 'talk', groups=2) as (scheduler, pool, _):
    scheduler.pump()
    os.kill(pool._host._process.pid, 9)
    groups = scheduler.batch()
    assert scheduler.counts['errors'] >= 1
  assert sum(len(group.trajectories) for group in groups) == 4


def test_an_agent_that_cannot_be_started_costs_its_own_episode(monkeypatch):
  ours, theirs = socket.socketpair()
  agents = host.Host(theirs, None, {'kill': lambda pid: None})
  files = set(os.listdir('/dev/fd'))
  for name, error in (('pipe', errno.EMFILE), ('fork', errno.EAGAIN)):
    with monkeypatch.context() as patch:
      patch.setattr(host.os, name, Mock(side_effect=OSError(error, os.strerror(error))))
      agents.start({'run': 7})
    assert json.loads(ours.recv(1000)) == {'id': 7, 'crash': f'it cannot be started: {reason_of(error)}'}
  assert set(os.listdir('/dev/fd')) <= files
  ours.close(), theirs.close()


def reason_of(number):
  return host.reason(OSError(number, os.strerror(number)))


def test_an_agent_has_no_pipe_of_another_one(tmp_path):
  source, running = tmp_path / 'slow.py', tmp_path / 'running'
  running.mkdir()
  source.write_text(f"""
import os, time

def agent(url, row):
  open(f'{running}/{{os.getpid()}}', 'w').close()
  while len(os.listdir('{running}')) < 6:
    time.sleep(0.01)
  return len(os.listdir('/dev/fd'))
""")
  with AgentPool(Program(f'{source}:agent', {}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    tickets = [pool.submit(Call((uid, 0), 'run', {})) for uid in range(6)]
    assert len({result.reward for result in results(pool, *tickets)}) == 1


def test_a_host_that_reads_nothing_does_not_hold_up_the_run(tmp_path):
  with AgentPool(Program(f'{PROGRAMS}:odd', {'how': 'raise'}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    os.kill(pool._host._process.pid, signal.SIGSTOP)
    try:  # 8 MB, more than the connection holds
      calls = [Call((uid, 0), 'run', {'seed': 2, 'text': 'x' * 1_000_000}) for uid in range(8)]
      tickets = with_time_limit(20.0, lambda: [pool.submit(call) for call in calls])
    finally:
      os.kill(pool._host._process.pid, signal.SIGCONT)
    assert all('the agent failed: ValueError: no (' in result.reason for result in results(pool, *tickets))


@pytest.mark.parametrize('safe', ['', '1'])
def test_the_host_starts_from_a_link_and_with_a_safe_path(tmp_path, monkeypatch, safe):
  file = tmp_path / 'paths.py'
  file.write_text('import os, sys\ndef agent(url, row): return any(os.path.exists(f"{path}/host.py") for path in sys.path)')
  link = tmp_path / 'package'
  link.mkdir()
  (link / 'host.py').symlink_to(host.__file__)
  monkeypatch.setattr(host, '__file__', str(link / 'host.py'))
  monkeypatch.setenv('PYTHONSAFEPATH', safe)
  with AgentPool(Program(f'{file}:agent', {}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    assert results(pool, pool.submit(Call((0, 0), 'run', {}))) == [Ended(0.0)]


@pytest.mark.parametrize(
  ('source', 'args', 'why'),
  [
    ('def other(url, row): pass', {}, r'mine\.py has no talk; it has other'),
    ('talk = 3', {}, 'talk is a int: expected a function'),
    ('def talk(url, row): pass', {'holes': 1}, r"talk\(url, row\) cannot be called .* unexpected keyword argument 'holes'"),
    ('def talk(url): pass', {}, r'talk\(url\) cannot be called .* too many positional arguments'),
    ('talk = print\nassert 1 > 2, "refused"', {}, r'AssertionError: refused \(.*mine\.py:2, in <module>\)'),
    ('def talk(url, row): pass\ndef prepare_agents(): open("/no/such")', {}, r'FileNotFoundError.*mine\.py:2, in prepare_agents'),
  ],
)
def test_agents_that_cannot_be_loaded_are_refused(tmp_path, source, args, why):
  (tmp_path / 'mine.py').write_text(source)
  with pytest.raises(SettingsError, match=f'cannot be loaded: .*{why}'):
    AgentPool(Program(f'{tmp_path / "mine.py"}:talk', args), Sampling(), Sampling(), 'tiny', 1.0).__enter__()


def test_an_agent_may_have_a_decorator_that_adds_arguments(tmp_path):
  (tmp_path / 'mine.py').write_text(
    'import functools\n'
    'def with_client(f): return functools.wraps(f)(lambda url, row: f(url, row, client=2.0))\n'
    '@with_client\n'
    'def talk(url, row, client): return client\n'
  )
  with AgentPool(Program(f'{tmp_path / "mine.py"}:talk', {}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    assert results(pool, pool.submit(Call((0, 0), 'run', {}))) == [Ended(2.0)]


def test_what_all_episodes_share_is_prepared_once_and_a_failure_names_its_line(tmp_path):
  file = tmp_path / 'mine.py'
  file.write_text(
    'shared = []\n'
    'def prepare_agents(word): shared.append(word)\n'
    'def talk(url, row, word):\n'
    '  raise ValueError(f"{shared} {row["n"]}")\n'
  )
  with AgentPool(Program(f'{file}:talk', {'word': 'x'}), Sampling(), Sampling(), 'tiny', 30.0) as pool:
    for n in range(2):
      [failed] = results(pool, pool.submit(Call((n, 0), 'run', {'n': n})))
      assert failed.reason.endswith(f"ValueError: ['x'] {n} ({file}:4, in talk)")


def test_rows_are_shuffled_in_each_epoch_and_have_the_seed_and_the_split():
  data = [{'prompt': str(i)} for i in range(5)]
  seen = [rows(data, 'train', lambda n: 2 * n, 7, number) for number in range(10)]
  assert [row['seed'] for row in seen] == [2 * n for n in range(10)]
  orders = [[row['prompt'] for row in seen[i : i + 5]] for i in (0, 5)]
  assert sorted(orders[0]) == sorted(orders[1]) == list('01234')
  assert orders[0] != orders[1]
  assert rows(data, 'test', lambda n: n, None, 6) == {'prompt': '1', 'seed': 6, 'split': 'test'}
  assert json.dumps(rows([], 'test', lambda n: n, None, 6)) == '{"seed": 6, "split": "test"}'
