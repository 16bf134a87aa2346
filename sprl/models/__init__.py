"""The policy network; it asks a memory for attention and knows nothing of caches."""
