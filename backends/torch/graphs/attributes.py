"""What a rewritten graph gets by name and the user's module does not have: bodies, constants, foreign parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

HOLDER = "_polyamp"  # the submodule that has them


class Attributes(dict[str, Any]):
    """Modules and tensors by the paths that the graph has for them.

    >>> import torch
    >>> attributes = Attributes("0")
    >>> attributes.add(torch.ones(2)), list(attributes.as_module().state_dict())
    ('_polyamp.0.constant_0', [])

    Args:
        name: of the graph among those of one module.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def add(self, held: Any) -> str:
        """The path of something new."""
        kind = "body" if isinstance(held, nn.Module) else "constant" if not isinstance(held, nn.Parameter) else "weight"
        path = f"{HOLDER}.{self.name}.{kind}_{len(self)}"
        self[path] = held
        return path

    def as_module(self) -> nn.Module:
        """A module that has them by the last part of their paths; tensors that are no parameters are not saved."""
        module = nn.Module()
        for path, held in self.items():
            name = path.rpartition(".")[2]
            if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
                module.register_buffer(name, held, persistent=False)
            else:
                setattr(module, name, held)
        _forget(module)
        return module


def _forget(module: nn.Module) -> None:
    """Keep the constants of bodies out of the state too."""
    for part in module.modules():
        part._non_persistent_buffers_set.update(part._buffers)
