"""Every private name of PyTorch that polyamp uses, in one place, so that a new release can only break code here."""

from polyamp.backends.torch.unstable.fakes import *
from polyamp.backends.torch.unstable.graphs import *
from polyamp.backends.torch.unstable.operators import *
from polyamp.backends.torch.unstable.steps import *
