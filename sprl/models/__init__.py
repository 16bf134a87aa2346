"""The policy network. Attention is an argument, so the network does not know about caches."""
