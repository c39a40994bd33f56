"""The public verbs refuse bad input before any framework is asked."""

import sys
from typing import Any

import pytest

import polyamp
from polyamp import adapters


@pytest.fixture
def no_framework_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that imported none: here another suite may have."""
    for root in adapters.entries().keys() & sys.modules.keys():
        monkeypatch.setitem(sys.modules, root, None)


class Stranger:
    """An object of no framework."""

    dtype = "float32"


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), 10**400, "1", True])
def test_bad_norm_limit_is_refused(limit: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="gradient-norm limit"):
        polyamp.wrap_optimizer(Stranger(), max_grad_norm=limit)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: polyamp.wrap_optimizer([], "mixed_float16"), "no adapter knows this object(?s:.)*torch"),
        (lambda: polyamp.wrap_optimizer("adam", "mixed_float16"), "make one first, as in keras.optimizers.Adam"),
        (lambda: polyamp.convert(Stranger()), "no adapter knows"),
        (lambda: polyamp.save_loss_scale(Stranger()), "no adapter knows"),
        (lambda: polyamp.scale_loss(1.0, Stranger()), "no adapter knows"),
        (lambda: polyamp.autocast("mixed_float16", "mixed_bfloat16"), "one policy"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(call: Any, says: str) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match=says):
        call()


def test_unknown_backend_is_refused_and_the_known_are_listed() -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="no adapter of that name") as caught:
        polyamp.wrap_optimizer(Stranger(), backend="caffe")
    assert all(name in str(caught.value) for name in adapters.names())


def test_casting_plain_values_leaves_them_alone_and_strange_arrays_are_refused() -> None:
    policy = polyamp.policy("mixed_float16")
    tree = {"steps": 3, "name": "x", "nested": [1, (2.5, None)]}
    assert policy.cast_to_compute(tree) is tree
    with pytest.raises(polyamp.errors.InvalidTypeError, match="no adapter knows"):
        policy.cast_to_compute({"w": Stranger()})


@pytest.mark.parametrize("thing", [3, "model", [], object()], ids=str)
@pytest.mark.parametrize("verb", [polyamp.rewrite, polyamp.explain])
def test_what_cannot_be_called_is_not_rewritten(verb: Any, thing: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="cannot be called") as caught:
        verb(thing, 1.0, policy="mixed_float16")
    assert verb.__name__ in str(caught.value)
    assert type(thing).__name__ in str(caught.value)


def double(number: Any = 1) -> Any:
    """Twice as much."""
    return 2 * number


@pytest.mark.usefixtures("no_framework_is_loaded")
@pytest.mark.parametrize(
    "call",
    [
        lambda: polyamp.rewrite(double, 3),
        lambda: polyamp.rewrite(double, number=[3.0, "x"]),
        lambda: polyamp.rewrite(double, Stranger()),
        lambda: polyamp.rewrite(double)(3),
        lambda: polyamp.rewrite(double)(),
        lambda: polyamp.rewrite(double)(policy="O1", backend="jax"),
        lambda: polyamp.explain(double),
        lambda: polyamp.explain(double, 3),
    ],
)
def test_plain_arguments_tell_no_framework(call: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidTypeError, match="no adapter knows this object") as caught:
        call()
    assert "backend=" in str(caught.value)


@pytest.mark.usefixtures("no_framework_is_loaded")
def test_there_is_no_plan_before_the_first_call() -> None:
    rewritten = polyamp.rewrite(double)
    for _ in range(2):
        with pytest.raises(polyamp.errors.UsageError, match="not traced yet") as caught:
            _ = rewritten.plan
        assert "rewrite(fn, *args)" in str(caught.value)
        with pytest.raises(polyamp.errors.InvalidTypeError, match="no adapter knows"):  # a failed call is no first call
            rewritten(3)


@pytest.mark.parametrize("options", [{}, {"policy": "mixed_float16"}, {"policy": polyamp.policy("O1")}], ids=str)
def test_rewrite_is_a_decorator(options: Any) -> None:
    rewritten = polyamp.rewrite(**options)(double)
    assert (rewritten.__name__, rewritten.__doc__, rewritten.__wrapped__) == ("double", "Twice as much.", double)


@pytest.mark.parametrize(
    "call",
    [
        lambda: polyamp.rewrite(policy="mixed_float15"),
        lambda: polyamp.rewrite(double, policy="mixed_float15"),
        lambda: polyamp.rewrite(double, 3, policy="mixed_float15"),
    ],
)
def test_a_wrong_policy_is_refused_when_the_function_is_wrapped(call: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="mixed_float15"):
        call()
