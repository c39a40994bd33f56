"""Plugins for trainers, where the trainer is not installed."""

import importlib
import sys

import pytest

import polyamp


@pytest.mark.parametrize(("plugin", "needs"), [("lightning", "lightning"), ("accelerate", "accelerate")])
def test_a_plugin_names_the_trainer_that_is_missing(plugin: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == needs]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"polyamp.backends.torch.integrations.{plugin}", raising=False)
    with pytest.raises(polyamp.errors.MissingFrameworkError, match=f"{needs}.* is not installed") as caught:
        importlib.import_module(f"polyamp.backends.torch.integrations.{plugin}")
    assert f"pip install {needs}" in str(caught.value)
