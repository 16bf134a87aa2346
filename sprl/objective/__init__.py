"""Advantages, corrections, losses, diagnostics: pure functions of arrays."""
