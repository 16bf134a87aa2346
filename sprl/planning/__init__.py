"""What a run will need of devices that need not be there: memory, operations, bytes, and the time they take at the least."""
