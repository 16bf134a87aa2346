"""A small engine behind an endpoint, shared by the tests of the endpoint so that each program compiles once."""

import threading
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import hermes
import jax.numpy as jnp
import openai
import small

from sprl.agents.endpoint import application
from sprl.agents.engine_thread import EngineBackend, EngineThread
from sprl.agents.server import ServerThread
from sprl.cache.layout import cache_layout
from sprl.config import UNQUANTISED, Cache, Sampling
from sprl.io.tokenizer import Tokenizer
from sprl.sampler.engine import Engine
from sprl.sampler.engine_config import EngineConfig
from sprl.sampler.weights import sampler_weights

ROWS = 4
SAMPLING = Sampling(max_prompt=256, max_tokens=64, prompt_buckets=(256,), chunk=4)


@cache
def network():
  config, params = small.model('qwen2', num_hidden_layers=1, max_position_embeddings=512)
  return config, sampler_weights(params, jnp.dtype('float32'), UNQUANTISED)


def engine(tokenizer, sampling=SAMPLING, rows=ROWS, stop_ids=(2,), cache=Cache()):  # noqa: B008
  config, weights = network()
  layout = cache_layout(config, cache, UNQUANTISED, sampling.max_prompt, sampling.max_tokens, 'float32')
  made = EngineConfig(config, sampling, layout, rows, prefill=2, seed=0, stop_ids=stop_ids, text=tokenizer.decode)
  return Engine(made, weights)


@contextmanager
def served(folder: Path, queue: int = 100, **changes):
  """Yield (client, thread, tokenizer) of an endpoint over an engine."""
  hermes.write_tokenizer(folder)
  tokenizer = Tokenizer.load(folder)
  with ExitStack() as stack:
    thread = stack.enter_context(EngineThread(engine(tokenizer, **changes), queue))
    backend = EngineBackend(thread, tokenizer, changes.get('sampling', SAMPLING), 'tiny')
    server = stack.enter_context(ServerThread(application(backend)))
    url = f'http://127.0.0.1:{server.port}/v1'
    client = stack.enter_context(openai.OpenAI(base_url=url, api_key='none', max_retries=0, timeout=60))
    yield SimpleNamespace(client=client, thread=thread, tokenizer=tokenizer, url=url)


def together(calls):
  """Call functions in threads. Return their results, or the exceptions that they raise, in order."""
  results = [None] * len(calls)

  def call(i):
    try:
      results[i] = calls[i]()
    except Exception as error:
      results[i] = error

  threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results
