"""Unscaling, testing and clipping of every kind of gradient."""

import math

import pytest
import torch

from polyamp.backends.torch.step.gradients import Gradients

HALF = torch.tensor(0.5)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def params_with(*grads: torch.Tensor) -> list[torch.Tensor]:
    params = []
    for grad in grads:
        param = torch.zeros(grad.shape, dtype=grad.dtype)
        param.grad = grad
        params.append(param)
    return params


def gradients_of(*grads: torch.Tensor) -> Gradients:
    return Gradients([{"params": params_with(*grads)}])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bad", "simple"), [(math.nan, True), (math.inf, False), (-math.inf, True)])
def test_one_bad_value_in_any_gradient_sets_the_flag_to_exactly_one(
    dtype: torch.dtype, bad: float, simple: bool
) -> None:
    last = torch.ones(4, dtype=dtype)
    last[2] = bad
    flag = gradients_of(torch.ones(2, dtype=dtype), torch.empty(0, dtype=dtype), last).unscale(HALF, simple=simple)
    assert flag.item() == 1.0
    assert gradients_of(torch.ones(2, dtype=torch.float32), last).unscale(HALF, simple=simple).item() == 1.0


def test_the_raw_gradient_is_tested_and_not_its_product() -> None:
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    assert gradients_of(largest).unscale(torch.tensor(4.0)).item() == 0.0  # overflows after the test, not before


@pytest.mark.parametrize("simple", [True, False])
def test_several_dtypes_are_unscaled_once_each(simple: bool) -> None:
    grads = [torch.full((2,), 8.0, dtype=dtype) for dtype in FLOATS]
    assert gradients_of(*grads).unscale(HALF, simple=simple).item() == 0.0
    assert [grad.tolist() for grad in grads] == [[4.0, 4.0]] * 4


def test_complex_gradients_are_unscaled_in_place_and_once() -> None:
    grads = [torch.tensor([8.0]), torch.tensor([4 + 2j]), torch.tensor([8.0])]
    both = gradients_of(*grads)
    assert both.unscale(HALF, simple=both.are_simple()).item() == 0.0
    assert [grad.item() for grad in grads] == [4.0, 2 + 1j, 4.0]
    assert gradients_of(torch.tensor([complex(1, math.nan)])).unscale(HALF).item() == 1.0


@pytest.fixture
def sparse_checks() -> object:
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


def sparse(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    indices = torch.zeros(1, len(values), dtype=torch.long)  # duplicates, as an embedding gives them
    return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (3,))


@pytest.mark.parametrize("simple", [True, False])
def test_sparse_gradients_between_dense_ones_are_unscaled_once(sparse_checks: object, simple: bool) -> None:
    params = params_with(torch.tensor([8.0]), sparse([4.0, 2.0]), torch.tensor([8.0]))
    assert Gradients([{"params": params}]).unscale(HALF, simple=simple).item() == 0.0
    assert [param.grad.to_dense().tolist() for param in params] == [[4.0], [3.0, 0.0, 0.0], [4.0]]


def test_a_sum_of_sparse_duplicates_that_overflows_is_found(sparse_checks: object) -> None:
    assert gradients_of(sparse([60000.0, 60000.0], torch.float16)).unscale(HALF).item() == 1.0


@pytest.mark.parametrize("beside", [(), (torch.tensor([1.0]),)], ids=["alone", "beside float32"])
def test_the_norm_of_float16_gradients_does_not_overflow(beside: tuple[torch.Tensor, ...]) -> None:
    grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert gradients_of(*beside, grad).clip(1.0).item() == pytest.approx(120000, rel=1e-3)
    assert grad.tolist() == pytest.approx([0.5] * 4, rel=1e-2)


def test_clip_takes_sparse_dense_and_several_dtypes_together(sparse_checks: object) -> None:
    params = params_with(sparse([3.0, 0.0]), torch.tensor([4.0], dtype=torch.float64))
    assert Gradients([{"params": params}]).clip(1.0).item() == pytest.approx(5.0)
    assert params[0].grad.to_dense().tolist() == pytest.approx([0.6, 0.0, 0.0], rel=1e-5)
    assert params[1].grad.item() == pytest.approx(0.8, rel=1e-5)
