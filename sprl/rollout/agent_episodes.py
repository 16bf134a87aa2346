"""Episodes of agents: programs that call the model over an OpenAI-compatible endpoint (sprl/agents, docs/agents.md).

What the model wrote is never encoded again. A request whose messages begin with a known conversation (its messages, and its
answers as they were returned) goes on from the tokens of that conversation; only the messages behind it are encoded. Any other
request starts a new branch: another sequence, with a prompt of its own, or with the tokens up to the last answer that both have.

    request 1   [user]                                  branch 0   prompt | answer
    request 2   [user, answer, tool]                    branch 0   prompt | answer tool answer
    request 3   [user, answer, another message]         branch 1   prompt | (answer) message answer    ( ): not trained twice
    request 4   [other messages]                        branch 2   other prompt | answer
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sprl.agents.engine_thread import answer_of, refusal
from sprl.agents.pool import Asked, Call, Ended, Key
from sprl.agents.protocol import ChatRequest, Message, Refused, canonical
from sprl.io.tokenizer import TokenizerError
from sprl.rollout.codec import ChatCodec
from sprl.rollout.episodes import TURNS_CUT, Episode, EpisodeError, Generate, Limits, Transcript, Work, cut_off
from sprl.types import Completion, Trajectory


@dataclass
class Branch:
  """A sequence of an episode: its tokens, and the messages that they stand for."""

  number: int
  tools: Sequence[Mapping[str, Any]]
  template_args: Mapping[str, Any]
  transcript: Transcript
  messages: list[Message]  # of the last request and its answer
  answers: list[tuple[int, int]] = field(
    default_factory=list
  )  # of each answer: messages and parts of the transcript up to its end

  @property
  def drawn(self) -> int:
    """The tokens that the model wrote for this branch."""
    return sum(len(answer.tokens) for answer in self.transcript.answers)

  def known(self, request: ChatRequest) -> int:
    """Return how many answers of this branch the request repeats before its new messages."""
    if (self.tools, self.template_args) != (request.tools, request.template_args):
      return 0
    count = 0
    for messages, _ in self.answers:
      if len(request.messages) > messages and list(request.messages[:messages]) == self.messages[:messages]:
        count += 1
    return count


def agent_episode(
  row: Mapping[str, Any], limits: Limits, most: int, codec: ChatCodec, key: Key, release: Callable[[Key], None]
) -> Episode:
  """The episode of an agent. It lasts until the agent returns its reward.

  Args:
    row: the argument of the agent.
    limits: how long the episode may be: answers in all, tokens of an answer, tokens of each sequence.
    most: sequences of the episode that are trained.
    codec: turns messages into ids and back.
    key: (uid, attempt) of the episode.
    release: called once with the key at the end, also if the episode is closed early or raises.

  Raises:
    EpisodeError: the agent ended and has no answer of the model.
  """
  branches: list[Branch] = []
  newest: Branch | None = None  # the branch that was answered last
  answers = dropped = 0
  try:
    event: Asked | Ended = yield Work(Call(key, 'run', row))
    while True:
      if event.lost and newest is not None:  # no client has seen the newest answer
        dropped += take_back(newest)
      if isinstance(event, Ended):
        break
      try:
        if answers >= limits.turns:
          raise Refused(400, f'config.task.turns = {limits.turns}: the episode has no answer left', code='turn_limit_exceeded')
        branch = find(branches, event.request, codec, limits)
        room = limits.max_tokens - len(branch.transcript.given)
        asked = event.request.max_tokens or limits.turn_tokens
        if room <= 0:
          raise too_long(len(branch.transcript.prompt) + len(branch.transcript.given), limits)
      except Refused as refused:
        event = yield Work(Call(key, 'answer', refused))
        continue
      wanted = branch.transcript.prompt, branch.transcript.given, min(room, asked, limits.turn_tokens)
      completion: Completion = yield Generate(*wanted, keep=answers + 1 < limits.turns, branch=branch.number)
      answers, newest = answers + 1, branch
      prompt_ids = np.concatenate(wanted[:2]).tolist()
      answer = answer_of(codec.tokenizer, event.request, prompt_ids, completion, f'{key[0]}_{answers}')
      branch.transcript.parts.append(completion)
      branch.messages.append(canonical(answer.message, 'answer'))
      branch.answers.append((len(branch.messages), len(branch.transcript.parts)))
      event = yield Work(Call(key, 'answer', answer))
    return trajectory(branches, newest, event, most, answers, dropped, limits.turn_tokens)
  finally:
    release(key)


def find(branches: list[Branch], request: ChatRequest, codec: ChatCodec, limits: Limits) -> Branch:
  """Return the branch that the request goes on with, its new messages encoded. If none fits, a new one, added to `branches`.

  Raises Refused if the chat template refuses the messages, or if they leave no room for an answer.
  """
  encode = {'tools': request.tools, 'template_args': request.template_args}
  parent = max(branches, key=lambda branch: branch.known(request), default=None)
  count = 0 if parent is None else parent.known(request)
  try:
    if parent is None or count == 0:
      ids = np.array(codec.opening(request.messages, **encode), np.int32)
      P = limits.max_prompt  # tokens beyond the limit go to `given`
      made = Branch(len(branches), request.tools, request.template_args, Transcript(ids[:P], [ids[P:]]), list(request.messages))
    else:
      messages, parts = parent.answers[count - 1]
      answer = parent.transcript.parts[parts - 1]
      ids = answer.tokens if isinstance(answer, Completion) else answer
      reply = np.array(codec.reply(request.messages[messages:], ids.tolist(), **encode), np.int32)
      if count == len(parent.answers):
        parent.transcript.parts[parts:] = [reply]
        parent.messages[messages:] = request.messages[messages:]
        return parent
      shared = [part.tokens if isinstance(part, Completion) else part for part in parent.transcript.parts[:parts]]
      made = replace(
        parent,
        number=len(branches),
        transcript=Transcript(parent.transcript.prompt, [*shared, reply]),
        messages=list(request.messages),
        answers=parent.answers[:count],
      )
  except TokenizerError as error:
    raise refusal(error) from None
  if limits.max_tokens <= len(made.transcript.given):
    raise too_long(len(made.transcript.prompt) + len(made.transcript.given), limits)
  branches.append(made)
  return made


def too_long(tokens: int, limits: Limits) -> Refused:
  """Return the refusal of a conversation that leaves no room for an answer."""
  most = f'config.sampling.max_prompt = {limits.max_prompt} and config.sampling.max_tokens = {limits.max_tokens}'
  return Refused(400, f'the conversation has {tokens} tokens, which leaves no room: {most}', code='context_length_exceeded')


def take_back(branch: Branch) -> int:
  """Remove the newest answer of a branch. Returns the number of its tokens."""
  messages, parts = branch.answers.pop()
  lost = branch.transcript.parts[parts - 1]
  del branch.messages[messages - 1 :], branch.transcript.parts[parts - 1 :]
  return len(lost.tokens) if isinstance(lost, Completion) else 0


def trajectory(
  branches: Sequence[Branch], newest: Branch | None, end: Ended, most: int, answers: int, dropped: int, turn_tokens: int
) -> Trajectory:
  """Return the sequences of an episode: the branch that was answered last, then the longest of the others, at most `most`.

  `dropped` tokens were taken back. An answer has at most `turn_tokens`.

  Raises EpisodeError if no branch has a token of the model.
  """
  written = [branch for branch in branches if branch.drawn]
  if not written:
    raise EpisodeError('the agent ended and has no answer of the model: expected at least one request')
  order = sorted(written, key=lambda branch: (branch is not newest, -branch.drawn, branch.number))
  trained, left = order[:most], order[most:]
  main, *others = [branch.transcript.trajectory() for branch in trained]
  metrics = {
    'agent/branches': float(len(written)),
    'agent/turns': float(answers),
    'agent/tokens_dropped': float(dropped + sum(branch.drawn for branch in left)),
    'agent/cut': float(end.cut),
    TURNS_CUT: cut_off([answer for branch in written for answer in branch.transcript.answers], turn_tokens),
  }
  finish = 'length' if end.cut else 'stop'
  return replace(main, reward=end.reward, finish=finish, metrics={**end.metrics, **metrics}, branches=tuple(others))
