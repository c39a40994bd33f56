"""The rest of Apex that has an equivalent in PyTorch: fused optimizers and norms, data parallelism, ``fp16_utils``."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from polyamp.migration.arguments import Arguments, literal
from polyamp.migration.program import Program, Use, dotted_name

_SHIM = "polyamp.backends.torch.compat.apex"

_NORMS = {
    "apex.normalization.FusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.MixedFusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.fused_layer_norm.FusedLayerNorm": "torch.nn.LayerNorm",
}
_KEPT = {
    f"apex.{module}.{name}": f"{_SHIM}.{module}.{name}"
    for module, names in {
        "optimizers": ("FusedLAMB", "FusedNovoGrad"),
        "parallel": ("LARC",),
    }.items()
    for name in names
}
"""What PyTorch does not have: polyamp keeps it under the name that it had."""

_FP16 = ("apex.fp16_utils", "apex.contrib.optimizers.fp16_optimizer")
_PARALLEL = (
    "apex.parallel.DistributedDataParallel",
    "apex.parallel.distributed.DistributedDataParallel",
    "apex.parallel.convert_syncbn_model",
    "apex.parallel.SyncBatchNorm",
)
_OPTIMIZERS = ("apex.optimizers.FusedAdam", "apex.optimizers.FusedSGD")

ROOTS: tuple[str, ...] = (*_NORMS, *_KEPT, *_FP16, *_PARALLEL, *_OPTIMIZERS)
WRITE = f"the equivalent in docs/migrate/apex.md, or import it from {_SHIM}"

_DDP_OPTIONS: tuple[str, ...] = ("message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params", "prof")
_DDP_OPTIONS += (
    "retain_allreduce_buffers",
    "allreduce_always_fp32",
    "num_allreduce_streams",
    "allreduce_communicators",
)
_FUSED_OPTIONS = {
    "FusedAdam": ("params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad"),
    "FusedSGD": ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
_IGNORED = {"set_grad_none", "materialize_master_grads", "capturable", "master_weights"}
_OPTIMIZER_METHODS = {
    "clip_master_grads": "clip_grad_norm_({0})",
    "update_master_grads": "unscale_()",
}
"""Methods of ``FP16_Optimizer``, with the calls of a wrapped optimizer; ``backward`` and ``loss_scale`` stay."""


def convert(program: Program) -> None:
    """Convert each use that has an equivalent."""
    for use in program.uses(ROOTS):
        change = _CHANGES.get(use.name)
        if use.name in _NORMS or use.name in _KEPT:
            program.replace(use.node, (_NORMS | _KEPT)[use.name])
        elif change is not None:
            change(program, use)


def _parallel(program: Program, use: Use) -> None:
    call = program.call(use)
    if call is None:
        program.replace(use.node, _DDP)
        return
    given = Arguments(program, call, ("module",))
    unusual = given.unknown or given.others("module", *_DDP_OPTIONS, "gradient_average")
    if unusual or given.literal("gradient_average", True) is not True:
        program.refuse(use.node, "apex.parallel.DistributedDataParallel in this form", _DDP)
    else:
        program.replace(call, f"{_DDP}({given.code('module')})")


_DDP = "torch.nn.parallel.DistributedDataParallel"


def _sync_batch_norm(program: Program, use: Use) -> None:
    program.replace(use.node, "torch.nn.SyncBatchNorm.convert_sync_batchnorm")


def _sync_class(program: Program, use: Use) -> None:
    program.replace(use.node, "torch.nn.SyncBatchNorm")


def _optimizer(program: Program, use: Use) -> None:
    """Write torch's optimizer with Apex' defaults, or polyamp's of the old name if torch has no such option."""
    call, kind = program.call(use), use.name.rpartition(".")[2]
    names = _FUSED_OPTIONS[kind]
    given = Arguments(program, call, names) if call is not None else None
    modes = [given.literal(name, True) for name in ("adam_w_mode", "bias_correction")] if given is not None else []
    unusual = (
        given is None or given.unknown or given.others(*names, *_IGNORED) or modes[0] is ... or modes[1] is not True
    )
    if call is None or given is None or unusual:  # polyamp keeps it, with all of its options
        program.replace(use.node, f"{_SHIM}.optimizers.{kind}")
        return
    kept = {name: value for name in names if (value := given.code(name)) is not None}
    target = "torch.optim.SGD" if kind == "FusedSGD" else "torch.optim.AdamW" if modes[0] else "torch.optim.Adam"
    if target == "torch.optim.AdamW":
        kept.setdefault("weight_decay", "0")
    first = [kept.pop("params")] if "params" in kept else []
    for name in ("adam_w_mode", "bias_correction"):
        kept.pop(name, None)
    program.replace(call, f"{target}({', '.join([*first, *(f'{name}={code}' for name, code in kept.items())])})")


def _network_to_half(program: Program, use: Use) -> None:
    call = program.call(use)
    if call is None or len(call.args) != 1:
        program.refuse(use.node, "network_to_half in this form", 'model = polyamp.convert(model, "O2")')
    else:
        program.replace(call, f'polyamp.convert({program.code(call.args[0].value)}, "O2")')


_SETTINGS = {"init_scale": "init", "scale_factor": "growth", "scale_window": "interval"}


def _fp16_optimizer(program: Program, use: Use) -> None:
    """Wrap the optimizer; ``backward(loss)`` and ``loss_scale`` of the wrapped optimizer have the same names."""
    call = program.call(use)
    names = ("init_optimizer", "static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args", "verbose")
    given = Arguments(program, call, names) if call is not None else None
    target = program.parent(program.parent(use.node) or use.node)
    scale = _fp16_scale(given) if given is not None else None
    if call is None or given is None or given.unknown or given.others(*names) or scale is None:
        program.refuse(use.node, "FP16_Optimizer in this form", 'polyamp.wrap_optimizer(opt, "O2", loss_scale=...)')
        return
    if not isinstance(target, cst.Assign) or not _methods(program, program.code(target.targets[0].target)):
        program.refuse(
            use.node,
            "FP16_Optimizer whose methods are called elsewhere",
            "opt.backward(loss), opt.clip_grad_norm_(limit)",
        )
        return
    program.replace(call, f'polyamp.wrap_optimizer({given.code("init_optimizer")}, "O2"{scale})')


def _fp16_scale(given: Arguments) -> str | None:
    """Return the option for the loss scale; None if it cannot be told."""
    dynamic, static = given.literal("dynamic_loss_scale", False), given.code("static_loss_scale")
    settings = given.literal("dynamic_loss_args")
    if dynamic is True and settings is None:
        return ', loss_scale=polyamp.LossScale.like("apex", init=2.0**32, interval=1000)'
    if dynamic is True and isinstance(settings, dict) and settings.keys() <= _SETTINGS.keys():
        changed = {"init": 2.0**32, "interval": 1000} | {_SETTINGS[name]: value for name, value in settings.items()}
        limits = ", max=2.0**127" if changed["init"] > 2**24 else ""
        return (
            f', loss_scale=polyamp.LossScale.like("apex", {", ".join(f"{k}={v}" for k, v in changed.items())}{limits})'
        )
    if dynamic is False:
        value = literal(static or "1.0")
        return (
            f", loss_scale={static or '1.0'}" if value is ... or isinstance(value, float) else f", loss_scale={value}.0"
        )
    return None


def _owner(program: Program, call: cst.Call) -> str | None:
    return program.code(call.func.value) if isinstance(call.func, cst.Attribute) else None


def _methods(program: Program, name: str) -> bool:
    """Convert the methods of an ``FP16_Optimizer``; return whether all of them have an equivalent."""
    calls = [call for call in program.find(cst.Call) if _owner(program, call) == name]
    for call in calls:
        method = (dotted_name(call.func) or "").rpartition(".")[2]
        if method in _OPTIMIZER_METHODS:
            argument = program.code(call.args[0].value) if call.args else ""
            program.replace(call, f"{name}.{_OPTIMIZER_METHODS[method].format(argument)}")
        elif method == "backward" and any(
            arg.keyword and arg.keyword.value == "update_master_grads" for arg in call.args
        ):
            kept = [
                program.code(arg).rstrip(",")
                for arg in call.args
                if not (arg.keyword and arg.keyword.value == "update_master_grads")
            ]
            program.replace(call, f"{name}.backward({', '.join(kept)})")
        elif method == "inspect_master_grad_data":
            return False
    return True


_CHANGES: dict[str, Callable[[Program, Use], None]] = {
    "apex.parallel.DistributedDataParallel": _parallel,
    "apex.parallel.distributed.DistributedDataParallel": _parallel,
    "apex.parallel.convert_syncbn_model": _sync_batch_norm,
    "apex.parallel.SyncBatchNorm": _sync_class,
    "apex.optimizers.FusedAdam": _optimizer,
    "apex.optimizers.FusedSGD": _optimizer,
    "apex.fp16_utils.network_to_half": _network_to_half,
    "apex.fp16_utils.FP16_Optimizer": _fp16_optimizer,
}
