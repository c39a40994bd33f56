"""Reports about a model describe it as it is: with its layers' own dtype policies, or without any."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp

X = np.random.default_rng(0).standard_normal((32, 6)).astype("float32")
Y = np.zeros((32, 2), "float32")
BACKEND = keras.backend.backend()
F16 = polyamp.policy("mixed_float16")

pytestmark = pytest.mark.filterwarnings("ignore:the loss was not finite before scaling")


@pytest.fixture(autouse=True)
def _fresh_names() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)


def scaled(optimizer: Any) -> Any:
    return polyamp.wrap_optimizer(optimizer, F16, loss_scale=polyamp.LossScale(init=1.0))


def made(policy: Any = F16, *, hot: float = 1.0, wrap: Any = scaled) -> keras.Model:
    parts = [layers.Dense(16, name="body"), layers.Dense(8, name="hot"), layers.Dense(2, name="head")]
    model = keras.Sequential([keras.Input((6,)), *parts])
    for name, factor in (("hot", hot), ("head", 1 / hot)):  # beyond float16 only in between
        kernel = model.get_layer(name).kernel
        kernel.assign(kernel * factor)
    if policy is not None:
        polyamp.convert(model, policy)
    model.compile(wrap(keras.optimizers.SGD(1e-12)), "mse")
    return model


def products(plan: polyamp.Plan) -> list[str]:
    return [one.format for one in plan.operations if one.name == "matmul"]


IN_FLOAT32 = pytest.mark.skipif(BACKEND == "torch", reason="there Keras computes float16 products in float32 on a CPU")
NAMED = pytest.mark.skipif(BACKEND == "torch", reason="there what is recorded of a model has no layers' names")


@IN_FLOAT32
@pytest.mark.parametrize("args", [(X, Y), (X,)])
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_explain_has_the_layers_formats(args: Any, compute: str) -> None:
    plan = polyamp.explain(made(f"mixed_{compute}"), *args, policy=f"mixed_{compute}")
    assert products(plan)[:3] == [compute, compute, "float32"]
    assert plan.policy == f"mixed_{compute}"
    reasons = {one.reason for one in plan.operations if one.name == "matmul"}
    assert reasons == {"its layer's own policy"}


def test_explain_of_a_float32_model_is_what_a_policy_would_make_of_it() -> None:
    assert set(products(polyamp.explain(made(None), X, Y, policy=F16))) == {"float16"}


@IN_FLOAT32
def test_explain_tries_rules() -> None:
    model = made()
    plan = polyamp.explain(model, X, Y, policy=polyamp.policy(F16, rules={"hot": "full"}))
    assert products(plan)[:3] == ["float16", "float32", "float32"]
    assert model.get_layer("hot").compute_dtype == "float16"


def rules_of_a_verdict(model: keras.Model) -> Any:
    verdict = polyamp.diagnose(model, X, Y, policy=F16)
    assert (verdict.kind, verdict.is_cured) == ("forward", True)
    return verdict.rules


def rules_of_a_calibration(model: keras.Model) -> Any:
    found = polyamp.calibrate(model, [(X, Y)], F16)
    assert (found.before[0].is_safe, found.is_safe) == (False, True)
    return found.rules


@NAMED
@pytest.mark.parametrize("rules_of", [rules_of_a_verdict, rules_of_a_calibration])
def test_rules_that_were_found_cure_the_model(rules_of: Any) -> None:
    model = made(hot=3e5)
    rules = rules_of(model)
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float16", "float32"]  # as it was
    for copy in (model, made(hot=3e5)):  # Keras gives the second one another name
        polyamp.convert(copy, polyamp.policy(F16, rules=rules))
        copy.train_on_batch(X, Y)
        assert copy.optimizer.last_step.applied


def test_a_float32_layer_does_not_overflow() -> None:
    """Only its output is beyond float16, and the layer is kept in float32."""
    model = made(polyamp.policy(F16, rules={"hot": "full"}), hot=3e5)
    assert not [one.place for one in polyamp.probe(model, X, Y, policy=F16).overflowing if "hot" in one.place]
    assert polyamp.diagnose(model, X, Y, policy=F16).kind == "finite"


def trained(model: keras.Model, how: str) -> list[str]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(X, Y, verbose=0) if how == "fit" else model.train_on_batch(X, Y)
    return [str(one.message) for one in shown if issubclass(one.category, polyamp.PolyampWarning)]


@pytest.mark.parametrize("how", ["fit", "train_on_batch"])
@pytest.mark.parametrize(
    ("policy", "wrap", "what", "remedy"),
    [
        (None, scaled, "trains in float32", "polyamp.convert"),
        (None, polyamp.wrap_optimizer, "without a policy", "polyamp.wrap_optimizer"),
        ("mixed_bfloat16", polyamp.wrap_optimizer, "without a policy", "polyamp.wrap_optimizer"),
    ],
)
def test_training_says_once_that_a_policy_is_missing(how: str, policy: Any, wrap: Any, what: str, remedy: str) -> None:
    (message,) = trained(made(policy, wrap=wrap), how)
    assert what in message
    assert remedy in message


def made_under_keras_own_policy() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return made(None)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "model",
    [
        made,
        made_under_keras_own_policy,
        lambda: made(None, wrap=lambda plain: plain),
        lambda: made(None, wrap=lambda plain: polyamp.wrap_optimizer(plain, "float32")),
        lambda: made("mixed_bfloat16"),
        lambda: polyamp.convert(made(), "float32"),
    ],
)
def test_training_says_nothing_else(model: Any) -> None:
    assert trained(model(), "fit") == []


@pytest.mark.skipif(BACKEND != "torch", reason="only torch has an ambient autocast")
def test_an_autocast_will_do() -> None:
    model = made(None)
    with polyamp.autocast("mixed_bfloat16"):
        assert trained(model, "fit") == []


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a rewrite of TensorFlow")
def test_a_rewritten_step_will_do() -> None:
    model = made(None)
    model.optimizer.build(model.trainable_variables)
    model.train_step = polyamp.rewrite(model.train_step, policy=F16, backend="tensorflow")
    assert trained(model, "fit") == []
    assert "float16" in products(model.train_step.plan)
