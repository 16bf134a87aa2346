"""GPU kernels, one operation per file, each with its jnp reference."""
