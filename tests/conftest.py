"""Every test runs with the shapes and types in sprl's signatures checked at run time, and on the CPU unless told otherwise."""

import os

import jaxtyping

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
jaxtyping.install_import_hook('sprl', 'typechecking.checked')
