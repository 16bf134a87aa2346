"""A fake of the part of gem-llm 0.1.0 that its environments use: games by id, which draw from the global random generators."""

import logging

from gem.envs.registration import make

logging.basicConfig(level=logging.INFO)  # as the real package does

__all__ = ['make']
