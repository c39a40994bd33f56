"""One precision policy, one loss scaler and one flow rule, for PyTorch, JAX and TensorFlow.

Importing polyamp imports no framework. An adapter is loaded when the first object of its framework is seen. All errors
and warnings are in `polyamp.errors`, all formats in `polyamp.formats`.
"""

from typing import TYPE_CHECKING, Any

from polyamp.errors import PolyampError, PolyampWarning
from polyamp.policies import Policy, current_policy, policy, set_global_policy
from polyamp.regions import autocast
from polyamp.scale import StepResult, advance
from polyamp.settings import LossScale, LossScaleState
from polyamp.verbs import (
    convert,
    load_loss_scale,
    save_loss_scale,
    scale_loss,
    value_and_grad,
    wrap_optimizer,
)

if TYPE_CHECKING:
    from polyamp.diagnosis.diagnose import calibrate, diagnose
    from polyamp.diagnosis.health import health, watch
    from polyamp.diagnosis.lint import lint
    from polyamp.diagnosis.parity import parity
    from polyamp.diagnosis.probe import probe
    from polyamp.diagnosis.profile import profile
    from polyamp.plan import Plan
    from polyamp.rewriting import explain, rewrite
    from polyamp.version import __version__ as __version__

__all__ = [
    "LossScale",
    "LossScaleState",
    "Plan",
    "Policy",
    "PolyampError",
    "PolyampWarning",
    "StepResult",
    "advance",
    "autocast",
    "calibrate",
    "convert",
    "current_policy",
    "diagnose",
    "explain",
    "health",
    "lint",
    "load_loss_scale",
    "parity",
    "policy",
    "probe",
    "profile",
    "rewrite",
    "save_loss_scale",
    "scale_loss",
    "set_global_policy",
    "value_and_grad",
    "watch",
    "wrap_optimizer",
]

_ON_FIRST_USE = {
    "Plan": "plan",
    "__version__": "version",
    "explain": "rewriting",
    "rewrite": "rewriting",
    "calibrate": "diagnosis.diagnose",
    "watch": "diagnosis.health",
    **{verb: f"diagnosis.{verb}" for verb in ("diagnose", "health", "lint", "parity", "probe", "profile")},
}
"""The module of each name that a training step does not need. It is loaded when the name is used."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "backends":
        return import_module("polyamp.backends")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"polyamp.{_ON_FIRST_USE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
