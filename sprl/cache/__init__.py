"""The rollout's memory."""
