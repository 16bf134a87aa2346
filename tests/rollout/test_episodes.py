"""Episodes, driven by hand and by the scheduler: their requests, their trajectories, and the closing of environments.

The tests compose the ids of a conversation again, from the environment's texts and the answers.
"""

import itertools
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from pools import InlineWorker
from simulation import Clock, SimulatedEngine

from sprl.config import Rollout
from sprl.io.tokenizer import Tokenizer, write_tiny
from sprl.rollout.codec import PlainCodec
from sprl.rollout.episodes import TURNS_CUT, EpisodeError, Generate, Limits, Work, answered, conversation
from sprl.rollout.prompts import ConversationSource, seeds
from sprl.rollout.scheduler import Scheduler
from sprl.tasks import environment_pool
from sprl.tasks.environments.frozen_lake import FrozenLake
from sprl.tasks.environments.latency import faulty
from sprl.tasks.environments.protocol import Outcome, checked_reset, checked_step, episode_metrics, turn_messages
from sprl.tasks.grader_pool import Grade
from sprl.types import Completion, Request

WIDE = Limits(turns=10, turn_tokens=100, max_prompt=1000, max_tokens=1000)


class Letters:
  """A codec in which each character is its own id. Messages end in `/`, answers begin after `>`."""

  def opening(self, messages):
    return [ord(c) for c in self._told(messages)]

  def reply(self, messages, answer):
    return [ord(c) for c in ('' if answer[-1:] == [ord('.')] else '.') + self._told(messages)]

  def text(self, ids):
    return ''.join(map(chr, ids)).rstrip('.')

  def _told(self, messages):
    return ''.join(m['content'] + '/' for m in messages) + '>'


def ids(text):
  return np.array([ord(c) for c in text], np.int32)


def completion(wanted, text, version=0, finish='stop'):
  """Return an answer with this text. Its records hold the position of each token in the sequence."""
  places = len(wanted.prompt) + len(wanted.given) + np.arange(len(text), dtype=np.int32)
  request = Request(5, 2, wanted.prompt, wanted.max_tokens, wanted.given)
  logp, version = -(places / 8).astype(np.float32), np.full(len(text), version, np.int32)
  return Completion(request=request, tokens=ids(text), logp=logp, version=version, attended=places, finish=finish)


def step(observation, reward=0.0, done=False, **info):
  return Outcome(observation, reward, done, False, info)


class Talk:
  """An episode with scripted outcomes and answers. `asked` has everything that the episode yields."""

  def __init__(self, answers, outcomes, limits=WIDE, first=('first', {})):
    self.answers, self.outcomes, self.first = iter(answers), iter(outcomes), first
    self.released, self.asked = 0, []
    self.episode = conversation(11, limits, Letters(), lambda method, argument: (method, argument), self.release)
    self.trajectory = None

  def release(self):
    self.released += 1

  def run(self, turns=None):
    """Run the episode to its end, or through `turns` of its requests."""
    wanted = next(self.episode)
    try:
      while turns is None or len(self.asked) < turns:
        self.asked.append(wanted)
        wanted = self.episode.send(self._given(wanted))
    except StopIteration as end:
      self.trajectory = end.value
    return self

  def _given(self, wanted):
    if isinstance(wanted, Generate):
      answer = next(self.answers)
      return completion(wanted, *answer) if isinstance(answer, tuple) else completion(wanted, answer)
    return self.first if wanted.call[0] == 'reset' else next(self.outcomes)

  @property
  def generated(self):
    return [wanted for wanted in self.asked if isinstance(wanted, Generate)]


# --- one answer ------------------------------------------------------------------------------------------------------


def test_an_answer_is_generated_and_graded():
  episode = answered(ids('ask'), 9, lambda c: ('to be graded', c.tokens.tolist()))
  wanted = next(episode)
  assert isinstance(wanted, Generate)
  assert (wanted.prompt.tolist(), wanted.given.tolist(), wanted.max_tokens) == (ids('ask').tolist(), [], 9)
  given = completion(wanted, 'yes', version=4)
  assert episode.send(given) == Work(('to be graded', ids('yes').tolist()))
  with pytest.raises(StopIteration) as end:
    episode.send(Grade(0.5, 'timeout'))
  t = end.value.value
  assert (t.reward, t.status, t.finish, t.uid, t.group) == (0.5, 'timeout', 'stop', 5, 2)
  assert t.tokens.tolist() == ids('askyes').tolist()
  assert t.mask.tolist() == [False] * 3 + [True] * 3
  assert t.version.tolist() == [-1] * 3 + [4] * 3


# --- a conversation, by hand -----------------------------------------------------------------------------------------


def test_a_conversation_joins_the_supports_of_its_answers():
  """An answer's token c is drawn from {c, c + 1}; observations have no support."""
  episode = conversation(11, WIDE, Letters(), lambda method, argument: (method, argument), lambda: None)
  next(episode)
  wanted, outcomes = episode.send(('first', {})), iter([step('wall'), step('goal', 1.0, True)])
  for text in ('up.', 'down'):
    answer = replace(completion(wanted, text), support=np.stack([ids(text), ids(text) + 1], axis=1))
    episode.send(answer)
    try:
      wanted = episode.send(next(outcomes))
    except StopIteration as end:
      t = end.value
  assert t.support.tolist() == [[v, v + 1] for v in ids('up.down')]
  assert t.mask.sum() == len(t.support)


def test_a_conversation_is_one_sequence_with_a_record_of_each_token():
  talk = Talk(
    ['up.', ('down', 1, 'length'), ('left.', 2)],
    [step('wall', 0.25), step('ice', -0.5, suffix='Go on.'), step('goal', 1.0, True)],
    first=('lake', {'env_instruction': 'Cross.'}),
  ).run()
  t, prompt = talk.trajectory, 'Cross.\n\nlake/>'
  pieces = [(prompt, -1), ('up.', 0), ('wall/>', -1), ('down', 1), ('.ice\n\nGo on./>', -1), ('left.', 2)]
  text = ''.join(piece for piece, _ in pieces)
  version = np.concatenate([np.full(len(piece), v) for piece, v in pieces])
  place = np.arange(len(text))
  assert ''.join(map(chr, t.tokens)) == text
  assert t.prompt_length == len(prompt)
  np.testing.assert_array_equal(t.version, version)
  np.testing.assert_array_equal(t.mask, version >= 0)
  np.testing.assert_array_equal(t.sampler_logp, np.where(version >= 0, -place / 8, 0).astype(np.float32))
  np.testing.assert_array_equal(t.attended, np.where(version >= 0, place, 0))
  assert (t.uid, t.group, t.finish) == (5, 2, 'stop')
  assert t.rewards == (0.25, -0.5, 1.0)
  assert t.reward == 0.75
  assert [w.call for w in talk.asked if isinstance(w, Work)] == [
    ('reset', 11),
    *(('step', action) for action in ('up', 'down', 'left')),
  ]
  assert talk.released == 1


def test_engines_read_the_ids_that_are_trained_on():
  """Each request continues the ids of the request before it. The trajectory is the last request and its answer."""
  talk = Talk(['a', 'bb.', 'ccc'], [step('x'), step('y'), step('z', done=True)]).run()
  whole = talk.trajectory.tokens.tolist()
  consumed = [np.concatenate([w.prompt, w.given]).tolist() for w in talk.generated]
  assert all(w.prompt.tolist() == ids('first/>').tolist() for w in talk.generated)
  assert [''.join(map(chr, c)) for c in consumed] == ['first/>', 'first/>a.x/>', 'first/>a.x/>bb.y/>']
  assert [whole[: len(c)] for c in consumed] == consumed
  assert whole == consumed[-1] + ids('ccc').tolist()


def test_metrics_of_the_steps_become_metrics_of_the_episode():
  first = {'metrics': {'valid': 1, 'success': 0}, 'metrics_agg_mode': {'success': 'last'}}
  last = {'metrics': {'valid': 0, 'success': 1}, 'metrics_agg_mode': {'success': 'last'}}
  talk = Talk('ab', [step('x', **first), step('y', done=True, **last)]).run()
  assert talk.trajectory.metrics == {'valid': 0.5, 'success': 1.0, TURNS_CUT: 0}


def test_answers_that_reach_the_limit_of_a_turn_are_counted():
  answers = [('bbb', 0, 'stop'), ('bbb', 0, 'length'), ('bb', 0, 'length'), ('bbb', 0, 'length')]  # the third: by another limit
  steps = [step('x'), step('y'), step('z'), step('w', done=True)]
  assert Talk(answers, steps, replace(WIDE, turn_tokens=3)).run().trajectory.metrics == {TURNS_CUT: 0.5}


def test_an_episode_ends_when_terminated_or_truncated():
  for end in (Outcome('o', 1.0, True, False, {}), Outcome('o', 1.0, False, True, {})):
    talk = Talk('abc', [end]).run()
    assert (len(talk.generated), talk.trajectory.finish, talk.trajectory.reward) == (1, 'stop', 1.0)


def test_an_episode_ends_after_its_last_turn():
  talk = Talk('abcd', [step('x', 1.0)] * 4, replace(WIDE, turns=3)).run()
  assert len(talk.generated) == 3
  assert ''.join(map(chr, talk.trajectory.completion)) == 'a.x/>b.x/>c'  # without the last observation
  assert (talk.trajectory.finish, talk.trajectory.rewards) == ('turns', (1.0, 1.0, 1.0))


def test_an_episode_ends_at_its_token_limit():
  limits = Limits(turns=10, turn_tokens=4, max_prompt=100, max_tokens=10)
  talk = Talk(['aaaa', 'bb', 'c'], [step('x')] * 3, limits).run()
  assert [w.max_tokens for w in talk.generated] == [4, 2]  # .x/> is four tokens
  assert ''.join(map(chr, talk.trajectory.completion)) == 'aaaa.x/>bb'
  assert talk.trajectory.finish == 'length'
  long = Talk(['a', 'b'], [step('a long observation')] * 2, limits).run()  # no tokens are left for a second answer
  assert ''.join(map(chr, long.trajectory.completion)) == 'a'
  assert len(long.trajectory.rewards) == 1


def test_no_conversation_is_longer_than_its_limits():
  for seed in range(200):
    rng = np.random.default_rng(seed)
    limits = Limits(*(int(n) for n in (rng.integers(1, 6), rng.integers(1, 9), 100, rng.integers(1, 40))))
    outcomes = [step('o' * rng.integers(0, 9), done=rng.random() < 0.1) for _ in range(6)]
    talk = Talk(['?'] * 6, outcomes, limits)
    talk._given = lambda wanted, talk=talk, rng=rng: (
      completion(wanted, 'a' * int(rng.integers(1, wanted.max_tokens + 1)))
      if isinstance(wanted, Generate)
      else Talk._given(talk, wanted)
    )
    t = talk.run().trajectory
    assert 1 <= len(talk.generated) == len(t.rewards) <= limits.turns
    assert all(1 <= w.max_tokens <= limits.turn_tokens for w in talk.generated)
    assert len(t.completion) <= limits.max_tokens
    assert t.mask[-1]
    if t.finish != 'stop':  # a limit ended the episode
      assert (t.finish == 'turns') == (len(talk.generated) == limits.turns)


def test_a_first_observation_that_is_too_long_is_refused():
  talk = Talk([], [], replace(WIDE, max_prompt=6))
  with pytest.raises(EpisodeError, match=r'config\.sampling\.max_prompt = 6: expected at least 7'):
    talk.run()
  assert talk.released == 1
  assert Talk('a', [step('x', done=True)], replace(WIDE, max_prompt=7)).run().trajectory is not None


@pytest.mark.parametrize('asked', range(1, 6))
def test_an_episode_that_is_closed_early_releases_its_environment(asked):
  """The episode waits for a reset, an answer or a step when it is closed."""
  talk = Talk('ab', [step('x'), step('y', done=True)]).run(turns=asked - 1)
  assert talk.released == 0
  talk.episode.close()
  talk.episode.close()
  assert talk.released == 1


@pytest.mark.parametrize('asked', range(1, 6))
def test_an_episode_that_raises_releases_its_environment(asked):
  talk = Talk('ab', [step('x'), step('y', done=True)]).run(turns=asked - 1)
  with pytest.raises(ZeroDivisionError):
    talk.episode.throw(ZeroDivisionError())
  talk.episode.close()
  assert talk.released == 1


# --- with a real environment -----------------------------------------------------------------------------------------

DIRECTIONS = ('Left', 'Down', 'Right', 'Up')


def scripted_answer(uid, attempt, turn):
  """Return the answer at a turn: usually a direction, often with the end of the turn."""
  rng = np.random.default_rng([uid, attempt, turn])
  text = f'<answer>{rng.choice(DIRECTIONS)}</answer>' if rng.random() < 0.8 else 'I do not know'
  return text + '<eos>' * bool(rng.random() < 0.5)


@pytest.fixture(scope='module')
def tokens(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  write_tiny(folder)
  return Tokenizer.load(folder)


def replayed(tokens, seed, answers, env):
  """Play these answers in the environment alone. Return (ids, mask, rewards, metrics, whether the conversation is over)."""
  observation, info = checked_reset(env, seed)
  written, mask, outcomes = [], [], []

  def write(text, by_model):
    written.extend(tokens.encode(text))
    mask.extend([by_model] * (len(written) - len(mask)))

  write(turn_messages(observation, info)[0]['content'] + '\n', False)
  for i, answer in enumerate(answers):
    write(answer, True)
    outcomes.append(checked_step(env, answer.removesuffix('<eos>')))
    if i < len(answers) - 1:
      write('\n' + turn_messages(outcomes[-1].observation, outcomes[-1].info)[0]['content'] + '\n', False)
  metrics = episode_metrics([o.info for o in outcomes])
  return written, mask, tuple(o.reward for o in outcomes), metrics, outcomes[-1].done


def own(metrics):
  """Return the metrics that the environment reports. The engine alone knows which answers are cut."""
  return {name: value for name, value in metrics.items() if name != TURNS_CUT}


def test_equal_seeds_and_answers_give_equal_trajectories(tokens):
  def play(seed, uid):
    env, turn = FrozenLake(), 0
    limits = Limits(turns=10, turn_tokens=64, max_prompt=1000, max_tokens=3000)
    episode = conversation(seed, limits, PlainCodec(tokens), lambda *call: call, lambda: None)
    wanted = next(episode)
    try:
      while True:
        if isinstance(wanted, Generate):
          text, turn = scripted_answer(uid, 0, turn), turn + 1
          answer = np.array(tokens.encode(text), np.int32)
          filled = completion(wanted, 'x' * len(answer))
          wanted = episode.send(replace(filled, tokens=answer))
        else:
          method, argument = wanted.call
          wanted = episode.send(checked_reset(env, argument) if method == 'reset' else checked_step(env, argument))
    except StopIteration as end:
      return end.value, [scripted_answer(uid, 0, i) for i in range(turn)]

  for seed in range(8):
    (one, answers), (again, _) = play(seed, uid=seed), play(seed, uid=seed)
    for name in ('tokens', 'mask', 'sampler_logp', 'version', 'attended', 'reward', 'rewards', 'metrics', 'finish'):
      np.testing.assert_equal(getattr(one, name), getattr(again, name))
    written, mask, rewards, metrics, _ = replayed(tokens, seed, answers, FrozenLake())
    assert one.tokens.tolist() == written
    assert one.mask.tolist() == mask
    assert (one.rewards, one.metrics) == (rewards, {**metrics, TURNS_CUT: 0})
    assert one.reward == pytest.approx(sum(rewards))


class Talking(SimulatedEngine):
  """A simulated engine that answers with `scripted_answer` and records its requests."""

  def __init__(self, clock, capacity, tokens, **settings):
    super().__init__(clock, capacity, lambda r: 0.5 + r.uid % 3, **settings)
    self.tokens, self.asked = tokens, {}

  def add(self, request):
    self.asked.setdefault((request.uid, request.attempt), []).append(request)
    super().add(request)

  def _drawn(self, running, finish):
    drawn, r = super()._drawn(running, finish), running.request
    turn = len({a.start - a.resumed for a in self.asked[r.uid, r.attempt]}) - 1
    left = self.tokens.encode(scripted_answer(r.uid, r.attempt, turn))[r.resumed :][: r.max_tokens]
    n = min(len(drawn.tokens), len(left) - 1) if finish == 'abort' else len(left)
    places = r.start + np.arange(n, dtype=np.int32)
    version = np.full(n, running.version, np.int32)
    tokens, logp = np.array(left[:n], np.int32), -(places / 8).astype(np.float32)
    return Completion(request=r, tokens=tokens, logp=logp, version=version, attended=places, finish=finish)


class Played:
  """A run of the scheduler over FrozenLake: its groups, and the numbers of environments that it made and closed."""

  def __init__(self, tokens, make=FrozenLake, steps=5, limit=3600.0, gate=None, **rollout):
    self.made = self.closed = 0
    self.lock = threading.Lock()
    clock, limits, self.groups = Clock(), Limits(turns=8, turn_tokens=64, max_prompt=1000, max_tokens=3000), []
    with environment_pool.environment_pool(lambda: self.counted(make()), 4, limit) as pool:
      source = ConversationSource(
        lambda n: seeds(40 + n, False, False), limits, PlainCodec(tokens), pool.release, FrozenLake(), limit
      )
      self.engine = Talking(clock, 4, tokens, chunk=0.2)
      settings = Rollout(prompts=2, group=3, **rollout)
      scheduler = Scheduler([self.engine], pool, source, settings, clock, steps * settings.prompts)
      for _ in range(steps):
        self.groups += scheduler.batch()
        for _ in range(3):
          if not scheduler.idle:
            scheduler.pump(patience=0.01)
        scheduler.sync([None])
      assert scheduler.idle
      self.counts, self.source = scheduler.counts, source
      if gate is not None:
        gate.set()  # hanging calls return
    end = time.monotonic() + 30  # a thread closes its environments when it ends
    while self.closed < self.made and time.monotonic() < end:
      time.sleep(0.01)

  def counted(self, env):
    played = self

    class Counted:
      name, reset, step = 'lake', staticmethod(env.reset), staticmethod(env.step)

      def close(self):
        with played.lock:
          played.closed += 1

    with self.lock:
      self.made += 1
    return Counted()

  @property
  def trajectories(self):
    return [t for group in self.groups for t in group.trajectories]

  def check(self, tokens):
    """Assert that every trajectory equals that of the environment alone, for any order of events."""
    for group in self.groups:
      opening = self.source.prompt(group.number).tolist()
      for t in group.trajectories:
        assert t.tokens[: t.prompt_length].tolist() == opening  # the members share the first observation
        attempt = max(a for uid, a in self.engine.asked if uid == t.uid)
        asked = self.engine.asked[t.uid, attempt]
        starts = sorted({r.start - r.resumed for r in asked})
        answers = [scripted_answer(t.uid, attempt, turn) for turn in range(len(starts))]
        written, mask, rewards, metrics, done = replayed(tokens, seeds(40 + group.number, False, False), answers, FrozenLake())
        assert t.tokens.tolist() == written
        assert t.mask.tolist() == mask
        assert (t.rewards, own(t.metrics)) == (rewards, metrics)
        assert t.reward == pytest.approx(sum(rewards))
        assert t.finish == ('stop' if done else 'turns' if len(answers) == 8 else 'length')
        for r in asked:
          consumed = [*r.prompt.tolist(), *r.given.tolist()]
          assert consumed == written[: len(consumed)]
        place = np.arange(len(written))
        np.testing.assert_array_equal(t.attended, np.where(mask, place, 0))
        np.testing.assert_array_equal(t.sampler_logp, np.where(mask, -place / 8, 0).astype(np.float32))
        assert np.all((t.version >= 0) == mask)
        assert np.all(np.diff(t.version[t.mask]) >= 0)
        assert t.version[t.mask][0] >= t.start_version == group.start_version


def test_scheduled_conversations_equal_those_of_the_environment_alone(tokens, monkeypatch):
  monkeypatch.setattr(environment_pool, 'starter', lambda executor, load: partial(InlineWorker, load))  # the same in every run
  played = Played(tokens, async_ratio=1.0)
  played.check(tokens)
  assert [g.number for g in played.groups] == list(range(10))
  assert len({tuple(t.tokens[: t.prompt_length]) for t in played.trajectories}) == 10
  assert len({tuple(t.tokens) for t in played.trajectories}) > 20  # members differ in their answers
  assert any(len(set(t.version[t.mask])) > 1 for t in played.trajectories)
  assert played.counts['resumed_tokens'] > 0
  assert played.made == 30


class Unreliable:
  """A FrozenLake that raises or hangs. Its seed and the number of earlier resets to that seed decide which."""

  def __init__(self, gate, resets):
    self.gate, self.resets, self.env = gate, resets, FrozenLake()

  def reset(self, seed):
    salt = 100 * next(self.resets[seed])
    self.env = faulty(FrozenLake(), raising=0.05, hanging=0.02, salt=salt, sleep=lambda seconds: self.gate.wait(60))
    return self.env.reset(seed)

  def step(self, action):
    return self.env.step(action)


@pytest.mark.usefixtures('no_pauses')
def test_conversations_with_faults_and_hangs_are_complete(tokens, caplog):
  """The scheduler retries or drops members that fail. All trajectories that it returns are complete."""
  gate = threading.Event()
  resets = {seeds(40 + number, False, False): itertools.count() for number in range(100)}  # atomic, for threads
  played = Played(tokens, partial(Unreliable, gate, resets), limit=0.15, gate=gate, async_ratio=1.0)
  played.check(tokens)
  assert played.made == played.closed
  counts = Counter(played.counts)
  assert counts['errors'] > 0
  assert counts['hung'] > 0
  assert counts['started'] == 10 + counts['failed']
  assert len(played.groups) == 10
  assert any('InjectedFault' in record.getMessage() for record in caplog.records)
  assert any('config.task.time_limit' in record.getMessage() for record in caplog.records)
