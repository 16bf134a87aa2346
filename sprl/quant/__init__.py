"""Number formats of the weights and the cache, and the one matrix product that understands them."""
