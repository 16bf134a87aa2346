"""Guess the number: hints and rewards."""

import pytest

from sprl.tasks.environments.guess_number import GuessNumber


def answer(number):
  return f'<answer>{number}</answer>'


@pytest.mark.parametrize('seed', range(20))
def test_bisection_by_the_hints_finds_the_number(seed):
  env, low, high = GuessNumber(), 1, 50
  env.reset(seed)
  for _ in range(6):  # 2 ** 6 > 50
    guess = (low + high) // 2
    text, reward, terminated, truncated, info = env.step(answer(guess))
    assert not truncated
    assert info['metrics'] == {'success': float(terminated), 'valid_action': 1.0}
    if terminated:
      assert reward == 1.0
      return
    assert reward == 0.0
    low, high = (guess + 1, high) if f'higher than {guess}' in text else (low, guess - 1)
  pytest.fail('not found')


def test_every_number_of_the_range_occurs():
  asked = set()
  for seed in range(200):
    env = GuessNumber(low=-2, high=2)
    env.reset(seed)
    for guess in range(-2, 3):
      if env.step(answer(guess))[2]:
        asked.add(guess)
        break
  assert asked == {-2, -1, 0, 1, 2}


@pytest.mark.parametrize('guess', ['', 'seven', '0', '51', '7.0', '7 8', '9' * 5000, '٧', '--7', '1_0'])
def test_an_invalid_guess_costs_a_penalty_and_gives_no_hint(guess):
  env = GuessNumber()
  env.reset(0)
  text, reward, terminated, truncated, info = env.step(answer(guess))
  assert (reward, terminated, truncated, info['metrics']['valid_action']) == (-0.1, False, False, 0.0)
  assert text == 'This is no whole number between 1 and 50.'


def test_the_last_guess_of_a_text_counts_and_the_tenth_is_the_last():
  env = GuessNumber(low=1, high=1000)
  env.reset(0)
  assert 'than 3.' in env.step('<answer>2</answer> or <answer> +3 </answer>')[0]
  steps = [env.step(answer(0)) for _ in range(9)]
  assert [step[3] for step in steps] == [False] * 8 + [True]
