"""The host side of rollouts: requests, grading, groups."""
