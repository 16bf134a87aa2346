"""The learner: packing, dense scoring, the jitted update, the optimiser, the train state."""
