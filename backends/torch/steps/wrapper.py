"""A torch optimizer that wraps another one and forwards all attributes to it."""

from __future__ import annotations

from typing import Any

import torch

Groups = list[dict[str, Any]]


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer whose groups, state, defaults, hooks and other attributes are those of ``inner``.

    >>> inner = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5)
    >>> wrapper = OptimizerWrapper(inner)
    >>> wrapper.param_groups is inner.param_groups, wrapper.defaults["lr"], isinstance(wrapper, torch.optim.Optimizer)
    (True, 0.5, True)
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # No super().__init__(): it would build its own groups and state in addition to the inner optimizer's.
        self.inner = inner

    @property
    def param_groups(self) -> Groups:
        """The inner optimizer's groups, with master weights in place of 16-bit parameters."""
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
        if name == "inner" or name.startswith("__"):  # copying and unpickling start without an inner optimizer
            raise AttributeError(name)
        return getattr(self.inner, name)
