"""python -m sprl.sft --config=FILE --out=FOLDER [--steps=200] [--batch=32] [--learning_rate=1e-4] [--config.key=value ...]

Supervised fine-tuning before reinforcement learning. Fine-tunes all weights of a run's model on worked solutions of its training
problems, so that reinforcement learning starts from a model that answers in the expected form. Writes a Hugging Face folder in
float32; pass it to the run as `--config.model.path=FOLDER`. The solution is GSM8K's worked text, the `solution` of a JSONL line
or of a data set's columns, the last message of the assistant, or else the answer; a token that ends the turn follows it.

The last line printed is JSON. The exit status is 2, with a line that gives the reason, if settings or files cannot be used.
"""

import dataclasses
import itertools
import json
import logging
import math
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
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import config_flags

from sprl import command_line
from sprl.config import Lora, Optimizer, Remat, Rollout, Run, SettingsError
from sprl.config_checks import require
from sprl.config_reader import resolve
from sprl.distributed.process_group import require_single_process
from sprl.guards.stop import MAX_BAD_UPDATES
from sprl.io.files import local_folder
from sprl.learner.batch import TrainBatch, pack, put, shape
from sprl.learner.copies import with_copies
from sprl.learner.logprobs import ForwardConfig, copies_for, micro_logprobs
from sprl.learner.optimizer import make_optimizer
from sprl.learner.restore import export
from sprl.learner.state import TrainState, abstract_state, guarded_step
from sprl.learner.update import accumulate
from sprl.model import Model, abstract_params
from sprl.planning.remat import decided
from sprl.rollout import collect
from sprl.sharding.rules import OnMesh, row_shards, tie_to_iteration, token_shards
from sprl.tasks import problems
from sprl.tasks.problems import Problem
from sprl.tasks.prompts import Mix, PromptStream
from sprl.types import Trajectory

log = logging.getLogger(__name__)

SHOWN_EVERY = 10  # steps between two lines of progress, when losses are read back
PATIENCE = 1000  # consecutive problems that do not fit, after which the search ends
KINDS = (*problems.SOURCES, 'mixture')  # of tasks that have solutions


def fine_tune(
  run: Run, out: Path, *, steps: int, batch: int, learning_rate: float, show: Callable[[str], None] = print
) -> dict[str, Any]:
  """Take `steps` steps on `batch` solutions each and write the model to `out`, a folder that appears when it is complete.

  Returns {out, steps, loss_first, loss_last, skipped, seconds}. The losses are the losses of the first and the last batch, in
  nats per token, each before its step. `skipped` counts, in each epoch, the problems whose prompt is too long, or whose
  solution is too long or empty. On one machine, equal settings give equal weights.

  Raises SettingsError, and the errors of `Model.open`, before any device work; SettingsError if losses or
  gradients are not finite.
  """
  start = time.perf_counter()
  require(run, 'task.kind', run.task.kind in KINDS, f'one of {", ".join(KINDS)}, whose problems have answers to learn')
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise SettingsError(f'--out = {out}: exists and is not empty; expected a new folder')
  train_set = problems.load(run.task, 'train')
  model = Model.open(dataclasses.replace(run, lora=Lora()))
  model = dataclasses.replace(model, param_dtype=jnp.dtype('float32'))
  packing = dataclasses.replace(run.packing, share_prefix=False)
  asked, mesh = Rollout(prompts=batch, group=1), model.mesh
  sizes = shape(run.sampling, asked, packing, minibatches=1, shards=row_shards(mesh), parts=token_shards(mesh))
  solutions = SolutionStream(run, model, train_set, batch)
  first = solutions.take(batch)  # before the weights are read, so that unusable problems are found early

  settings = Optimizer(learning_rate=learning_rate, schedule='linear', warmup_steps=steps // 10, weight_decay=0.0)
  optimizer = make_optimizer(settings, steps)
  shardings = jax.tree.map(lambda a: a.sharding, abstract_state(abstract_params(model), optimizer))
  state = jax.device_put(TrainState.create(model.load(), optimizer), shardings)
  forward = ForwardConfig(1.0, model.dtype, packing.score_chunk, model.kernels)
  own = Run(
    model=dataclasses.replace(run.model, param_dtype='float32', router_replay='none'), packing=packing, optimizer=settings
  )
  remat = decided(own, model, sizes).model.remat  # the run's other settings concern reinforcement learning only
  assert remat != 'auto'
  update = make_update(model.graphdef, optimizer, forward, remat, model.mesh)

  losses: list[float] = []
  unread: list[Float[Array, '']] = []  # losses on the device
  tokens, since = 0, time.perf_counter()
  for step in range(1, steps + 1):
    taken = first if step == 1 else solutions.take(batch)
    packed, metrics = pack(taken, np.ones(batch, np.float32), sizes, share_prefix=False)
    state, loss = update(state, put(packed, model.mesh))
    unread.append(loss)
    tokens += int(metrics['packing/tokens'])
    if step == 1 or step % SHOWN_EVERY == 0 or step == steps:
      found, bad_streak = jax.device_get((unread, state.bad_streak))
      losses += map(float, found)
      unread = []
      check_finite(losses, int(bad_streak), learning_rate, run)
      now = time.perf_counter()
      show(f'step {step:{len(str(steps))}d}/{steps}  loss {losses[-1]:7.4f}  {tokens / (now - since):8,.0f} tokens/s')
      tokens, since = 0, now

  export(model, state.params, out, 'float32')
  return {
    'out': str(out),
    'steps': steps,
    'loss_first': losses[0],
    'loss_last': losses[-1],
    'skipped': solutions.skipped,
    'seconds': round(time.perf_counter() - start, 2),
  }


# --- problems to trajectories ----------------------------------------------------------------------------------------


class SolutionStream:
  """An endless stream of solved problems; the seed fixes their order. Problems that do not fit are skipped and counted.

  `batch` is the number of problems per step, by which a mixture counts the steps of its weights.
  """

  def __init__(self, run: Run, model: Model, train_set: Sequence[Problem], batch: int = 1):
    self.skipped = 0
    self._sampling, self._tokenizer = run.sampling, model.tokenizer
    self._end = end_of_turn(run, model)
    stream = PromptStream(train_set, run.seed, Mix.of(run.task, train_set, batch))
    # Between the only problem that fits at the start of one epoch and at the end of the next are 2 * (len - 1) others.
    self._stream = self._fitting(stream, min(PATIENCE, 2 * len(train_set) - 1))

  def take(self, n: int) -> list[Trajectory]:
    """Return the next n trajectories.

    Raises SettingsError, which names the setting, if no problem of two epochs fits, or none of PATIENCE in a row.
    """
    return list(itertools.islice(self._stream, n))

  def _fitting(self, stream: PromptStream, patience: int) -> Iterator[Trajectory]:
    skipped = 0  # in a row
    while True:
      [problem] = stream.next(1)
      prompt = collect.encode(problem, self._tokenizer)
      solution = self._tokenizer.encode(solution_of(problem))
      if reason := self._obstacle(problem, len(prompt), len(solution)):
        skipped, self.skipped = skipped + 1, self.skipped + 1
        if skipped == patience:
          raise SettingsError(f'{reason}. None of {patience} training problems in a row can be used.')
        if self.skipped == 1:
          log.warning('%s. This problem and others like it are skipped; their number is reported at the end.', reason)
        continue
      skipped = 0
      yield solution_trajectory(prompt, [*solution, self._end])

  def _obstacle(self, problem: Problem, prompt: int, solution: int) -> str | None:
    """Return the reason to skip a problem with these numbers of tokens; None if it fits."""
    if not solution:
      return f'config.task: the solution of {problem.id} is empty'
    for name, room, needed in (
      ('max_prompt', self._sampling.max_prompt, prompt),
      ('max_tokens', self._sampling.max_tokens, solution + 1),
    ):
      if needed > room:
        part = 'prompt' if name == 'max_prompt' else 'solution with its end of turn'
        return f'config.sampling.{name} = {room}: expected at least {needed}, the tokens of the {part} of {problem.id}'
    return None


def check_finite(losses: Sequence[float], bad_streak: int, learning_rate: float, run: Run) -> None:
  """Raise SettingsError if a loss is not finite, or the gradients of the last updates. The first loss is that of the model.

  `bad_streak` is the number of last updates that were skipped, because their loss or gradient was not finite.
  """
  wrong = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
  if wrong == 1 or bad_streak == len(losses):  # no update has changed the weights
    raise SettingsError(
      f'config.model.path = {run.model.path!r}: loss or gradient of its weights is not finite; expected undamaged weights, and a '
      f'config.model.dtype (now {run.model.dtype!r}) with the range of their numbers'
    )
  if wrong is not None:
    raise SettingsError(
      f'--learning_rate = {learning_rate:g}: the loss is no longer finite at step {wrong}; expected a lower one'
    )
  if bad_streak >= MAX_BAD_UPDATES:
    raise SettingsError(
      f'--learning_rate = {learning_rate:g}: the gradients of the {bad_streak} updates up to step {len(losses)} are not finite; '
      'expected a lower one'
    )


def solution_of(problem: Problem) -> str:
  """Return the worked solution if the source has one, else the bare answer."""
  return problem.extra.get('solution', problem.answer)


def end_of_turn(run: Run, model: Model) -> int:
  """Return the token that follows a solution.

  It is the token with which the chat template ends an answer, if the sampler stops at it. Otherwise, and without a chat template,
  it is the first end token of the model's files or of config.sampling.stop_ids. Raises SettingsError if there is none.
  """
  tokenizer, sampling = model.tokenizer, run.sampling
  named = (*tokenizer.eos_ids, *model.config.eos_token_ids, *sampling.stop_ids)
  if run.task.chat:
    answer = 'the answer'
    messages = [{'role': 'user', 'content': 'a question'}, {'role': 'assistant', 'content': answer}]
    tail = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False).rpartition(answer)[2])
    if tail and (tail[0] in named or tokenizer.decode(tail[:1]) in sampling.stop):
      return tail[0]
  if not named:
    raise SettingsError(
      "config.sampling.stop_ids = (): expected the id of the token that ends an answer; the model's files name none"
    )
  return named[0]


def solution_trajectory(prompt: Sequence[int] | np.ndarray, solution: Sequence[int]) -> Trajectory:
  """Return a trajectory whose mask covers the solution's tokens only, as if the model had written them."""
  P, T = len(prompt), len(prompt) + len(solution)
  zeros = np.zeros(T, np.int32)
  return Trajectory(
    uid=0,
    group=0,
    tokens=np.concatenate([prompt, solution]).astype(np.int32),
    mask=np.arange(T) >= P,
    sampler_logp=np.zeros(T, np.float32),
    version=zeros,
    attended=zeros,
    prompt_length=P,
    finish='stop',
  )


# --- the update ------------------------------------------------------------------------------------------------------


def make_update(
  graphdef: nnx.GraphDef,
  optimizer: optax.GradientTransformationExtraArgs,
  config: ForwardConfig,
  remat: Remat,
  mesh: Mesh | None = None,
) -> OnMesh:
  """Return the jitted update(state, batch) -> (state, loss) on a mesh; `state` is donated.

  The loss is the mean of -log p over the tokens in the batch's mask, in nats, before the step.
  """
  return OnMesh(jax.jit(partial(_update, graphdef, optimizer, config, remat), donate_argnums=0), mesh)


def _update(graphdef, optimizer, config: ForwardConfig, remat: Remat, state: TrainState, batch: TrainBatch):
  copies = copies_for(state.params, batch, config)

  def micro_loss(params, i):
    logp, *_ = micro_logprobs(graphdef, with_copies(params, tie_to_iteration(copies, i)), batch, i, config, remat)
    return -jnp.sum(logp) / jnp.sum(batch.mask), ()

  loss, gradient, _ = accumulate(micro_loss, state.params, batch.used)
  state, metrics = guarded_step(state, optimizer, gradient, loss, batch.used)
  return state, metrics['update/loss']


# --- the command -----------------------------------------------------------------------------------------------------


def define_flags(argv: list[str]) -> None:
  """Define the flags of the command. Not at import, so that other commands can use the module's functions."""
  config_flags.DEFINE_config_file(
    'config', None, 'The config: a Python file with get_config(). `file.py:argument` passes it an argument.'
  )
  flags.DEFINE_string('out', None, 'The folder to write.', required=True)
  flags.DEFINE_integer('steps', 200, 'Updates.', lower_bound=1)
  flags.DEFINE_integer('batch', 32, 'Solutions per update.', lower_bound=1)
  flags.DEFINE_float(
    'learning_rate', 1e-4, 'Peak learning rate, reached after a tenth of the steps; then linear to 0.', lower_bound=0.0
  )
  flags.mark_flag_as_required('config')


def main() -> int:
  """Fine-tune as the flags say, and print the result as JSON."""
  given: Any = flags.FLAGS
  run, show = resolve(given.config, command_line.settings_of_flags()), partial(print, flush=True)
  require_single_process('sprl.sft')
  result = fine_tune(
    run, local_folder('--out', given.out), steps=given.steps, batch=given.batch, learning_rate=given.learning_rate, show=show
  )
  print(json.dumps(result))
  return 0


if __name__ == '__main__':
  command_line.start(main, define_flags)
