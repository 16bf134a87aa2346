"""FrozenLake: its maps, its moves, its rewards."""

import collections

import numpy as np
import pytest

from sprl.tasks.environments.frozen_lake import FrozenLake

STEPS = {'Left': (0, -1), 'Down': (1, 0), 'Right': (0, 1), 'Up': (-1, 0)}


def grid(observation):
  return [line.split(' ') for line in observation.split('\n\n')[-1].split('\n')]


def find(cells, symbol):
  return next((r, c) for r, row in enumerate(cells) for c, cell in enumerate(row) if cell == symbol)


def solve(cells):
  """Return the shortest way from P to G around O, by breadth-first search of the text, or None."""
  queue, seen = collections.deque([(find(cells, 'P'), ())]), set()
  while queue:
    (r, c), path = queue.popleft()
    if cells[r][c] == 'G':
      return path
    for name, (dr, dc) in STEPS.items():
      to = (r + dr, c + dc)
      if 0 <= to[0] < len(cells) and 0 <= to[1] < len(cells) and cells[to[0]][to[1]] != 'O' and to not in seen:
        seen.add(to)
        queue.append((to, (*path, name)))
  return None


def answer(direction):
  return f'<answer>{direction}</answer>'


@pytest.mark.parametrize(('size', 'holes', 'max_actions'), [(4, 0.2, 10), (8, 0.4, 10), (3, 0.5, 2), (2, 0.5, 1)])
def test_every_map_can_be_solved_in_time_and_solving_it_is_rewarded(size, holes, max_actions):
  env = FrozenLake(size=size, holes=holes, max_actions=max_actions)
  lengths = set()
  for seed in range(60):
    path = solve(grid(env.reset(seed)[0]))
    assert path is not None
    assert 1 <= len(path) <= max_actions
    lengths.add(len(path))
    *before, last = [env.step(answer(direction)) for direction in path]
    assert [step[1:4] for step in before] == [(0.0, False, False)] * len(before)
    assert last[1:4] == (1.0, True, False)
    assert last[4]['metrics'] == {'success': 1.0, 'valid_action': 1.0, 'effective_action': 1.0}
    assert find(grid(last[0]), '√')
  assert len(lengths) == min(max_actions, len(lengths)) >= min(2, max_actions)


def test_the_map_is_four_by_four_with_one_player_and_one_goal():
  observation, info = FrozenLake().reset(0)
  cells = grid(observation)
  assert [len(row) for row in cells] == [4] * 4
  symbols = collections.Counter(cell for row in cells for cell in row)
  assert symbols['P'] == symbols['G'] == 1
  assert symbols.keys() <= {'P', 'G', '_', 'O'}
  assert 'frozen lake' in observation
  assert 'You have 10 turns.' in observation
  assert '<answer>Left</answer>' in info['suffix']


def test_moves_have_their_direction_and_stop_at_the_edge():
  env = FrozenLake(holes=0.0, max_actions=1000)
  rng = np.random.default_rng(0)
  player = find(grid(env.reset(3)[0]), 'P')
  for _ in range(60):
    direction = rng.choice(list(STEPS))
    wanted = tuple(int(np.clip(at + by, 0, 3)) for at, by in zip(player, STEPS[direction], strict=True))
    observation, _, terminated, _, info = env.step(answer(direction))
    if terminated:
      player = find(grid(env.reset(3)[0]), 'P')
      continue
    assert find(grid(observation), 'P') == wanted
    assert info['metrics']['effective_action'] == (wanted != player)
    player = wanted


def test_a_hole_ends_the_episode_without_a_reward():
  env, fallen = FrozenLake(holes=0.5), 0
  for seed in range(20):
    cells = grid(env.reset(seed)[0])
    r, c = find(cells, 'P')
    for direction, (dr, dc) in STEPS.items():
      if 0 <= r + dr < 4 and 0 <= c + dc < 4 and cells[r + dr][c + dc] == 'O':
        observation, reward, terminated, truncated, info = env.step(answer(direction))
        assert (reward, terminated, truncated, info['metrics']['success']) == (0.0, True, False, 0.0)
        assert find(grid(observation), 'X') == (r + dr, c + dc)
        assert 'suffix' not in info
        fallen += 1
        break
  assert fallen > 3


@pytest.mark.parametrize(
  'action', ['', 'Left', '<answer>West</answer>', '<answer></answer>', '<answer>Left', '<answer>Left Up</answer>']
)
def test_an_invalid_answer_costs_a_penalty_and_moves_nothing(action):
  env = FrozenLake()
  before = grid(env.reset(0)[0])
  observation, reward, terminated, truncated, info = env.step(action)
  assert (reward, terminated, truncated) == (-0.01, False, False)
  assert info['metrics'] == {'success': 0.0, 'valid_action': 0.0, 'effective_action': 0.0}
  assert grid(observation) == before


@pytest.mark.parametrize(
  'form', ['<answer>{}</answer>', '<answer> {}\n</answer>', '<answer>Up?</answer> no, <answer>{}</answer>!']
)
@pytest.mark.parametrize('case', [str.lower, str.upper, str.title])
def test_the_last_answer_counts_in_any_case(form, case):
  env = FrozenLake()
  path = solve(grid(env.reset(0)[0]))
  steps = [env.step(form.format(case(direction))) for direction in path]
  assert steps[-1][1:3] == (1.0, True)


def test_the_tenth_action_is_the_last():
  env = FrozenLake()
  env.reset(0)
  steps = [env.step('hm') for _ in range(10)]
  assert [step[3] for step in steps] == [False] * 9 + [True]
  assert not any(step[2] for step in steps)
  assert 'no turns left' in steps[-1][0]
  with pytest.raises(RuntimeError, match='no episode'):
    env.step('hm')


def test_reaching_the_goal_with_the_last_action_is_no_truncation():
  for seed in range(50):
    env = FrozenLake(max_actions=1)
    path = solve(grid(env.reset(seed)[0]))
    assert env.step(answer(path[0]))[1:4] == (1.0, True, False)


def test_slippery_ice_takes_each_of_three_ways_a_third_of_the_time():
  went = collections.Counter()
  for seed in range(900):
    env = FrozenLake(size=20, holes=0.0, slippery=True, max_actions=100)
    player = find(grid(env.reset(seed)[0]), 'P')
    if not 1 <= min(player) <= max(player) <= 18:
      continue
    observation, _, terminated, *_ = env.step(answer('Right'))
    to = find(grid(observation), '√' if terminated else 'P')
    went[to[0] - player[0], to[1] - player[1]] += 1
  assert went.keys() == {(0, 1), (1, 0), (-1, 0)}  # never back
  assert max(abs(count / went.total() - 1 / 3) for count in went.values()) < 0.08
