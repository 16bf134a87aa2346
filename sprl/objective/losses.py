"""Policy losses, the KL penalty, and the aggregation of tokens into one number (async_rollouts 7, fp8_rollouts 4.4).

Three log-probs of a token: l (the weights being trained, differentiated), p = old_logp (dense, before this update) and
b = sampler_logp (what really drew it). The correction's mode says which ratio a variant sees, the same for every variant:

  decoupled   r = exp(l - p), and the loss is multiplied by w, the correction for p against b
  bypass      r = exp(l - b), which corrects already, so no w; `reinforce` alone has no ratio of its own and keeps its w

so that the gap between sampler and learner is paid for exactly once. Every ratio is exp of a log clamped to +-20.

For `exact on-policy` sequences, whose whole generation used the weights being trained, hand over p (in bypass mode b) as
stop_gradient(l): the ratio is then 1 and its gradient that of l.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sprl.objective.correction import pooled
from sprl.objective.masked import bounded_exp, k3
from sprl.settings import Loss

sg = jax.lax.stop_gradient


class Tokens(NamedTuple):
  """What a variant is a function of, over [B, T]. Only l carries a gradient."""

  l: Float[Array, 'B T']  # log-prob under the weights being trained
  reference: Float[Array, 'B T']  # p or b, the ratio's denominator
  A: Float[Array, 'B T']
  weight: Float[Array, 'B T']  # w, or 1 where the mode has none
  reward: Float[Array, 'B 1']
  mask: Bool[Array, 'B T']  # what the model wrote

  @property
  def log_r(self) -> Float[Array, 'B T']:
    """The token's log ratio, differentiable."""
    return self.l - self.reference


class Facts(NamedTuple):
  """What the policy metrics are made of, over [B, T]. Detached."""

  log_ratio: Float[Array, 'B T']  # the log ratio that the loss used, at its level
  clipped: Bool[Array, 'B T']  # whether a bound took effect on the token's loss


# --- one function a variant: tokens, settings -> loss of each token, its log ratio, whether a bound took effect -----------


def _ppo(t: Tokens, s: Loss, level: str = 'token'):
  log_r = pooled(t.log_r, t.mask, level)
  r = bounded_exp(log_r)
  free, held = -r * t.A, -_clipped(r, s) * t.A
  loss = jnp.maximum(free, held)
  bound = held > free
  if s.dual_clip > 0:
    worst = -s.dual_clip * t.A
    bound |= (t.A < 0) & (loss > worst)
    loss = jnp.where(t.A < 0, jnp.minimum(loss, worst), loss)
  return loss, log_r, bound


def _gspo(t: Tokens, s: Loss):
  return _ppo(t, s, 'geometric')


def _segment(t: Tokens, s: Loss):
  return _ppo(t, s, 'segment')


def _vanilla(t: Tokens, s: Loss):
  return -t.A * t.l, t.log_r, _never(t)


def _tis(t: Tokens, s: Loss):
  r = bounded_exp(t.log_r)
  return -sg(jnp.clip(r, s.tis_low, s.tis_high)) * t.A * t.l, t.log_r, (r < s.tis_low) | (r > s.tis_high)


def _topr(t: Tokens, s: Loss):
  r = bounded_exp(t.log_r)
  good = t.reward > 0  # the raw reward decides, not the advantage
  coefficient = jnp.where(good, s.topr_positive, s.topr_negative * jnp.clip(r, 0, 1))
  return -sg(coefficient) * t.A * t.l, t.log_r, ~good & (r > 1)


def _cispo(t: Tokens, s: Loss):
  r = bounded_exp(t.log_r)
  loss = -sg(_clipped(r, s)) * t.A * t.l
  if s.cispo_mask:
    left = ((t.A > 0) & (r > 1 + s.clip_high)) | ((t.A < 0) & (r < 1 - s.clip_low))
    loss = jnp.where(left, 0, loss)
  return loss, t.log_r, _clipped(r, s) != r


def _kimi15(t: Tokens, s: Loss):
  return -t.A * t.l + s.kimi_tau / 2 * t.log_r**2, t.log_r, _never(t)


def _dppo_kl(t: Tokens, s: Loss):
  moved = jnp.exp(t.l) - jnp.exp(t.reference)  # P - q
  left = ((t.A > 0) & (moved > s.dppo_delta)) | ((t.A < 0) & (moved < -s.dppo_delta))
  kept = jnp.where(left, 0, -t.A * bounded_exp(t.log_r))
  return kept + s.dppo_penalty * t.log_r**2, t.log_r, left


def _clipped(r, s):
  return jnp.clip(r, 1 - s.clip_low, 1 + s.clip_high)


def _never(t):
  return jnp.zeros_like(t.mask)


VARIANTS: dict[str, Callable] = {
  'vanilla': _vanilla,
  'reinforce': _vanilla,  # apart only in bypass mode, where it keeps its weight
  'ppo': _ppo,
  'decoupled_ppo': _ppo,  # ppo that insists on decoupled mode; AReaL's cap on w is the correction preset `areal`
  'gspo': _gspo,
  'segment': _segment,
  'tis': _tis,
  'topr': _topr,
  'cispo': _cispo,
  'kimi15': _kimi15,
  'dppo_kl': _dppo_kl,
}


def weighted(settings: Loss, correction_mode: str) -> bool:
  """Whether w is all that corrects for who sampled; if not, the variant's own ratio is to the sampler's log-probs.

  `vanilla` has none, which is why settings refuse it in bypass mode where rollouts run ahead.
  """
  return correction_mode == 'decoupled' or settings.variant == 'reinforce'


def token_loss(
  logp: Float[Array, 'B T'],
  old_logp: Float[Array, 'B T'],
  sampler_logp: Float[Array, 'B T'],
  advantage: Float[Array, 'B T'],
  reward: Float[Array, ' B'],
  weight: Float[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  settings: Loss,
  correction_mode: str,
) -> tuple[Float[Array, 'B T'], Facts]:
  """The loss of each token, 0 outside the mask, differentiable in `logp` alone.

  `mask` is all that the model wrote: sequence and segment ratios are means over it, also over rejected tokens, which
  `aggregation` takes out. `weight` is `Corrected.weight`.
  """
  reference = old_logp if correction_mode == 'decoupled' else sampler_logp
  # Values outside the mask may be anything, nan too, so they go before the arithmetic: 0 * nan is nan, in gradients as well.
  l, p, A, w = (jnp.where(mask, x, 0) for x in (logp, reference, advantage, weight))
  w = w if weighted(settings, correction_mode) else mask.astype(w.dtype)
  tokens = Tokens(l, sg(p), sg(A), sg(w), sg(reward)[:, None], mask)
  loss, log_ratio, clipped = VARIANTS[settings.variant](tokens, settings)
  return jnp.where(mask, tokens.weight * loss, 0), Facts(sg(log_ratio), sg(clipped & mask))


def kl(
  logp: Float[Array, 'B T'], ref_logp: Float[Array, 'B T'], estimator: str = 'k3', clip: float = 10.0
) -> Float[Array, 'B T']:
  """Each token's estimate of KL(policy || reference), clamped to +-clip. Only logp carries a gradient.

  With u = lref - l: k1 = -u, k2 = u^2 / 2, k3 = e^u - 1 - u.
  """
  u = sg(ref_logp) - logp
  return jnp.clip({'k1': lambda u: -u, 'k2': lambda u: u**2 / 2, 'k3': k3}[estimator](u), -clip, clip)


def aggregation(
  surviving: Bool[Array, 'B T'], mask: Bool[Array, 'B T'], settings: Loss, count_rejected: bool
) -> Float[Array, 'B T']:
  """Coefficients c such that the batch's loss is sum(c * loss of each token): also summed microbatch by microbatch.

  n = surviving tokens of a row, N = rows of the batch.
    seq-mean-token-mean 1/(N n)   token-mean 1/sum(n)   seq-mean-token-sum 1/N   seq-mean-token-sum-norm 1/(N T)
  A row whose tokens were all rejected counts in N, and with all its tokens in sum(n), unless count_rejected is off.
  Rows in which the model wrote nothing are padding and count nowhere.
  """
  n = surviving.sum(axis=1)
  counted = mask.any(axis=1) if count_rejected else n > 0
  rows = jnp.maximum(counted.sum(), 1)
  match settings.aggregate:
    case 'seq-mean-token-mean':
      denominator = (rows * jnp.maximum(n, 1))[:, None]
    case 'token-mean':
      tokens = jnp.where(n > 0, n, mask.sum(axis=1) if count_rejected else 0)
      denominator = jnp.maximum(tokens.sum(), 1)
    case 'seq-mean-token-sum':
      denominator = rows
    case _:  # seq-mean-token-sum-norm
      denominator = rows * mask.shape[1]
  return surviving / denominator


def objective(
  logp: Float[Array, 'B T'],
  old_logp: Float[Array, 'B T'],
  sampler_logp: Float[Array, 'B T'],
  ref_logp: Float[Array, 'B T'] | None,
  entropy: Float[Array, 'B T'] | None,
  advantage: Float[Array, 'B T'],
  reward: Float[Array, ' B'],
  weight: Float[Array, 'B T'],
  mask: Bool[Array, 'B T'],
  coefficient: Float[Array, 'B T'],
  settings: Loss,
  correction_mode: str,
) -> tuple[Float[Array, ''], Facts]:
  """sum of coefficient * (policy loss + beta * kl - entropy_coef * entropy): one microbatch's part of the loss.

  The coefficients are `aggregation`'s, so that rejected tokens give no policy loss, no kl and no entropy bonus.
  `ref_logp` and `entropy` may be None where their coefficients are 0. The weight scales the policy loss alone.
  """
  loss, facts = token_loss(logp, old_logp, sampler_logp, advantage, reward, weight, mask, settings, correction_mode)
  if settings.kl_coef > 0:
    assert ref_logp is not None, 'loss.kl_coef is above 0: the reference log-probs are needed'
    l, ref = (jnp.where(mask, x, 0) for x in (logp, ref_logp))
    loss += settings.kl_coef * kl(l, ref, settings.kl_estimator, settings.kl_clip)
  if settings.entropy_coef > 0:
    assert entropy is not None, 'loss.entropy_coef is above 0: the entropies are needed'
    loss -= settings.entropy_coef * jnp.where(mask, entropy, 0)
  return (sg(coefficient) * loss).sum(), facts
