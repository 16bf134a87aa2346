"""The sampler's KV cache: slots, eviction, FP8 scales, key biases."""
