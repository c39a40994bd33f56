"""An optimizer and a forward pass under different policies: which pairs are reported, and when."""

import warnings

import pytest

from polyamp import LossScale, Policy, PolyampWarning, policy
from polyamp.agreement import report_disagreement, traced_for
from polyamp.errors import forget_warnings
from polyamp.without_effect import chosen_policy

NONE, DYNAMIC, CHECKED = LossScale.none(), LossScale(), LossScale.skip_nonfinite()
FP16, BF16, FP32 = policy("mixed_float16"), policy("mixed_bfloat16"), policy("float32")
UNSCALED_FP16 = policy("mixed_float16", loss_scale=NONE)


@pytest.mark.parametrize("settings", [NONE, CHECKED], ids=repr)
@pytest.mark.parametrize("own", [FP32, BF16], ids=str)
def test_a_missing_loss_scale_is_reported(settings: LossScale, own: Policy) -> None:
    forget_warnings()
    with pytest.warns(PolyampWarning, match="without a loss scale"):
        report_disagreement(own, FP16, settings)


@pytest.mark.parametrize("forward", [None, FP16, BF16], ids=str)
def test_an_optimizer_whose_policy_nobody_chose_is_reported(forward: Policy | None) -> None:
    forget_warnings()
    with pytest.warns(PolyampWarning, match="without a policy"):
        report_disagreement(None, forward, NONE)


@pytest.mark.parametrize("own", [FP16, BF16], ids=str)
def test_losses_in_float32_alone_are_reported(own: Policy) -> None:
    forget_warnings()
    with pytest.warns(PolyampWarning, match=f"wrapped for {own.compute}, and these losses"):
        report_disagreement(own, None, DYNAMIC, in_float32="these losses")
    report_disagreement(FP32, None, DYNAMIC, in_float32="these losses")


@pytest.mark.parametrize(
    ("settings", "own", "forward"),
    [
        (DYNAMIC, FP16, FP16),
        (NONE, FP16, FP16),  # the user's own choice
        (NONE, FP32, UNSCALED_FP16),
        (NONE, FP32, FP32),
        (NONE, FP32, BF16),
        (NONE, None, FP32),
        (DYNAMIC, None, FP16),
        (DYNAMIC, FP32, FP16),  # it scales, whatever it was wrapped for
        (DYNAMIC, FP16, BF16),
        (DYNAMIC, FP16, FP32),
        (CHECKED, BF16, BF16),
    ],
)
def test_these_agree(settings: LossScale, own: Policy | None, forward: Policy) -> None:
    forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_disagreement(own, forward, settings)


def test_the_forward_pass_is_that_of_the_trace_or_of_the_region() -> None:
    forget_warnings()
    report_disagreement(FP32, None, NONE)
    with policy("mixed_bfloat16"), traced_for(FP16), pytest.warns(PolyampWarning, match="without a loss scale"):
        report_disagreement(FP32, None, NONE)
    with policy("mixed_bfloat16"):
        report_disagreement(FP32, None, NONE)
        report_disagreement(FP16, None, DYNAMIC)
    report_disagreement(FP32, FP16, NONE)  # shown already


@pytest.mark.parametrize("call", ["autocast()", "rewrite(fn)", "value_and_grad(fun)"])
def test_a_call_without_a_policy_is_reported_once_under_the_default(call: str) -> None:
    forget_warnings()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            assert chosen_policy(None, call) == FP32
    (one,) = shown
    assert one.category is PolyampWarning
    assert str(one.message).startswith(f"{call} without a policy takes the current one, float32, which changes nothing")
    assert one.filename == __file__


def test_a_policy_that_somebody_chose_is_not_reported() -> None:
    forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen_policy(FP32, "rewrite(fn)") == FP32
        with FP32:
            assert chosen_policy(None, "rewrite(fn)") == FP32
