"""The bodies, constants and foreign parameters that a rewritten graph refers to and the user's module does not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

HOLDER = "_polyamp"  # the submodule that holds them


class Attributes(dict[str, Any]):
    """Modules and tensors, by the paths that a graph uses for them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def add(self, held: Any) -> str:
        """Add a module or tensor, and return its path."""
        kind = "body" if isinstance(held, nn.Module) else "constant" if not isinstance(held, nn.Parameter) else "weight"
        path = f"{HOLDER}.{self.name}.{kind}_{len(self)}"
        self[path] = held
        return path

    def as_module(self) -> nn.Module:
        """Return a module with all of these, named by the last part of their paths. Only its parameters are saved."""
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
    """Keep constants, also those of bodies, out of the saved state."""
    for part in module.modules():
        part._non_persistent_buffers_set.update(part._buffers)
