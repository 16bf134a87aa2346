"""Compute rows of benchmarks/scaling.py for models of one layer on 2 of 8 host devices. Prints JSON."""

import json

from scaling import measured, weights_of

from sprl.models.config import tiny

dense, mixture = (tiny(family, num_hidden_layers=1, vocab_size=264) for family in ('llama', 'qwen3_moe'))
found = {
  'weights': weights_of(dense),
  'data': measured(dense, 'update', 'data', 'strong', 2, 2),
  'expert': measured(mixture, 'decode', 'expert', 'weak', 2, 4),
}
print(json.dumps(found))
