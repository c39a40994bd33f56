"""The model of a wrapped optimizer's steps: plain PyTorch in float64, where nothing is scaled.

The same program runs twice, with polyamp's optimizers and with `PlainOptimizer`. It has to end with the same
parameters, or be refused with nothing changed.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import polyamp
from polyamp import LossScale


class PlainOptimizer:
    """An optimizer that clips, tests, and steps or does nothing; all that `wrap_optimizer` promises, on its inner one.

    A loss that is not finite is multiplied by inf: then no gradient that it reaches is finite.
    """

    def __init__(self, inner: torch.optim.Optimizer, checks: bool, max_grad_norm: float | None) -> None:
        self.inner, self.checks, self.max_grad_norm = inner, checks, max_grad_norm
        self.applied = True
        self.must_skip = False  # whether a test before the step found what is not finite, whatever was cleaned since
        self.may_skip = False  # whether a step from finite gradients may be skipped, since a loss before was not finite
        self.skips = False  # what polyamp did then
        for param in trained(inner):
            param.data = param.data.double()

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def loss_scale(self) -> float:
        return 1.0

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        pass

    def scale(self, loss: Any, loss_id: Hashable = None) -> Any:
        if isinstance(loss, list):
            return [self.scale(one) for one in loss]
        return loss if loss.isfinite().all() or not self.checks else loss * float("inf")

    def backward(self, loss: Tensor, loss_id: Hashable = None, **options: Any) -> None:
        self.must_skip &= not self.is_clear()  # else this is another window
        self.scale(loss).backward(**options)

    def unscaled_grad(self, loss: Tensor, inputs: Any, create_graph: bool = True) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, inputs, create_graph=create_graph)

    def unscale_(self, *, scaled: bool | None = None) -> None:
        self.must_skip |= self.checks and not self.is_finite()

    def is_finite(self) -> bool:
        return all(bool(param.grad.isfinite().all()) for param in trained(self) if param.grad is not None)

    def is_clear(self) -> bool:
        return not any(param.grad is not None and bool(param.grad.any()) for param in trained(self))

    def clip_grad_norm_(self, limit: float) -> Tensor:
        self.unscale_()
        grads = [param.grad for param in trained(self) if param.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if norm.isfinite() or not self.checks:
            for grad in grads:
                grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, closure: Callable[[], Any] | None = None, *, scaled: bool | None = None) -> Any:
        loss = None if closure is None else closure()
        self.applied = not self.checks or (self.is_finite() and not self.must_skip)
        if self.applied and self.may_skip:
            self.applied = not self.skips
        self.may_skip = self.must_skip = False
        if self.applied:
            if self.max_grad_norm is not None:
                self.clip_grad_norm_(self.max_grad_norm)
            self.inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        self.may_skip = self.must_skip = False

    def add_param_group(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            param.data = param.data.double()
        self.inner.add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict(saved)


def plain(optimizer: Any, policy: Any, *, loss_scale: Any = None, max_grad_norm: Any = None, **options: Any) -> Any:
    """Wrap as `polyamp.wrap_optimizer` does: every 16-bit policy tests its gradients, and only `none()` never does."""
    if isinstance(optimizer, list):
        return [plain(one, policy, loss_scale=loss_scale, max_grad_norm=max_grad_norm) for one in optimizer]
    checks = "16" in str(polyamp.policy(policy).compute) if loss_scale is None else loss_scale != LossScale.none()
    return PlainOptimizer(optimizer, checks, max_grad_norm)


def trained(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer updates: masters, if there are any."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def weights(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -1.0], dtype=dtype)) for _ in range(count)]


def S(param: Tensor) -> Tensor:
    """Return a loss whose gradient is 1."""
    return param.float().sum()


def sgd(*params: Tensor, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer that moves by 0.125 for a gradient of 1."""
    return torch.optim.SGD(params, **{"lr": 0.125, **options})


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return what roundings may come to; those of a 16-bit format come from the user's own writes to parameters."""
    rounding = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-4)
    return {"rtol": rounding, "atol": rounding, "equal_nan": True}


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.detach().double(), expected.detach().double(), **tolerance(found.dtype))


class Kind(NamedTuple):
    """A policy, the format of its parameters and a loss scale with which small gradients stay finite."""

    policy: str
    dtype: torch.dtype
    options: dict[str, Any]


KINDS = {
    "float16": Kind("mixed_float16", torch.float32, {}),
    "float16-masters": Kind("float16", torch.float16, {"loss_scale": LossScale(init=8.0, max=64.0)}),
    "bfloat16": Kind("mixed_bfloat16", torch.float32, {}),
    "bfloat16-masters": Kind("bfloat16", torch.bfloat16, {}),
    "scale-1": Kind("mixed_float16", torch.float32, {"loss_scale": LossScale.fixed(1.0)}),
}

Program = Callable[..., None]


class Run:
    """One run of ``program(wrap, p, q, ...)``, which wraps optimizers of the parameters that it gets, and uses them."""

    def __init__(self, program: Program, kind: Kind, wrap: Callable[..., Any], **options: Any) -> None:
        self.params = weights(program.__code__.co_argcount - 1, kind.dtype)
        self.moments: list[list[Tensor]] = [self._values()]  # the parameters before and after every update of the model
        self.refusal: polyamp.PolyampError | None = None

        def wrapping(optimizer: Any, **more: Any) -> Any:
            if wrap is plain:  # polyamp's operators would leave a step with hooks to the optimizer
                for one in optimizer if isinstance(optimizer, list) else [optimizer]:
                    one.register_step_pre_hook(lambda *_: self.moments.append(self._values()))
                    one.register_step_post_hook(lambda *_: self.moments.append(self._values()))
            made = wrap(optimizer, kind.policy, **{**kind.options, **options, **more})
            with polyamp.autocast(kind.policy):  # a step without any region would be reported
                return made

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                program(wrapping, *self.params)
            except polyamp.PolyampError as error:
                self.refusal = error
        self.moments.append(self._values())
        self.told = [str(one.message) for one in caught if issubclass(one.category, polyamp.PolyampWarning)]

    def _values(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]


def outcome(program: Program, kind: Kind, **options: Any) -> str:
    """Return "right" or "refused". Fail if the parameters are others than the model's, now or at the refusal."""
    found, model = Run(program, kind, polyamp.wrap_optimizer, **options), Run(program, kind, plain)
    assert model.refusal is None
    possible = model.moments[-1:] if found.refusal is None else model.moments
    same_as = [all(map(same, found.moments[-1], moment)) for moment in possible]
    report = [(*map(torch.Tensor.tolist, moment),) for moment in (found.moments[-1], *possible)]
    assert any(same_as), (
        f"found {report[0]}, expected {' or '.join(map(str, report[1:]))}; {found.refusal or found.told}"
    )
    return "right" if found.refusal is None else "refused"
