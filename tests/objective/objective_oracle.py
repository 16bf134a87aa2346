"""The formulas of sparse_rollouts 3 and 8, fp8_rollouts 4 and 5, async_rollouts 7 once more: in loops and float64."""

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
  """Lists of positions, one for each contiguous run."""
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
      'off': [[t] for t in ts],
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
    if s.estimator == 'grpo' and s.normalise_std:
      std = np.std(peers, ddof=1) if len(peers) > 1 else 0.0
      out[i] = (reward[i] - np.mean(peers)) / (std + s.epsilon)
    elif s.estimator in ('grpo', 'dr_grpo'):
      out[i] = reward[i] - np.mean(peers)
    elif s.estimator == 'rloo':
      out[i] = reward[i] - np.mean(others) if others else 0.0
    elif s.estimator == 'reinforce_baseline':
      out[i] = reward[i] - np.mean(everyone)
    else:
      out[i] = reward[i]
    if s.clip > 0:
      out[i] = min(max(out[i], -s.clip), s.clip)
  return out


# --- correction ------------------------------------------------------------------------------------------------------


def read_bounds(option, text):
  parts = [float(p) for p in text.split('_')]
  if option.endswith('k1'):
    return (parts[0], parts[1]) if len(parts) == 2 else (1 / parts[0], parts[0])
  return -math.inf, parts[0]


def options(c):
  texts = c.reject_bounds if len(c.reject_bounds) == len(c.reject) else c.reject_bounds * len(c.reject)
  return {o: read_bounds(o, t) for o, t in zip(c.reject, texts)}


def ratio_or_value(option, statistic):
  """What the bounds of an option are on: rho for k1."""
  return math.exp(statistic) if option.endswith('k1') else statistic


def statistic(option, log_rho, mask, b):
  """Of a row: one number, or {t: number} for token options."""
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
      if c.level == 'off':
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
    where = np.zeros(B, int) if c.norm_scope == 'global' else micro
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
      if c.veto > 0 and math.exp(log_rho[b, t]) < c.veto:
        keep[b] = False
      if c.token_mask:
        survive[b, t] &= c.mask_low <= math.exp(safe(log_rho[b, t])) <= c.mask_high
      if c.max_prob_diff > 0:
        survive[b, t] &= abs(math.exp(old[b, t]) - math.exp(roll[b, t])) <= c.max_prob_diff
    ts = written(mask, b)
    if c.max_sequence_error > 0 and ts:
      keep[b] &= sum(math.exp(safe(abs(log_rho[b, t]))) for t in ts) / len(ts) <= c.max_sequence_error
    if not keep[b]:
      survive[b] = False
  return {'weight': weight, 'mask': survive, 'keep': keep, 'raw': raw, 'applied': applied, 'norm': norm}


# --- losses ----------------------------------------------------------------------------------------------------------


def clip(x, low, high):
  return min(max(x, low), high)


def ppo(r, A, s):
  """A reward to be made large, as async_rollouts 7 writes it: -min(r A, clip(r) A); dual clip with c = 1 + 2 eps and others."""
  loss = -min(r * A, clip(r, 1 - s.clip_low, 1 + s.clip_high) * A)
  if s.dual_clip > 0 and A < 0:
    loss = min(loss, -s.dual_clip * A)
  return loss


def token_loss(l, old, roll, A, reward, weight, mask, s, mode, frozen=None):
  """Loss of each token. Factors that carry no gradient are those of the log-probs `frozen`, for finite differences in l."""
  B, T = mask.shape
  frozen = l if frozen is None else frozen
  reference = old if mode == 'decoupled' else roll
  level = {'gspo': 'geometric', 'segment': 'segment'}.get(s.variant, 'token')
  log_r = at_level(np.where(mask, l - reference, 0.0), mask, level)
  out = np.zeros((B, T))
  for b in range(B):
    for t in written(mask, b):
      r, still, a, lt = math.exp(safe(log_r[b, t])), math.exp(safe(frozen[b, t] - reference[b, t])), A[b, t], l[b, t]
      if s.variant in ('ppo', 'decoupled_ppo', 'gspo', 'segment'):
        x = ppo(r, a, s)
      elif s.variant in ('vanilla', 'reinforce'):
        x = -a * lt
      elif s.variant == 'tis':
        x = -clip(still, s.tis_low, s.tis_high) * a * lt
      elif s.variant == 'topr':
        x = -s.topr_positive * a * lt if reward[b] > 0 else -s.topr_negative * clip(still, 0, 1) * a * lt
      elif s.variant == 'cispo':
        x = -clip(still, 1 - s.clip_low, 1 + s.clip_high) * a * lt
        if s.cispo_mask and ((a > 0 and still > 1 + s.clip_high) or (a < 0 and still < 1 - s.clip_low)):
          x = 0.0
      elif s.variant == 'kimi15':
        x = -a * lt + s.kimi_tau / 2 * (lt - reference[b, t]) ** 2
      elif s.variant == 'dppo_kl':
        q, p = math.exp(reference[b, t]), math.exp(frozen[b, t])
        gone = (a > 0 and p - q > s.dppo_delta) or (a < 0 and p - q < -s.dppo_delta)
        x = (0.0 if gone else -a * r) + s.dppo_penalty * (lt - reference[b, t]) ** 2
      out[b, t] = x * (weight[b, t] if mode == 'decoupled' or s.variant == 'reinforce' else 1.0)
  return out


def kl(l, ref, estimator, bound):
  u = ref - l
  values = {'k1': -u, 'k2': u * u / 2, 'k3': np.exp(u) - 1 - u}[estimator]
  return np.minimum(np.maximum(values, -bound), bound)


def aggregated(loss, survive, mask, s, count_rejected):
  """The batch's loss, row by row."""
  rows, row_means, row_sums, counts = 0, [], [], []
  for b in range(mask.shape[0]):
    ts = written(survive, b)
    if not written(mask, b) or (not ts and not count_rejected):
      continue
    rows += 1
    row_sums.append(sum(loss[b, t] for t in ts))
    row_means.append(row_sums[-1] / max(len(ts), 1))
    counts.append(len(ts) or len(written(mask, b)))
  rows = max(rows, 1)
  return {
    'seq-mean-token-mean': sum(row_means) / rows,
    'token-mean': sum(row_sums) / max(sum(counts), 1),
    'seq-mean-token-sum': sum(row_sums) / rows,
    'seq-mean-token-sum-norm': sum(row_sums) / rows / mask.shape[1],
  }[s.aggregate]


# --- diagnostics -----------------------------------------------------------------------------------------------------


def _std(values, ddof=0):
  return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0


def mismatch(old, roll, mask, A, reward, c):
  """Every metric of the two tables, of a batch with at least one token."""
  B = mask.shape[0]
  fixed = correct(old, roll, mask, c, np.zeros(B, int))
  at = [(b, t) for b in range(B) for t in written(mask, b)]
  rows = [b for b in range(B) if written(mask, b)]
  d = [old[i] - roll[i] for i in at]
  ms = lambda x, b: float(np.mean([x[b, t] for t in written(mask, b)]))  # noqa: E731
  delta = [ms(roll, b) - ms(old, b) for b in rows]
  rho = [math.exp(safe(x)) for x in d]
  p, q = np.array([math.exp(old[i]) for i in at]), np.array([math.exp(roll[i]) for i in at])
  k3 = lambda u: math.exp(u) - u - 1  # noqa: E731
  mid = [(x + y) / 2 for x, y in zip(p, q)]
  m = {
    'training_ppl': np.mean([math.exp(-ms(old, b)) for b in rows]),
    'rollout_ppl': np.mean([math.exp(-ms(roll, b)) for b in rows]),
    'training_log_ppl': np.mean([-ms(old, b) for b in rows]),
    'rollout_log_ppl': np.mean([-ms(roll, b) for b in rows]),
    'log_ppl_diff': np.mean(delta),
    'log_ppl_abs_diff': np.mean(np.abs(delta)),
    'log_ppl_diff_max': max(delta),
    'log_ppl_diff_min': min(delta),
    'ppl_ratio': np.mean([math.exp(x) for x in delta]),
    'kl': np.mean([-x for x in d]),
    'k3_kl': np.mean([k3(safe(x)) for x in d]),
    'chi2_token': np.mean([x * x for x in rho]) - 1,
    'chi2_seq': np.mean([math.exp(2 * safe(sum(old[b, t] - roll[b, t] for t in written(mask, b)))) for b in rows]) - 1,
    'probs_diff_valid': 1.0,
    'probs_diff_max': max(p - q),
    'probs_diff_mean': np.mean(p - q),
    'probs_diff_std': np.std(p - q),
    'probs_pearson': np.corrcoef(p, q)[0, 1],
    'token_mult_prob_error': np.mean([math.exp(safe(abs(x))) for x in d]),
    'gen_kl_error': np.mean([k3(safe(x)) for x in d]),
    'policy_kl_error': np.mean([k3(safe(-x)) for x in d]),
    'js_divergence_error': np.mean([0.5 * k3(math.log(x / z)) + 0.5 * k3(math.log(y / z)) for x, y, z in zip(p, q, mid)]),
    'abs_dlogp_mean': np.mean(np.abs(d)),
    'abs_dlogp_p99': np.percentile(np.abs(d), 99),
    'abs_dlogp_max': np.max(np.abs(d)),
    'adv_signed_bias': np.mean([A[i] * x for i, x in zip(at, d)]) / np.mean([abs(A[i]) for i in at]),
  }
  raw, applied = [fixed['raw'][i] for i in at], [fixed['applied'][i] for i in at]
  surviving = [fixed['applied'][i] for i in at if fixed['mask'][i]]
  m['corrected_fraction'] = np.mean([w != 1 for w in surviving]) if surviving else 1.0
  low = c.floor if c.weight in ('clip', 'icepop') else 1 / c.cap
  held = [clip(w, 0, c.cap) for w in raw]
  row = [ms(fixed['applied'], b) for b in rows]
  raw_row = [ms(fixed['raw'], b) for b in rows]
  weights = {
    'mean': np.mean(applied),
    'min': min(applied),
    'max': max(applied),
    'raw_min': min(raw),
    'raw_max': max(raw),
    'std': math.sqrt(max(np.mean([w * w for w in held]) - np.mean(held) ** 2, 0)),
    'eff_sample_size': 1 / np.mean([(w / np.mean(held)) ** 2 for w in held]),
    'ratio_fraction_high': np.mean([w > c.cap for w in raw]),
    'ratio_fraction_low': np.mean([w < low for w in raw]),
    'seq_mean': np.mean(row),
    'seq_std': _std(row, ddof=1),
    'seq_max': max(row),
    'seq_min': min(row),
    'seq_max_deviation': max(abs(x - 1) for x in row),
    'seq_fraction_high': np.mean([x > c.cap for x in raw_row]),
    'seq_fraction_low': np.mean([x < low for x in raw_row]),
    'batch_norm_factor': np.mean([fixed['norm'][b] for b in rows]),
  }
  if c.weight == 'icepop':
    weights['oob_ratio'] = np.mean([not c.floor <= w <= c.cap for w in raw])
  m |= {f'rollout_is_{name}': value for name, value in weights.items()}

  log_rho = np.where(mask, old - roll, 0.0)
  for option, (lo, hi) in options(c).items():
    per_row = [statistic(option, log_rho, mask, b) for b in rows]
    if option.endswith('k1'):
      lo, hi = (math.log(lo) if lo > 0 else -math.inf), math.log(hi)
    if option.startswith('token'):
      x = [v for s in per_row for v in s.values()]
      out = [[not lo <= v <= hi for v in s.values()] for s in per_row]
      per_row = [sum(s.values()) / len(s) for s in per_row]
    else:
      x = per_row
      out = [[not lo <= s <= hi] * len(written(mask, b)) for s, b in zip(per_row, rows)]
    of_option = {
      'mean': np.mean(x),
      'max': max(x),
      'min': min(x),
      'std': _std([clip(v, lo, hi) for v in x]),
      'fraction_high': np.mean([v > hi for v in x]),
      'fraction_low': np.mean([v < lo for v in x]),
      'seq_mean': np.mean(per_row),
      'seq_std': _std(per_row, ddof=1),
      'seq_max': max(per_row),
      'seq_min': min(per_row),
      'seq_max_deviation': max(abs(v) for v in per_row),
      'seq_fraction_high': np.mean([v > hi for v in per_row]),
      'seq_fraction_low': np.mean([v < lo for v in per_row]),
      'masked_fraction': np.mean([o for r in out for o in r]),
      'seq_masked_fraction': np.mean([any(r) for r in out]),
    }
    m |= {f'rollout_rs_{option}_{name}': value for name, value in of_option.items()}
  m['rollout_rs_masked_fraction'] = np.mean([not fixed['mask'][i] for i in at])
  m['rollout_rs_seq_masked_fraction'] = np.mean([any(not fixed['mask'][b, t] for t in written(mask, b)) for b in rows])
  bad = [math.exp(x) < c.veto for x in d]
  vetoed = [b for b in rows if any(math.exp(old[b, t] - roll[b, t]) < c.veto for t in written(mask, b))]
  kept = [b for b in rows if b not in vetoed]
  m['veto_fraction'], m['catastrophic_token_fraction'] = len(vetoed) / len(rows), np.mean(bad)
  m['catastrophic_sequence_fraction'] = m['veto_fraction']  # these differ where no veto is set

  xi, w = rho, [min(x, c.cap) for x in rho]
  agreement = [math.exp(-abs(x)) for x in d]
  of = lambda x, bs: float(np.mean([x(b) for b in bs])) if bs else 0.0  # noqa: E731
  sparse = {
    'veto_fraction': m['veto_fraction'],
    'catastrophic_token_fraction': m['catastrophic_token_fraction'],
    'catastrophic_sequence_fraction': m['catastrophic_sequence_fraction'],
    'masked_token_fraction': m['rollout_rs_masked_fraction'],
    'xi_mean': np.mean(xi),
    'xi_p05': np.percentile(xi, 5),
    'xi_p50': np.percentile(xi, 50),
    'xi_p95': np.percentile(xi, 95),
    'xi_max': max(xi),
    'ess': 1 / np.mean([(x / np.mean(w)) ** 2 for x in w]),
    'k3_kl': m['k3_kl'],
    'kl': m['kl'],
    'agreement_mean': np.mean(agreement),
    'agreement_p05': np.percentile(agreement, 5),
    'response_length_vetoed': of(lambda b: len(written(mask, b)), vetoed),
    'response_length_kept': of(lambda b: len(written(mask, b)), kept),
    'reward_vetoed': of(lambda b: reward[b], vetoed),
    'reward_kept': of(lambda b: reward[b], kept),
  }
  return {f'rollout_corr/{k}': float(v) for k, v in m.items()} | {f'sparse/{k}': float(v) for k, v in sparse.items()}


# --- batches ---------------------------------------------------------------------------------------------------------


def batch(seed, B=5, T=11, spread=0.5):
  """Log-probs of three policies, a mask with gaps, prompts, an empty and a full row, rewards and per-token advantages."""
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
  """A test's name for settings: what differs from the defaults."""
  changed = [f'{k}={v}' for k, v in vars(settings).items() if v != getattr(type(settings)(), k)]
  return ','.join(changed).replace(' ', '') or 'default'
