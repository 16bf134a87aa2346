"""A sampler: one way to sample from a loaded model, with its cache, number format and limits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sprl.api.inputs import listed
from sprl.api.rollouts import Rollouts, Sample, describe
from sprl.api.settings import Settings
from sprl.config import Run, SettingsError
from sprl.kernels.support import record_format
from sprl.model import Model
from sprl.planning.room import check_caches_fit
from sprl.rollout import collect
from sprl.rollout.setup import place_engines
from sprl.sampler import calibrate
from sprl.sampler.engine import generate
from sprl.tasks import in_memory
from sprl.tasks.problems import Problem
from sprl.types import Request, Trajectory

if TYPE_CHECKING:
  from sprl.api.loaded import LoadedModel


@dataclass(frozen=True)
class Sampler:
  """Samples from the newest weights of a loaded model. Made by `LoadedModel.sampler`."""

  loaded: 'LoadedModel'
  settings: Settings
  run: Run
  model: Model

  def generate(
    self,
    prompts: Iterable[str | Mapping[str, Any]],
    samples: int | np.integer = 1,
    *,
    greedy: bool = False,
    evictions: bool = False,
  ) -> Rollouts:
    """Sample completions.

    The random numbers depend on the seed of the settings, the number of updates, the number of a sample and the position of a
    token. So a second call with the same weights gives the same samples.

    Args:
      prompts: questions, or rows as `sprl.fit` takes them. With task.chat, a question is a message to the chat template.
      samples: completions of each prompt.
      greedy: take the most likely token each time. Such rollouts cannot be trained on.
      evictions: record when each token was evicted, for `Sample.visible`. A dense cache evicts nothing and records nothing.

    Raises SettingsError for one text in place of a list, for `samples` that is not a whole number above 0, if a prompt has no
    token or more than sampling.max_prompt, and if the caches do not fit into memory. An empty text usually has tokens: those of
    the chat template, or the one that begins a text.
    """
    prompts = listed('prompts', prompts, 'prompts')
    if isinstance(samples, bool) or not isinstance(samples, int | np.integer) or samples < 1:
      raise SettingsError(f'samples = {samples!r}: expected a whole number above 0')
    run, loaded, samples = self.run, self.loaded, int(samples)
    run = replace(run, rollout=replace(run.rollout, prompts=len(prompts), group=samples))
    asked = list(in_memory.load(run.task, [{'prompt': p} if isinstance(p, str) else p for p in prompts], 'prompts'))
    ids = [collect.encode(problem, self.model.tokenizer) for problem in asked]
    collect.check_lengths((collect.Length(i, len(x), asked[i].id) for i, x in enumerate(ids)), run.sampling.max_prompt)

    sampling = replace(run.sampling, temperature=0.0, top_k=None, top_p=1.0, min_p=0.0) if greedy else run.sampling
    run = replace(run, sampling=sampling)
    record = evictions or run.masked_learner
    layout = self.model.cache_layout(sampling, run.cache, run.quant, record, run.model.router_replay == 'R3')
    check_caches_fit(run, layout, self.model.engine_meshes[:1])
    placed = place_engines(run, self.model, layout)[0]
    placed = replace(placed, config=replace(placed.config, record_support=recordable(run, self.model)))
    scales = None
    if layout.fp8:
      found = calibrate.amax_of_prompts(self.model.graphdef, layout, loaded.params, ids, run.prefill, run.quant, self.model.mesh)
      scales = calibrate.scales((found,), run.quant, layout, loaded.params)
    weights = placed.place(self.model.sampler_weights(loaded.params, run.quant, scales))
    requests = [
      Request(g * samples + n, g, x, sampling.max_tokens, attempt=loaded.version)  # other random numbers after an update
      for g, x in enumerate(ids)
      for n in range(samples)
    ]
    drawn = generate(placed.config, weights, requests, loaded.version)
    made = tuple(self._sample(asked[t.group], t) for t in drawn)
    return Rollouts(made, self.settings, run, placed.config, scales, loaded.version, greedy)

  def _sample(self, problem: Problem, trajectory: Trajectory) -> Sample:
    decode = self.model.tokenizer.decode
    text = decode(trajectory.completion.tolist(), skip_special=True)
    pieces = tuple(decode([token], skip_special=False) for token in trajectory.tokens.tolist())
    return Sample(problem, text, pieces, trajectory, self.model.config.sliding_windows)

  def __repr__(self) -> str:
    return f'Sampler: {describe(self.run)}, at most {self.run.sampling.max_tokens} tokens, of {self.loaded!r}'


def recordable(run: Run, model: Model) -> bool:
  """Return whether the tokens that the filters keep can be recorded, which training needs."""
  try:
    record_format(run.sampling, model.config.vocab_size)
  except SettingsError:
    return False
  return True
