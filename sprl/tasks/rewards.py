"""Reward functions: which arguments they can take, and how sprl calls them.

The names of a function's parameters choose its arguments. `**kwargs` gets all of them.

    def brief(completion, finish): ...                            one sample
    def grade(prompt, completion, answer, difficulty): ...        `difficulty` is a column of the row
    def rank(prompts, completions, answer, **kwargs): ...         all samples of one prompt: a groupwise function
    async def ask(prompt, completion): ...                        many calls at a time (sprl/tasks/async_workers.py)

A function with a parameter `completions` is groupwise: each argument is a list with one item per sample, and the function returns
a list of numbers. This is also the form of TRL's reward functions, which may name the token ids `completion_ids`.

A function that needs three parameters with unknown names, such as `f(question, text, truth)`, is called by position: prompt,
completion, answer. It is refused if one of them has a known name, but not in its own of these three places.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

ARGUMENTS = {  # the name of an argument -> its meaning; a column with such a name is found in `row`
  'prompt': 'the question: the text of the last message, with task.suffix',
  'completion': 'the text of the answer, without special tokens',
  'answer': 'the right answer, as text',
  'row': 'the whole row of the data set',
  'messages': 'the conversation before the answer: {role, content} each; empty without a chat',
  'tokens': 'the token ids of the completion',
  'finish': 'how the completion ended: stop or length',
}
PLURAL = {'prompt': 'prompts', 'completion': 'completions'}  # names in a sample -> names in a groupwise function
OF_TRL = {'completion_ids': 'tokens'}  # names in TRL -> names here, for groupwise functions
_ORDER = ('prompt', 'completion', 'answer')  # of the arguments in a call by position
_MEANS = {  # usual names of parameters -> the argument that they mean; `data_source`, the first of verl's, means none of ours
  **dict.fromkeys(('question', 'query', 'problem', 'instruction'), 'prompt'),
  **dict.fromkeys(('response', 'solution_str', 'output', 'generation', 'prediction'), 'completion'),
  **dict.fromkeys(('ground_truth', 'label', 'target', 'reference', 'gold'), 'answer'),
  'data_source': 'data_source',
}
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Sample:
  """A completion to grade: the values of ARGUMENTS, and extra data for the grader of its task."""

  prompt: str
  completion: str
  answer: str
  row: Mapping[str, Any] = field(default_factory=dict)
  messages: tuple[Mapping[str, str], ...] = ()
  tokens: tuple[int, ...] = ()
  finish: str = 'stop'
  extra: Mapping[str, Any] = field(default_factory=dict)  # a Problem's extra

  @property
  def values(self) -> dict[str, Any]:
    """The values by name: the columns of the row, and ARGUMENTS."""
    lists = {'messages': list(self.messages), 'tokens': list(self.tokens)}
    return {**self.row, **{name: getattr(self, name) for name in ARGUMENTS}, **lists}


Grader = Callable[[Sample], Any]  # returns the score of a sample
GroupGrader = Callable[[Sequence[Sample]], Any]  # returns the scores of the samples of one prompt


def is_groupwise(parameters: Collection[str]) -> bool:
  """Return whether a function with these parameters gets all completions of a prompt at once."""
  return PLURAL['completion'] in parameters


def reads_answers(function: Callable[..., Any] | None) -> bool:
  """Return whether a function cannot be called without the argument `answer`."""
  parameter = inspect.signature(function).parameters.get('answer') if function is not None else None
  return parameter is not None and parameter.default is Parameter.empty


def is_async(function: Callable[..., Any]) -> bool:
  """Return whether the function, or the method `__call__` of the object, is an `async def`."""
  return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, '__call__', None))  # noqa: B004


def for_samples(function: Callable[..., Any], columns: Collection[str]) -> Grader:
  """Return a grader that calls `function` with the values that its parameters name, or by position.

  `columns` are the columns that rows have. Raises TypeError if the function needs an argument that does not exist.
  """
  parameters = inspect.signature(function).parameters
  known = {*ARGUMENTS, *columns}
  if _by_position(parameters, known):
    inspect.signature(function).bind(*_ORDER)
    return lambda sample: function(sample.prompt, sample.completion, sample.answer)
  _check(parameters, known)
  return lambda sample: function(**_chosen(parameters, sample.values))


def for_groups(function: Callable[..., Any], columns: Collection[str]) -> GroupGrader:
  """Return a grader of all samples of one prompt. It calls `function` with one list for each of its parameters.

  Raises TypeError if the function needs an argument that does not exist.
  """
  parameters = inspect.signature(function).parameters
  _check(parameters, {PLURAL.get(name, name) for name in (*columns, *ARGUMENTS)} | OF_TRL.keys())

  def grade(samples: Sequence[Sample]) -> Any:
    of_samples = [sample.values for sample in samples]
    shared = [name for name in of_samples[0] if all(name in values for values in of_samples)]
    values = {PLURAL.get(name, name): [v[name] for v in of_samples] for name in shared}
    return function(**_chosen(parameters, {name: values[ours] for name, ours in OF_TRL.items()} | values))

  return grade


def _by_position(parameters: Mapping[str, Parameter], known: set[str]) -> bool:
  """Whether a function takes (prompt, completion, answer) under other names, so that it is called by position."""
  kinds = {p.kind for p in parameters.values()}
  if Parameter.POSITIONAL_ONLY in kinds:
    return True
  if kinds == {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
    raise TypeError('the function has only *args and **kwargs, which name no argument: a decorator needs functools.wraps')
  if Parameter.VAR_POSITIONAL in kinds:
    names = [name for name, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    return not any(name in known and name != place for name, place in zip(names, _ORDER))
  required = [name for name, p in parameters.items() if p.default is Parameter.empty and p.kind in _BY_NAME]
  if len(required) != len(_ORDER) or any(parameters[name].kind is Parameter.KEYWORD_ONLY for name in required):
    return False
  displaced = any((name if name in known else _MEANS.get(name, place)) != place for name, place in zip(required, _ORDER))
  first_two = required[:2] == list(_ORDER[:2])  # the third is then the answer or a column by its name
  return not (displaced or first_two or all(name in known for name in required))


def _check(parameters: Mapping[str, Parameter], known: Collection[str]) -> None:
  required = [name for name, p in parameters.items() if p.default is Parameter.empty and p.kind in _BY_NAME]
  if unknown := [name for name in required if name not in known]:
    raise TypeError(f'the function wants {unknown[0]!r}; a reward may take {", ".join(sorted(known))}')


def _chosen(parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> dict[str, Any]:
  """Return the values that the parameters name; all values for `**kwargs`. Raises LookupError for a column that the row lacks."""
  if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
    return dict(values)
  chosen = {name: values[name] for name in parameters if name in values}
  if missing := [n for n, p in parameters.items() if n not in chosen and p.default is Parameter.empty and p.kind in _BY_NAME]:
    raise LookupError(f'the row has no column {missing[0]!r}')
  return chosen
