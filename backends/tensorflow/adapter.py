"""The adapter: what `polyamp`'s verbs do with TensorFlow objects."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import tensorflow as tf

from polyamp.backends.tensorflow.autocast.context import autocast_context, current
from polyamp.backends.tensorflow.casting import cast
from polyamp.backends.tensorflow.devices import devices
from polyamp.backends.tensorflow.facts import facts
from polyamp.backends.tensorflow.graphs.grappler import GrapplerRewritten
from polyamp.backends.tensorflow.graphs.refusals import check_engine
from polyamp.backends.tensorflow.graphs.rewrite import explain, rewrite, rewritten_graph
from polyamp.backends.tensorflow.operations import OPERATIONS
from polyamp.backends.tensorflow.recording.record import record
from polyamp.backends.tensorflow.steps.optimizer import LossScaledOptimizer
from polyamp.backends.tensorflow.steps.scaler import LossScaler
from polyamp.devices import why_not_fast
from polyamp.diagnosis.facts import Facts
from polyamp.diagnosis.recording import Recording
from polyamp.loss_scale import LossScale, LossScaleState, on_host
from polyamp.plan import Plan
from polyamp.policy import Policy
from polyamp.refusals import no_loss_scale, no_options


@final
class TensorFlowAdapter:
    """TensorFlow behind `polyamp.adapter.Adapter`: tensors, and optimizers of ``tf.compat.v1.train``."""

    name = "tensorflow"
    operations: Mapping[str, str] = OPERATIONS
    rewrites_unseen = True
    """Functions are rewritten before they see arguments: what `rewrite` returns is a ``tf.function`` at once."""

    def owns(self, obj: object) -> bool:
        """Whether ``obj`` is a tensor, variable, module or optimizer."""
        kinds = tf.Tensor | tf.Variable | tf.Module | tf.compat.v1.train.Optimizer | tf.compat.v1.GraphDef
        return isinstance(obj, kinds)

    def describe(self) -> dict[str, Any]:
        """Version, devices with the formats that are fast there, and notes.

        >>> adapter.describe()["devices"][-1]["name"]
        'cpu'
        """
        *gpus, cpu = map(dict, devices())
        notes = [] if gpus else ["no GPU: no Tensor Cores"]
        notes += [why_not_fast(gpu["name"], gpu["capability"]) for gpu in gpus if not gpu["fast"]]
        return {"version": tf.__version__, "devices": [*gpus, cpu], "notes": notes}

    def cast(self, tree: Any, format_name: str, /) -> Any:
        """See `polyamp.backends.tensorflow.cast`."""
        return cast(tree, format_name)

    def wrap_optimizer(
        self,
        optimizer: Any,
        policy: Policy,
        *,
        loss_scale: LossScale,
        max_grad_norm: float | None,
        master_weights: bool | None = None,
    ) -> LossScaledOptimizer:
        """See `polyamp.backends.tensorflow.LossScaledOptimizer`."""
        wrapped = LossScaledOptimizer(optimizer, loss_scale, max_grad_norm, master_weights=master_weights)
        wrapped.scaler.compute = policy.compute
        return wrapped

    def autocast_context(self, policy: Policy) -> AbstractContextManager[None]:
        """See `polyamp.backends.tensorflow.autocast_context`."""
        return autocast_context(policy)

    def is_lowering(self) -> bool:
        """Whether an autocast of ours, or TensorFlow's own pass, lowers what runs now."""
        return current() is not None or bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))

    def rewrite(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        policy: Policy,
        *,
        engine: str = "polyamp",
        jit_compile: bool | None = None,
    ) -> Any:
        """See `polyamp.backends.tensorflow.rewrite`; for a ``GraphDef`` `rewritten_graph`.

        ``engine="grappler"`` is `polyamp.backends.tensorflow.graphs.grappler.GrapplerRewritten`.
        """
        check_engine(engine)
        if engine == "grappler":
            rewritten = GrapplerRewritten(fn, policy, jit_compile)
            return rewritten.traced_for(args, kwargs) if args or kwargs else rewritten
        if not callable(fn):
            if jit_compile is not None:
                raise no_options(["jit_compile"], where="rewrite(graph_def)")
            return rewritten_graph(fn, policy)
        return rewrite(fn, *args, policy=policy, jit_compile=jit_compile, **kwargs)

    def explain(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy) -> Plan:
        """See `polyamp.backends.tensorflow.explain`."""
        return explain(fn, *args, policy=policy, **kwargs)

    def record(
        self,
        step: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        policy: Policy,
        *,
        widened: bool,
        scale: float | None = None,
    ) -> Recording:
        """See `polyamp.backends.tensorflow.recording.record`."""
        return record(step, args, kwargs, policy, widened=widened, scale=scale)

    def facts(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy, optimizer: Any
    ) -> Facts:
        """See `polyamp.backends.tensorflow.facts.facts`."""
        return facts(target, args, kwargs, policy, optimizer, self.describe()["devices"])

    def scale_loss(self, loss: Any, holder: Any) -> tf.Tensor:
        """See `LossScaler.scale`."""
        return _scaler(holder, "scale_loss(holder)").scale(loss)

    def loss_scale_of(self, holder: Any) -> tuple[LossScale, LossScaleState]:
        """The settings of a wrapped optimizer or a `LossScaler`, and its state on the host. Outside of graphs."""
        scaler = _scaler(holder, "loss_scale_of(holder)")
        return scaler.settings, on_host(scaler.state)

    def save_loss_scale(self, holder: Any) -> dict[str, Any]:
        """See `LossScaler.save_loss_scale`."""
        return _scaler(holder, "save_loss_scale(holder)").save_loss_scale()

    def load_loss_scale(self, holder: Any, saved: Mapping[str, Any]) -> Any:
        """See `LossScaler.load_loss_scale`; gives ``holder``."""
        _scaler(holder, "load_loss_scale(holder)").load_loss_scale(saved)
        return holder


adapter = TensorFlowAdapter()


def _scaler(holder: Any, where: str) -> LossScaler:
    scaler = holder.scaler if isinstance(holder, LossScaledOptimizer) else holder
    if not isinstance(scaler, LossScaler):
        raise no_loss_scale(
            holder, where=where, allowed="what polyamp.wrap_optimizer gave, or a polyamp.backends.tensorflow.LossScaler"
        )
    return scaler
