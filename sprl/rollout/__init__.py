"""Rollouts on the host: prompts, episodes, the scheduler and its window, evaluation."""
