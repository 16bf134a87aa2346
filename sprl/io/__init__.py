"""Files: weights, tokenizer, checkpoints, metrics, plots."""
