"""What `polyamp run` does to TensorFlow, right after a script has imported it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow import graph_rewrite
from polyamp.backends.tensorflow.autocast.context import autocast_everywhere, lowering_of
from polyamp.backends.tensorflow.autocast.lowering import Operation
from polyamp.backends.tensorflow.compat.true_gradients import TrueGradients
from polyamp.backends.tensorflow.steps.optimizer import LossScaledOptimizer
from polyamp.backends.tensorflow.unstable import replace_functions, scope_path
from polyamp.flow import AS_WRITTEN
from polyamp.loss_scale import LossScale
from polyamp.plan import Plan, PlannedOperation
from polyamp.policies import Policy, policy
from polyamp.scripts.places import script_line
from polyamp.scripts.session import Session

v1 = tf.compat.v1

_VARIABLE = "TF_ENABLE_AUTO_MIXED_PRECISION"
_ON = (_VARIABLE, f"{_VARIABLE}_GRAPH_REWRITE")
# `from tensorflow.train.experimental import x` loads a second module from the same file as `tf.train.experimental`.
_TRAIN_EXPERIMENTAL = [
    f"{root}.train.experimental"
    for version in ("", ".compat.v1", ".compat.v2")
    for root in (f"tensorflow{version}", f"tensorflow._api.v2{version}")
] + [f"{root}.mixed_precision" for root in ("tensorflow.compat.v1", "tensorflow._api.v2.compat.v1")]
_MOST_CALLS = 4096
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "scatter_sub", "scatter_add", "scatter_nd_sub", "scatter_nd_add")


def begin(session: Session) -> None:
    """Put removed functions in their old places; with a policy, run the script's products in 16 bits.

    ``TF_ENABLE_AUTO_MIXED_PRECISION=1``, which NVIDIA's TensorFlow 1 obeyed, is such a policy too: float16, with the
    loss scale of TensorFlow 1.

    Raises:
        UsageError: there are both.
        UnsupportedError: TensorFlow does not compute in the policy's format.
    """
    _supply_graph_rewrite(session)
    chosen, scale = session.policy, None if session.policy is None else session.policy.loss_scale
    named = next((name for name in _ON if os.environ.get(name) == "1"), None)
    if named is not None:
        session.found(f"{named}=1")
        chosen, scale = policy("mixed_float16"), LossScale.like("tensorflow")
    if chosen is not None and scale is not None:
        lower(session, chosen)
        if scale.check:
            scale_losses(session, scale)


def _supply_graph_rewrite(session: Session) -> None:
    """Put ``enable_mixed_precision_graph_rewrite`` where TensorFlow 1 had it, under each name of its modules."""

    def enable_mixed_precision_graph_rewrite(opt: Any, loss_scale: Any = "dynamic") -> Any:
        session.found("tf.train.experimental.enable_mixed_precision_graph_rewrite")
        wrapped = graph_rewrite.enable_mixed_precision_graph_rewrite(opt, loss_scale)
        if tf.executing_eagerly():
            session.add(wrapped)
        return wrapped

    enable, disable = enable_mixed_precision_graph_rewrite, graph_rewrite.disable_mixed_precision_graph_rewrite
    for place in _TRAIN_EXPERIMENTAL:
        module = import_module(place)
        session.replace(module, "enable_mixed_precision_graph_rewrite", enable)
        session.replace(module, "disable_mixed_precision_graph_rewrite", disable)


def lower(session: Session, chosen: Policy) -> None:
    """Run products in the policy's format until the session ends, and refuse the script's own mixed precision."""
    autocast_everywhere(chosen)
    session.at_end(lambda: autocast_everywhere(None))
    lowering = lowering_of(chosen)
    if lowering is not None:
        products = _Products(session, chosen)
        lowering.observer = products.note
        session.at_end(lambda: setattr(lowering, "observer", None))
        session.add(products.report)
    options = tf.config.optimizer.set_experimental_options

    def set_experimental_options(given: Any) -> None:
        names = [name for name, is_on in given.items() if name.startswith("auto_mixed_precision") and is_on]
        if names:
            session.found(f"tf.config.optimizer.set_experimental_options({names[0]!r})")
        options(given)

    session.replace(tf.config.optimizer, "set_experimental_options", set_experimental_options)


class _Products:
    """Records the products of a script, each place once, and the formats that they ran in.

    Args:
        session: the run.
        policy: what its products run under.
    """

    def __init__(self, session: Session, policy: Policy) -> None:
        self._session, self._policy = session, policy
        self._seen: dict[tuple[str, str, bool], PlannedOperation] = {}
        self._calls = 0

    def note(self, operation: Operation, lowered: bool) -> None:
        """Record a product, unless there were very many: eager code repeats them in each step."""
        self._session.has_low |= lowered
        self._calls += 1
        if self._calls > _MOST_CALLS:
            return
        where = scope_path() or script_line()
        decided = self._policy.decide(operation.canonical, where)
        made_in = self._policy.compute if lowered else AS_WRITTEN
        planned = PlannedOperation(
            operation.canonical, operation.native, where, decided.op_class, made_in, decided.reason
        )
        self._seen.setdefault((operation.native, where, lowered), planned)

    def report(self) -> None:
        """Add the plan of the products to the report."""
        if self._seen:
            operations = tuple(self._seen.values())
            self._session.ran(Plan(str(self._policy), operations, engine="autocast, the products of TensorFlow"))


def scale_losses(session: Session, settings: LossScale) -> None:
    """Scale losses where gradients are taken, and skip steps where they are applied, until the session ends."""
    scaling = TrueGradients(settings, session)
    session.shared["tensorflow"] = scaling
    _where_taken(session, scaling)
    _where_applied(session, scaling)
    _where_assigned(session, scaling)


def _where_taken(session: Session, scaling: TrueGradients) -> None:
    of_tape = tf.GradientTape.gradient

    @functools.wraps(of_tape)
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **options: Any) -> Any:
        def take(seeds: Any) -> Any:
            return of_tape(self, target, sources, seeds, *args, **options)

        return scaling.take(take, target, sources, output_gradients)

    session.replace(tf.GradientTape, "gradient", tf.autograph.experimental.do_not_convert(gradient))
    _replace(session, {function: _in_graph(scaling, function) for function in (tf.gradients, v1.gradients)})


def _in_graph(scaling: TrueGradients, of_graph: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_graph)
    def gradients(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **options: Any) -> Any:
        return scaling.take(lambda seeds: of_graph(ys, xs, seeds, *args, **options), ys, xs, grad_ys)

    return gradients


def _where_applied(session: Session, scaling: TrueGradients) -> None:
    """Skip steps of optimizers of TensorFlow 1, including those whose class has its own ``apply_gradients``."""
    made = v1.train.Optimizer.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, LossScaledOptimizer):
            session.found("polyamp.wrap_optimizer")
        for kind in type(self).__mro__:
            if "apply_gradients" in vars(kind):
                _skip_in(session, scaling, kind)
        made(self, *args, **kwargs)

    session.replace(v1.train.Optimizer, "__init__", __init__)


def _skip_in(session: Session, scaling: TrueGradients, kind: type) -> None:
    original = vars(kind)["apply_gradients"]
    if getattr(original, "_polyamp_skips", None) is scaling:
        return

    @functools.wraps(original)
    def apply_gradients(self: Any, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        if scaling.is_inside:
            return original(self, grads_and_vars, global_step=global_step, name=name)
        result = scaling.step(self, list(grads_and_vars), global_step=global_step, name=name)
        return None if tf.executing_eagerly() else tf.group(result.scale, name=name)

    apply_gradients._polyamp_skips = scaling  # type: ignore[attr-defined]
    session.replace(kind, "apply_gradients", apply_gradients)


def _where_assigned(session: Session, scaling: TrueGradients) -> None:
    """Refuse updates by hand, by variables' methods and by functions of TensorFlow 1."""
    with tf.Graph().as_default():
        kinds = [type(v1.Variable(0.0, use_resource=resource)) for resource in (True, False)]
    for kind in kinds:
        for name in _ASSIGNMENTS:
            owner = next((one for one in kind.__mro__ if name in vars(one)), None)
            if owner is not None:
                session.replace(owner, name, _checked(scaling, vars(owner)[name]))
    functions = [getattr(v1, name) for name in _ASSIGNMENTS]
    _replace(session, {function: _checked(scaling, function) for function in functions})


def _checked(scaling: TrueGradients, assign: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(assign)
    def checked(variable: Any, *args: Any, **kwargs: Any) -> Any:
        scaling.check_assignment(variable)
        return assign(variable, *args, **kwargs)

    return checked


def _replace(session: Session, replaced: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    replace_functions(replaced)
    session.at_end(lambda: replace_functions({ours: original for original, ours in replaced.items()}))
