"""Attention, rotary turns, log-probs: each file one operation with its jnp reference."""
