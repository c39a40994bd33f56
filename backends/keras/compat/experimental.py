"""``tf.keras.mixed_precision.experimental`` of TensorFlow 2.1 to 2.3, which later versions do not have.

Import from here, or let `polyamp run` or `polyamp.backends.keras.compat.names.install` put it in its old place::

    from polyamp.backends.keras.compat import experimental as mixed_precision

    mixed_precision.set_policy(mixed_precision.Policy("mixed_float16"))
    optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(), loss_scale="dynamic")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from polyamp.backends.keras.compat import loss_scale_optimizer
from polyamp.backends.keras.compat.compiling import wrap_by_policy
from polyamp.backends.keras.steps.optimizer import LossScaledOptimizer
from polyamp.errors import InvalidTypeError, warn_deprecated
from polyamp.given_scales import loss_scale_of
from polyamp.loss_scale import LossScale
from polyamp.scripts.session import found
from polyamp.validation import kind_of

__all__ = ["LossScaleOptimizer", "Policy", "get_layer_policy", "global_policy", "set_policy"]

_MODULE = "tf.keras.mixed_precision.experimental"


@keras.saving.register_keras_serializable(package="polyamp")
class Policy(keras.DTypePolicy):
    """A dtype policy of Keras with a loss scale; ``compile`` wraps the optimizer of a model that has one.

    >>> policy = Policy("mixed_float16", loss_scale=1024)
    >>> policy.compute_dtype, policy.variable_dtype, policy.loss_scale
    ('float16', 'float32', LossScale.fixed(1024.0))

    Args:
        name: a name that `keras.DTypePolicy` knows.
        loss_scale: ``"auto"`` means ``"dynamic"`` for ``mixed_float16`` and None otherwise. Or ``"dynamic"``; a number;
            a `polyamp.LossScale`; a loss scale of ``tf.mixed_precision.experimental``; or None, for no scaling.

    Raises:
        InvalidTypeError: ``loss_scale`` is none of these.
        InvalidValueError: a number is outside what `polyamp.LossScale` allows.
    """

    def __init__(self, name: str | None = None, loss_scale: Any = "auto") -> None:
        _deprecated(f"{_MODULE}.Policy(name)", "polyamp.convert(model, name)")
        super().__init__(name)
        if isinstance(loss_scale, str) and loss_scale == "auto":
            loss_scale = "dynamic" if self.name == "mixed_float16" else None
        where = "Policy(loss_scale=)"
        self.loss_scale = None if loss_scale is None else loss_scale_of(loss_scale, where=where)
        wrap_by_policy(_wrapped)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments as JSON values."""
        return {"name": self.name, "loss_scale": None if self.loss_scale is None else self.loss_scale.to_dict()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Policy:
        """Make a policy from the result of `get_config`."""
        scale = config.get("loss_scale", "auto")
        return cls(config["name"], LossScale.from_dict(scale) if isinstance(scale, Mapping) else scale)


def set_policy(policy: Policy | str | None) -> None:
    """Make a policy that of all layers and models which are made from now on without one.

    >>> set_policy("mixed_float16")
    >>> keras.layers.Dense(1).compute_dtype
    'float16'
    >>> set_policy("float32")

    Args:
        policy: a policy or its name; None is Keras' ``floatx``.
    """
    _deprecated(f"{_MODULE}.set_policy(policy)", "polyamp.convert(model, policy)")
    name = keras.config.floatx() if policy is None else policy
    keras.config.set_dtype_policy(Policy(name) if isinstance(name, str) else name)


def global_policy() -> Policy:
    """Return the policy of layers and models that are made without one.

    >>> global_policy().name
    'float32'
    """
    current = keras.config.dtype_policy()
    return current if isinstance(current, Policy) else Policy(current.name)


def get_layer_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """Return a layer's policy.

    >>> get_layer_policy(keras.layers.Dense(1)).name
    'float32'

    Raises:
        InvalidTypeError: it is not a layer.
    """
    _deprecated(f"{_MODULE}.get_layer_policy(layer)", "layer.dtype_policy")
    if not isinstance(layer, keras.Layer):
        raise InvalidTypeError(
            "this is not a layer", where="get_layer_policy(layer)", found=kind_of(layer), allowed="a keras.Layer"
        )
    return layer.dtype_policy


class CurrentScale:
    """The loss scale of an optimizer as TensorFlow 2.1 to 2.3 had it: an object that returns it when it is called.

    >>> opt = LossScaleOptimizer(keras.optimizers.SGD(), 8)
    >>> float(opt.loss_scale()), float(opt.loss_scale)
    (8.0, 8.0)

    Args:
        value: the scale; scalar float32 tensor.
        settings: of the rule.
    """

    def __init__(self, value: Any, settings: LossScale) -> None:
        self._value = value
        self.settings = settings

    def __call__(self) -> Any:
        """Return the scale; scalar float32 tensor."""
        return self._value

    def __float__(self) -> float:
        return float(self._value)

    def numpy(self) -> Any:
        """Return the scale as a NumPy number."""
        return np.float32(float(self._value))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(float(self._value), dtype or "float32")

    def __repr__(self) -> str:
        return repr(self.settings)


@keras.saving.register_keras_serializable(package="polyamp", name="ExperimentalLossScaleOptimizer")
class LossScaleOptimizer(loss_scale_optimizer.LossScaleOptimizer):
    """`polyamp.wrap_optimizer` with the interface of TensorFlow 2.1 to 2.3.

    >>> weight = keras.Variable(3.0)
    >>> opt = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale="dynamic")
    >>> _ = opt.minimize(lambda: weight * weight, [weight])
    >>> float(weight), float(opt.loss_scale())
    (0.0, 32768.0)

    Args:
        optimizer: any `keras.optimizers.Optimizer`.
        loss_scale: ``"dynamic"``, a number, a `polyamp.LossScale`, or a loss scale of
            ``tf.mixed_precision.experimental``.
        name: as for any Keras optimizer.
        **options: those of `polyamp.backends.keras.LossScaledOptimizer`.

    Raises:
        InvalidTypeError: ``optimizer`` is not a Keras optimizer, or ``loss_scale`` is not a loss scale.
        InvalidValueError: a number is outside what `polyamp.LossScale` allows.
        UsageError: it is wrapped already.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, loss_scale: Any, name: str | None = None, **options: Any
    ) -> None:
        _deprecated(f"{_MODULE}.LossScaleOptimizer(opt, loss_scale)", 'polyamp.wrap_optimizer(opt, "mixed_float16")')
        settings = loss_scale_of(loss_scale, where="LossScaleOptimizer(loss_scale=)")
        super().__init__(optimizer, name=name, loss_scale=settings, **options)

    @property
    def loss_scale(self) -> Any:
        """The scale of the next loss; a `CurrentScale`: call it, or take its ``float``."""
        return CurrentScale(super().loss_scale, self.scaler.settings)


def _wrapped(model: Any, optimizer: Any) -> Any:
    """Return the optimizer that a model with a `Policy` trains with; None leaves it to Keras."""
    policy = model.dtype_policy
    if not isinstance(policy, Policy):
        return None
    plain = policy.loss_scale is None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer if plain else LossScaledOptimizer(optimizer, policy.loss_scale)


def _deprecated(old: str, instead: str) -> None:
    warn_deprecated(old, instead, stacklevel=4)
    found(old.partition("(")[0])
