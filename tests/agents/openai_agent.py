"""An agent with the official client: it offers a function, streams one answer, and may kill itself or hang up."""

import contextlib
import os
import random
import signal

import openai

TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}}


async def agent(base_url, row, kills=0.0):
  """Three turns. With probability `kills` it dies at one of them, or closes a connection without waiting for the answer."""
  fate, at = random.choice(['die', 'hang up']) if random.random() < kills else '', random.randrange(3)
  messages, letters = [{'role': 'user', 'content': f'seed {row["seed"]}'}], 0
  async with openai.AsyncOpenAI(base_url=base_url, api_key='none', max_retries=2) as client:
    for turn in range(3):
      if turn == at and fate == 'die':
        os.kill(os.getpid(), signal.SIGKILL)
      if turn == at and fate == 'hang up':
        with contextlib.suppress(openai.APITimeoutError):
          await client.with_options(timeout=0.03, max_retries=0).chat.completions.create(
            model='m', messages=messages, tools=[TOOL]
          )
      if turn == 1:
        async with client.chat.completions.stream(model='m', messages=messages, tools=[TOOL]) as stream:
          message = (await stream.get_final_completion()).choices[0].message
      else:
        message = (await client.chat.completions.create(model='m', messages=messages, tools=[TOOL])).choices[0].message
      letters += len(message.content or '')
      messages += [message.model_dump(exclude_none=True), {'role': 'user', 'content': 'on'}]
  return {'reward': letters / 100, 'metrics': {'letters': letters}}
