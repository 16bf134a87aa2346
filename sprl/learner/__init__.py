"""Train state, packing, dense scoring, the jitted update."""
