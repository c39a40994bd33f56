"""`apex.amp` on polyamp: the functions that NVIDIA's Apex had until 2025, for programs that still call them.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

What each of them is built of:

    initialize    `polyamp.autocast` (O1) or `polyamp.convert` (O2, O3), and `attach` for each optimizer
    scale_loss    `LossScaledOptimizer.scale`, and `unscale_` when the block ends
    step          the wrapper's step: an overflow in any block since the last step skips it

It runs on all devices, and differs from Apex where polyamp promises more: a static loss scale also skips an overflow,
a loss that is not finite skips the step, and a step on an unscaled loss is refused.
"""

from polyamp.backends.torch.compat.apex.amp._amp_state import _amp_state, master_params
from polyamp.backends.torch.compat.apex.amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from polyamp.backends.torch.compat.apex.amp.handle import disable_casts, init
from polyamp.backends.torch.compat.apex.amp.initializing import initialize
from polyamp.backends.torch.compat.apex.amp.losses import scale_loss
from polyamp.backends.torch.compat.apex.amp.saving import load_state_dict, state_dict

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
