"""Reports on an optimizer whose policy does not fit the regions that its losses come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, compiler

from polyamp.backends.torch.autocast.regions import HERE
from polyamp.backends.torch.dtypes import DTYPES, SIXTEEN_BIT
from polyamp.backends.torch.scale import losses_in
from polyamp.errors import warn_once
from polyamp.policies import in_policy
from polyamp.regions import report_missing_scale

if TYPE_CHECKING:
    from polyamp.backends.torch.optimizer import LossScaledOptimizer

STEPS = 2  # after which it is reported; the first one can be a warm-up


def look_for_casts(optimizer: LossScaledOptimizer, loss: Any) -> None:
    """Note whether one of the first losses of an optimizer for 16 bits shows a region, or a cast to 16 bits."""
    dtype = DTYPES.get(optimizer.scaler.compute or "")
    if dtype in SIXTEEN_BIT and not compiler.is_compiling():
        seen = optimizer.lowers or HERE.thread.count > optimizer.regions_before
        optimizer.lowers = seen or any(map(_casts, losses_in(loss)))


def report_policy(optimizer: LossScaledOptimizer, alive: Iterable[LossScaledOptimizer]) -> None:
    """Warn once, at a later step, if the regions and the optimizer's policy do not fit each other."""
    if optimizer.steps < STEPS:
        optimizer.steps += 1
        if optimizer.steps == STEPS and optimizer.lacks_policy and not in_policy():
            warn_once(
                "the optimizer was wrapped without a policy, so nothing is scaled or checked: pass one, as in "
                'polyamp.wrap_optimizer(optimizer, "mixed_float16").',
                stacklevel=4,
            )
        if optimizer.steps == STEPS and optimizer.lowers is False:
            warn_once(
                f"the optimizer was wrapped for {optimizer.scaler.compute}, and its losses were computed in float32 "
                "alone: nothing runs in 16 bits. Compute the loss in a region: with polyamp.autocast(policy): ...",
                stacklevel=4,
            )
    scaler, forward = optimizer.scaler, HERE.thread.policy
    if HERE.thread.count == optimizer.regions_before or (forward is not None and forward.compute == scaler.compute):
        return
    optimizer.regions_before = HERE.thread.count
    # Another optimizer may have a loss scale, and the region may have been for that one.
    if not (scaler.multiplies or any(one.scaler.multiplies for one in list(alive))):
        optimizer.lacks_policy = False  # reported here
        report_missing_scale(scaler.settings, scaler.compute, forward, stacklevel=4)


def _casts(loss: Tensor) -> bool:
    """Return whether a loss has 16 bits, or its graph has a cast, or code that does not show what is in it."""
    if loss.dtype in SIXTEEN_BIT:
        return True
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting and len(seen) < 20_000:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith(("ToCopyBackward", "CompiledFunction")):
            return True
        waiting += [child for child, _ in node.next_functions]
    return loss.grad_fn is None
