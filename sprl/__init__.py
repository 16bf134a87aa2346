"""sprl: reinforcement learning of language models with cheap rollouts, in JAX."""

__version__ = '0.1.0'
