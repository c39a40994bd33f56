"""Each row of the table "Formats that do not fit": a program raises the message, and what the row recommends helps."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyamp
from support.torch_cases import Product

PAGE = Path(__file__).parents[2] / "docs" / "diagnose" / "troubleshooting.md"
TABLE = PAGE.read_text().partition("## Formats that do not fit")[2]
ROWS = [re.findall(r"`([^`]+)`", cells.split("|")[1]) for cells in re.findall(r"^\| `.*$", TABLE, re.MULTILINE)]

HALF, BRAIN = "mixed_float16", "mixed_bfloat16"
X, ROW, ROWS_OF = torch.linspace(-2, 2, 16).reshape(4, 4), torch.arange(4), torch.zeros(4, 4, dtype=torch.long)
MASK = torch.eye(4).bool()

Program = Callable[[], Any]


class Case:
    """A program that raises a row's message, and what helps: each way is run, and its result is finite."""

    def __init__(self, program: Program, *ways: Program) -> None:
        self.program, self.ways = program, ways


def within(body: Callable[[Tensor], Any], policy: Any = HALF) -> Program:
    """Run code on a product in a region, where the product is low."""

    def run() -> Any:
        with polyamp.autocast(policy, backend="torch"):
            return body(X @ X)

    return run


def natively(body: Callable[[Tensor], Any]) -> Program:
    def run() -> Any:
        with torch.autocast("cpu", torch.float16):
            return body(X @ X)

    return run


def rewritten(body: Callable[[Tensor], Any], policy: Any = HALF) -> Program:
    return lambda: polyamp.rewrite(lambda x: body(x @ x), X, policy=policy)(X)


def written(in_place: Callable[..., Any], out_of_place: Callable[..., Any]) -> Case:
    def cast(low: Tensor) -> Any:
        return in_place(torch.zeros(4, 4), low.to(torch.float32))

    def changed(low: Tensor) -> Any:
        return in_place(torch.zeros(4, 4), low)

    return Case(within(changed), within(lambda low: out_of_place(X, low)), within(cast), rewritten(changed))


def put(into: Tensor, new: Tensor) -> Tensor:
    into[MASK] = new[MASK]
    return into


class Decorated(Product):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


def step(function: Any, *, rewrite: bool = False) -> Program:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return function.apply(x @ x, weight).float().mean()

    def run() -> Tensor:
        weight = torch.eye(4, requires_grad=True)
        opt = polyamp.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), HALF)
        with polyamp.autocast("float32" if rewrite else HALF, backend="torch"):
            made = polyamp.rewrite(loss, X, weight, policy=HALF) if rewrite else loss
            value = made(X, weight)
        opt.backward(value)
        assert weight.grad is not None
        return weight.grad

    return run


def in_float32(low: Tensor) -> Tensor:
    with polyamp.autocast("float32", backend="torch"):
        return functional.linear(low, X)


def jacobian(policy: Any, *, inside: bool = False) -> Program:
    def run() -> Tensor:
        module, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), X.clone().requires_grad_()
        with polyamp.autocast(policy, backend="torch"):
            out = module(x)
        rows = torch.eye(out.numel()).reshape(-1, *out.shape).to(out.dtype)
        with polyamp.autocast(policy, backend="torch") if inside else contextlib.nullcontext():
            return torch.func.vmap(lambda row: torch.autograd.grad(out, x, row, retain_graph=True)[0])(rows)

    return run


def normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (4,), torch.ones(4).half())


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x[None])[0]


def tagged(policy: Any, *, onednn: bool = True) -> Program:
    def run() -> Any:
        flags = contextlib.nullcontext() if onednn else torch.backends.mkldnn.flags(enabled=False)
        with flags, polyamp.autocast(policy, backend="torch"):
            return Tagger()(X)

    return run


def has_float16_lstm() -> bool:
    with contextlib.suppress(RuntimeError):
        natively(lambda _: Tagger()(X))()
        return True
    return False


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with polyamp.autocast(HALF, backend="torch"):
            return self.layer(x)


def traced(*, cached: bool) -> Program:
    def run() -> Any:
        with polyamp.autocast(HALF, backend="torch"):
            torch.set_autocast_cache_enabled(cached)
            return torch.jit.trace(nn.Linear(4, 4), X)(X)

    return run


W = jnp.eye(4)


def state_of(weight: Any, *, back: bool = False, low: bool = True) -> Program:
    def loop(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            new = jnp.tanh(h.astype(weight.dtype) @ weight if low else h @ weight)
            return (new.astype(x.dtype) if back else new), None

        return jax.lax.scan(body, jnp.zeros_like(x), None, length=2)[0]

    return lambda: (loop if low else polyamp.autocast(loop, HALF))(jnp.ones((4, 4)))


def pulled(function: Any, dtype: Any) -> Program:
    return lambda: jax.vjp(function, jnp.ones((4, 4)))[1](jnp.ones((4, 4), dtype))[0]


def low_product(x: Any) -> Any:
    return x.astype(jnp.float16) @ W.astype(jnp.float16)


class Noise(keras.layers.Layer):
    def __init__(self, *, typed: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.typed = typed

    def call(self, x: Any) -> Any:
        return x * tf.random.uniform(tf.shape(x), dtype=self.compute_dtype if self.typed else "float32")

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def noisy(rules: Any = None, *, keras_policy: bool = False, typed: bool = False) -> Program:
    def run() -> Any:
        dtype = HALF if keras_policy else "float32"
        layers = [keras.layers.Dense(4, dtype=dtype), Noise(typed=typed, name="noise", dtype=dtype)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        if not keras_policy:
            polyamp.convert(model, polyamp.policy(HALF, rules=rules))
        return model.predict(np.ones((2, 4), "float32"), verbose=0)

    return run


def filled(policy: str, value: float) -> Case:
    def fill(x: Tensor) -> Tensor:
        return x.masked_fill(MASK, value)

    return Case(
        within(fill, policy),
        within(lambda low: low.masked_fill(MASK, torch.finfo(low.dtype).min), policy),
        within(fill, polyamp.policy(policy, rules={"where": "full"})),
        within(lambda low: fill(low.float()), policy),
        rewritten(fill, policy),
    )


def without_kernel(body: Callable[[Tensor], Tensor], name: str) -> Case:
    full = polyamp.policy(HALF, rules={name: "full"})
    return Case(within(body), within(lambda low: body(low.float())), within(body, full), rewritten(body))


MINIMUM = torch.finfo(torch.float32).min

CASES: dict[str, list[Case]] = {
    "self (Float) and source (Half) must have the same scalar type": [
        written(lambda h, y: h.index_add_(0, ROW, y), lambda h, y: h.index_add(0, ROW, y)),
    ],
    "Expected self.dtype to be equal to src.dtype": [
        written(lambda h, y: h.scatter_add_(0, ROWS_OF, y), lambda h, y: h.scatter_add(0, ROWS_OF, y)),
        written(lambda h, y: h.scatter_(0, ROWS_OF, y), lambda h, y: h.scatter(0, ROWS_OF, y)),
        written(
            lambda h, y: h.scatter_reduce_(0, ROWS_OF, y, "sum"), lambda h, y: h.scatter_reduce(0, ROWS_OF, y, "sum")
        ),
    ],
    "Index put requires the source and destination dtypes match": [
        written(put, lambda h, y: h.index_put((MASK,), y[MASK])),
    ],
    "masked_scatter: expected self and source to have same dtypes": [
        written(lambda h, y: h.masked_scatter_(MASK, y), lambda h, y: h.masked_scatter(MASK, y)),
    ],
    "but got dtype c10::Half": [written(lambda h, y: h.lerp_(y, 0.1), lambda h, y: h.lerp(y, 0.1))],
    "to have the same type as tensor for argument #1 'per_sample_weights'": [
        Case(
            natively(lambda low: functional.embedding_bag(ROWS_OF, X, per_sample_weights=low, mode="sum")),
            within(lambda low: functional.embedding_bag(ROWS_OF, X, per_sample_weights=low, mode="sum")),
            natively(lambda low: functional.embedding_bag(ROWS_OF, X, per_sample_weights=low.float(), mode="sum")),
        )
    ],
    "without overflow": [filled(HALF, -1e9), filled(HALF, MINIMUM), filled(BRAIN, MINIMUM)],
    "Expected out tensor to have dtype c10::Half, but got float instead": [
        Case(
            within(lambda low: torch.mm(low, low, out=torch.zeros(4, 4))),
            within(lambda low: torch.mm(low, low)),
            within(lambda low: torch.mm(low, low, out=torch.zeros(4, 4, dtype=low.dtype))),
            rewritten(lambda low: torch.mm(low, low, out=torch.zeros(4, 4))),
        )
    ],
    "to have the same dtype, but got: c10::Half != float": [
        Case(step(Product), step(Decorated), step(Product, rewrite=True)),
        Case(within(in_float32), within(lambda low: in_float32(low.float()))),
    ],
    "expected scalar type Half but found Float": [
        Case(jacobian(BRAIN), jacobian(BRAIN, inside=True), jacobian(polyamp.policy(BRAIN, rules={"*_norm": "full"})))
    ],
    "expect parameter to have scalar type of Float": [
        Case(natively(lambda _: normed(X)), within(lambda _: normed(X)), natively(lambda _: normed(X.half())))
    ],
    "could not create a primitive descriptor for the LSTM": [
        Case(
            tagged(HALF),
            tagged(HALF, onednn=False),
            tagged(polyamp.policy(HALF, rules={"lstm": "full"})),
            tagged(BRAIN),
            lambda: polyamp.rewrite(Tagger(), X, policy=HALF)(X),
        ),
    ],
    "not implemented for 'Half'": [
        without_kernel(lambda x: torch.special.zeta(x + 9, x + 9), "zeta"),
        without_kernel(lambda x: torch.linalg.pinv(x) @ x + X @ X, "svd"),
    ],
    "Cannot insert a Tensor that requires grad as a constant": [
        Case(traced(cached=True), traced(cached=False), lambda: torch.jit.trace(Within(), X)(X))
    ],
    "scan body function carry input and carry output must have equal types": [
        Case(
            state_of(W.astype(jnp.float16)),
            state_of(W, low=False),
            state_of(W.astype(jnp.float16), back=True),
        )
    ],
    "for argument to VJP function: got float32": [
        Case(
            pulled(low_product, jnp.float32),
            pulled(polyamp.autocast(lambda x: x @ W, HALF), jnp.float32),
            pulled(low_product, jnp.float16),
        )
    ],
    "has type float32 that does not match type float16": [
        Case(
            noisy(keras_policy=True),
            noisy(),
            noisy({"noise": "inner"}),
            noisy({"noise": "full"}),
            noisy(keras_policy=True, typed=True),
        )
    ],
}


def test_each_row_of_the_table_has_a_program() -> None:
    assert [row[0] for row in ROWS] == list(CASES)


def cases() -> Iterator[Any]:
    for row in ROWS:
        for number, case in enumerate(CASES.get(row[0], ())):
            yield pytest.param(row, case, id=f"{row[0]} {number}")


@pytest.mark.parametrize(("messages", "case"), list(cases()))
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:TF32 acceleration")
def test_a_program_raises_the_message_and_each_way_helps(messages: list[str], case: Case) -> None:
    torch.manual_seed(0)
    if "LSTM" in messages[0] and has_float16_lstm():
        pytest.skip("this CPU has the kernel")
    with pytest.raises(Exception, match="|".join(map(re.escape, messages))):
        case.program()
    for way in case.ways:
        found = way()
        assert np.isfinite(found.detach().float().numpy() if isinstance(found, Tensor) else np.asarray(found)).all()
