"""The scores of sparse_rollouts 5 once more: in loops and float64, for one kv head of one row, with nothing but its n keys.

k [n,D], position [n], q [g,a,D], q_position [a], carried [n] -> score and carried of the slots before the window.
"""

import math

import numpy as np


def score(method, k, position, q, q_position, carried, a, s):
  k, q, carried = (np.asarray(x, np.float64) for x in (k, q, carried))
  queries = [j for j in range(q.shape[1]) if q_position[j] >= 0]
  old = max(len(k) - a, 0)
  match method:
    case 'rkv':
      mix = 0.1 if s.mix < 0 else s.mix
      I, Rd = importance(k, q, queries, old, s.pool), rkv_redundancy(k, s.similarity, s.protect_slot0)
      return [mix * I[i] - (1 - mix) * Rd[i] for i in range(old)], carried[:old]
    case 'snapkv':
      return importance(k, q, queries, old, s.pool), carried[:old]
    case 'h2o':
      return carried[:old], carried[:old]
    case 'streaming':
      return [math.inf if position[i] < s.sinks else position[i] for i in range(old)], carried[:old]
    case 'keydiff':
      anchor = sum(unit(key) for key in k) / len(k)
      return [-sum(unit(k[i]) * unit(anchor)) for i in range(old)], carried[:old]
    case 'gkv':
      mix = 0.5 if s.mix < 0 else s.mix
      F = gkv_importance(k, position, q, q_position, queries, carried, old, s.decay)
      Rd = gkv_redundancy(k, s.similarity)[:old]
      return [mix * F[i] - (1 - mix) * Rd[i] / max(Rd) for i in range(old)], F
    case 'tova_like':
      if not queries:
        return [0.0] * old, carried[:old]
      last = max(queries, key=lambda j: q_position[j])
      heads = [softmax([logit(q[h, last], k[i]) for i in range(len(k))]) for h in range(len(q))]
      return [sum(p[i] for p in heads) / len(heads) for i in range(old)], carried[:old]


def unit(x):
  return x / (math.sqrt(sum(x * x)) + 1e-8)


def logit(q, k):
  return sum(q * k) / math.sqrt(len(k))


def softmax(x):
  weights = [math.exp(v - max(x)) for v in x]
  return [w / sum(weights) for w in weights]


def importance(k, q, queries, old, kernel):
  mean = [0.0] * old
  for j in queries:
    P = softmax([max(logit(q[h, j], k[i]) for h in range(len(q))) for i in range(old)]) if old else []
    for i in range(old):
      mean[i] += P[i] / len(queries)
  reach = kernel // 2
  return [max(mean[m] for m in range(old) if abs(m - i) <= reach) for i in range(old)]


def cosines(k):
  n, khat = len(k), [unit(key) for key in k]
  Sim = np.zeros((n, n))
  for i in range(n):
    for j in range(n):
      Sim[i, j] = sum(khat[i] * khat[j]) if i != j else 0.0
  return Sim


def rkv_redundancy(k, threshold, protect_slot0):
  n, Sim = len(k), cosines(k)
  zeroed = Sim.copy()
  for i in range(n):
    near = [j for j in range(n) if Sim[i, j] > threshold]
    if near or protect_slot0:
      zeroed[i, near[-1] if near else 0] = 0
  return softmax([sum(zeroed[i, j] for i in range(n)) / n for j in range(n)])


def gkv_redundancy(k, threshold):
  n, Sim = len(k), cosines(k)
  zeroed = Sim.copy()
  for i in range(n):
    near = [m for m in range(n) if Sim[m, i] > threshold]
    if near:
      zeroed[near[-1], i] = 0
  return softmax([sum(zeroed[m, i] for i in range(n)) / n for m in range(n)])


def gkv_importance(k, position, q, q_position, queries, carried, old, decay):
  now = [0.0] * old
  for j in queries:
    seen = [i for i in range(len(k)) if position[i] <= q_position[j]]
    heads = [dict(zip(seen, softmax([logit(q[h, j], k[i]) for i in seen]))) for h in range(len(q))]
    for i in range(old):
      now[i] += max(p.get(i, 0.0) for p in heads) / len(queries)
  if queries and old:
    now = [x / max(now) for x in now]
  return [max(decay * carried[i], now[i]) if carried[i] >= 0 else now[i] for i in range(old)]
