"""`LossScaledOptimizer`, the optimizer that `polyamp.wrap_optimizer` returns, and the order of its step.

A step, in `LossScaledOptimizer.make_step`, does this, in this order:

1. It asks what the gradients are multiplied by: ``provenance.py``.
2. It tests them for inf and NaN, and
3. divides them by that factor, in float32: ``gradients.py``.
4. It clips them to ``max_grad_norm``.
5. The inner optimizer updates the parameters or their masters, or skips: `update_or_skip` below.
6. The loss scale advances: ``scale.py``.

For example, a loss of 0.5 under a loss scale of 1024 and an `SGD` on the CPU:

    backward(loss)   512 is differentiated; a gradient is 3072
    1., 2., 3., 4.   3072 is finite, and of a loss times 1024; it becomes 3.0, and under ``max_grad_norm=1`` 1.0
    5.               the parameter moves by the learning rate times 1.0
    6.               one more finite step; after ``LossScale(interval=)`` of them the scale doubles

With `fused.py` two operators do 2 to 6.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyamp.backends.torch.autocast.regions import HERE
from polyamp.backends.torch.step import overflow, passes, refusals
from polyamp.backends.torch.step.gradients import Gradients, WindowFlags
from polyamp.backends.torch.step.guards import STEPS, guard, look_for_casts, report_hooks, report_policy
from polyamp.backends.torch.step.masters import make_masters
from polyamp.backends.torch.step.overflow import Overflow
from polyamp.backends.torch.step.passes import LISTENERS, update_begins
from polyamp.backends.torch.step.provenance import ALIVE, WrappedOptimizer
from polyamp.backends.torch.step.ranks import has_peers
from polyamp.backends.torch.step.scale import LossScaler, Scaling, losses_in
from polyamp.backends.torch.step.sharding import check_groups
from polyamp.backends.torch.step.witness import Witness
from polyamp.backends.torch.unstable import asked_by_checkpoint, infers_pipeline, not_traced, note_step
from polyamp.errors import (
    InvalidValueError,
    check_callable,
    kind_of,
    no_method,
    no_optimizer,
    unknown_options,
    wrapped_already,
    wrong_type,
)
from polyamp.scale import StepResult
from polyamp.settings import LossScale

if TYPE_CHECKING:
    from polyamp.backends.torch.step.fused import FusedStep
    from polyamp.policies import Policy

Groups = list[dict[str, Any]]
_OF_BACKWARD = ("gradient", "retain_graph", "create_graph", "inputs")
_OF_GRAD = ("grad_outputs", "retain_graph", "only_inputs", "allow_unused", "is_grads_batched", "materialize_grads")


class LossScaledOptimizer(WrappedOptimizer):
    """An optimizer that unscales, tests, clips, updates or skips, then advances the loss scale: always in that order.

    It is a `torch.optim.Optimizer`: ``param_groups``, ``state``, ``defaults`` and hooks are the inner optimizer's own,
    so schedulers and trainers work. Step hooks run when the inner optimizer steps.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0), max_grad_norm=1.0)
    >>> opt.backward((weight * torch.tensor([3.0, 4.0])).sum())
    >>> opt.step()
    >>> weight.detach(), opt.last_step
    (tensor([0.7000, 0.6000]), StepResult(applied=True, scale=8.0, skipped_in_a_row=0))

    Args:
        optimizer: any `torch.optim.Optimizer`. On an accelerator a step of a fused optimizer needs no host sync, of any
            other optimizer one. LBFGS and other optimizers that evaluate a closure more than once need a copy of
            parameters and state, to undo an overflow.
        loss_scale: None is ``LossScale()``. With ``LossScale.none()`` the steps are exactly those of ``optimizer``.
        max_grad_norm: clip unscaled gradients to this global L2 norm at every step; None does not clip.
        master_weights: train float32 copies of 16-bit parameters, which replace them in ``param_groups``. None does so
            if there are such parameters; False updates them directly, with gradients in 16 bits.
        fused_step: leave skipping to a kernel on the device, without a host sync. None does so on accelerators if
            one of these can: on GPUs with the compiled extension, polyamp's operators for SGD, Adam and AdamW, which
            also unscale, clip, update and advance the loss scale (gradients then stay scaled after a step); else the
            optimizer's kernel if that is fused. True does so on all devices, False never.
        process_group: the ranks that step or skip together: an overflow on one is an overflow on all. None is the
            default group of ``torch.distributed`` if that is initialised; False is this rank alone.
        norm_group: ranks that have other parameters of the same model, such as the stages of a pipeline: gradients are
            clipped by the norm over all of them. None: every rank has all of a parameter, or a shard of a distributed
            tensor, whose ranks are known.
        named_parameters: names for the parameters in messages, as in ``model.named_parameters()``. Without them, the
            names given to the optimizer, or those of a module that has the parameters.
        policy: the policy that it is wrapped for, which `repr`, states and reports name; None if nobody chose one.

    Raises:
        InvalidTypeError: ``optimizer`` is not an optimizer, or another argument has the wrong type.
        UsageError: it is wrapped already, or ``fully_shard`` put its parameters of several dtypes into one group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None = None,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool | None = None,
        fused_step: bool | None = None,
        process_group: Any = None,
        norm_group: Any = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        policy: Policy | None = None,
    ) -> None:
        # No super().__init__(): it would build its own groups and state in addition to the inner optimizer's.
        if isinstance(optimizer, LossScaledOptimizer):
            raise wrapped_already(f"a LossScaledOptimizer around {type(optimizer.inner).__name__}")
        if isinstance(getattr(optimizer, "polyamp_wrapper", None), LossScaledOptimizer):
            raise wrapped_already(f"{type(optimizer).__name__}, attached to its wrapper")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise no_optimizer(optimizer, allowed="an instance of torch.optim.Optimizer")
        refusals.check_wrapping(fused_step, process_group, norm_group)
        check_groups([param for group in optimizer.param_groups for param in group["params"]])
        named = refusals.named_tensors(named_parameters)
        self.inner = optimizer
        settings = LossScale.of("dynamic" if loss_scale is None else loss_scale)
        self.scaler = LossScaler(settings, policy)
        self.max_grad_norm, self.fused_step, self.masters_wanted = max_grad_norm, fused_step, master_weights
        self.on_device = fused_step if self.scaler.settings.check else False  # who skips; see `update_or_skip`
        self.masters = make_masters(optimizer, master_weights)
        self.last_step = StepResult(self.scaler.state)
        self.has_stepped = False  # whether the inner optimizer has, since its state was replaced
        # What copies and pickles keep. Not kept: what is known of the gradients, a `step` that a scheduler patched on
        # the instance, and process groups, which cannot be copied.
        self._saved_attributes = (*vars(self), "_saved_attributes")
        self._reset_unsaved(process_group, norm_group, named)

    def _reset_unsaved(
        self, process_group: Any = None, norm_group: Any = None, named: Mapping[str, Tensor] | None = None
    ) -> None:
        self.is_stepping = False
        self.process_group, self.norm_group = process_group, norm_group
        self._join_config: Any = None  # set by torch's ``Join``
        self.named = {} if named is None else named
        self.steps = 0
        self.lowers = None
        HERE.thread.policy = None  # that of forward passes from now on
        self.findings = WindowFlags()
        self.is_decided = False
        self._simple_for = (0, False)  # the number of parameters at the last `Gradients.are_simple`, and its result
        self._fused: FusedStep | None = None
        self.witness: Witness = Witness(self)
        ALIVE.add(self)
        guard(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self._saved_attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_unsaved()

    def __repr__(self) -> str:
        return f"LossScaledOptimizer({self.inner!r}, {self.scaler.settings!r}, policy={self.policy})"

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # copying and unpickling start without an inner optimizer
            raise AttributeError(name)
        if hasattr(self.inner, name):
            return getattr(self.inner, name)
        raise no_method(self, name, {"update": "leave it out: step() updates the loss scale too"})

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's default options."""
        return self.inner.defaults

    @property
    def policy(self) -> Policy | None:
        """The policy that it was wrapped for; None if nobody chose one."""
        return self.scaler.policy

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by. Reading it waits for the device if the scale is on one."""
        return float(self.scaler.state.scale)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.scaler.set(scale, where="opt.loss_scale = scale")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Reading it costs a sync if the device decided."""
        return self.last_step.was_skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` sets attributes, by which `step` sees and refuses it."""
        return self.scaler.multiplies

    def scale(self, loss: Any, loss_id: Hashable = None) -> Any:
        """Return the loss in float32 (float64 stays) times the loss scale, for ``scale(loss).backward()``.

        >>> weight = torch.ones(1, requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
        >>> opt.scale(weight.sum()).backward()
        >>> opt.scale(3 * weight.sum(), loss_id="penalty").backward()  # with another scale
        >>> opt.unscale_()
        >>> weight.grad
        tensor([4.])

        Losses can be scaled after `unscale_` too: what their backward passes add is unscaled on arrival.

        Args:
            loss: floating-point tensor of any shape, or such tensors in lists, tuples and dicts.
            loss_id: any name for a loss that gets its own scale. If there are gradients of another loss, this
                loss's are brought to the scale of those.

        Raises:
            InvalidTypeError: ``loss`` is not a floating-point tensor.
            NonFiniteLossError: under ``nonfinite_loss="raise"``, inf or NaN on the CPU; on other devices a later `step`
                raises it. By default the step is skipped, with a warning.
            UsageError: the loss is the result of an earlier call.
        """
        if not torch.compiler.is_compiling() and infers_pipeline():
            return loss
        if self.steps < STEPS:
            look_for_casts(self, losses_in(loss))
        scaler = self.scaler.of(loss_id, self.process_group)
        return passes.scale(scaler, loss, process_group=self.process_group, by=self.witness)

    @not_traced
    def backward(self, loss: Tensor, loss_id: Hashable = None, *more: Any, **options: Any) -> None:
        """Call ``scale(loss, loss_id).backward(**options)``. Gradients of several calls add up until `zero_grad`.

        Raises:
            UsageError: the gradients of the last step were not cleared.
        """
        if more or options:
            unknown = [*map(kind_of, more), *(name for name in options if name not in _OF_BACKWARD)]
            if unknown:
                raise unknown_options(unknown, _OF_BACKWARD, where="opt.backward(loss, loss_id)")
        if self.witness.is_consumed and self.checks:
            raise refusals.not_cleared(where="backward(loss)")
        try:
            self.scale(loss, loss_id).backward(**options)
        except RuntimeError as error:
            from polyamp.backends.torch.autocast.format_errors import raise_explained  # no step that runs needs it

            raise_explained(error)
            raise

    @not_traced
    def unscaled_grad(
        self, loss: Tensor, inputs: Tensor | Sequence[Tensor], *, create_graph: bool = True, **options: Any
    ) -> tuple[Any, ...]:
        """Return unscaled gradients of a scaled loss, for a gradient penalty. The parameters' ``grad`` stays unchanged.

        >>> weight = torch.tensor([3.0], requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> (grad,) = opt.unscaled_grad(weight.square().sum(), [weight])
        >>> opt.backward(weight.square().sum() + grad.square().sum())
        >>> weight.grad / opt.loss_scale
        tensor([30.])

        Args:
            loss: floating-point scalar.
            inputs: tensors to differentiate by.
            create_graph: keep the graph of the gradients, so that a penalty can be differentiated. False is for
                gradients that are only numbers, such as those of cached representations.
            **options: other options of ``torch.autograd.grad``.

        Raises:
            UnsupportedError: ``torch.autograd.grad`` has no such option.
        """
        unknown = sorted(options.keys() - set(_OF_GRAD))
        if unknown:
            raise unknown_options(unknown, ("create_graph", *_OF_GRAD), where="opt.unscaled_grad(loss, inputs)")
        (one,), scaler = losses_in(loss), self.scaler
        scaled: Any = torch.autograd.grad(scaler.multiply(one), inputs, create_graph=create_graph, **options)
        inverse = scaler.inverse(scaler.state.scale)
        return tuple(None if grad is None else grad.float() * inverse.to(grad.device) for grad in scaled)

    @not_traced
    def unscale_(self, *, scaled: bool | None = None) -> None:
        """Unscale the gradients now, to read or change them before `step`; call it again after further losses.

        With master weights, the unscaled gradients are those of the parameters in ``param_groups``.

        Args:
            scaled: see `step`.

        Raises:
            UsageError: there was no backward pass, or the gradients are unscaled already or of an unscaled loss.
        """
        if LISTENERS:
            update_begins()
        self._unscale_now(scaled, again=False)

    @not_traced
    def clip_grad_norm_(self, max_norm: float, *, scaled: bool | None = None) -> Tensor:
        """Unscale if necessary, then clip to a global L2 norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        Args:
            max_norm: not negative.
            scaled: see `step`.

        Returns:
            The norm before clipping; float32 scalar tensor, not finite if the step will be skipped.

        Raises:
            UsageError: there was no backward pass, or its loss was not scaled.
            InvalidValueError: ``max_norm`` is negative or NaN.
        """
        refusals.check_norm(max_norm)
        if LISTENERS:
            update_begins()
        gradients = self._unscale_now(scaled)
        norm = gradients.clip(max_norm)
        if self.masters is not None:
            self.masters.are_clipped = True
        self.witness.accept_writes()
        return norm

    @not_traced
    def step(self, closure: Callable[[], Any] | None = None, *, scaled: bool | None = None) -> Any:
        """Unscale, test, clip, update or skip, and advance the loss scale.

        A skipped step leaves parameters, masters and optimizer state bitwise unchanged; see `last_step`. A step after
        backward passes that reached none of the parameters is applied, and changes nothing.

        >>> weight = torch.ones(1, requires_grad=True)
        >>> opt = LossScaledOptimizer(torch.optim.SGD([weight], lr=0.5), LossScale(init=8.0))
        >>> weight.grad = torch.ones(1)
        >>> opt.step(scaled=False), weight.detach()
        (None, tensor([0.5000]))

        Args:
            closure: computes the loss, calls `backward` and returns the unscaled loss.
            scaled: for gradients that were set by hand, or by a backward pass that did not start from a scaled loss:
                True if they are multiplied by the loss scale; False if they are not, and are to be tested, clipped and
                used as they are. None: `backward`, or `scale` and a backward pass, made them.

        Returns:
            The return value of the inner optimizer's ``step``; after a skip, the closure's loss or None.

        Raises:
            UsageError: there was no backward pass, gradients are from the last step, or their loss was not scaled.
            LossScaleError: see `LossScale`: ``max_skips`` and ``on_min``.
            NonFiniteLossError: under ``nonfinite_loss="raise"``, a loss on an accelerator was inf or NaN.
        """
        if "found_inf" in vars(self) or "grad_scale" in vars(self):
            vars(self).pop("found_inf", None)
            vars(self).pop("grad_scale", None)
            raise refusals.scaled_twice(self.inner, where="torch.amp.GradScaler.step(optimizer)")
        if LISTENERS:
            update_begins(closure)
        result = self.make_step(scaled) if closure is None else self._step_with_closure(closure, scaled)
        if self.steps < STEPS or not self.scaler.multiplies:
            report_policy(self)
        return result

    def _unscale_now(self, scaled: bool | None, *, again: bool = True) -> Gradients:
        try:
            is_done = self.witness.is_unscaled and not (again or self.witness.has_more)
            if is_done and self.first_with_gradient() is not None:
                raise refusals.unscaled_already(where="unscale_()", fix="call it once after the last backward()")
            scaling = self.witness.judge(scaled)
            gradients = self._take(remember=True)
            if scaling is None:
                return gradients
            checks = scaling.scaler.settings.check or self.checks
            if not self.witness.is_unscaled:
                self._note(self._unscale(gradients, scaling, checks=checks), scaling)
            elif checks and self.witness.contributors:
                self._note(gradients.test(), scaling)
        except Exception:
            self.tell_peers()
            raise
        self.witness.accept_unscaling()
        return gradients

    def make_step(self, scaled: bool | None = None) -> Any:
        """Make a step from the current gradients, in the order that the top of this file describes."""
        self.is_stepping = True
        try:
            for scaler in self.scaler.all():
                if not (scaler.late.copy is None and scaler.decisions.copy is None):
                    scaler.report_earlier_step(overflow.explanation(self), process_group=self.process_group)
            scaling, operators = self.witness.judge(scaled), self._operators()  # 1.
            if scaling is None:
                return self._step_without_gradients()
            if operators is not None:
                applied = operators.step(self, scaling, is_tested=self.witness.has_tested)  # 2. to 6.
                if applied is not None:
                    explain = overflow.explanation(self, scaling.scaler.loss_was_finite, self.findings.overflowed)
                    self._close(scaling.scaler, applied, explain, left=scaling)
                    return None
            bad, gradients = self._prepare(scaling, operators)  # 2., 3., 4.
            inner, on_device = self.inner, self.on_device
            result, finite = update_or_skip(inner, bad, gradients, on_device, has_stepped=self.has_stepped)  # 5.
            self.has_stepped = self.has_stepped or finite is True
            self._finish(finite, scaling)  # 6.
            return result
        except Exception:
            self.tell_peers()
            raise
        finally:
            self.is_stepping = self.is_decided = False

    def _prepare(self, scaling: Scaling, operators: FusedStep | None = None) -> tuple[Tensor, Gradients]:
        """Test, unscale and clip. The tensor is 1.0 if a rank has a gradient that is not finite, else 0.0."""
        limit, was_unscaled = self.max_grad_norm, self.witness.is_unscaled
        checks = scaling.scaler.settings.check or self.checks
        gradients, found = self._take(), None
        if operators is not None and checks and not was_unscaled and limit is not None and self.norm_group is None:
            found = operators.unscale_and_clip(gradients, scaling.factor, limit)
        bad = self._unscale(gradients, scaling, checks=checks) if found is None else found
        if checks:
            if was_unscaled:  # somebody may have changed them since
                bad = gradients.test()
            if self.findings.partners is not None:
                bad = torch.maximum(bad, self.findings.partners.to(bad.device))
            if self.findings.flags or self.findings.losses:
                bad = self.findings.worst(bad)
            self._note(bad, scaling)
            if has_peers(self.process_group):
                bad = self.decide(bad, scaling)
        if found is None and limit is not None:  # after the decision: ranks that refuse have no norm to add
            gradients.clip(limit, skipped=bad)
            if self.masters is not None:
                self.masters.are_clipped = True
        return bad, gradients

    def _finish(self, finite: bool | Tensor, scaling: Scaling) -> None:
        """Round the masters into the model after an applied step, advance the loss scale, and report a skipped step."""
        scaler, known = scaling.scaler, scaling.scaler.loss_was_finite
        explain: Callable[[], str] | None = None
        if finite is not True:
            explain = overflow.explanation(self, known, self.findings.overflowed, skipped=finite is False)
        if finite is not False and self.masters is not None:
            self.masters.update_model()
        if len(self.findings.flags) < 2:
            next(iter(self.findings.flags), scaler).advance(finite, self)
        else:
            for each, was_finite in self.findings.by_loss(finite):
                each.advance(was_finite, self)
        self._close(scaler, finite, explain)
        if finite is False:
            if isinstance(known, Tensor) and not known:
                scaler.report_loss("inf or NaN", process_group=self.process_group, where="scaling the loss")
            scaler.report_step(explain)

    def _close(
        self, scaler: LossScaler, finite: bool | Tensor, explain: Callable[[], str] | None, left: Scaling | None = None
    ) -> None:
        """End the step; ``left`` is the scaling that gradients still have."""
        if finite is not False:
            torch.clear_autocast_cache()  # else an autocast region would go on using the old weights
        self.last_step = StepResult(scaler.state, finite, explain)
        self.findings = WindowFlags()
        if self.scaler.multiplies:
            report_hooks(self.witness.with_hooks())
        self.witness.close(left or Scaling(scaler, 1.0))

    def _step_with_closure(self, closure: Callable[[], Any], scaled: bool | None) -> Any:
        """Step with a closure that makes the gradients; call it before the step, or let the optimizer call it."""
        from polyamp.backends.torch.step.closures import evaluates_once, step_reevaluating  # others do not load it

        allowed, fix = "a function that computes the loss and returns it, or None", "give the function itself"
        check_callable(closure, where="step(closure)", allowed=allowed, fix=fix)
        if evaluates_once(self.inner):
            with torch.enable_grad():
                loss = closure()
            self.make_step(scaled)
            return loss

        def evaluate() -> Any:
            self.forget_gradients()
            with torch.enable_grad():
                return closure()

        witness, judge = self.witness, partial(self.witness.judge, scaled)
        made = witness.scaling is not None and not witness.from_last_step and self.first_with_gradient() is not None
        try:
            result, applied, scaling = step_reevaluating(self, evaluate, judge, self._prepare, has_gradients=made)
            if scaling is None:
                self._close(self.scaler, True, None)
            else:
                self._finish(applied, scaling)
            return result
        except Exception:
            self.tell_peers()
            raise
        finally:
            self.is_decided = False

    def _step_without_gradients(self) -> Any:
        """Step without gradients: as in plain PyTorch parameters stay, and no loss scale advances."""
        self._take()
        result = self.inner.step()
        self._close(self.scaler, True, None)
        return result

    def _operators(self) -> FusedStep | None:
        """Return polyamp's operators; None if they are not used on the first parameter's device."""
        first: Tensor | None = None
        for group in self.inner.param_groups:
            if first is None and group["params"]:
                first = group["params"][0]
        if first is None or self.fused_step is False or (self.fused_step is None and not first.is_cuda):
            return None
        if self._fused is None:
            from polyamp.backends.torch.step.fused import FusedStep  # other programs do not load the operators

            self._fused = FusedStep(self.inner, always=self.fused_step is True)
        return self._fused if self._fused.is_for(first.device) else None

    def _take(self, *, remember: bool = False) -> Gradients:
        """Return the gradients of ``param_groups``, after masters took theirs from the model."""
        masters, witness = self.masters, self.witness
        if masters is not None:
            masters.follow()
            if not witness.is_unscaled:
                masters.take_gradients(remember=remember or not self.checks)
            elif witness.model_scaling is not None:
                masters.look_again(self.scaler.inverse(witness.model_scaling.factor))
        if self.norm_group is None:
            return Gradients(self.inner.param_groups)
        return Gradients(self.inner.param_groups, lambda _: self.norm_group)

    def _unscale(self, gradients: Gradients, scaling: Scaling, *, checks: bool) -> Tensor:
        """Unscale, unless that was done; return 1.0 if this finds inf or NaN on this rank, else 0.0."""
        if self.witness.is_unscaled or not checks:
            return torch.zeros((), device="cpu")
        if self._simple_for[0] != len(gradients.parameters):
            self._simple_for = len(gradients.parameters), gradients.are_simple()
        inverse = scaling.scaler.inverse(scaling.factor)
        over_mesh = self.process_group is not None  # a group may not span the mesh
        return gradients.unscale(inverse, simple=self._simple_for[1], over_mesh=over_mesh)

    def _note(self, bad: Tensor, scaling: Scaling) -> None:
        """Note the flag ``bad`` for the losses of the gradients, which are unscaled now."""
        self.findings.note(bad, self.witness.contributors or ([] if self.witness.is_unscaled else [scaling.scaler]))
        self.witness.note_unscaled(scaling.scaler, masters=self.masters is not None)

    def share_scales(self, other: LossScaledOptimizer) -> None:
        """Use the loss scales of another wrapped optimizer, which trains on the same losses."""
        self.scaler = other.scaler
        self.last_step = StepResult(self.scaler.state)

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook of ``torch.distributed.algorithms.Join([model, self])`` for ranks without further inputs."""
        from polyamp.backends.torch.step.joining import JoinedRank  # other programs do not load it

        inner = getattr(self.inner, "join_hook", None)
        return JoinedRank(self, None if inner is None else inner(**kwargs))

    @property
    def join_process_group(self) -> Any:
        """The ranks that step together, for ``Join``."""
        return self.process_group or torch.distributed.group.WORLD

    def forget_gradients(self) -> None:
        """Forget the gradients, which are cleared or about to be replaced."""
        self.findings = WindowFlags()
        self.witness.open()

    def overflowed(self) -> list[Overflow]:
        """Return the parameters whose gradients hold inf or NaN now, by name. Waits for the device.

        >>> model = torch.nn.Linear(2, 1)
        >>> opt = LossScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        >>> opt.backward(model(torch.full((1, 2), 3e34)).sum())
        >>> opt.step()
        >>> bool(opt.last_step), *opt.overflowed()
        (False, Overflow(name='weight', inf=2, nan=0, elements=2))
        """
        return overflow.overflowed(self)

    @not_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including the model's own 16-bit ones, and start a new window."""
        self.inner.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)
        self.forget_gradients()

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the inner optimizer, with master weights if its parameters have 16 bits.

        Raises:
            InvalidTypeError: it is not a dict.
            InvalidValueError: a parameter is in another group already.
        """
        if not isinstance(param_group, dict):
            where, fix = "add_param_group(param_group)", 'give {"params": parameters, ...}'
            raise wrong_type(param_group, where=where, allowed="a dict", fix=fix)
        self.inner.add_param_group(param_group)
        try:
            if self.masters is None:
                self.masters = make_masters(self.inner, self.masters_wanted)
            else:
                self.masters.adopt(self.inner, self.param_groups[-1])
        except InvalidValueError:
            self.param_groups.pop()
            raise
        self.witness.add(self.parameter_groups()[-1])

    @property
    def param_groups(self) -> Groups:
        """The inner optimizer's groups, with master weights in place of 16-bit parameters."""
        if not asked_by_checkpoint():
            return self.inner.param_groups
        from polyamp.backends.torch.step import checkpoints  # other programs do not load it

        return checkpoints.param_groups(self)

    @param_groups.setter
    def param_groups(self, groups: Groups) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, by parameter."""
        if not asked_by_checkpoint():
            return self.inner.state
        from polyamp.backends.torch.step import checkpoints

        return checkpoints.StateNames(self)

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's ``state`` and ``param_groups``, with ``loss_scale`` and ``master_weights``.

        `torch.distributed.checkpoint` gets the same data in another form; see ``checkpoints.py``.

        >>> opt = LossScaledOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.5))
        >>> sorted(opt.state_dict())
        ['loss_scale', 'master_weights', 'param_groups', 'state']
        """
        is_asked = asked_by_checkpoint()
        from polyamp.backends.torch.step import checkpoints, saving

        return checkpoints.state_dict(self) if is_asked else saving.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume bit for bit from a result of `state_dict`; the state keeps its dtypes.

        The state of a plain optimizer is accepted too, with a warning: the loss scale starts at ``init``.

        Raises:
            StateError: it is another kind of state, incomplete, or of other parameters; nothing is changed.
        """
        from polyamp.backends.torch.step import checkpoints, saving

        steps = self.scaler.state.steps
        saving.load(self, checkpoints.read(self, state_dict) if checkpoints.is_checkpoint(state_dict) else state_dict)
        self.has_stepped = False
        if self.scaler.state.steps != steps:  # else a plain optimizer's state was joined to the scale that was here
            checkpoints.report_lost_state(self)


def update_or_skip(
    inner: torch.optim.Optimizer, bad: Tensor, gradients: Gradients, on_device: bool | None, *, has_stepped: bool
) -> tuple[Any, bool | Tensor]:
    """Let an optimizer step unless a flag is set; return its result, and whether it stepped.

    The host reads the flag, which waits for the device, or passes it to a fused optimizer, whose kernel reads it:

        CPU, or an optimizer without fused=True    bad == 1.0 -> read by the host -> inner.step() is not called
        accelerator, fused=True                    bad -> inner.found_inf -> inner.step(), whose kernel writes nothing
    """
    wanted = bad.device.type != "cpu" if on_device is None else on_device
    # torch's fused SGD allocates momentum without filling it, and would keep that memory if its kernel skipped. So the
    # host decides until every parameter had an applied step.
    if wanted and getattr(inner, "_step_supports_amp_scaling", False) and _is_complete(inner, gradients, has_stepped):
        inner.found_inf = bad  # type: ignore[attr-defined]  # interface of _step_supports_amp_scaling
        try:
            return inner.step(), bad == 0
        finally:
            del inner.found_inf  # type: ignore[attr-defined]
    if bad:
        note_step(inner)
        return None, False
    return inner.step(), True


def _is_complete(inner: torch.optim.Optimizer, gradients: Gradients, has_stepped: bool) -> bool:
    return all(map(inner.state.__contains__, gradients.params)) if inner.state else has_stepped
