"""What transformers says, for test_parity.py to compare with. Runs in an environment with torch and transformers, not sprl.

    python reference.py jobs.json

Each job of the list is a dict with `out`, the .npz to write (tokens [B, T], logits [B, T, V] in float32, greedy [B, N]), and

  make    config.json's dict: a randomly filled model of it is saved to `folder` first
  folder  the model to run
  dtype   float64 instead of float32 (its norms and rotary angles stay float32)
  adapter a PEFT folder to put on it
  gguf    instead of a folder's safetensors: the GGUF file in it
  tokens  the prompts

or, with `texts` and `chats`: `out` is a .json of their ids, decoded texts and renderings under the folder's tokenizer.
"""

import json
import sys

import numpy as np
import torch
import transformers

torch.manual_seed(0)
torch.set_num_threads(2)


def make(config, folder):
  """A model whose every weight matters: biases and norms random too, logits of order one."""
  model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).float()
  for name, weight in model.named_parameters():
    center = 1.0 if 'norm' in name else 0.0
    torch.nn.init.normal_(weight, center, 0.2)
  model.save_pretrained(folder, max_shard_size='60KB')


def run(job):
  """The logits of the prompts, and 32 greedy tokens after them."""
  gguf = {'gguf_file': job['gguf']} if 'gguf' in job else {}
  model = transformers.AutoModelForCausalLM.from_pretrained(job['folder'], dtype=torch.float32, **gguf).eval()
  if 'adapter' in job:
    from peft import PeftModel  # an environment made before there were adapters lacks it

    PeftModel.from_pretrained(model, job['adapter'])  # puts itself between the model's linears
  model = model.to(getattr(torch, job.get('dtype', 'float32')))
  tokens = torch.tensor(job['tokens'])
  model.generation_config.eos_token_id = None  # 32 tokens, whatever they are
  model.generation_config.pad_token_id = 0
  with torch.no_grad():
    logits = model(tokens).logits
    whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=32)
  rotary = model.model.rotary_emb
  np.savez(
    job['out'],
    logits=logits.numpy(),
    greedy=whole[:, tokens.shape[1] :].numpy(),
    inv_freq=rotary.inv_freq.float().numpy(),
    scale=rotary.attention_scaling,
  )


def tokenize(job):
  """Ids, decoded texts, rendered conversations."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(job['folder'])
  ids = [tokenizer(text, add_special_tokens=False)['input_ids'] for text in job['texts']]
  result = {
    'ids': ids,
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
