def obstacle(q, k):
  return 'none yet'
def packed_attention(q, k, v, visible):
  raise NotImplementedError
