"""The KV-cache sampler: its weights, prefill, decode, drawing."""
