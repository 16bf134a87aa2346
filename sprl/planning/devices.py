"""Ceilings of the devices that a plan can be made for, as their vendors state them. Measured ceilings can replace them."""

import dataclasses
import math
from dataclasses import dataclass

from sprl.config import SettingsError


@dataclass(frozen=True)
class Device:
  """One accelerator. A GB of a data sheet is 1e9 bytes; rates are of dense matrices, without sparsity."""

  name: str
  memory: float  # bytes
  bandwidth: float  # bytes/s between memory and chip
  bfloat16: float  # FLOP/s of matrix products
  float32: float  # FLOP/s of JAX's float32 matrix products at default precision: TF32 on these GPUs, bfloat16 on TPUs
  link: float  # bytes/s in each direction to the other devices of its node
  network: float  # bytes/s in each direction beyond the node
  node: int  # devices that are linked to each other
  source: str
  hopper: bool = False  # a GPU that sprl's kernels are written for


_HGX = 'network: one 400 Gb/s adapter a GPU, as in a DGX'

DEVICES = {
  'h100': Device('h100', 80e9, 3.35e12, 989e12, 494e12, 450e9, 50e9, 8, f'NVIDIA, H100 data sheet, SXM; {_HGX}', hopper=True),
  'h200': Device('h200', 141e9, 4.8e12, 989e12, 494e12, 450e9, 50e9, 8, f'NVIDIA, H200 data sheet, SXM; {_HGX}', hopper=True),
  'a100': Device(
    'a100', 80e9, 2.039e12, 312e12, 156e12, 300e9, 25e9, 8, 'NVIDIA, A100 80GB data sheet, SXM; network: 200 Gb/s a GPU'
  ),
  'v5e': Device(
    'v5e', 16e9, 0.819e12, 197e12, 197e12, 200e9, 3.1e9, 256,
    "Google Cloud, TPU v5e; link: half of the interconnect's 400 GB/s both ways; network: 6.4 Tb/s a pod",
  ),
  'v5p': Device(
    'v5p', 95e9, 2.765e12, 459e12, 459e12, 600e9, 6.25e9, 8960,
    "Google Cloud, TPU v5p; link: half of the interconnect's 1,200 GB/s both ways; network: 200 Gb/s a host of 4",
  ),
}  # fmt: skip

# JAX's device_kind -> name. Variants of these chips with other ceilings, such as PCIe cards, have no entry.
KINDS = {
  'NVIDIA H100 80GB HBM3': 'h100', 'NVIDIA H200': 'h200', 'NVIDIA A100-SXM4-80GB': 'a100',
  'TPU v5 lite': 'v5e', 'TPU v5e': 'v5e', 'TPU v5': 'v5p', 'TPU v5p': 'v5p',
}  # fmt: skip


def of_kind(kind: str) -> Device | None:
  """Return the device that JAX calls `kind`; None if its ceilings are not known here."""
  return DEVICES[KINDS[kind]] if kind in KINDS else None


def device(name: str, **measured: float | None) -> Device:
  """Return a device by name, with measured ceilings in place of stated ones; None keeps the stated ceiling.

  Raises SettingsError for an unknown name or a ceiling that is not above 0.
  """
  if name not in DEVICES:
    raise SettingsError(f'--device={name}: expected one of {", ".join(DEVICES)}')
  given = {key: value for key, value in measured.items() if value is not None}
  for key, value in given.items():
    if not 0 < value < math.inf:
      raise SettingsError(f'--{key}={value}: expected a finite number above 0')
  stated = DEVICES[name]
  source = f'{stated.source}; given: {", ".join(given)}' if given else stated.source
  return dataclasses.replace(stated, source=source, **given)
