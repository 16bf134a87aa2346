"""python -m sprl.warmstart --config=FILE --out=FOLDER [--steps=200] [--batch=32] [--learning_rate=1e-4] [--config.key=value ...]

Fine-tunes a run's model, all of its weights, on worked solutions of its training problems, so that reinforcement learning
begins with a model that answers in their form, and writes it as a Hugging Face folder in float32: `--config.model.path=FOLDER`
of the run takes it. The solution is GSM8K's worked text, a JSONL line's `solution`, or else the answer; a token that ends the
turn follows it. The last line printed is JSON. The exit status is 2, with a line that says why, for settings or files that
cannot be used.
"""

import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import nnx
from jaxtyping import Array, Float
from ml_collections import config_flags

from sprl import command_line
from sprl.learner.packing import TrainBatch, pack, shape
from sprl.learner.score import micro_logprobs
from sprl.learner.state import TrainState, make_optimizer
from sprl.parallel.processes import only_one
from sprl.parallel.rules import OnMesh, anew, row_shards
from sprl.policy import Policy, abstract_state
from sprl.rollout import collect
from sprl.saved import export
from sprl.settings import Kernels, Lora, Optimizer, Remat, Rollout, Run, SettingsError, resolve
from sprl.tasks import problems
from sprl.tasks.problems import Problem
from sprl.tasks.prompts import PromptStream
from sprl.trajectory import Trajectory

log = logging.getLogger(__name__)

SHOWN_EVERY = 10  # steps between two lines of progress, which are also when the losses are looked at
PATIENCE = 1000  # problems left out in a row, after which no more are tried


def warm_start(
  run: Run, out: Path, steps: int, batch: int, learning_rate: float, show: Callable[[str], None] = print
) -> dict[str, Any]:
  """Takes `steps` steps on `batch` solutions each, and writes the model to `out`, which appears whole or not at all.

  {out, steps, loss_first, loss_last, skipped, seconds}: the losses are those of the first and the last batch, each before its
  step; `skipped` problems had a prompt or solution too long, or none. On one machine, equal settings give equal weights.

  Raises SettingsError and what `Policy.open` raises before any device work; SettingsError where the loss is not finite.
  """
  start = time.perf_counter()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise SettingsError(f'--out = {out}: exists and is not empty; expected a new folder')
  train_set = problems.load(run.task, 'train')
  policy = Policy.open(dataclasses.replace(run, lora=Lora()))
  policy = dataclasses.replace(policy, param_dtype=jnp.dtype('float32'))
  packing = dataclasses.replace(run.packing, share_prefix=False)
  sizes = shape(run.sampling, Rollout(prompts=batch, group=1), packing, minibatches=1, shards=row_shards(policy.mesh))
  lessons = Lessons(run, policy, train_set)
  first = lessons.take(batch)  # what cannot be learned from is found before the weights are read

  settings = Optimizer(learning_rate=learning_rate, schedule='linear', warmup_steps=steps // 10, weight_decay=0.0)
  optimizer = make_optimizer(settings, steps)
  shardings = jax.tree.map(lambda a: a.sharding, abstract_state(policy, optimizer))
  state = jax.device_put(TrainState.create(policy.load(), optimizer), shardings)
  update = make_update(policy.graphdef, optimizer, policy.dtype, packing.score_chunk, run.model.remat, policy.kernels)

  losses: list[float] = []
  unseen: list[Float[Array, '']] = []  # losses still on the device
  tokens, since = 0, time.perf_counter()
  for step in range(1, steps + 1):
    packed, metrics = pack(first if step == 1 else lessons.take(batch), np.ones(batch, np.float32), sizes, share_prefix=False)
    state, loss = update(state, policy.put(packed))
    unseen.append(loss)
    tokens += int(metrics['packing/tokens'])
    if step == 1 or step % SHOWN_EVERY == 0 or step == steps:
      losses += [float(x) for x in jax.device_get(unseen)]
      unseen = []
      if not np.isfinite(losses).all():
        raise SettingsError(
          f'--learning_rate = {learning_rate:g}: the loss is no longer finite at step {step}; expected a lower one'
        )
      now = time.perf_counter()
      show(f'step {step:{len(str(steps))}d}/{steps}  loss {losses[-1]:7.4f}  {tokens / (now - since):8,.0f} tokens/s')
      tokens, since = 0, now

  export(policy, state.params, out, 'float32')
  return {
    'out': str(out),
    'steps': steps,
    'loss_first': losses[0],
    'loss_last': losses[-1],
    'skipped': lessons.skipped,
    'seconds': round(time.perf_counter() - start, 2),
  }


# --- problems to what is learned from them ---------------------------------------------------------------------------


class Lessons:
  """An endless stream of solved problems in the order that the seed fixes, those left out that the settings have no room for."""

  def __init__(self, run: Run, policy: Policy, train_set: Sequence[Problem]):
    self.skipped = 0
    self._sampling, self._tokenizer = run.sampling, policy.tokenizer
    self._end = end_of_turn(run, policy)
    self._stream = self._fitting(PromptStream(train_set, run.seed), min(PATIENCE, len(train_set)))

  def take(self, n: int) -> list[Trajectory]:
    """The next n. Raises SettingsError where problem after problem has no room, naming the setting."""
    return list(itertools.islice(self._stream, n))

  def _fitting(self, stream: PromptStream, patience: int) -> Iterator[Trajectory]:
    left_out = 0  # in a row
    while True:
      [problem] = stream.next(1)
      prompt = collect.encode(problem, self._tokenizer)
      solution = self._tokenizer.encode(solution_of(problem))
      if reason := self._obstacle(problem, len(prompt), len(solution)):
        left_out, self.skipped = left_out + 1, self.skipped + 1
        if left_out == patience:
          raise SettingsError(f'{reason}; so it is with all of {patience} training problems tried one after the other')
        if self.skipped == 1:
          log.warning('%s; this problem and others like it are left out (their number is told at the end)', reason)
        continue
      left_out = 0
      yield lesson(prompt, [*solution, self._end])

  def _obstacle(self, problem: Problem, prompt: int, solution: int) -> str | None:
    """Why nothing can be learned from a problem of so many tokens; None if it can."""
    if not solution:
      return f'config.task: {problem.id} has no answer to learn'
    for name, room, needed in (
      ('max_prompt', self._sampling.max_prompt, prompt),
      ('max_tokens', self._sampling.max_tokens, solution + 1),
    ):
      if needed > room:
        what = 'prompt' if name == 'max_prompt' else 'solution, its end included,'
        return f'config.sampling.{name} = {room}: the {what} of {problem.id} has {needed} tokens; expected room for them'
    return None


def solution_of(problem: Problem) -> str:
  """The worked solution where the source has one, else the bare answer."""
  return problem.extra.get('solution', problem.answer)


def end_of_turn(run: Run, policy: Policy) -> int:
  """The token that follows a solution: the one that the chat template ends an answer with, if the sampler stops at it.

  Otherwise, and without a chat, the first that the model's files or config.sampling.stop_ids name. Raises SettingsError: none.
  """
  tokenizer, sampling = policy.tokenizer, run.sampling
  named = (*tokenizer.eos_ids, *policy.config.eos_token_ids, *sampling.stop_ids)
  if run.task.chat:
    answer = 'the answer'
    messages = [{'role': 'user', 'content': 'a question'}, {'role': 'assistant', 'content': answer}]
    tail = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False).rpartition(answer)[2])
    if tail and (tail[0] in named or tokenizer.decode(tail[:1]) in sampling.stop):
      return tail[0]
  if not named:
    raise SettingsError(
      'config.sampling.stop_ids = (): the files of the model name no token that ends an answer; expected one here'
    )
  return named[0]


def lesson(prompt: Sequence[int] | np.ndarray, solution: Sequence[int]) -> Trajectory:
  """The solution as if the model had written it: only its tokens are in the mask."""
  P, T = len(prompt), len(prompt) + len(solution)
  nothing = np.zeros(T, np.int32)
  return Trajectory(
    uid=0,
    group=0,
    tokens=np.concatenate([prompt, solution]).astype(np.int32),
    mask=np.arange(T) >= P,
    sampler_logp=np.zeros(T, np.float32),
    version=nothing,
    kept=nothing,
    prompt_length=P,
    finish='stop',
  )


# --- the update ------------------------------------------------------------------------------------------------------


def make_update(
  graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, dtype, chunk: int, remat: Remat, kernels: Kernels = 'auto'
) -> Callable:
  """update(state, batch) -> (state, loss), jitted; `state` is donated.

  The loss is the mean of -log p over the batch's masked tokens, before the step.
  """
  return OnMesh(jax.jit(partial(_update, graphdef, optimizer, dtype, chunk, remat, kernels), donate_argnums=0))


def _update(graphdef, optimizer, dtype, chunk: int, remat: Remat, kernels: Kernels, state: TrainState, batch: TrainBatch):
  def micro_loss(params, i):
    logp, *_ = micro_logprobs(graphdef, params, batch, i, 1.0, dtype, chunk, remat, kernels)
    return -jnp.sum(logp) / jnp.sum(batch.mask)

  def accumulate(i, carry):
    return jax.tree.map(jnp.add, carry, jax.value_and_grad(micro_loss)(anew(state.params, i), i))

  zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
  loss, grads = jax.lax.fori_loop(0, batch.used, accumulate, zero)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return dataclasses.replace(state, params=params, opt_state=opt_state, version=state.version + 1), loss


# --- the command -----------------------------------------------------------------------------------------------------


def define_flags(argv: list[str]) -> None:
  """The command's flags; not at import, for the module's functions are of use beside other commands."""
  config_flags.DEFINE_config_file('config', None, 'The run: a Python file with get_config(), `file.py:argument` to pass it one.')
  flags.DEFINE_string('out', None, 'The folder to write.', required=True)
  flags.DEFINE_integer('steps', 200, 'Updates.', lower_bound=1)
  flags.DEFINE_integer('batch', 32, 'Solutions an update.', lower_bound=1)
  flags.DEFINE_float(
    'learning_rate', 1e-4, 'Its peak: up to it over the first tenth of the steps, then down to 0.', lower_bound=0.0
  )
  flags.mark_flag_as_required('config')


def main() -> int:
  """Flags to a model folder."""
  given: Any = flags.FLAGS
  run, show = resolve(given.config), partial(print, flush=True)
  only_one('sprl.warmstart')
  result = warm_start(run, Path(given.out), given.steps, given.batch, given.learning_rate, show)
  print(json.dumps(result))
  return 0


if __name__ == '__main__':
  command_line.start(main, define_flags)
