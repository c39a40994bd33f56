"""Every public name, with every argument wrong in many ways: polyamp's own error or a result, and no change."""

import functools
import inspect
import time
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax  # all frameworks are asked whether an object is theirs
import keras  # noqa: F401
import numpy as np
import pytest
import scipy.stats  # noqa: F401  # which parity would import within the second
import tensorflow as tf
import torch

import polyamp
from polyamp.errors import PolyampError
from polyamp.policies import in_policy
from polyamp.report import Report
from support.harness import endless_trees


def raising(*args: Any) -> Any:
    raise RuntimeError("not now")


class Hostile:
    __repr__ = raising


def hostile(base: type, *methods: str, value: Any = None, is_property: bool = False) -> Any:
    kind = type("Hostile", (base,), dict.fromkeys(methods, property(raising) if is_property else raising))
    return kind.__new__(kind) if value is None else base.__new__(kind, value)


class Slow:
    def __repr__(self) -> str:
        time.sleep(2)
        return "slow"


class Huge:
    def __repr__(self) -> str:
        return "x" * 10**7


NUMBERS = (None, True, 3, -1.5, float("nan"), float("inf"), 1j)
WRONG: dict[str, Callable[[], Any]] = {
    **{repr(one): lambda one=one: one for one in (*NUMBERS, "text", "", "a\0b", b"x", [], {}, (), int)},
    "pairs": lambda: [("a",)],
    "secret": lambda: {"token": "s3cret"},
    "mapping": lambda: UserDict({"token": "s3cret"}),
    "object": object,
    "class": lambda: Hostile,
    "function": lambda: lambda: 0,
    "generator": lambda: (one for one in ()),
    "module": lambda: time,
    "error": lambda: ValueError("x"),
    "tensors": lambda: torch.ones(2, 2),
    "arrays": lambda: jax.numpy.ones(2),
    "constants": lambda: tf.ones(2),
    "numpy": lambda: np.zeros((2, 2)),
    **{kind: lambda kind=kind: endless_trees(0)[kind] for kind in ("shared", "cyclic", "deep")},
    "hostile": Hostile,
    "hostile inside": lambda: {"a": [Hostile()]},
    "hostile class": lambda: hostile(object, "__class__", is_property=True),
    "hostile attributes": lambda: hostile(object, "__getattr__"),
    "hostile attribute": lambda: hostile(object, "__getattribute__"),
    "hostile comparison": lambda: hostile(object, "__eq__", "__hash__", "__bool__"),
    "hostile list": lambda: hostile(list, "__len__", "__iter__", "__getitem__"),
    "hostile items": lambda: hostile(list, "__iter__"),
    "hostile values": lambda: hostile(dict, "values"),
    "hostile mapping": lambda: hostile(dict, "__getitem__", "__iter__", "__len__", "items", "keys", "values", "get"),
    "hostile string": lambda: hostile(str, "__repr__", "__str__", "__format__", value="fp16"),
    "hostile word": lambda: hostile(str, "__eq__", "__hash__", value="fp16"),
    "hostile text": lambda: hostile(str, "lower", "strip", "partition", "__getitem__", "__len__", value="fp16"),
    "hostile number": lambda: hostile(float, "__lt__", "__le__", "__gt__", "__ge__", "__eq__", value=2.0),
    "hostile count": lambda: hostile(int, "__lt__", "__le__", "__gt__", "__ge__", "__eq__", value=2),
    "odd module": lambda: type("Odd", (), {"__module__": None})(),
    "slow": Slow,
    "huge": Huge,
    "long": lambda: "x" * 10**6,
    "large": lambda: 10**5000,
}


CALLED = ("fn", "fun", "step", "train", "target", "where", "progress")  # a user's function may raise what it likes


@functools.cache
def reports() -> dict[str, Any]:
    """Return a result of each verb, by the name of its class."""
    model = torch.nn.Linear(2, 2)
    step, x = (lambda x: model(x).square().mean()), torch.ones(3, 2)
    holder = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    verbs = (polyamp.explain, polyamp.probe, polyamp.diagnose, polyamp.lint)
    found = [verb(step, x, policy="fp16", backend="torch") for verb in verbs]
    found += [polyamp.calibrate(step, [x], "fp16"), polyamp.health(holder)]
    found += [polyamp.parity(lambda seed: 1.0 + seed, "fp16", seeds=3, controls=False, progress=False)]
    return {type(one).__name__: one for one in found}


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods of settings, of policies and of every report."""
    yield from ((f"LossScale.{name}", one) for name, one in inspect.getmembers(polyamp.LossScale(), inspect.ismethod))
    yield from ((f"Policy.{name}", one) for name, one in inspect.getmembers(polyamp.policy("fp16"), inspect.ismethod))
    for kind, report in reports().items():
        shared = [name for name in ("plot", *vars(Report)) if inspect.ismethod(getattr(report, name, None))]
        yield from ((f"{kind}.{name}", getattr(report, name)) for name in shared)


@functools.cache
def callables() -> dict[str, Callable[..., Any]]:
    """Return every public function and class, and the methods of what they return, by name."""
    verbs = {name: getattr(polyamp, name) for name in polyamp.__all__ if inspect.isroutine(getattr(polyamp, name))}
    own = {name: one for name, one in methods() if not name.partition(".")[2].startswith("_")}
    return {**verbs, "LossScale": polyamp.LossScale, "StepResult": polyamp.StepResult, **own}


def right() -> dict[str, Any]:
    """Return right values for arguments, by their names."""
    plain = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    holder = polyamp.wrap_optimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), "mixed_float16")
    config = polyamp.LossScale()
    values = {"optimizer": plain, "holder": holder, "config": config, "state": config.initial_state(), "finite": True}
    values |= {"operation": "matmul", "name": "torch", "scale": 2.0}
    return {**values, "loss": torch.tensor(1.0), "model": torch.nn.Linear(2, 2), "batches": [torch.ones(2)]}


def step(*args: Any, **kwargs: Any) -> float:
    return 1.0


def calls(name: str, kind: str) -> Iterator[tuple[str, dict[str, Any], Callable[[], object]]]:
    """Yield a call with each argument wrong in turn, the right values of its others, and the argument's name."""
    function = callables()[name]
    parameters = inspect.signature(function).parameters.values()
    needed = [one for one in parameters if one.default is one.empty and one.kind in (0, 1)]
    for one in parameters:
        calls_it = one.name in CALLED and callable(WRONG[kind]())
        if not calls_it:
            values, keyword = right(), "unknown" if one.kind == one.VAR_KEYWORD else one.name
            args = [WRONG[kind]() if each is one else values.get(each.name, step) for each in needed]
            args += [WRONG[kind]()] if one.kind in (0, 2) and one not in needed else []
            kwargs = {keyword: WRONG[kind]()} if one.kind in (1, 3, 4) and one not in needed else {}
            yield one.name, values, lambda args=args, kwargs=kwargs: function(*args, **kwargs)


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """Return the text of polyamp's own error, empty without one, and the seconds that the call took."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filters = list(warnings.filters)
        try:
            call()
            polyamp.set_global_policy("float32")
        except PolyampError as error:
            return str(error), time.perf_counter() - start
        finally:
            assert list(warnings.filters) == filters
    return "", time.perf_counter() - start


def test_every_public_name_is_called() -> None:
    assert len(callables()) > 50
    assert {"explain", "Policy.cast_to_compute", "Plan.table", "Probe.plot", "LossScale.like"} <= callables().keys()


@pytest.mark.filterwarnings("ignore::polyamp.PolyampWarning")
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_argument_is_polyamp_s_own_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in callables():
        for argument, values, call in calls(name, kind):
            case = f"{name}({argument}=)"
            before = polyamp.current_policy(), in_policy(), polyamp.save_loss_scale(values["holder"])
            text, seconds = outcome(call)
            assert seconds < 1 or outcome(call)[1] < 1, case  # the first call of a verb imports what it needs
            assert len(text) < 4000, case
            assert "s3cret" not in text or argument == "rules", case
            if text:
                after = polyamp.current_policy(), in_policy(), polyamp.save_loss_scale(values["holder"])
                assert after == before, case
