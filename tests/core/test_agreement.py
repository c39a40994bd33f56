"""An optimizer and a forward pass under different policies: which pairs are reported, and when."""

import warnings

import pytest

from polyamp import LossScale, Policy, PolyampWarning, policy
from polyamp.errors import forget_warnings
from polyamp.without_effect import chosen_policy, report_missing_scale, traced_for

NONE, DYNAMIC, CHECKED = LossScale.none(), LossScale(), LossScale.skip_nonfinite()
FP16, BF16, FP32 = policy("mixed_float16"), policy("mixed_bfloat16"), policy("float32")
UNSCALED_FP16 = policy("mixed_float16", loss_scale=NONE)


@pytest.mark.parametrize("settings", [NONE, CHECKED], ids=repr)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_missing_loss_scale_is_reported(settings: LossScale, compute: str) -> None:
    forget_warnings()
    with pytest.warns(PolyampWarning, match="without a loss scale"):
        report_missing_scale(settings, compute, FP16)


@pytest.mark.parametrize(
    ("settings", "compute", "forward"),
    [
        (DYNAMIC, "float16", FP16),
        (NONE, "float16", FP16),  # the user's own choice
        (NONE, "float32", UNSCALED_FP16),
        (NONE, "float32", FP32),
        (NONE, "float32", BF16),
        (DYNAMIC, "float32", FP16),  # it scales, whatever it was wrapped for
        (DYNAMIC, "float16", BF16),
        (DYNAMIC, "float16", FP32),
        (NONE, None, FP16),
        (CHECKED, "bfloat16", BF16),
    ],
)
def test_these_agree(settings: LossScale, compute: str | None, forward: Policy) -> None:
    forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_missing_scale(settings, compute, forward)


def test_the_forward_pass_is_that_of_the_trace_or_of_the_region() -> None:
    forget_warnings()
    report_missing_scale(NONE, "float32")
    with policy("mixed_bfloat16"), traced_for(FP16), pytest.warns(PolyampWarning, match="without a loss scale"):
        report_missing_scale(NONE, "float32")
    with policy("mixed_bfloat16"):
        report_missing_scale(NONE, "float32")
        report_missing_scale(DYNAMIC, "float16")
    report_missing_scale(NONE, "float32", FP16)  # shown already


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
