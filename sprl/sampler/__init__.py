"""The KV-cache sampler: weights as served, drawing, prefill, decode."""
