"""A torch optimizer that stands for another one: what is read from it and written to it is the other's."""

from __future__ import annotations

from typing import Any

import torch

Groups = list[dict[str, Any]]


class OptimizerWrapper(torch.optim.Optimizer):
    """Groups, state, defaults, hooks and whatever else there is are those of ``inner``.

    >>> inner = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5)
    >>> wrapper = OptimizerWrapper(inner)
    >>> wrapper.param_groups is inner.param_groups, wrapper.defaults["lr"], isinstance(wrapper, torch.optim.Optimizer)
    (True, 0.5, True)
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # No super().__init__(): it would build groups and state of its own beside the inner optimizer's.
        self.inner = inner

    @property
    def param_groups(self) -> Groups:
        """The inner optimizer's groups; master weights stand in them where parameters have 16 bits."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, by parameter."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's default options."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # while copying or unpickling there is no inner optimizer yet
            raise AttributeError(name)
        return getattr(self.inner, name)
