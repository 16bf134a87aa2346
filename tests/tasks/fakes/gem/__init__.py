"""As much of gem-llm 0.1.0 as its environments run on: games by id, whose chance is everybody's."""

import logging

from gem.envs.registration import make

logging.basicConfig(level=logging.INFO)  # as the real one does

__all__ = ['make']
