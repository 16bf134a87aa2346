"""Sokoban: its rooms, its pushes, its rewards. The solver here searches the text of a room."""

import collections

import numpy as np
import pytest

from sprl.tasks.environments.sokoban import Sokoban

STEPS = {'Left': (0, -1), 'Down': (1, 0), 'Right': (0, 1), 'Up': (-1, 0)}


def read(observation):
  """Return (walls, targets, boxes, player) of the room in a text."""
  cells = {
    (r, c): cell for r, line in enumerate(observation.split('\n\n')[-1].split('\n')) for c, cell in enumerate(line.split(' '))
  }
  where = lambda symbols: frozenset(at for at, cell in cells.items() if cell in symbols)  # noqa: E731
  (player,) = where('@+')
  return where('#'), where('.*+'), where('$*'), player


def move(room, direction):
  """Return the room after a move, by the rules of the game."""
  walls, targets, boxes, (r, c) = room
  dr, dc = STEPS[direction]
  to, behind = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
  if to in walls or (to in boxes and (behind in walls or behind in boxes)):
    return room
  return walls, targets, boxes - {to} | {behind} if to in boxes else boxes, to


def solve(room, limit):
  queue, seen = collections.deque([(room, ())]), {room[2:]}
  while queue:
    room, path = queue.popleft()
    if room[2] == room[1]:
      return path
    if len(path) < limit:
      for direction in STEPS:
        after = move(room, direction)
        if after[2:] not in seen:
          seen.add(after[2:])
          queue.append((after, (*path, direction)))
  return None


def answer(direction):
  return f'<answer>{direction}</answer>'


@pytest.mark.parametrize(('args', 'seeds'), [({}, 60), ({'boxes': 2, 'size': 7}, 30), ({'boxes': 3, 'max_actions': 14}, 10)])
def test_every_room_can_be_solved_in_time_and_solving_it_is_rewarded(args, seeds):
  env, limit, lengths = Sokoban(**args), args.get('max_actions', 10), []
  for seed in range(seeds):
    room = read(env.reset(seed)[0])
    assert len(room[1]) == len(room[2]) == args.get('boxes', 1)
    assert room[3] not in room[0] | room[2]
    placed = len(room[1] & room[2])
    path = solve(room, limit)
    assert path, seed  # () is the path of a room that is already solved
    lengths.append(len(path))
    steps = [env.step(answer(direction)) for direction in path]
    assert not any(step[2] or step[3] for step in steps[:-1])
    assert steps[-1][2:4] == (True, False)
    assert steps[-1][4]['metrics']['success'] == 1.0
    assert sum(step[1] for step in steps) == pytest.approx(1 + 0.1 * (args.get('boxes', 1) - placed))
  assert np.mean(lengths) > 2  # most rooms need several moves
  assert len(set(lengths)) > 2


def test_the_outer_wall_is_whole():
  walls, *_ = read(Sokoban(size=8).reset(0)[0])
  assert {(r, c) for r in range(8) for c in range(8) if {r, c} & {0, 7}} <= walls


@pytest.mark.parametrize('args', [{}, {'boxes': 3}])
def test_random_play_follows_the_rules(args):
  env, rng, pushes, blocked = Sokoban(**args, max_actions=60), np.random.default_rng(0), 0, 0
  for seed in range(20):
    room, done = read(env.reset(seed)[0]), False
    while not done:
      direction = rng.choice(list(STEPS))
      before, room = room, move(room, direction)
      observation, reward, terminated, truncated, info = env.step(answer(direction))
      done = terminated or truncated
      assert read(observation) == room
      assert terminated == (room[1] == room[2])
      gained = len(room[1] & room[2]) - len(before[1] & before[2])
      assert reward == pytest.approx(0.1 * gained + terminated)
      assert info['metrics']['boxes_on_target'] == len(room[1] & room[2])
      assert info['metrics']['effective_action'] == (room[3] != before[3])
      pushes += room[2] != before[2]
      blocked += room == before
  assert pushes > 10
  assert blocked > 10


@pytest.mark.parametrize('action', ['', 'Left', '<answer>West</answer>', '<answer>Left'])
def test_an_invalid_answer_costs_a_penalty_and_moves_nothing(action):
  env = Sokoban()
  before = read(env.reset(0)[0])
  observation, reward, terminated, truncated, info = env.step(action)
  assert (reward, terminated, truncated) == (-0.15, False, False)
  assert info['metrics']['valid_action'] == 0.0
  assert read(observation) == before


def test_the_tenth_action_is_the_last():
  env = Sokoban()
  env.reset(0)
  steps = [env.step('hm') for _ in range(10)]
  assert [step[3] for step in steps] == [False] * 9 + [True]
  assert not any(step[2] for step in steps)
