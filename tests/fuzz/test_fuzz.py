"""A few cases of each target, in this process: what is random is the same in every run. `python tests/fuzz` runs more."""

import argparse
import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import arguments
import campaign
import fuzz_templates
import jinja2
import pytest
import values

from sprl.io import template_process

TESTS = Path(__file__).resolve().parents[1]
CASES = {
  'settings': 24, 'commands': 2, 'weights': 24, 'tokenizers': 40, 'rows': 80, 'templates': 20, 'graders': 3, 'environments': 3,
  'endpoint': 100,
}  # fmt: skip


def outcomes(name, *more):
  with campaign.opened(name) as (target, world):
    cases = [campaign.case_of(target, world, 0, number) for number in range(CASES[name])]
    return [target.check(world, case) for case in (*cases, *more)]


@pytest.mark.parametrize('name', [name for name in CASES if name != 'commands'])
def test_random_inputs_end_in_an_answer_or_a_refusal(name):
  assert len(set(outcomes(name))) > 1  # not all are refused


@pytest.mark.slow
def test_random_commands_end_in_a_run_or_a_refusal():
  """A command takes 15 seconds of CPU time: there are few random ones, and one that runs and one that does not are given."""
  runs, refused = ({'config': 'config.py', 'flags': [f'--config.steps={steps}']} for steps in (1, -1))
  assert outcomes('commands', runs, refused)[-2:] == ['status 0', 'status 2']


@pytest.mark.parametrize('name', ['getattr', 'getitem'])
def test_a_sandbox_that_gives_a_hidden_attribute_is_noticed(monkeypatch, name):
  """The sandbox here looks names up as jinja2's environment for trusted templates does."""
  make, trusted = template_process.make_environment, jinja2.Environment()

  def unsafe():
    env = make()
    setattr(env, name, getattr(trusted, name))
    return env

  templates = {
    'getattr': ["{{ 'a'.__class__ }}", '{{ messages.__len__ }}'],
    'getitem': ["{{ 'a'['__class__'] }}", "{{ ['a'] | map(attribute='__class__') | list }}", "{{ messages[0]['__len__'] }}"],
  }
  cases = [{'template': template, 'messages': [{'role': 'user'}], 'tools': None} for template in templates[name]]
  for case in cases:
    fuzz_templates.watched(case)
  monkeypatch.setattr(template_process, 'make_environment', unsafe)
  for case in cases:
    with pytest.raises(AssertionError, match=r'__(class|len)__ is'):
      fuzz_templates.watched(case)


def test_random_templates_read_hidden_names_in_each_way():
  """As attributes, elements, and attributes that a filter reads."""
  rng, world = random.Random(0), SimpleNamespace(filters=['string'], tests=['none'])
  made = '\n'.join(fuzz_templates.expression(rng, world) for _ in range(2000))
  assert all(form in made for form in ('.__class__', "['__class__']", "attr('__class__')", "map(attribute='__class__')"))


def test_levels_near_the_limit_of_the_parser_are_drawn():
  """The parser refuses some of them and accepts others."""
  depths = {int(values.deep(random.Random(seed)).split()[1]) for seed in range(200)}
  assert {-40, 0, 5, values.TOO_DEEP} <= depths
  for depth, parses in ((-200, True), (200, False)):
    with contextlib.nullcontext() if parses else pytest.raises(RecursionError):
      json.loads(values.as_json({'a': f'{values.DEEP} {depth}'}))


@pytest.mark.parametrize('text', ['-1', '0', 'nan', 'inf', 'x'])
def test_minutes_that_are_no_number_above_0_are_refused(text):
  with pytest.raises(argparse.ArgumentTypeError, match=f"found '{text}'; expected a finite number of minutes above 0"):
    arguments.minutes(text)
  assert arguments.minutes('0.5') == 0.5


@pytest.mark.parametrize('command', [('fuzz',), ('soak', 'kills')], ids=lambda command: command[0])
def test_a_campaign_of_no_minutes_is_refused(command):
  program, *words = command
  done = subprocess.run([sys.executable, str(TESTS / program), *words, '--minutes=0'], capture_output=True, text=True)
  assert done.returncode == 2
  assert "argument --minutes: found '0'; expected a finite number of minutes above 0" in done.stderr


def test_the_shortest_campaign_runs_a_case(capsys):
  campaign.Campaign('templates', seed=0).run(0.0)
  assert 'templates: 1 cases in' in capsys.readouterr().out


def test_every_target_has_cases_here():
  assert set(campaign.TARGETS) == set(CASES)
