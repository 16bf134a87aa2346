"""A taskset of verifiers 0.4 and its harness: two turns about a letter; the reward is the share of the letter in the answers."""

import openai
import verifiers.v1 as vf

__all__ = ['LettersHarness', 'LettersTaskset']


class LettersData(vf.TaskData):
  letter: str


class LettersTask(vf.Task[LettersData]):
  @vf.reward(weight=1.0)
  async def share(self, trace: vf.Trace) -> float:
    text = ''.join(m.content or '' for m in trace.branches[-1].messages if m.role == 'assistant')
    return text.count(self.data.letter) / max(len(text), 1)

  @vf.metric
  async def letters(self, trace: vf.Trace) -> float:
    return float(sum(len(m.content or '') for m in trace.branches[-1].messages if m.role == 'assistant'))


class LettersConfig(vf.TasksetConfig):
  num_tasks: int = 8


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
  def load(self):
    letters = 'abcdefgh'[: self.config.num_tasks]
    return [LettersTask(LettersData(prompt=f'Write {letter}.', letter=letter), self.config.task) for letter in letters]


class LettersHarnessConfig(vf.HarnessConfig):
  pass


class LettersHarness(vf.Harness[LettersHarnessConfig]):
  """Runs its loop in this process, as the contract of `launch` allows."""

  APPENDS_SYSTEM_PROMPT = True
  EXECUTES_CODE = False
  NEEDS_CONTAINER = False

  async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
    messages = [{'role': 'user', 'content': data.prompt}]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
      for _ in range(2):
        response = await client.chat.completions.create(model=ctx.model, messages=messages)
        messages.append(response.choices[0].message.model_dump(exclude_none=True))
        messages.append({'role': 'user', 'content': 'Again.'})
    return vf.ProgramResult(exit_code=0, stdout='', stderr='')
