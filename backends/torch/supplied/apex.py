"""Stands in for Apex, if that is not installed, in scripts under `polyamp run`."""

import sys

from polyamp.backends.torch.apex import modules

sys.modules.update(modules())
