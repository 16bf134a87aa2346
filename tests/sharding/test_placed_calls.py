"""A jitted function on a mesh takes arrays on that mesh alone."""

from host_devices import FAST, on_devices


def test_arrays_on_other_devices_than_the_mesh_are_refused():
  found = on_devices('placed_calls.py', **FAST)
  assert found['its mesh'] == found['host array'] == 28.0
  for name, count in (('other devices', 4), ('fewer devices', 2)):
    assert f'total: found an argument on the {count} devices' in found[name]
    assert "expected the devices of the given mesh {'fsdp': 4}" in found[name]
  assert 'of the given mesh None' in found['no mesh']
