"""Guards: the reasons to stop a run, and warnings about one that continues, from its metrics and settings."""
