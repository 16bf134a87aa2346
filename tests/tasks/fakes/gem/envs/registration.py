"""Games by id."""

ENV_REGISTRY = {}


def register(env_id, entry_point, **kwargs):
  ENV_REGISTRY[env_id] = (entry_point, kwargs)


def make(env_id, **kwargs):
  entry_point, own = ENV_REGISTRY[env_id]
  return entry_point(**{**own, **kwargs})
