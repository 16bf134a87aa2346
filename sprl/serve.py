"""python -m sprl.serve --model=FOLDER [--host=127.0.0.1] [--port=8000] [--config.cache.budget=512 ...]

Serves a model over an OpenAI-compatible endpoint (docs/agents.md), with any cache and quantisation of the rollouts. Concurrent
requests decode side by side on one engine of `config.sampling.rows` rows; at most --queue more wait, others get status 429.
Every request needs a token, sent as the API key of OpenAI's clients. The token is SPRL_API_KEY; without this variable the command
makes a random one and prints it. --notoken serves everyone who reaches the port. After SIGTERM or Ctrl-C the server takes no new
requests, and running ones have --grace seconds to end.
Exit status: 2 where the model, a setting, the host or the port cannot be used; 1 where the engine fails.
"""

import os
import re
import secrets
import signal
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections import config_flags

from sprl import command_line
from sprl.agents.extra import check_installed
from sprl.config import Run, SettingsError, default_config
from sprl.config_reader import resolve

CALIBRATION = (  # texts whose keys and values give the scales of an FP8 cache
  'Write a short story about a lighthouse keeper who finds a letter in a bottle.',
  'Solve for x: 3 * (x - 4) = 27. Show each step.',
  'def median(values):\n  values = sorted(values)\n  middle = len(values) // 2\n  return values[middle]',
  'The treaty was signed in 1648 and ended thirty years of war in central Europe.',
)

_MODEL = flags.DEFINE_string('model', None, 'A Hugging Face folder, hub name or wheel, as config.model.path.', required=True)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'The address to serve on. There is no encryption.')
_TOKEN = flags.DEFINE_bool('token', True, 'Whether requests need a token: SPRL_API_KEY, or else a random one that is printed.')
_PORT = flags.DEFINE_integer('port', 8000, 'The port to serve on. 0: a free one.')
_QUEUE = flags.DEFINE_integer('queue', 256, 'Requests that may wait beside those that decode.', lower_bound=0)
_GRACE = flags.DEFINE_float('grace', 30.0, 'Seconds that running requests have to end after a signal.', lower_bound=0.0)


def define_config(argv: list[str]) -> None:
  """Define the flags --config.*, whose defaults suit a server."""
  config = default_config()
  config.sampling.max_prompt, config.sampling.max_tokens, config.sampling.rows = 2048, 1024, 8
  config_flags.DEFINE_config_dict('config', config)
  flag = flags.FLAGS['config']
  flag.help = 'A setting, such as --config.cache.budget=512; sprl/config.py describes all of them.'
  flag.default_as_str = None  # else --help prints the values of all settings


def main() -> int:
  """Run the command and return its exit status."""
  config: Any = flags.FLAGS['config'].value
  command_line.use_model(config, _MODEL.value)
  access = access_of(_TOKEN.value, os.environ)
  return serve(run_of(config, command_line.settings_of_flags()), access, _HOST.value, _PORT.value, _QUEUE.value, _GRACE.value)


def run_of(config: Any, given: Collection[str] = ()) -> Run:
  """Return the settings of a server. Unlike a run, it may be greedy: with `sampling.temperature` = 0. Raises SettingsError."""
  if greedy := config.sampling.temperature == 0:
    config.sampling.temperature = 1.0
  run = resolve(config, given)
  if run.devices != Run().devices:
    raise SettingsError('config.devices: expected its defaults: a server uses all devices, and config.mesh.rollout divides them')
  return replace(run, sampling=replace(run.sampling, temperature=0.0)) if greedy else run


class Access(NamedTuple):
  """Who may ask."""

  token: str | None  # what a client must show; None: nothing
  said: str  # what the command prints of it


def access_of(needed: bool, environment: Mapping[str, str]) -> Access:
  """Return the token of SPRL_API_KEY, which is not printed, or a random one. Raises SettingsError if a header cannot hold it."""
  chosen = environment.get('SPRL_API_KEY')
  if not needed:
    return Access(None, 'no token: all who reach the port may ask')
  if not chosen:
    token = secrets.token_urlsafe(24)
    return Access(token, f'token: {token}')
  if not re.fullmatch('[!-~]+', chosen):
    raise SettingsError('SPRL_API_KEY: expected visible ASCII characters without spaces, as in a header of HTTP')
  return Access(chosen, 'token: that of SPRL_API_KEY')


def serve(run: Run, access: Access, host: str, port: int, queue: int, grace: float) -> int:
  """Serve until a signal arrives. Returns the exit status."""
  check_installed('sprl.serve')
  # Imported late: an error in the settings is reported before jax loads.
  from sprl.agents.endpoint import application
  from sprl.agents.engine_thread import EngineBackend, EngineThread
  from sprl.agents.server import ServerThread, bound

  held = bound(host, port, ('--host', '--port'))  # before the model loads, which can take minutes
  engine, tokenizer = open_engine(run)
  stop = threading.Event()

  # Until here, and after the first signal, a signal ends the process at once: a chunk may hang.
  def end(*_: Any) -> None:
    stop.set()
    for number in signal.SIGTERM, signal.SIGINT:
      signal.signal(number, signal.SIG_DFL)

  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, end)
  with EngineThread(engine, queue) as thread:
    app = application(EngineBackend(thread, tokenizer, run.sampling, run.model.path), token=access.token)
    with ServerThread(app, held, grace) as server:
      print(f'http://{host}:{server.port}/v1 serves {run.model.path}, {engine.capacity} rows', flush=True)
      print(access.said, flush=True)
      while not stop.wait(0.2) and not thread.ended.is_set():
        pass
  return 0 if thread.error is None else 1


def open_engine(run: Run) -> tuple[Any, Any]:
  """Return an engine with the weights of `run.model.path` and the run's cache and quantisation, and the tokenizer."""
  from sprl.model import Model
  from sprl.sampler import calibrate
  from sprl.sampler.engine import Engine

  model = Model.open(run)
  if model.tokenizer.template is None:
    raise SettingsError(f'--model = {run.model.path!r}: expected a model with a chat template')
  layout = model.cache_layout(run.sampling, run.cache, run.quant)
  params, scales = model.load(model.dtype), None
  if layout.fp8:
    texts = [np.array(model.tokenizer.encode(text)[: run.sampling.max_prompt], np.int32) for text in CALIBRATION]
    found = calibrate.amax_of_prompts(model.graphdef, layout, params, texts, len(texts), run.quant, model.mesh)
    scales = calibrate.scales((found,), run.quant, layout, params)
  rows = run.sampling.rows or 8
  config = model.engine_config(run.sampling, layout, rows, min(rows, 4), run.seed)
  return Engine(config, model.sampler_weights(params, run.quant, scales)), model.tokenizer


if __name__ == '__main__':
  command_line.start(main, define_config)
