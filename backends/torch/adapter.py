"""The PyTorch adapter: a table from each verb of `polyamp` to its function."""

import torch

from polyamp.adapters import AdapterTable
from polyamp.backends.torch.autocast.context import autocast_context
from polyamp.backends.torch.casting import cast
from polyamp.backends.torch.devices import describe
from polyamp.backends.torch.operations import OPERATIONS
from polyamp.backends.torch.verbs import (
    load_loss_scale,
    loss_scale_of,
    save_loss_scale,
    scale_loss,
    wrap_optimizer,
)

adapter = AdapterTable(
    "torch",
    OPERATIONS,
    owns=(torch.Tensor, torch.nn.Module, torch.optim.Optimizer),
    verbs={
        "describe": describe,
        "least_over_ranks": "polyamp.backends.torch.step.ranks:least_over_ranks",
        "trial": "polyamp.backends.torch.selftest:trial",
        "cast": cast,
        "convert": "polyamp.backends.torch.convert:convert",
        "wrap_optimizer": wrap_optimizer,
        "scale_loss": scale_loss,
        "loss_scale_of": loss_scale_of,
        "save_loss_scale": save_loss_scale,
        "load_loss_scale": load_loss_scale,
        "autocast_context": autocast_context,
        "is_tracing": torch.compiler.is_compiling,
        "rewrite": "polyamp.backends.torch.graphs.rewrite:rewritten_for",
        "explain": "polyamp.backends.torch.graphs.rewrite:planned",
        "fsdp_policy": "polyamp.backends.torch.step.sharding:fsdp_policy",
        "record": "polyamp.backends.torch.recording.record:record",
        "holder": "polyamp.backends.torch.recording.holder:holder",
        "profiler": "polyamp.backends.torch.profiling:profiler",
    },
)
