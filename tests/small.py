"""Small models, and rollouts of random tokens that need no sampler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sprl.models import transformer
from sprl.models.attention import PackedAttention
from sprl.models.config import tiny
from sprl.types import LogProbs, Trajectory


def model(family='llama', **changes):
  """Return (config, weights) of a tiny model. Norms and biases are random too, so that every weight changes the outputs."""
  config = tiny(family, **changes)
  params = transformer.init_params(config, jax.random.key(0), scale=0.2)
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return config, tree.unflatten([w + 0.1 * jax.random.normal(key, w.shape) for w, key in zip(leaves, keys)])


def rollouts(lengths, prompts, vocab=259, seed=0):
  """Return trajectories of random tokens. `lengths[g]` are the completion lengths of group g, `prompts[g]` its prompt length."""
  rng = np.random.default_rng(seed)
  made = []
  for g, (completions, P) in enumerate(zip(lengths, prompts)):
    prompt = rng.integers(0, vocab, P)
    for n in completions:
      mask = np.arange(P + n) >= P
      made.append(
        Trajectory(
          uid=len(made),
          group=g,
          tokens=np.concatenate([prompt, rng.integers(0, vocab, n)]).astype(np.int32),
          mask=mask,
          sampler_logp=np.where(mask, -6 * rng.random(P + n), 0).astype(np.float32),
          version=np.where(mask, 0, -1).astype(np.int32),
          attended=np.where(mask, np.arange(P + n), 0).astype(np.int32),
          prompt_length=P,
          finish='length',
          reward=float(rng.integers(0, 2)),
        )
      )
  return made


def unscored(batch):
  """Return the log-probs of a batch that the old policy has not scored: the sampler's alone."""
  return LogProbs(sampler=batch.sampler_logp)


def teacher_forced(config, params, trajectory, temperature=1.0):
  """Return log-probs [T] of a sequence's tokens, from the logits of one row. The first token has 0."""
  n = len(trajectory.tokens)
  tokens = np.pad(trajectory.tokens, (0, -n % 32))[None]  # multiples of 32: few shapes to compile
  logp = _teacher_forced(transformer.graph(config), params, jnp.asarray(tokens), jnp.arange(tokens.shape[1])[None], temperature)
  return np.concatenate([[0], logp[0, : n - 1]]).astype(np.float32)


@partial(jax.jit, static_argnames='graph')
def _teacher_forced(graph, params, tokens, positions, temperature):
  memory = PackedAttention.of(jnp.ones(tokens.shape, jnp.int32))
  hidden = transformer.forward(graph, params, tokens, positions, memory).hidden
  logp = jax.nn.log_softmax(hidden @ transformer.head_weight(params).T / temperature)
  return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], 2)[..., 0]


def rectangle(trajectories, per_token, columns):
  """Return ragged [T] arrays as one array [B, C] in the learner's layout of completions."""
  out = np.zeros((len(trajectories), columns), np.float32)
  for b, (t, x) in enumerate(zip(trajectories, per_token)):
    out[b, : len(t.completion)] = np.where(t.mask, x, 0)[t.prompt_length :]
  return out
