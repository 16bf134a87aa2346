"""A fake of the part of verifiers 0.3 that its environments use: load_environment, rollouts that ask a client, rubrics."""

import importlib
import signal

from verifiers.clients import Client
from verifiers.types import Tool

__version__ = '0.3.fake'


class Error(Exception):
  pass


class Rubric:
  def __init__(self, funcs):
    self.funcs = funcs


class MultiTurnEnv:
  def __init__(self, dataset, rubric, max_turns=-1, system_prompt=None):
    self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns
    self.before = [{'role': 'system', 'content': system_prompt}] if system_prompt else []
    self.tool_defs = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the real package also replaces both handlers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

  requires_group_rollouts = property(lambda self: any('completions' in f.__code__.co_varnames for f in self.rubric.funcs))

  def get_dataset(self):
    return self.dataset

  def get_eval_dataset(self):
    return self.dataset[::-1]

  async def solved(self, state):
    return False

  async def no_tools_called(self, state):
    return False

  async def run_rollout(self, input, client, model, sampling_args):
    assert isinstance(client, Client)
    prompt = [*self.before, *input['prompt']]
    state = {'answer': input['answer'], 'trajectory': []}
    conversation, error = prompt, None
    while True:
      if self.max_turns > 0 and len(state['trajectory']) >= self.max_turns:
        stop = 'max_turns_reached'
      elif error:
        stop = 'has_error'
      elif await self.solved(state):
        stop = 'solved'
      elif await self.no_tools_called(state):
        stop = 'no_tools_called'
      else:
        try:
          if state['trajectory']:
            response = await self.env_response(conversation, state)  # may change `conversation`
            conversation = [*conversation, *response]
          response = await client.get_response(
            prompt=conversation, model=model, tools=self.tool_defs or None, sampling_args=sampling_args, state=state
          )
        except Error as raised:
          error = {'error': 'Error', 'message': str(raised)}
          continue
        conversation = [*conversation, {'role': 'assistant', 'content': response.message.content}]
        state['trajectory'].append({'completion': [conversation[-1]], 'message': response.message})
        continue
      break
    completion = conversation[len(prompt) :]
    scores = {f.__name__: await f(completion=completion, answer=input['answer']) for f in self.rubric.funcs}
    return {'reward': sum(scores.values()), 'metrics': scores, 'error': error, 'stop_condition': stop, 'completion': completion}


class SingleTurnEnv(MultiTurnEnv):
  def __init__(self, **kwargs):
    super().__init__(max_turns=1, **kwargs)


class ToolEnv(MultiTurnEnv):
  def __init__(self, tools, **kwargs):
    super().__init__(**kwargs)
    self.tools = {tool.__name__: tool for tool in tools}
    self.tool_defs = [Tool(t.__name__, t.__doc__, {'required': list(t.__annotations__)[:-1]}) for t in tools]

  async def no_tools_called(self, state):
    return bool(state['trajectory']) and not state['trajectory'][-1]['message'].tool_calls

  async def env_response(self, messages, state):
    import json

    found = []
    for call in state['trajectory'][-1]['message'].tool_calls:
      try:
        content = str(self.tools[call.name](**json.loads(call.arguments)))
      except Exception as error:
        content = str(error)
      found.append({'role': 'tool', 'tool_call_id': call.id, 'content': content})
    return found


def stop(function):
  return function


def load_environment(env_id, **args):
  try:
    module = importlib.import_module(env_id.replace('-', '_'))
  except ImportError as error:
    raise ValueError(f"Could not import '{env_id}' environment.") from error
  try:
    return module.load_environment(**args)
  except Exception as error:
    raise RuntimeError(f"Failed to load environment '{env_id}': {error}") from error
