"""Stands for Apex in scripts under `polyamp run` where it is not installed."""

import sys

from polyamp.backends.torch.apex import modules

sys.modules.update(modules())
