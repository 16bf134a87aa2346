"""Adds configs/ to a built wheel as sprl/configs, so that an installed sprl has the recipes. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
  """Builds the package, then copies the configs."""

  def run(self):
    """Run the command."""
    super().run()
    if not self.editable_mode:  # a checkout has them already
      ignored = shutil.ignore_patterns('__pycache__')
      shutil.copytree('configs', Path(self.build_lib, 'sprl', 'configs'), ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={'build_py': BuildWithConfigs})
