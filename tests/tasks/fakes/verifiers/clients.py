"""The abstract class of clients."""

import abc


class Client(abc.ABC):
  def __init__(self, client_or_config):
    raise AssertionError('it would set up a connection')

  @abc.abstractmethod
  def setup_client(self, config): ...

  @abc.abstractmethod
  async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs): ...

  async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
    raise AssertionError('it would ask a server')
