"""`polyamp run` for PyTorch: what begins when a script has imported torch.

The deprecated ``torch.cuda.amp`` and ``torch.cpu.amp`` become polyamp's. Under a policy, mixed precision is turned on
for a script that has none, by three changes to torch that last until the run ends:

    nn.Module.__call__         the outermost module runs in autocast; its outputs are float32 again
    Optimizer.__init__         an optimizer is attached to a wrapper where it is made, and stays the same object
    torch.autograd.backward    the loss is scaled; when it returns, gradients are unscaled

So the script only sees float32 losses and unscaled gradients, and its own clipping, accumulation and logging are right.
A script for which this would be wrong is refused: see ``script_refusals.py``.
"""

from __future__ import annotations

from polyamp.backends.torch import cuda_amp
from polyamp.backends.torch.compat.script_forward import Regions
from polyamp.backends.torch.compat.script_refusals import check_sources, refuse_unsafe
from polyamp.backends.torch.compat.script_steps import ScaledSteps
from polyamp.backends.torch.dtypes import SIXTEEN_BIT
from polyamp.policies import Policy
from polyamp.scripts.session import Session

_LOW = {str(dtype).removeprefix("torch.") for dtype in SIXTEEN_BIT}


def begin(session: Session) -> None:
    """Replace what is deprecated in torch, and turn mixed precision on if the session has a policy.

    Raises:
        UsageError: the script cannot be run safely under the policy.
    """
    cuda_amp.install(session)
    session.at_end(cuda_amp.uninstall)
    policy = session.policy
    if policy is None or not _changes_something(session, policy):
        return
    check_sources(session)
    refuse_unsafe(session, scales=policy.loss_scale.check)
    Regions(session, policy).install()
    ScaledSteps(session, policy).install()


def _changes_something(session: Session, policy: Policy) -> bool:
    if policy.param != "float32":
        session.refuse(
            "this policy stores parameters in another format, which a script cannot be given from outside",
            found=str(policy),
            fix="use mixed_float16 or mixed_bfloat16, or polyamp.convert in the script",
        )
    return policy.compute in _LOW
