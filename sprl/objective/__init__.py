"""Advantages, corrections, losses and diagnostics: pure functions of arrays."""
