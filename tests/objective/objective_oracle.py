"""The formulas of docs/methods/losses.md, in loops and float64."""

import math

import numpy as np


def safe(x):
  return min(max(x, -20.0), 20.0)


def k_value(k, log_rho):
  u = safe(log_rho)
  return {'k1': u, 'k2': 0.5 * u * u, 'k3': math.exp(u) - 1.0 - u}[k]


def written(mask, b):
  return [t for t in range(mask.shape[1]) if mask[b, t]]


def segments(mask, b):
  """Return lists of positions, one for each contiguous run."""
  found, current = [], []
  for t in range(mask.shape[1]):
    if mask[b, t]:
      current.append(t)
    elif current:
      found.append(current)
      current = []
  return [*found, current] if current else found


def at_level(log_ratio, mask, level):
  out = np.zeros(mask.shape)
  for b in range(mask.shape[0]):
    ts = written(mask, b)
    groups = {
      None: [[t] for t in ts],
      'token': [[t] for t in ts],
      'segment': segments(mask, b),
      'sequence': [ts],
      'geometric': [ts],
    }[level]
    for group in groups:
      sum_ = sum(log_ratio[b, t] for t in group)
      for t in group:
        out[b, t] = sum_ if level == 'sequence' else sum_ / len(group)
  return out


# --- advantages ------------------------------------------------------------------------------------------------------


def advantages(reward, group, valid, s):
  everyone = [reward[j] for j in range(len(reward)) if valid[j]]
  out = np.zeros(len(reward))
  for i in range(len(reward)):
    if not valid[i]:
      continue
    peers = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
    others = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i] and j != i]
    if s.estimator == 'grpo':
      std = np.std(peers, ddof=1) if len(peers) > 1 else 0.0
      out[i] = (reward[i] - np.mean(peers)) / (std + 1e-6)
    elif s.estimator == 'dr_grpo':
      out[i] = reward[i] - np.mean(peers)
    elif s.estimator == 'rloo':
      out[i] = reward[i] - np.mean(others) if others else 0.0
    elif s.estimator == 'reinforce_baseline':
      out[i] = reward[i] - np.mean(everyone)
    else:
      out[i] = reward[i]
  return out


# --- correction ------------------------------------------------------------------------------------------------------


def read_bounds(option, text):
  parts = [float(p) for p in text.split(':')]
  if option.endswith('k1'):
    return (parts[0], parts[1]) if len(parts) == 2 else (1 / parts[0], parts[0])
  return -math.inf, parts[0]


def options(c):
  return {o: read_bounds(o, t) for o, t in (rule.split('=') for rule in c.reject)}


def ratio_or_value(option, statistic):
  """Return the quantity to which the bounds of an option apply: rho for k1, the statistic for the others."""
  return math.exp(statistic) if option.endswith('k1') else statistic


def statistic(option, log_rho, mask, b):
  """Return the statistic of a row: one number, or {t: number} for token options."""
  over, k = option.rsplit('_', 1)
  values = {t: k_value(k, log_rho[b, t]) for t in written(mask, b)}
  if over == 'token':
    return values
  if not values:
    return 0.0
  return {'seq_sum': sum, 'seq_mean': lambda v: sum(v) / len(v), 'seq_max': max}[over](list(values.values()))


def correct(old, roll, mask, c, micro=None):
  B, T = mask.shape
  log_rho = np.where(mask, old - roll, 0.0)
  log_raw = at_level(log_rho, mask, c.level)
  raw, applied = np.zeros((B, T)), np.zeros((B, T))
  for b in range(B):
    for t in written(mask, b):
      w = raw[b, t] = math.exp(safe(log_raw[b, t]))
      if c.level is None:
        w = 1.0
      elif c.weight == 'truncate':
        w = min(w, c.cap)
      elif c.weight == 'clip':
        w = min(max(w, c.floor), c.cap)
      elif not c.floor <= w <= c.cap:
        w = 0.0
      applied[b, t] = w
  weight, norm = applied.copy(), np.ones(B)
  if c.normalise:
    where = np.zeros(B, int) if c.normalise == 'global' else micro
    for b in range(B):
      members = [a for a in range(B) if where[a] == where[b]]
      if c.level in ('sequence', 'geometric'):
        pool = [applied[a, written(mask, a)[0]] for a in members if written(mask, a)]
      else:
        pool = [applied[a, t] for a in members for t in written(mask, a)]
      if pool and np.mean(pool) > 1e-8:
        norm[b] = np.mean(pool)
      weight[b] = applied[b] / norm[b]
  keep, survive = np.ones(B, bool), mask.copy()
  for b in range(B):
    for option, (low, high) in options(c).items():
      s = statistic(option, log_rho, mask, b)
      if isinstance(s, dict):
        for t, v in s.items():
          survive[b, t] &= low <= ratio_or_value(option, v) <= high
      else:
        keep[b] &= low <= ratio_or_value(option, s) <= high
    for t in written(mask, b):
      if c.veto is not None and math.exp(log_rho[b, t]) < c.veto:
        keep[b] = False
    if not keep[b]:
      survive[b] = False
  return {'weight': weight, 'mask': survive, 'raw': raw, 'applied': applied}


# --- losses ----------------------------------------------------------------------------------------------------------


def clip(x, low, high):
  return min(max(x, low), high)


def clipped(r, s):
  low, high = {'gspo': (3e-4, 4e-4), 'cispo': (math.inf, 0.2)}.get(s.variant, (0.2, 0.2))
  low, high = (own if given is None else given for own, given in ((low, s.clip_low), (high, s.clip_high)))
  return clip(r, 1 - low, 1 + high)


def ppo(r, A, s):
  """Return minus the objective of PPO, min(r A, clip(r) A), with the dual clip."""
  loss = -min(r * A, clipped(r, s) * A)
  if s.dual_clip is not None and A < 0:
    loss = min(loss, -s.dual_clip * A)
  return loss


def token_loss(l, old, roll, A, reward, weight, mask, s, mode, frozen=None):
  """Return the loss of each token. Factors without gradient use the log-probs `frozen`, for finite differences in l."""
  B, T = mask.shape
  frozen = l if frozen is None else frozen
  reference = old if mode == 'decoupled' else roll
  level = {'gspo': 'geometric', 'segment': 'segment', 'topr': s.topr.level}.get(s.variant, 'token')
  log_r = at_level(np.where(mask, l - reference, 0.0), mask, level)
  log_frozen = at_level(np.where(mask, frozen - reference, 0.0), mask, level)
  out = np.zeros((B, T))
  for b in range(B):
    for t in written(mask, b):
      r, still, a, lt = math.exp(safe(log_r[b, t])), math.exp(safe(log_frozen[b, t])), A[b, t], l[b, t]
      if s.variant in ('ppo', 'gspo', 'segment'):
        x = ppo(r, a, s)
      elif s.variant == 'reinforce':
        x = -a * lt
      elif s.variant == 'tis':
        x = -clip(still, s.tis.low, s.tis.high) * a * lt
      elif s.variant == 'topr':
        x = -s.topr.positive_weight * a * lt if reward[b] > 0 else -clip(still, 0, 1) * a * lt
      elif s.variant == 'cispo':
        x = -clipped(still, s) * a * lt
      elif s.variant == 'kimi15':
        x = -a * lt + s.kimi15.tau / 2 * (lt - reference[b, t]) ** 2
      elif s.variant == 'dppo_kl':
        q, p = math.exp(reference[b, t]), math.exp(frozen[b, t])
        gone = (a > 0 and p - q > s.dppo_kl.delta) or (a < 0 and p - q < -s.dppo_kl.delta)
        x = (0.0 if gone else -a * r) + s.dppo_kl.penalty * (lt - reference[b, t]) ** 2
      out[b, t] = x * (weight[b, t] if mode == 'decoupled' or s.variant == 'reinforce' else 1.0)
  return out


def kl(l, ref, estimator, bound):
  u = ref - l
  values = {'k2': u * u / 2, 'k3': np.exp(u) - 1 - u}[estimator]
  return np.minimum(np.maximum(values, -bound), bound)


def aggregated(loss, survive, mask, s, prompt):
  """Return the loss of the batch, row by row."""
  rows, row_means, row_sums, counts, prompts = 0, [], [], [], {}
  for b in range(mask.shape[0]):
    ts = written(survive, b)
    if not written(mask, b):
      continue
    rows += 1
    row_sums.append(sum(loss[b, t] for t in ts))
    row_means.append(row_sums[-1] / max(len(ts), 1))
    counts.append(len(ts) or len(written(mask, b)))
    prompts.setdefault(prompt[b], []).append((row_sums[-1], counts[-1]))
  rows = max(rows, 1)
  return {
    'seq-mean-token-mean': sum(row_means) / rows,
    'token-mean': sum(row_sums) / max(sum(counts), 1),
    'prompt-mean-token-mean': sum(sum(x for x, _ in of) / sum(n for _, n in of) for of in prompts.values())
    / max(len(prompts), 1),
    'seq-mean-token-sum': sum(row_sums) / rows,
    'seq-mean-token-sum-norm': sum(row_sums) / rows / mask.shape[1],
  }[s.aggregate]


# --- diagnostics -----------------------------------------------------------------------------------------------------


def mismatch(old, roll, mask, A, c):
  """Return every metric of `diagnostics.mismatch`, for a batch with at least one token."""
  B = mask.shape[0]
  fixed = correct(old, roll, mask, c, np.zeros(B, int))
  at = [(b, t) for b in range(B) for t in written(mask, b)]
  rows = [b for b in range(B) if written(mask, b)]
  d = [old[i] - roll[i] for i in at]
  ms = lambda x, b: float(np.mean([x[b, t] for t in written(mask, b)]))  # noqa: E731
  rho = [math.exp(safe(x)) for x in d]
  p, q = np.array([math.exp(old[i]) for i in at]), np.array([math.exp(roll[i]) for i in at])
  k3 = lambda u: math.exp(u) - u - 1  # noqa: E731
  mid = [(x + y) / 2 for x, y in zip(p, q)]
  m = {
    'ppl_ratio': np.mean([math.exp(ms(roll, b) - ms(old, b)) for b in rows]),
    'kl': np.mean([-x for x in d]),
    'k3_kl': np.mean([k3(safe(x)) for x in d]),
    'policy_kl_error': np.mean([k3(safe(-x)) for x in d]),
    'js_divergence_error': np.mean([0.5 * k3(math.log(x / z)) + 0.5 * k3(math.log(y / z)) for x, y, z in zip(p, q, mid)]),
    'chi2_token': np.mean([x * x for x in rho]) - 1,
    'chi2_seq': np.mean([math.exp(2 * safe(sum(old[b, t] - roll[b, t] for t in written(mask, b)))) for b in rows]) - 1,
    'token_mult_prob_error': np.mean([math.exp(safe(abs(x))) for x in d]),
    'abs_dlogp_mean': np.mean(np.abs(d)),
    'abs_dlogp_p99': np.percentile(np.abs(d), 99),
    'abs_dlogp_max': np.max(np.abs(d)),
    'probs_pearson': np.corrcoef(p, q)[0, 1],
    'adv_signed_bias': np.mean([A[i] * x for i, x in zip(at, d)]) / np.mean([abs(A[i]) for i in at]),
  }
  raw, applied = [fixed['raw'][i] for i in at], [fixed['applied'][i] for i in at]
  surviving = [fixed['applied'][i] for i in at if fixed['mask'][i]]
  low = c.floor if c.weight in ('clip', 'icepop') else 1 / c.cap
  held = applied if c.weight == 'icepop' and c.level is not None else [clip(w, 0, c.cap) for w in raw]
  m |= {
    'corrected_fraction': np.mean([w != 1 for w in surviving]) if surviving else 1.0,
    'rollout_is_mean': np.mean(applied),
    'rollout_is_std': np.std(held),
    'rollout_is_eff_sample_size': 1 / np.mean([(w / np.mean(held)) ** 2 for w in held]),
    'rollout_is_ratio_fraction_high': np.mean([w > c.cap for w in raw]),
    'rollout_is_ratio_fraction_low': np.mean([w < low for w in raw]),
    'rollout_rs_masked_fraction': np.mean([not fixed['mask'][i] for i in at]),
    'rollout_rs_seq_masked_fraction': np.mean([any(not fixed['mask'][b, t] for t in written(mask, b)) for b in rows]),
  }
  log_rho = np.where(mask, old - roll, 0.0)
  for option, (lo, hi) in options(c).items():
    found = [statistic(option, log_rho, mask, b) for b in rows]
    if option.startswith('token'):
      x = out_of = [v for s in found for v in s.values()]
    else:
      x, out_of = found, [s for s, b in zip(found, rows) for _ in written(mask, b)]
    m[f'rollout_rs_{option}_mean'] = np.mean(x)
    m[f'rollout_rs_{option}_masked_fraction'] = np.mean([not lo <= ratio_or_value(option, v) <= hi for v in out_of])

  w, agreement = [min(x, 2.0) for x in rho], [math.exp(-abs(x)) for x in d]
  below = lambda bound: np.mean([any(math.exp(old[b, t] - roll[b, t]) < bound for t in written(mask, b)) for b in rows])  # noqa: E731
  sparse = {
    'agreement_mean': np.mean(agreement),
    'agreement_p05': np.percentile(agreement, 5),
    'ess': 1 / np.mean([(x / np.mean(w)) ** 2 for x in w]),
    'veto_fraction': below(c.veto or 0.0),
    'catastrophic_sequence_fraction': below(c.veto or 1e-4),
  }
  return {f'rollout_corr/{k}': float(v) for k, v in m.items()} | {f'sparse/{k}': float(v) for k, v in sparse.items()}


# --- batches ---------------------------------------------------------------------------------------------------------


def batch(seed, B=5, T=11, spread=0.5):
  """Return log-probs of three policies, a mask with gaps, an empty and a full row, rewards and advantages of tokens."""
  rng = np.random.default_rng(seed)
  roll = -rng.exponential(1.0, (B, T))
  old = np.minimum(roll + rng.normal(0, spread, (B, T)), -1e-3)
  new = np.minimum(old + rng.normal(0, spread / 2, (B, T)), -1e-3)
  mask = rng.random((B, T)) < 0.7
  mask[0] = True
  mask[1] = False
  mask[2, :4] = False
  reward = rng.integers(0, 2, B).astype(float)
  advantage = rng.normal(0, 1, (B, T))
  return {'old': old, 'roll': roll, 'new': new, 'mask': mask, 'reward': reward, 'advantage': advantage}


def name(settings):
  """Return a test id for settings: the values that differ from the defaults."""
  changed = [f'{k}={v}' for k, v in vars(settings).items() if v != getattr(type(settings)(), k)]
  return ','.join(changed).replace(' ', '') or 'default'
