"""Advantages, corrections, losses, diagnostics and guards: pure functions of arrays."""
