"""Attention, compaction, block-scaled matmul, log-probs: each file one operation with its jnp reference."""
