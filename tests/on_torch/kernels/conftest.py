"""The compiled operators, for all tests of this folder."""

import os
from typing import Any

import pytest
import torch

from polyamp.backends.torch import extension


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if extension.mode() == "off":
        pytest.skip("POLYAMP_EXTENSION=off")
    if extension.available("cuda" if torch.cuda.is_available() else "cpu"):  # what other tests of this process use too
        return torch.ops.polyamp
    with pytest.MonkeyPatch.context() as patch:
        if "POLYAMP_CACHE" not in os.environ:
            patch.setenv("POLYAMP_CACHE", str(tmp_path_factory.mktemp("extension")))
        extension.build("operators")
        return torch.ops.polyamp
