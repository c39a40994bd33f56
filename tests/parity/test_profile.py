"""`polyamp.profile` of steps whose composition is known, in every framework."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

import polyamp
from polyamp.diagnosis.profile import Profile, Timed, Work, add_up, shares_of
from polyamp.errors import InvalidTypeError, InvalidValueError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(512, 250)).astype(np.float32)
WEIGHTS = {
    "inner": RNG.normal(size=(250, 256)).astype(np.float32),
    "outer": RNG.normal(size=(256, 16)).astype(np.float32),
}


def torch_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make a training step with a product of a size that is not divisible by 8 at ``inner``, and one at ``outer``."""
    model = torch.nn.Sequential()
    for name, weight in WEIGHTS.items():
        model.add_module(name, torch.nn.Linear(*weight.shape))
    opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), "mixed_bfloat16")

    def step(x: torch.Tensor) -> torch.Tensor:
        with polyamp.autocast("mixed_bfloat16"):
            loss = model(x).square().mean()
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        return loss

    return step, (torch.from_numpy(X),)


def jax_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    tx = polyamp.wrap_optimizer(optax.sgd(1e-3), "mixed_bfloat16")

    def loss_fn(params: Any, x: Any) -> Any:
        for name, weight in params.items():
            with jax.named_scope(name):
                x = x @ weight
        return jnp.square(x).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = polyamp.value_and_grad(loss_fn, "mixed_bfloat16")(state, params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {name: jnp.asarray(weight) for name, weight in WEIGHTS.items()}
    return step, (params, tx.init(params), jnp.asarray(X))


def tensorflow_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    weights = {name: tf.Variable(weight) for name, weight in WEIGHTS.items()}

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for name, weight in weights.items():
                with tf.name_scope(name):
                    x = x @ weight
            loss = tf.reduce_mean(tf.square(x))
        with tf.name_scope("optimizer"):
            for weight, gradient in zip(weights.values(), tape.gradient(loss, list(weights.values())), strict=True):
                weight.assign_sub(1e-3 * gradient)
        return loss

    return polyamp.rewrite(step, policy="mixed_bfloat16"), (tf.constant(X),)


def keras_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make the step of a Keras model, which has the profiler of the framework that Keras runs on."""
    layers = [keras.layers.Dense(weight.shape[1], name=name) for name, weight in WEIGHTS.items()]
    model = keras.Sequential([keras.Input((250,)), *layers])
    opt = keras.optimizers.SGD(1e-3)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        opt.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    return polyamp.rewrite(step, policy="mixed_bfloat16"), (tf.constant(X),)


STEPS = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step, "keras": keras_step}


@pytest.fixture(params=STEPS, scope="module")
def report(request, tmp_path_factory) -> Any:
    step, args = STEPS[request.param]()
    return polyamp.profile(step, *args, runs=2, folder=tmp_path_factory.mktemp("traces"))


def at(report: Profile, name: str, where: str) -> list[Work]:
    return [one for one in report.work if one.name == name and one.where.rpartition("/")[2] == where]


def test_products_casts_and_the_optimizer_are_found_at_their_places(report) -> None:
    for where in WEIGHTS:
        products = at(report, "matmul", where)
        assert products
        assert {one.kind for one in products} <= {"16-bit products", "other compute"}
        assert all((one.kind == "16-bit products") == (one.format == "bfloat16") for one in products)
        assert 2 <= sum(one.times for one in products) <= 3  # the input of the first one needs no gradient
    assert [one.kind for one in at(report, "update", "")] == ["optimizer"]
    assert any(one.kind == "casts" for one in report.work)


def test_a_size_that_is_not_divisible_by_8_is_named_with_its_place(report) -> None:
    sizes = {(one.name, one.where.rpartition("/")[2]): one.odd for one in report.work if one.odd}
    assert sizes == {("matmul", "inner"): (250,)}
    if any(one.kind == "16-bit products" and one.share > 0.03 for one in at(report, "matmul", "inner")):
        assert "sizes not divisible by 8; pad them: " in str(report)
        assert "inner/matmul (250)" in str(report)


def test_a_product_has_the_reason_of_the_plan(report) -> None:
    assert report.plan is not None
    assert all(one.why for where in WEIGHTS for one in at(report, "matmul", where))


def test_the_profilers_file_is_kept_and_a_second_one_does_not_replace_it(report, tmp_path) -> None:
    assert Path(report.file).stat().st_size > 0
    step, args = torch_step()
    files = [polyamp.profile(step, *args, runs=1, folder=tmp_path).file for _ in range(2)]
    assert all(json.loads(Path(file).read_text())["traceEvents"] for file in files)
    assert len(set(files)) == 2


def test_the_report_is_json_and_a_picture(report, tmp_path) -> None:
    report.save(tmp_path / "profile.json")
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["shares"] == pytest.approx(dict(report.shares))
    assert sum(one["seconds"] for one in saved["work"]) == pytest.approx(
        saved["seconds"] * (1 - saved["shares"]["host"])
    )
    report.plot(tmp_path / "profile.png")
    assert imread(tmp_path / "profile.png").shape[1] == 1500


def test_a_policy_that_is_given_decides_the_formats(tmp_path) -> None:
    layer, x = torch.nn.Linear(250, 256), torch.from_numpy(X)
    for policy, format_name in (("mixed_bfloat16", "bfloat16"), ("float32", "float32")):
        report = polyamp.profile(layer, x, policy=policy, runs=1, folder=tmp_path)
        (product,) = [one for one in report.work if one.name == "matmul"]
        assert product.format == format_name


def test_a_rewritten_module_has_its_plan(tmp_path) -> None:
    x = torch.from_numpy(X)
    layer = polyamp.rewrite(torch.nn.Linear(250, 256), x, policy="mixed_bfloat16")
    report = polyamp.profile(layer, x, runs=1, folder=tmp_path)
    assert report.plan is layer.plan
    assert "no plan" not in str(report)


def test_a_given_policy_is_that_of_regions_without_one(tmp_path) -> None:
    tx = polyamp.wrap_optimizer(optax.sgd(1e-3), "mixed_bfloat16")

    def step(weight: Any, state: Any, x: Any) -> Any:
        loss, grads = polyamp.value_and_grad(lambda weight: jnp.square(x @ weight).mean())(state, weight)
        return tx.update(grads, state, weight)[0], loss

    weight = jnp.asarray(WEIGHTS["inner"])
    args = (weight, tx.init(weight), jnp.asarray(X))
    report = polyamp.profile(step, *args, policy="mixed_bfloat16", runs=1, folder=tmp_path)
    assert {op.format for op in report.plan.operations if op.name == "matmul"} == {"bfloat16"}


def test_attention_in_16_bits_is_a_product_of_16_bits_backward_too(tmp_path) -> None:
    q = torch.randn(2, 2, 32, 16, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()

    found = [one for one in polyamp.profile(step, runs=1, folder=tmp_path).work if one.name == "attention"]
    assert [(one.kind, one.times) for one in found] == [("16-bit products", 2)]


def test_a_step_without_operations_that_the_profiler_sees_says_so(tmp_path) -> None:
    x = tf.constant(X)
    report = polyamp.profile(lambda: tf.matmul(x, x, transpose_b=True), folder=tmp_path, backend="tensorflow")
    assert report.shares["host"] == 1
    assert any("saw no operation" in sentence for sentence in report.sentences())


def test_the_layers_of_a_stack_are_added_up(tmp_path) -> None:
    blocks = [torch.nn.Sequential(OrderedDict(linear=torch.nn.Linear(250, 250))) for _ in range(2)]
    model = torch.nn.Sequential(OrderedDict(stack=torch.nn.Sequential(*blocks)))
    report = polyamp.profile(model, torch.from_numpy(X), runs=1, folder=tmp_path)
    assert [(one.where, one.times) for one in report.work if one.name == "matmul"] == [("stack/*/linear", 2)]


def test_donated_arguments_are_the_users_afterwards(tmp_path) -> None:
    step, args = jax_step()
    donating = jax.jit(step, donate_argnums=(0, 1))
    polyamp.profile(donating, *args, runs=2, folder=tmp_path)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"runs": 0}, InvalidValueError, "runs"),
        ({"runs": 2.5}, InvalidTypeError, "runs"),
        ({"folder": "file/in"}, InvalidValueError, "cannot be written"),
        ({"folder": 3}, InvalidValueError, "cannot be written"),
        ({"backend": "numpy"}, InvalidTypeError, "backend"),
    ],
)
def test_bad_arguments_are_refused_before_the_step_runs(options, error, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(error, match=words):
        polyamp.profile(lambda x: pytest.fail("it ran"), torch.ones(1), **options)
    with pytest.raises(InvalidTypeError, match="cannot be called"):
        polyamp.profile(torch.ones(1))


NAMES = ["matmul", "conv", "attention", "cast", "add", "layer_norm", "custom_call", "call", "cholesky", "aten::unknown"]
FORMATS = [(), ("float32",), ("bfloat16",), ("bfloat16", "float32")]
PLACES = ["", "head", "layers/0/linear", "layers/1/linear"]
PARTS = (st.sampled_from(NAMES), st.sampled_from(PLACES), st.sampled_from(FORMATS), st.floats(0, 10))
TIMED = st.builds(Timed, *PARTS, is_update=st.booleans())


@given(st.lists(TIMED), st.floats(0, 1), st.randoms(use_true_random=False))
def test_each_operation_is_in_one_kind_whatever_their_order(operations, busy, random) -> None:
    """And each is read once: a step of an optimizer that is not fused has thousands."""
    work = add_up(iter(operations), 1, 1.0, busy, None)
    shares = shares_of(work)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= part <= 1 for part in shares.values())
    assert shares["host"] == pytest.approx(1 - busy * any(one.seconds for one in operations), abs=1e-9)
    assert Counter(one.kind for one in work for _ in range(int(one.times))) == Counter(one.kind for one in operations)
    random.shuffle(operations)
    assert add_up(operations, 1, 1.0, busy, None) == work
