"""Runs over several host processes: start, shared decisions, signals, and detection of lost processes."""
