"""Wrapped optimizers in torch's ``Join``, for uneven inputs: ranks that are out of inputs follow the others.

A rank that has joined answers each collective of the ranks that still train. `JoinedRank` answers a step's decision:

    with Join([model, opt]):    after DDP's collectives of a forward and a backward pass, one decision
        ...                     the joined rank has no gradients, and advances its loss scale as the others do

An optimizer that ``Join`` does not know would decide with nobody, and its all-reduce would meet one of DDP's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from polyamp.backends.torch.step.provenance import WrappedOptimizer
from polyamp.backends.torch.step.ranks import has_peers
from polyamp.errors import UsageError
from polyamp.scale import StepResult


class JoinedRank:
    """A ``JoinHook`` of torch: what a rank without inputs does at each step of the others."""

    def __init__(self, optimizer: WrappedOptimizer, inner: Any) -> None:
        self._optimizer, self._inner = optimizer, inner  # the inner optimizer's own hook, if it has one

    def main_hook(self) -> None:
        """Decide with the others, and advance the loss scale as they do."""
        optimizer, finite = self._optimizer, True
        if optimizer.checks and has_peers(optimizer.process_group):
            flag = torch.zeros((), device=optimizer.join_device)
            finite = not optimizer.scaler.decide(flag, optimizer.process_group).flag(flag.device)
            optimizer.scaler.advance(finite, optimizer)
            optimizer.last_step = StepResult(optimizer.scaler.state, finite)
        if finite and self._inner is not None:
            optimizer.is_stepping = True
            try:
                self._inner.main_hook()
            finally:
                optimizer.is_stepping = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Call the inner optimizer's hook."""
        if self._inner is not None:
            self._inner.post_hook(is_last_joiner)


def check_join(joinables: Sequence[Any], optimizers: Iterable[WrappedOptimizer]) -> None:
    """Refuse a ``Join`` that lacks the wrapped optimizer of a model, or lists it first."""
    models = [one for one in joinables if isinstance(one, nn.Module)]
    trained = {id(param) for model in models for param in model.parameters()}
    for optimizer in list(optimizers):
        places = [place for place, one in enumerate(joinables) if one is optimizer]
        is_right = places and (places[0] > 0 or not models)
        is_meant = any(one is optimizer.inner for one in joinables) or any(
            id(param) in trained for param in optimizer.model_parameters()
        )
        if is_right or not (is_meant and optimizer.checks and has_peers(optimizer.process_group)):
            continue
        raise UsageError(
            "ranks that have joined would leave the decision of a step to the others, and collide with it",
            where="Join([...])",
            found=", ".join(type(one).__name__ for one in joinables),
            allowed="each model, and after it the wrapped optimizer of its parameters",
            fix="write Join([model, opt]), where opt is what polyamp.wrap_optimizer returned, and call opt.step() once "
            "for each forward pass; or give every rank as many batches",
        )
