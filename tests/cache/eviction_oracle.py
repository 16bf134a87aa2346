"""The scores of docs/methods/sparse.md, eq. 7 to 17, as loops in float64, for one kv head of one row without empty slots.

`score` takes k [n, D], position [n], q [G, A, D], q_position [A] and carried [n]. It returns the scores and carried numbers of
all slots before the window. The window is the newest `a` slots.
"""

import math

import numpy as np

POOL, SIMILARITY = 7, 0.5


def score(method, k, position, q, q_position, carried, a, settings):
  k, q, carried = (np.asarray(x, np.float64) for x in (k, q, carried))
  queries = [j for j in range(q.shape[1]) if q_position[j] >= 0]
  old = max(len(k) - a, 0)
  match method:
    case 'rkv':
      mix = settings.rkv.mix
      imp, red = importance(k, q, queries, old), rkv_redundancy(k)
      return [mix * imp[i] - (1 - mix) * red[i] for i in range(old)], carried[:old]
    case 'snapkv':
      return importance(k, q, queries, old), carried[:old]
    case 'h2o':
      return carried[:old], carried[:old]
    case 'streaming':
      return [math.inf if position[i] < settings.streaming.sinks else position[i] for i in range(old)], carried[:old]
    case 'keydiff':
      anchor = sum(unit(key) for key in k) / len(k)
      return [-sum(unit(k[i]) * unit(anchor)) for i in range(old)], carried[:old]
    case 'gkv':
      lasting = gkv_importance(k, position, q, q_position, queries, carried, old, settings.gkv.decay)
      red = gkv_redundancy(k)[:old]
      return [0.5 * lasting[i] - 0.5 * red[i] / max(red) for i in range(old)], lasting
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


def importance(k, q, queries, old):
  mean = [0.0] * old
  for j in queries:
    p = softmax([max(logit(q[h, j], k[i]) for h in range(len(q))) for i in range(old)]) if old else []
    for i in range(old):
      mean[i] += p[i] / len(queries)
  reach = POOL // 2
  return [max(mean[m] for m in range(old) if abs(m - i) <= reach) for i in range(old)]


def cosines(k):
  n, units = len(k), [unit(key) for key in k]
  cosine = np.zeros((n, n))
  for i in range(n):
    for j in range(n):
      cosine[i, j] = sum(units[i] * units[j]) if i != j else 0.0
  return cosine


def rkv_redundancy(k):
  n, cosine = len(k), cosines(k)
  spared = cosine.copy()
  for i in range(n):
    near = [j for j in range(n) if cosine[i, j] > SIMILARITY]
    spared[i, near[-1] if near else 0] = 0
  return softmax([sum(spared[i, j] for i in range(n)) / n for j in range(n)])


def gkv_redundancy(k):
  n, cosine = len(k), cosines(k)
  spared = cosine.copy()
  for i in range(n):
    near = [m for m in range(n) if cosine[m, i] > SIMILARITY]
    if near:
      spared[near[-1], i] = 0
  return softmax([sum(spared[m, i] for i in range(n)) / n for m in range(n)])


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
