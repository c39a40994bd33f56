"""The promises of the optional verbs that an adapter offers, as pytest tests.

Every framework's arrays can be multiplied with ``@``, so the functions below are the same in all of them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyamp import adapters
from polyamp.adapters import OPTIONAL, REQUIRED, Adapter
from polyamp.errors import InvalidTypeError
from polyamp.formats import name_of_dtype
from polyamp.policies import policy
from polyamp.scale import LossScale
from polyamp.testing.harness import Harness, random_arrays

FLOAT16 = policy("mixed_float16")
_RNG = np.random.default_rng(0)
LEFT, RIGHT = (_RNG.standard_normal(shape).astype(np.float32) for shape in ((1, 8), (8, 1)))


def product(left: Any, right: Any) -> Any:
    """Multiply two matrices of any framework."""
    return left @ right


def loss(left: Any, right: Any) -> Any:
    """Return a scalar loss of any framework."""
    return (left @ right)[0, 0]


def offered(verb: str, harness: Harness) -> Adapter:
    """Return the adapter if it has this verb; skip the test if it does not."""
    adapter = adapters.adapter_named(harness.name)
    if not hasattr(adapter, verb):
        pytest.skip(f"{harness.name} does not offer {verb}")
    return adapter


def operands(harness: Harness) -> tuple[Any, Any]:
    """Return `LEFT` and `RIGHT` as the framework's arrays."""
    tree = harness.tree({"left": LEFT, "right": RIGHT})
    return tree["left"], tree["right"]


def is_lowered(harness: Harness, result: Any) -> bool:
    """Return whether a product of `LEFT` and `RIGHT` is right, and was computed from float16 numbers."""
    found = harness.arrays({"y": result})["y"].astype(np.float64)
    half = [matrix.astype(np.float16).astype(np.float64) for matrix in (LEFT, RIGHT)]
    exact, rounded = LEFT.astype(np.float64) @ RIGHT, half[0] @ half[1]
    return abs(float((found - rounded).item())) <= 2.0**-10 and float((found - exact).item()) ** 2 > 1e-10


def accepts(function: Callable[..., Any], signature: Callable[..., Any]) -> bool:
    """Return whether a function can be called as a method of a protocol is.

    >>> accepts(lambda tree, format_name: tree, Adapter.cast), accepts(lambda tree: tree, Adapter.cast)
    (True, False)
    """
    parameters = list(inspect.signature(signature).parameters.values())[1:]
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError:
        return False
    return True


class OptionalVerbs:
    """Tests of the optional verbs. The fixture ``harness`` comes from `polyamp.testing.Conformance`."""

    @pytest.mark.parametrize("name", REQUIRED)
    def test_required_verb_has_its_signature(self, harness: Harness, name: str) -> None:
        assert accepts(getattr(adapters.adapter_named(harness.name), name), getattr(Adapter, name))

    @pytest.mark.parametrize("verb", OPTIONAL)
    def test_optional_verb_has_its_signature(self, harness: Harness, verb: str) -> None:
        assert accepts(getattr(offered(verb, harness), verb), getattr(Adapter, verb))

    def test_autocast_context_lowers_products_inside_it(self, harness: Harness) -> None:
        context = offered("autocast_context", harness).autocast_context
        left, right = operands(harness)
        with context(FLOAT16):
            assert is_lowered(harness, product(left, right))
            with context(policy("float32")):
                assert not is_lowered(harness, product(left, right))
        with pytest.raises(ZeroDivisionError), context(FLOAT16):
            raise ZeroDivisionError
        assert not is_lowered(harness, product(left, right))

    def test_traced_context_is_for_compiled_code_only(self, harness: Harness) -> None:
        assert offered("traced_context", harness).traced_context(FLOAT16) is None

    def test_is_lowering_reports_autocast(self, harness: Harness) -> None:
        is_lowering = offered("is_lowering", harness).is_lowering
        assert not is_lowering()
        with offered("autocast_context", harness).autocast_context(FLOAT16):
            assert is_lowering()
        assert not is_lowering()

    def test_autocast_function_lowers_products(self, harness: Harness) -> None:
        transform = offered("autocast_function", harness).autocast_function
        assert is_lowered(harness, transform(product, FLOAT16)(*operands(harness)))
        assert not is_lowered(harness, transform(product, policy("float32"))(*operands(harness)))
        with FLOAT16:
            assert is_lowered(harness, transform(product, None)(*operands(harness)))

    @pytest.mark.parametrize("with_examples", [True, False])
    def test_rewrite_lowers_products_and_has_a_plan(self, harness: Harness, with_examples: bool) -> None:
        arrays = operands(harness)
        rewritten = offered("rewrite", harness).rewrite(product, arrays if with_examples else (), {}, FLOAT16)
        assert is_lowered(harness, rewritten(*arrays))
        assert ("matmul", "float16") in [(one.name, one.format) for one in rewritten.plan.operations]

    def test_explain_lists_products(self, harness: Harness) -> None:
        plan = offered("explain", harness).explain(product, operands(harness), {}, FLOAT16)
        assert plan.policy == str(FLOAT16)
        assert ("matmul", "float16") in [(one.name, one.format) for one in plan.operations]
        assert json.loads(json.dumps(plan.as_dict())) == plan.as_dict()

    def test_convert_refuses_what_is_not_a_model(self, harness: Harness) -> None:
        with pytest.raises(InvalidTypeError):
            offered("convert", harness).convert(object(), FLOAT16)

    def test_value_and_grad_scales_only_the_gradients(self, harness: Harness) -> None:
        differentiate = offered("value_and_grad", harness).value_and_grad
        holder = harness.start(random_arrays(0), FLOAT16, loss_scale=LossScale.fixed(8)).holder
        found, grads = differentiate(loss, FLOAT16, False)(holder, *operands(harness))
        assert is_lowered(harness, found)
        np.testing.assert_allclose(harness.arrays({"g": grads})["g"], 8 * RIGHT.T, rtol=2.0**-10)
        (_, aux), _ = differentiate(lambda *arrays: (loss(*arrays), 3), FLOAT16, True)(holder, *operands(harness))
        assert aux == 3

    def test_save_loss_scale_writes_what_loss_scale_of_reads(self, harness: Harness) -> None:
        adapter = offered("save_loss_scale", harness)
        holder = harness.start(random_arrays(0), FLOAT16, loss_scale=LossScale.like("torch")).holder
        settings, state = adapter.loss_scale_of(holder)
        assert adapter.save_loss_scale(holder) == settings.to_state_dict(state)
        assert adapter.save_loss_scale(holder, like="torch") == settings.to_state_dict(state, like="torch")

    def test_holds_loss_scale_finds_a_state(self, harness: Harness) -> None:
        holds = offered("holds_loss_scale", harness).holds_loss_scale
        assert holds({"inside": harness.start(random_arrays(0), FLOAT16).holder})
        assert not holds(harness.tree(random_arrays(0)))

    def test_fsdp_policy_gathers_in_the_compute_format(self, harness: Harness) -> None:
        make = offered("fsdp_policy", harness).fsdp_policy
        found = make(FLOAT16, reduce="float32", output="float32", cast_forward_inputs=True)
        formats = (found.param_dtype, found.reduce_dtype, found.output_dtype)
        assert [name_of_dtype(one) for one in formats] == ["float16", "float32", "float32"]

    @pytest.mark.parametrize("widened", [True, False])
    def test_record_reports_products_and_their_gradients(self, harness: Harness, widened: bool) -> None:
        record = offered("record", harness).record
        left, right = harness.trainable(LEFT), operands(harness)[1]
        found = record(loss, (left, right), {}, FLOAT16, widened=widened, scale=8.0)
        assert (found.policy, found.scale) == (str(FLOAT16), 8.0)
        assert found.loss == pytest.approx(float((LEFT @ RIGHT).item()), rel=2.0**-9)  # not scaled
        products = [one for one in found.of_kind("activation") if one.name == "matmul"]
        assert [one.format for one in products] == ["float16"]
        assert products[0].spread.largest == pytest.approx(abs(float((LEFT @ RIGHT).item())), rel=2.0**-9)
        gradients = list(found.of_kind("parameter gradient"))
        assert [one.spread.largest for one in gradients] == pytest.approx([8 * np.abs(RIGHT).max()], rel=2.0**-9)

    def test_facts_name_policy_products_and_optimizer(self, harness: Harness) -> None:
        collect = offered("facts", harness).facts
        wrapped = harness.start(random_arrays(0), FLOAT16).holder
        for optimizer, kind in ((None, ""), (harness.plain_optimizer(), "plain"), (wrapped, "wrapped")):
            found = collect(loss, operands(harness), {}, FLOAT16, optimizer)
            assert (found.policy, found.optimizer) == (FLOAT16, kind)
            assert [(one.name, one.format, set(one.sizes)) for one in found.products] == [("matmul", "float16", {1, 8})]
