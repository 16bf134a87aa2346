"""Memory and time of a run on devices that need not be present."""
