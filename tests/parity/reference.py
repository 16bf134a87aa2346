"""Results of transformers for test_parity.py. Runs in an environment with torch and transformers, without sprl.

    python reference.py jobs.json

jobs.json is a list of dicts. A job with `tokens` writes logits [B, T, V], greedy [B, N], inv_freq and scale to the .npz `out`. If
layers with a sliding window have rotary embeddings of their own, it writes inv_freq_sliding too:

  make    contents of config.json; a random model of it is saved to `folder` first
  folder  folder of the model
  dtype   float64 instead of float32; norms and rotary angles stay float32
  adapter PEFT folder of an adapter to apply
  gguf    name of a GGUF file in `folder`, read instead of the safetensors
  tokens  prompts [B, T]

A job with `texts` and `chats` writes ids, prompts with their first tokens, decoded texts and rendered chats of the tokenizer in
`folder` to the .json `out`.
"""

import json
import sys

import numpy as np
import torch
import transformers

torch.manual_seed(0)
torch.set_num_threads(2)


def make(config, folder):
  """Save a model with random weights. Biases and norms are random too, so that every weight matters. Logits are of order 1."""
  model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float()
  for name, weight in model.named_parameters():
    center = 1.0 if 'norm' in name else 0.0
    torch.nn.init.normal_(weight, center, 0.2)
  model.save_pretrained(folder, max_shard_size='60KB')


def run(job):
  """Write the logits of the prompts and 32 greedy tokens after each."""
  gguf = {'gguf_file': job['gguf']} if 'gguf' in job else {}
  model = transformers.AutoModelForCausalLM.from_pretrained(job['folder'], dtype=torch.float32, **gguf).eval()
  if 'adapter' in job:
    from peft import PeftModel  # older environments lack it, and only jobs with adapters need it

    PeftModel.from_pretrained(model, job['adapter'])  # replaces linears of `model` in place
  model = model.to(getattr(torch, job.get('dtype', 'float32')))
  tokens = torch.tensor(job['tokens'])
  model.generation_config.eos_token_id = None  # no token ends the generation early
  model.generation_config.pad_token_id = 0
  with torch.no_grad():
    logits = model(tokens).logits
    whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=32)
  rotary = model.model.rotary_emb
  if hasattr(rotary, 'inv_freq'):
    angles = {'inv_freq': rotary.inv_freq.float().numpy(), 'scale': rotary.attention_scaling}
  else:
    angles = {
      'inv_freq': rotary.full_attention_inv_freq.float().numpy(),
      'scale': rotary.full_attention_attention_scaling,
      'inv_freq_sliding': rotary.sliding_attention_inv_freq.float().numpy(),
    }
  np.savez(job['out'], logits=logits.numpy(), greedy=whole[:, tokens.shape[1] :].numpy(), **angles)


def tokenize(job):
  """Write ids, decoded texts and rendered conversations."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(job['folder'])
  ids = [tokenizer(text, add_special_tokens=False)['input_ids'] for text in job['texts']]
  result = {
    'ids': ids,
    'prompts': [tokenizer(text)['input_ids'] for text in job['texts']],
    'decoded': [tokenizer.decode(i) for i in ids],
    'skipped': [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
    'rendered': [
      [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=more) for more in (True, False)]
      for chat in job['chats']
    ],
    'chat_ids': [tokenizer.apply_chat_template(chat, add_generation_prompt=True)['input_ids'] for chat in job['chats']],
    'eos': tokenizer.eos_token_id,
    'pad': tokenizer.pad_token_id,
    'size': len(tokenizer),
  }
  with open(job['out'], 'w') as file:
    json.dump(result, file)


if __name__ == '__main__':
  with open(sys.argv[1]) as file:
    jobs = json.load(file)
  for job in jobs:
    if 'make' in job:
      make(job['make'], job['folder'])
    tokenize(job) if 'texts' in job else run(job)
