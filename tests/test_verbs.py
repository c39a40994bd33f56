"""The public verbs refuse bad input before any framework is asked."""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from polyamp import registry


class Stranger:
    """An object of no framework."""

    dtype = "float32"


@pytest.mark.parametrize("optimizer", [object(), Stranger(), 3, "adam", None, [], lambda: None])
def test_wrapping_what_no_adapter_knows_is_refused(optimizer: Any) -> None:
    with pytest.raises(polyamp.InvalidTypeError, match="no adapter knows this object") as caught:
        polyamp.wrap_optimizer(optimizer, "mixed_float16")
    assert "torch" in str(caught.value)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_bad_norm_limit_is_refused(limit: Any) -> None:
    with pytest.raises(polyamp.InvalidValueError, match="gradient-norm limit"):
        polyamp.wrap_optimizer(Stranger(), max_grad_norm=limit)


def test_convert_and_the_other_verbs_refuse_strangers() -> None:
    for call in (polyamp.convert, polyamp.save_loss_scale):
        with pytest.raises(polyamp.InvalidTypeError, match="no adapter knows"):
            call(Stranger())
    with pytest.raises(polyamp.InvalidTypeError, match="no adapter knows"):
        polyamp.scale_loss(1.0, Stranger())


def test_loss_scale_of_another_type_is_refused() -> None:
    with pytest.raises(polyamp.InvalidTypeError, match="loss_scale is no LossScale"):
        polyamp.wrap_optimizer(Stranger(), "mixed_float16", loss_scale=128)  # type: ignore[arg-type]


def test_two_policies_are_refused() -> None:
    with pytest.raises(polyamp.InvalidTypeError, match="one policy"):
        polyamp.autocast("mixed_float16", "mixed_bfloat16")


def test_unknown_backend_is_refused_and_the_known_are_listed() -> None:
    with pytest.raises(polyamp.InvalidTypeError, match="no adapter of that name") as caught:
        polyamp.wrap_optimizer(Stranger(), backend="caffe")
    assert all(name in str(caught.value) for name in registry.names())


def test_casting_plain_values_leaves_them_alone_and_strange_arrays_are_refused() -> None:
    policy = polyamp.policy("mixed_float16")
    tree = {"steps": 3, "name": "x", "nested": [1, (2.5, None)]}
    assert policy.cast_to_compute(tree) is tree
    with pytest.raises(polyamp.InvalidTypeError, match="no adapter knows"):
        policy.cast_to_compute({"w": Stranger()})
