"""Unknown, misspelt and other libraries' names: everywhere the error is polyamp's, and names what to write."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import keras
import optax
import pytest
import tensorflow as tf
import torch

import polyamp
from polyamp import LossScale, adapters
from polyamp.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from polyamp.verbs import WrapOptions


def torch_optimizer() -> Any:
    return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)


PLAIN: dict[str, Any] = {
    "torch": torch_optimizer,
    "jax": lambda: optax.sgd(0.1),
    "keras": lambda: keras.optimizers.SGD(0.1),
    "tensorflow": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("init_scale", "init"),
        ("growth_factor", "growth"),
        ("growth_interval", "interval"),
        ("scale_window", "interval"),
        ("backoff_factor", "backoff"),
        ("min_loss_scale", "min"),
        ("hysteresys", "hysteresis"),
    ],
)
def test_settings_of_other_libraries_are_named_as_here(name: str, meant: str) -> None:
    makers: list[Any] = [
        LossScale,
        lambda **given: LossScale.like("torch", **given),
        lambda **g: LossScale.from_dict(g),
    ]
    for make in makers:
        with pytest.raises(InvalidValueError, match=f"unknown loss-scale setting(?s:.)*did you mean {meant}[?]"):
            make(**{name: 2})


@pytest.mark.parametrize(
    ("name", "meant"), [("lossscale", "loss_scale"), ("param_dtype", "param"), ("computes", "compute")]
)
def test_arguments_of_a_policy(name: str, meant: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"policy\(spec\)(?s:.)*did you mean {meant}[?]"):
        polyamp.policy("mixed_float16", **{name: "float16"})


@pytest.mark.parametrize("name", ["clipnorm", "max_norm", "clip_grad_norm", "gradient_clip_val", "max_gradnorm"])
def test_clipping_by_the_norm(name: str) -> None:
    for make in PLAIN.values():
        with pytest.raises(UnsupportedError, match=r"did you mean max_grad_norm[?]"):
            polyamp.wrap_optimizer(make(), "mixed_float16", **{name: 1.0})


@pytest.mark.parametrize("framework", ["jax", "keras", "tensorflow"])
def test_methods_of_a_torch_optimizer(framework: str) -> None:
    opt = polyamp.wrap_optimizer(PLAIN[framework](), "mixed_float16")
    with pytest.raises(UnsupportedError, match=r"LossScaled\w*.backward(?s:.)*to do: .*gradients") as caught:
        opt.backward(1.0)
    assert isinstance(caught.value, AttributeError)
    assert not hasattr(opt, "unscale_")
    with pytest.raises(AttributeError, match="has no attribute 'sclae'") as other:
        _ = opt.sclae
    assert not isinstance(other.value, polyamp.PolyampError)


# --- "dynamic", and numbers in quotes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", PLAIN)
def test_dynamic_is_a_loss_scale_with_the_defaults(framework: str) -> None:
    policy = polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(8.0))
    holder = polyamp.wrap_optimizer(PLAIN[framework](), policy, loss_scale="dynamic")
    state = holder.init({"w": jnp.ones(2)}) if framework == "jax" else holder
    assert polyamp.save_loss_scale(state)["scale"] == 2.0**16
    assert polyamp.policy(policy, loss_scale="dynamic").loss_scale == LossScale()


@pytest.mark.parametrize(("given", "says"), [("128.0", "write 128, without quotes"), ("static", r"LossScale.fixed")])
def test_other_strings_are_refused(given: str, says: str) -> None:
    for call in (
        lambda: polyamp.policy("mixed_float16", loss_scale=given),
        lambda: polyamp.wrap_optimizer(torch_optimizer(), "mixed_float16", loss_scale=given),
    ):
        with pytest.raises(InvalidTypeError, match=f'or "dynamic"(?s:.)*{says}'):
            call()


@pytest.mark.parametrize("loss_scale", [LossScale(), "dynamic", 1.0])
@pytest.mark.parametrize("framework", PLAIN)
def test_under_bfloat16_only_an_optimizer_has_a_dynamic_loss_scale(framework: str, loss_scale: Any) -> None:
    if loss_scale != 1.0:
        with pytest.raises(InvalidValueError, match=r"bfloat16 needs no loss scale(?s:.)*policy\(loss_scale=\)"):
            polyamp.policy("mixed_bfloat16", loss_scale=loss_scale)
    polyamp.wrap_optimizer(PLAIN[framework](), "mixed_bfloat16", loss_scale=loss_scale)


# --- options that a framework lacks -----------------------------------------------------------------------------------

OPTIONS = {
    "torch": {"master_weights", "fused_step", "process_group", "norm_group", "named_parameters"},
    "jax": {"axis_name", "master_weights"},
    "keras": {"master_weights"},
    "tensorflow": {"master_weights"},
}
EVERY = {"max_norm", "fused_stepp"}.union(*OPTIONS.values())
LACKING = [(framework, option) for framework in PLAIN for option in sorted(EVERY - OPTIONS[framework])]


@pytest.mark.parametrize(("framework", "option"), LACKING)
def test_an_option_that_a_framework_lacks_is_refused_with_those_that_it_has(framework: str, option: str) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="an option that does not exist here") as caught:
        polyamp.wrap_optimizer(PLAIN[framework](), "mixed_float16", **{option: True})
    assert all(known in str(caught.value) for known in OPTIONS[framework])


@pytest.mark.parametrize("value", ["remainder", 1, 0.0, "True", []])
@pytest.mark.parametrize("framework", PLAIN)
def test_master_weights_are_a_switch(framework: str, value: Any) -> None:
    with pytest.raises(polyamp.errors.InvalidValueError, match="master_weights"):
        polyamp.wrap_optimizer(PLAIN[framework](), "mixed_float16", master_weights=value)


@pytest.mark.parametrize(("verb", "option"), [("explain", "engine"), ("rewrite", "jit_compile")])
def test_engines_that_a_framework_lacks_are_refused(verb: str, option: str) -> None:
    with pytest.raises(polyamp.errors.UnsupportedError, match="an option that does not exist here"):
        getattr(polyamp, verb)(lambda x: x @ x, jnp.ones((2, 2)), policy="fp16", **{option: "autocast"})


@pytest.mark.parametrize(
    ("heading", "framework"),
    [("PyTorch", "torch"), ("JAX", "jax"), ("Keras and TensorFlow", "keras"), ("Keras and TensorFlow", "tensorflow")],
)
def test_the_docs_list_every_option(heading: str, framework: str) -> None:
    text = Path(__file__).parents[2].joinpath("docs/frameworks.md").read_text()
    table = text.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    options = inspect.signature(adapters.adapter_named(framework).wrap_optimizer).parameters.values()
    own = {option.name for option in options if option.kind is option.KEYWORD_ONLY} - {"loss_scale", "max_grad_norm"}
    assert set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)) == own == OPTIONS[framework]


def test_type_checkers_know_every_option() -> None:
    own = {option for options in OPTIONS.values() for option in options}
    assert WrapOptions.__annotations__.keys() == own | {"loss_scale", "max_grad_norm", "backend"}


@pytest.mark.slow
def test_a_backend_needs_no_import_of_its_own() -> None:
    program = "import polyamp; assert not hasattr(polyamp.backends, 'theano'); polyamp.backends.jax.autocast"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", PLAIN)
def test_no_file_takes_the_place_of_a_public_name(name: str) -> None:
    adapter = importlib.import_module(f"polyamp.backends.{name}")
    for file in pkgutil.iter_modules(adapter.__path__):
        if file.name in adapter.__all__:
            importlib.import_module(f"{adapter.__name__}.{file.name}")
    assert [public for public in adapter.__all__ if inspect.ismodule(getattr(adapter, public))] == []
