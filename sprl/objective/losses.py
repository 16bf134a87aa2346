"""Policy losses, the KL penalty and the aggregation of tokens into one number (docs/methods/losses.md, eq. 9, 10, 21 to 34).

`LogProbs` names the log-probs: `current` (the weights being trained, differentiated), `old` (dense, before this step's updates)
and `sampler` (the policy that drew the token). The mode of the correction decides the ratio of every variant:

  decoupled   r = exp(current - old), and the loss is multiplied by w, which corrects old against sampler
  bypass      r = exp(current - sampler), which corrects already, so there is no w; `reinforce` has no ratio and keeps its w

so the mismatch of sampler and learner is corrected exactly once. `tis`, `topr` and `cispo` bound the ratio to the policy that
drew the token: they are for bypass mode, and `sprl.config_checks` refuses them in decoupled mode. Every ratio is the exponential
of a log clamped to +-20.

For a sequence generated entirely by the weights being trained, pass stop_gradient(current) as the denominator: its ratio is
then 1, and the ratio has the gradient of `current`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sprl.config import Aggregate, Loss, SettingsError
from sprl.foreign import own_function
from sprl.objective.correction import pooled
from sprl.objective.masked import bounded_exp, k3
from sprl.types import LogProbs

sg = jax.lax.stop_gradient
KL_CLIP = 10.0  # bound on the KL estimate of a token
DENOMINATORS = {'decoupled': 'old', 'bypass': 'sampler'}  # correction.mode -> the policy that the ratio of a loss is to


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
  """Arguments of a loss variant. Only `logp` carries a gradient. Arrays [B, T] are 0 where the model wrote nothing."""

  logp: Float[Array, 'B T']  # under the weights being trained
  denominator: Float[Array, 'B T']  # log-prob of the policy that the ratio is to
  A: Float[Array, 'B T']  # advantage
  reward: Float[Array, 'B 1']
  mask: Bool[Array, 'B T']  # tokens that the model wrote

  @property
  def log_r(self) -> Float[Array, 'B T']:
    """The log ratio of the token, differentiable."""
    return self.logp - self.denominator


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenRatios:
  """Ratio of each token to the denominator of its loss, for the policy metrics. Without gradient."""

  log_ratio: Float[Array, 'B T']  # the log ratio that the loss used, at its level
  clipped: Bool[Array, 'B T']  # whether a bound took effect on the loss of the token


# --- variants: (tokens, settings) -> loss of each token, its log ratio, whether a bound took effect -----------------------


def _ppo(t: TokenTerms, s: Loss, level: str = 'token'):
  """Eq. 22 and 23; at level `geometric` or `segment` eq. 24."""
  log_r = pooled(t.log_r, t.mask, level)
  r = bounded_exp(log_r)
  unclipped, clipped = -r * t.A, -jnp.clip(r, *ratio_bounds(s)) * t.A
  # `where`, not `maximum`, whose gradient at equal losses is the mean of theirs: that of `clip` is halved at its bounds.
  bound = clipped > unclipped
  loss = jnp.where(bound, clipped, unclipped)
  if s.dual_clip is not None:
    worst = -s.dual_clip * t.A
    beyond = (t.A < 0) & (loss > worst)
    bound, loss = bound | beyond, jnp.where(beyond, worst, loss)
  return loss, log_r, bound


def _gspo(t: TokenTerms, s: Loss):
  return _ppo(t, s, 'geometric')


def _segment(t: TokenTerms, s: Loss):
  return _ppo(t, s, 'segment')


def _reinforce(t: TokenTerms, s: Loss):
  """Eq. 21."""
  return -t.A * t.logp, t.log_r, _never(t)


def _tis(t: TokenTerms, s: Loss):
  """Eq. 25."""
  r = bounded_exp(t.log_r)
  low, high = s.tis.low, s.tis.high
  return -sg(jnp.clip(r, low, high)) * t.A * t.logp, t.log_r, (r < low) | (r > high)


def _topr(t: TokenTerms, s: Loss):
  """Eq. 26. The raw reward decides the branch, not the advantage."""
  log_r = pooled(t.log_r, t.mask, s.topr.level)
  r = bounded_exp(log_r)
  good = t.reward > 0
  coefficient = jnp.where(good, s.topr.positive_weight, jnp.clip(r, 0, 1))
  return -sg(coefficient) * t.A * t.logp, log_r, ~good & (r > 1)


def _cispo(t: TokenTerms, s: Loss):
  """Eq. 27."""
  r = bounded_exp(t.log_r)
  bounded = jnp.clip(r, *ratio_bounds(s))
  return -sg(bounded) * t.A * t.logp, t.log_r, bounded != r


def _kimi15(t: TokenTerms, s: Loss):
  """Eq. 28."""
  return -t.A * t.logp + s.kimi15.tau / 2 * t.log_r**2, t.log_r, _never(t)


def _dppo_kl(t: TokenTerms, s: Loss):
  """Eq. 29."""
  moved = jnp.exp(t.logp) - jnp.exp(t.denominator)  # Delta: the change of the token's probability
  delta, penalty = s.dppo_kl.delta, s.dppo_kl.penalty
  left = ((t.A > 0) & (moved > delta)) | ((t.A < 0) & (moved < -delta))
  kept = jnp.where(left, 0, -t.A * bounded_exp(t.log_r))
  return kept + penalty * t.log_r**2, t.log_r, left


def ratio_bounds(s: Loss) -> tuple[float, float]:
  """Return the bounds of the clipped ratio: those of the settings, or the variant's own.

  GSPO clips a geometric mean, so its range is narrow (arXiv 2507.18071). CISPO has no lower bound (arXiv 2506.13585).
  """
  low, high = {'gspo': (3e-4, 4e-4), 'cispo': (1.0, 0.2)}.get(s.variant, (0.2, 0.2))
  return 1 - (low if s.clip_low is None else s.clip_low), 1 + (high if s.clip_high is None else s.clip_high)


def _never(t):
  return jnp.zeros_like(t.mask)


VARIANTS: dict[str, Callable] = {
  'reinforce': _reinforce,  # keeps its weight in bypass mode
  'ppo': _ppo,
  'gspo': _gspo,
  'segment': _segment,
  'tis': _tis,
  'topr': _topr,
  'cispo': _cispo,
  'kimi15': _kimi15,
  'dppo_kl': _dppo_kl,
}


def function_of(settings: Loss) -> Callable:
  """Return the function of a variant, or that of a user's file, `file.py:NAME`.

  Raises SettingsError for an unknown name, a file that does not define NAME, and a NAME that is no function.
  """
  if settings.variant in VARIANTS:
    return VARIANTS[settings.variant]
  return own_function('config.loss.variant', settings.variant, VARIANTS)


def token_loss(
  logprobs: LogProbs,
  settings: Loss,
  mode: str,
  *,
  advantage: Float[Array, 'B T'],
  reward: Float[Array, ' B'],
  weight: Float[Array, 'B T'],
  mask: Bool[Array, 'B T'],
) -> tuple[Float[Array, 'B T'], TokenRatios]:
  """Return the weighted policy loss of each token, 0 outside the mask, and its ratios. Differentiable in `current` alone.

  `mode` is correction.mode: it selects `old` or `sampler` as the denominator of the ratio. `mask` is True on all tokens that
  the model wrote: ratios of sequences and segments are means over them, rejected tokens included, which `aggregation` leaves
  out of the sum. `weight` is `TokenWeights.weight`.

  Raises ValueError for another mode, and if a log-prob that it needs is missing. Raises SettingsError if the variant's function
  returns anything but three arrays [B, T], the last one of bool.
  """
  if mode not in DENOMINATORS:
    raise ValueError(f'mode = {mode!r}: expected one of {", ".join(DENOMINATORS)}')
  other = DENOMINATORS[mode]
  denominator = getattr(logprobs, other)
  if logprobs.current is None or denominator is None:
    raise ValueError(f'LogProbs.current and .{other} in mode {mode!r}: expected arrays, got None')
  # Values outside the mask may be NaN. They are replaced before the arithmetic: 0 * NaN is NaN, in gradients as well.
  logp, denominator, A, w = (jnp.where(mask, x, 0) for x in (logprobs.current, denominator, advantage, weight))
  w = w if settings.weighted(mode) else mask.astype(w.dtype)
  tokens = TokenTerms(logp=logp, denominator=sg(denominator), A=sg(A), reward=sg(reward)[:, None], mask=mask)
  loss, log_ratio, clipped = _checked(function_of(settings)(tokens, settings), mask.shape, settings.variant)
  return jnp.where(mask, sg(w) * loss, 0), TokenRatios(log_ratio=sg(log_ratio), clipped=sg(clipped & mask & (tokens.A != 0)))


def _checked(returned: Any, shape: tuple[int, ...], variant: str) -> tuple[Array, Array, Array]:
  """Return what a variant returned. Other shapes would be broadcast to [B, T] without an error."""
  found = returned if isinstance(returned, tuple) else (returned,)
  forms = [(getattr(x, 'shape', None), getattr(x, 'dtype', None) == jnp.bool_) for x in found]
  if forms != [(shape, False), (shape, False), (shape, True)]:
    described = [f'{x.dtype}{list(x.shape)}' if hasattr(x, 'dtype') else type(x).__name__ for x in found]
    raise SettingsError(
      f'config.loss.variant = {variant!r}: its function returned {", ".join(described)}; '
      f'expected (loss, log ratio, clipped), each [B, T] = {list(shape)}, clipped of bool'
    )
  return returned


def kl(logprobs: LogProbs, estimator: str = 'k3') -> Float[Array, 'B T']:
  """Estimate KL(current || ref) of each token, clamped to 10 (eq. 30). Only `current` carries a gradient.

  With u = ref - current: k2 = u^2 / 2, k3 = e^u - 1 - u. (The gradient of k1 = -u is that of the log-prob, which is 0 in
  expectation.) Raises ValueError for another estimator, and if one of the two log-probs is missing.
  """
  if logprobs.current is None or logprobs.ref is None:
    raise ValueError('LogProbs.current and .ref: expected arrays where loss.kl_coef is above 0, got None')
  u = sg(logprobs.ref) - logprobs.current
  match estimator:
    case 'k2':
      estimate = u**2 / 2
    case 'k3':
      estimate = k3(u)
    case _:
      raise ValueError(f'estimator = {estimator!r}: expected k2 or k3')
  return jnp.minimum(estimate, KL_CLIP)


def aggregation(
  *, surviving: Bool[Array, 'B T'], mask: Bool[Array, 'B T'], prompt: Int[Array, ' B'], settings: Loss
) -> Float[Array, 'B T']:
  """Return coefficients c such that the loss of the batch is sum(c * loss of each token) (eq. 33).

  The sum may be taken microbatch by microbatch. With n the surviving tokens of a row, N the rows and P the prompts of the batch:
    seq-mean-token-mean 1/(N n)   token-mean 1/sum(n)   seq-mean-token-sum 1/N   seq-mean-token-sum-norm 1/(N T)
    prompt-mean-token-mean 1/(P sum(n over the rows of the prompt))
  `prompt` is the number of each row's prompt, 0 to B - 1. A row whose tokens were all rejected counts in N, its prompt in P, and
  all its tokens in sum(n). Rows in which the model wrote nothing are padding and count nowhere.
  """
  n = surviving.sum(axis=1)
  tokens = jnp.where(n > 0, n, mask.sum(axis=1))
  rows = jnp.maximum(mask.any(axis=1).sum(), 1)
  match settings.aggregate:
    case 'seq-mean-token-mean':
      denominator = (rows * jnp.maximum(n, 1))[:, None]
    case 'token-mean':
      denominator = jnp.maximum(tokens.sum(), 1)
    case 'prompt-mean-token-mean':
      of_prompt = jnp.zeros(len(prompt), tokens.dtype).at[prompt].add(tokens)
      prompts = jnp.maximum(jnp.sum(of_prompt > 0), 1)
      denominator = (prompts * jnp.maximum(of_prompt[prompt], 1))[:, None]
    case 'seq-mean-token-sum':
      denominator = rows
    case 'seq-mean-token-sum-norm':
      denominator = rows * mask.shape[1]
    case other:
      raise ValueError(f'settings.aggregate = {other!r}: expected one of {", ".join(get_args(Aggregate))}')
  return surviving / denominator


def objective(
  logprobs: LogProbs,
  settings: Loss,
  mode: str,
  *,
  advantage: Float[Array, 'B T'],
  reward: Float[Array, ' B'],
  weight: Float[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  coefficient: Float[Array, 'B T'],
  entropy: Float[Array, 'B T'] | None = None,
) -> tuple[Float[Array, ''], TokenRatios]:
  """Return sum(coefficient * (policy loss + kl_coef * kl - entropy_coef * entropy)), a microbatch's part of eq. 34.

  `coefficient` comes from `aggregation`: rejected tokens add no policy loss, no KL and no entropy. `weight` scales the policy
  loss alone. `logprobs.ref` and `entropy` (nats) may be None where their coefficients are 0. `mode` is correction.mode.

  Raises ValueError if a log-prob or entropy that the settings need is missing.
  """
  loss, ratios = token_loss(logprobs, settings, mode, advantage=advantage, reward=reward, weight=weight, mask=mask)
  if settings.kl_coef > 0:
    written = jax.tree.map(lambda x: jnp.where(mask, x, 0), logprobs)
    loss += settings.kl_coef * kl(written, settings.kl_estimator)
  if settings.entropy_coef > 0:
    if entropy is None:
      raise ValueError(f'entropy = None: expected an array, because loss.entropy_coef = {settings.entropy_coef}')
    loss -= settings.entropy_coef * jnp.where(mask, entropy, 0)
  return (sg(coefficient) * loss).sum(), ratios
