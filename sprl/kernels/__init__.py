"""GPU kernels, one operation a file, each beside its jnp reference."""
