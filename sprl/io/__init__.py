"""Everything that crosses to disk: weights, tokenizer, checkpoints, metrics, pictures."""
