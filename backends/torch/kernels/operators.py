"""The operators ``torch.ops.polyamp.*`` of a loss-scaled step: one schema for every device.

Their PyTorch implementations, in ``reference.py``, run on every device. If the compiled extension is loaded, its
kernels for the CPU and CUDA take precedence. Importing this module defines them.
"""

from __future__ import annotations

import torch

from polyamp.backends.torch.kernels import reference

SCHEMAS = {
    "grad_stats": "(Tensor[] grads, Tensor[] losses, Tensor scale, Tensor(a!) stats, Tensor(b!) workspace) -> ()",
    "unscale_clip_": "(Tensor(a!)[] grads, Tensor scale, Tensor stats, float max_norm) -> ()",
    "adam_step_": """(Tensor(a!)[] params, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] exp_avgs,
        Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] steps, Tensor groups, Tensor rules, Tensor[] lrs, Tensor scale,
        Tensor stats, Tensor(f!) control, Tensor(g!) workspace, Tensor settings, Tensor(h!) report) -> ()""",
    "sgd_step_": """(Tensor(a!)[] params, Tensor(b!)[] masters, Tensor[] grads, Tensor(c!)[] momenta,
        Tensor groups, Tensor rules, Tensor[] lrs, Tensor scale, Tensor stats, Tensor(d!) control,
        Tensor(e!) workspace, Tensor settings, Tensor(f!) report) -> ()""",
}
"""Names and schemas; ``reference.py`` describes the arguments."""

STATS = 3
"""Number of float64 values in ``stats``: the sum of squares of the unscaled gradients, the number of their non-finite
elements, and the number of non-finite elements of the losses."""

WORKSPACE = 3 * 1024 + 1
"""Number of float64 values in ``workspace``: partial ``stats`` of up to 1024 blocks, and a ticket that counts blocks.

Calls that may run at the same time, on several streams, need one workspace each."""

_library = torch.library.Library("polyamp", "DEF")  # type: ignore[no-untyped-call] # for as long as the process lives

for _name, _schema in SCHEMAS.items():
    _library.define(_name + " ".join(_schema.split()))  # type: ignore[no-untyped-call]
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"polyamp::{_name}", lambda *_: None, lib=_library)
