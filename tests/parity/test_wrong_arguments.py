"""Every public function, with every argument wrong in many ways: polyamp's own error or a result, and no change."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax  # noqa: F401  # all frameworks are asked whether an object is theirs
import keras  # noqa: F401
import pytest
import scipy.stats  # noqa: F401  # which parity would import within the second
import tensorflow  # noqa: F401
import torch

import polyamp
from polyamp.errors import PolyampError, shown
from polyamp.policies import in_policy


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def nested(depth: int, copies: int = 1) -> list[Any]:
    tree: list[Any] = [0]
    for _ in range(depth):
        tree = [tree] * copies
    return tree


WRONG: dict[str, Callable[[], Any]] = {
    **{repr(one): lambda one=one: one for one in (None, True, 3, -1.5, float("nan"), 1j, "text", b"x", [], {}, int)},
    "pairs": lambda: [("a",)],
    "secret": lambda: {"token": "s3cret"},
    "object": object,
    "function": lambda: lambda: 0,
    "generator": lambda: (one for one in ()),
    "module": lambda: time,
    "tensor": lambda: torch.ones(2, 2),
    "deep": lambda: nested(3000),
    "shared": lambda: nested(24, copies=2),
    "hostile": Hostile,
    "hostile inside": lambda: {"a": [Hostile()]},
    "long": lambda: "x" * 10**6,
    "large": lambda: 10**5000,
}
VERBS = [name for name in polyamp.__all__ if inspect.isroutine(getattr(polyamp, name))]


def right() -> dict[str, Any]:
    """Return right values for arguments, by their names."""
    plain = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    holder = polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    config = polyamp.LossScale()
    values = {"optimizer": plain, "holder": holder, "config": config, "state": config.initial_state(), "finite": True}
    return {**values, "loss": torch.tensor(1.0), "model": torch.nn.Linear(2, 2), "batches": [torch.ones(2)]}


def calls(name: str, kind: str) -> Iterator[tuple[str, dict[str, Any], Callable[[], object]]]:
    """Yield a call with each argument wrong in turn, the right values of its others, and the argument's name."""
    function = getattr(polyamp, name)
    parameters = inspect.signature(function).parameters.values()
    needed = [one for one in parameters if one.default is one.empty and one.kind in (0, 1)]
    for one in parameters:
        calls_it = one.name in ("fn", "fun", "step", "train", "target", "where") and callable(WRONG[kind]())
        if one.kind != one.VAR_KEYWORD and not calls_it:  # a user's function may raise what it likes
            values = right()
            args = [WRONG[kind]() if each is one else values.get(each.name, len) for each in needed]
            args += [WRONG[kind]()] if one.kind in (0, 2) and one not in needed else []
            kwargs = {one.name: WRONG[kind]()} if one.kind in (1, 3) and one not in needed else {}
            yield one.name, values, lambda args=args, kwargs=kwargs: function(*args, **kwargs)


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """Return the text of polyamp's own error, empty without one, and the seconds that the call took."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
            polyamp.set_global_policy("float32")
        except PolyampError as error:
            return str(error), time.perf_counter() - start
    return "", time.perf_counter() - start


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", [*VERBS, "LossScale", "StepResult"])
def test_a_wrong_argument_is_polyamp_s_own_error(name: str, kind: str) -> None:
    for argument, values, call in calls(name, kind):
        before = polyamp.current_policy(), in_policy(), polyamp.save_loss_scale(values["holder"])
        text, seconds = outcome(call)
        assert seconds < 1 or outcome(call)[1] < 1, argument  # the first call of a verb imports what it needs
        assert len(text) < 4000, argument
        assert "s3cret" not in text or argument == "rules", argument
        if text:
            assert (polyamp.current_policy(), in_policy(), polyamp.save_loss_scale(values["holder"])) == before


def test_no_object_can_make_the_text_of_an_error_long_or_fail() -> None:
    for make in WRONG.values():
        text = shown(make())
        assert len(text) < 300
        assert "s3cret" not in text
