"""Tensors of different formats: what a region promotes, what of CUDA's list the CPU follows, and what is refused."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import polyamp
from support.torch_cases import Product

FORMATS = {"mixed_float16": torch.float16, "mixed_bfloat16": torch.bfloat16}
both = pytest.mark.parametrize("policy", FORMATS)

X = torch.linspace(-2, 2, 16).reshape(4, 4)
ROW, PLACES, MASK = torch.arange(4), torch.zeros(4, 4, dtype=torch.long), torch.eye(4).bool()


# --- CUDA's list on a CPU ---------------------------------------------------------------------------------------------

PROMOTED = AutocastTestLists(torch.device("cpu")).torch_need_autocast_promote


@both
@pytest.mark.filterwarnings("ignore:Using torch.cross without")
@pytest.mark.parametrize("case", PROMOTED, ids=lambda case: case[0])
def test_the_cpu_promotes_what_cudas_list_promotes(case: tuple[str, tuple[Any, ...]], policy: str) -> None:
    name, args = case
    args = tree_map_only(Tensor, lambda one: one.to(FORMATS[policy]) if one.dtype == torch.float16 else one, args)
    with polyamp.autocast(policy):
        assert getattr(torch, name)(*args).dtype == torch.float32


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda into, new: into.index_add(0, ROW, new),
    "index_copy": lambda into, new: into.index_copy(0, ROW, new),
    "index_reduce": lambda into, new: into.index_reduce(0, ROW, new, "mean"),
    "index_put": lambda into, new: into.index_put((ROW,), new),
    "index_put by a mask": lambda into, new: torch.index_put(into, (MASK,), new[0]),
    "masked_scatter": lambda into, new: into.masked_scatter(MASK, new),
    "put": lambda into, new: into.put(ROW, new[0]),
    "scatter": lambda into, new: torch.scatter(into, 0, PLACES, new),
    "scatter_add": lambda into, new: into.scatter_add(0, PLACES, new),
    "scatter_reduce": lambda into, new: into.scatter_reduce(0, PLACES, new, "amax"),
    "lerp": lambda into, new: torch.lerp(into, new, 0.25),
    "lerp by a tensor": lambda into, new: torch.lerp(into, new, new),
    "embedding_bag": lambda into, new: functional.embedding_bag(PLACES, into, per_sample_weights=new, mode="sum"),
    "inner": torch.inner,
    "dot": lambda into, new: torch.dot(into[0], new[0]),
    "tensordot": torch.tensordot,
    "cross": lambda into, new: torch.linalg.cross(into[:, :3], new[:, :3]),
    "complex": lambda into, new: torch.view_as_real(torch.complex(into, new)),
}


@both
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("low_into", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_writes_out_of_place_promotes(
    write: Callable[[Tensor, Tensor], Tensor], low_into: bool, policy: str
) -> None:
    weight = torch.eye(4, requires_grad=True)
    with polyamp.autocast(policy):
        low, wide = X @ weight, X + 1
        given = (low, wide) if low_into else (wide, low)
        found = write(*given)
        (gradient,) = torch.autograd.grad(found.float().sum(), weight)
        with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError):
            write(*given)
    assert (found.dtype, gradient.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(found, write(*(one.float() for one in given)))


RUNS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "compiled": lambda body: torch.compile(body, backend="eager", fullgraph=True),
    "compiled by AOTAutograd": lambda body: torch.compile(body, backend="aot_eager", fullgraph=True),
    "checkpointed": lambda body: lambda x: checkpoint(body, x, use_reentrant=False),
    "in inference mode": torch.inference_mode(),
}


@both
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_regions_promote_however_code_runs(run: Callable[..., Callable[[Tensor], Tensor]], policy: str) -> None:
    def body(x: Tensor) -> Tensor:
        low = x @ x
        return functional.layer_norm(torch.lerp(X.index_add(0, ROW, low), low, 0.5), (4,), low[0], low[1]).sum()

    with polyamp.autocast(policy):
        found, expected = run(body)(X.clone().requires_grad_()), body(X)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach(), expected)
    if found.requires_grad:
        found.backward()


def test_products_with_vectors_run_in_the_compute_format_if_their_operands_differ_as_on_a_gpu() -> None:
    for policy, dtype in FORMATS.items():
        with polyamp.autocast(policy):
            low = X @ X
            assert torch.mv(X, low[0]).dtype == torch.addmv(X[0], low, X[0]).dtype == dtype
            assert torch.linalg.multi_dot([X, low, X]).dtype == dtype


@both
def test_what_has_no_kernel_in_16_bits_runs_in_float32(policy: str) -> None:
    with polyamp.autocast(policy):
        low = X @ X.t() + 5 * torch.eye(4, dtype=FORMATS[policy])
        assert torch.complex(low, low).dtype == {"mixed_bfloat16": torch.complex64}.get(policy, torch.complex32)
        assert torch.matrix_exp(low).isfinite().all()
        for run in (torch.det, torch.logdet, torch.slogdet, torch.pdist, lambda x: torch.linalg.lu(x)[2]):
            assert {one.dtype for one in tree_leaves(run(low))} == {torch.float32}
        assert torch.linalg.solve_triangular(low, X, upper=True).dtype == torch.float32


OVERRIDDEN = """
index_put index_add index_copy index_reduce masked_scatter put scatter scatter_add scatter_reduce lerp embedding_bag dot
vdot cross bilinear tensordot mv addmv multi_dot inner det logdet slogdet lu lu_factor lu_solve solve_triangular pinv
pdist layer_norm group_norm batch_norm instance_norm native_layer_norm native_batch_norm
"""


def native_calls() -> Iterator[tuple[str, Any, Any]]:
    """Calls of the operators that every region overrides, as PyTorch's own samples make them."""
    for info in op_db:
        if info.name.split(".")[-1] in OVERRIDDEN.split() and torch.float32 in info.supported_dtypes("cpu"):
            torch.manual_seed(0)
            samples = info.sample_inputs_func(info, "cpu", torch.float32, False)
            for sample in itertools.islice(samples, 3):
                yield info.name, info.op, (sample.input, sample.args, sample.kwargs)


def copied(call: Any, formats: tuple[torch.dtype, ...]) -> Any:
    turns = itertools.cycle(formats)
    return tree_map_only(Tensor, lambda one: one.to(next(turns)) if one.dtype == torch.float32 else one.clone(), call)


@pytest.mark.filterwarnings("ignore")
def test_no_program_that_ran_in_bfloat16_on_a_cpu_changes() -> None:
    def outcome(region: Any, op: Any, call: Any) -> list[Any]:
        value, args, kwargs = call
        torch.manual_seed(0)
        with region:
            return [(one.dtype, one) for one in tree_leaves(op(value, *args, **kwargs)) if isinstance(one, Tensor)]

    ran, refused = set(), set()
    for name, op, call in native_calls():
        count = sum(isinstance(one, Tensor) and one.dtype == torch.float32 for one in tree_leaves(call))
        for formats in itertools.product((torch.float32, torch.bfloat16), repeat=min(count, 4)):
            given = copied(call, formats)
            if not all(one.numel() for one in tree_leaves(given) if isinstance(one, Tensor)):
                continue  # where there are no numbers, kernels are not looked for
            try:
                native = outcome(torch.autocast("cpu", torch.bfloat16), op, given)
            except RuntimeError:
                refused.add(name)
                continue
            if not any(one.numel() for _, one in native):
                continue
            ours = outcome(polyamp.autocast("mixed_bfloat16"), op, given)
            assert [dtype for dtype, _ in ours] == [dtype for dtype, _ in native], (name, formats)
            for (_, one), (_, other) in zip(ours, native, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=f"{name} {formats}")
            ran.add(name)
    assert len(ran) > 15
    assert len(refused) > 15


# --- norms ------------------------------------------------------------------------------------------------------------

W = torch.ones(4)
NORMS: dict[str, Callable[..., Tensor]] = {
    "layer": lambda x, w, b: functional.layer_norm(x, (4,), w, b),
    "group": lambda x, w, b: functional.group_norm(x, 2, w, b),
    "batch": lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
    "batch, trained": lambda x, w, b: functional.batch_norm(x, torch.zeros(4), torch.ones(4), w, b),
    "instance": lambda x, w, b: functional.instance_norm(x[None].expand(2, 4, 4), weight=w, bias=b),
    "rms": lambda x, w, b: functional.rms_norm(x, (4,), w),
}


@both
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_take_16_bit_parameters_with_float32_data(norm: Callable[..., Tensor], policy: str) -> None:
    """As sharded parameters are, gathered in 16 bits."""
    low, expected = W.to(FORMATS[policy]).requires_grad_(), norm(X, W, W)
    with polyamp.autocast(policy):
        found = norm(X, low, low)
        found.sum().backward()
    torch.testing.assert_close(found, expected)
    assert low.grad is not None


def test_a_norm_updates_its_statistics_and_not_a_copy_of_them() -> None:
    running = torch.zeros(4)
    with polyamp.autocast("mixed_bfloat16"):
        functional.batch_norm(X + 1, running, torch.ones(4), W.bfloat16(), W.bfloat16(), training=True)
    assert running.all()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap of grad": lambda m, x: torch.func.vmap(torch.func.grad(lambda row: total(m, row[None])))(x),
    "per-sample gradients": lambda m, x: torch.func.vmap(
        torch.func.grad(lambda p, row: torch.func.functional_call(m, p, (row[None],)).float().square().sum()), (None, 0)
    )(dict(m.named_parameters()), x),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x).float(),
    "jacfwd": lambda m, x: torch.func.jacfwd(m)(x).float(),
    "hessian": lambda m, x: torch.func.hessian(lambda y: total(m, y))(x),
    "linearize": lambda m, x: torch.func.linearize(m, x)[1](x).float(),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,))[1].float(),
    "vmap of autograd.grad": lambda m, x: rows_of_jacobian(m, x),
}


def total(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).float().square().sum()


def rows_of_jacobian(module: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = module(x)
    rows = torch.eye(out.numel()).reshape(-1, *out.shape).to(out.dtype)
    return torch.func.vmap(lambda row: torch.autograd.grad(out, x, row, retain_graph=True)[0])(rows).float()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(4),
    "group": lambda: nn.GroupNorm(1, 4),
    "batch": lambda: nn.BatchNorm1d(4).eval(),
    "instance": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
}


@both
@pytest.mark.parametrize("norm", MODULES.values(), ids=MODULES)
@pytest.mark.filterwarnings("ignore:.*get_attr node", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_differentiate_norms(
    transform: Callable[..., Any], norm: Callable[[], nn.Module], policy: str
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), norm(), nn.Linear(4, 2))
    expected = transform(module, X[:3])
    with polyamp.autocast(policy):
        found = transform(module, X[:3])
    close = {"rtol": 0.1, "atol": 0.2} if policy == "mixed_bfloat16" else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(found, expected, check_dtype=False, **close)


def test_outside_of_regions_norms_are_as_they_were() -> None:
    with polyamp.autocast("mixed_bfloat16"):
        pass
    with pytest.raises(RuntimeError, match="mixed dtype"):
        NORMS["layer"](X, W.bfloat16(), W.bfloat16())


# --- errors -----------------------------------------------------------------------------------------------------------


def in_float32(low: Tensor) -> Tensor:
    with polyamp.autocast("float32"):
        return functional.linear(low, X)


WRITTEN, GIVEN = "cannot write a tensor into one of another format", "does not take operands of different formats"
REFUSED: list[tuple[str, Callable[[Tensor], Any]]] = [
    (WRITTEN, lambda low: torch.zeros(4, 4).index_add_(0, ROW, low)),
    (WRITTEN, lambda low: torch.zeros(4, 4).scatter_add_(0, PLACES, low)),
    (WRITTEN, lambda low: torch.zeros(4, 4).scatter_reduce_(0, PLACES, low, "sum")),
    (WRITTEN, lambda low: torch.zeros(4, 4).__setitem__(MASK, low[MASK])),
    (WRITTEN, lambda low: low.__setitem__(ROW, X)),
    (WRITTEN, lambda low: torch.zeros(4, 4).masked_scatter_(MASK, low)),
    (WRITTEN, lambda low: torch.zeros(4, 4).lerp_(low, 0.5)),
    (WRITTEN, lambda low: torch.zeros(4, 4).addmm_(low, low)),
    (WRITTEN, lambda low: torch.zeros(4, 4).put_(ROW, low[0])),
    ("a number that the tensor's format", lambda low: low.masked_fill(MASK, torch.finfo(torch.float32).min)),
    ("the tensor of out=", lambda low: torch.softmax(low, 0, out=torch.zeros(4, 4))),
    ("the tensor of out=", lambda low: torch.max(low, 0, out=(torch.zeros(4), ROW.clone()))),
    ("the tensor of out=", lambda low: torch.arange(4, dtype=torch.float32, out=low[0])),
    ("the tensor of out=", lambda low: torch.masked_select(low, MASK, out=torch.zeros(4))),
    ("no kernel in 16 bits", lambda low: torch.std(low, out=torch.zeros(()))),
    (GIVEN, lambda low: torch.abs(low, out=torch.zeros(4, 4))),
    (GIVEN, lambda low: torch.cummax(low, 0, out=(torch.zeros(4, 4), PLACES.clone()))),
    (GIVEN, in_float32),
    (GIVEN, lambda low: torch.isclose(low, X)),
    (GIVEN, lambda low: torch.heaviside(low, X)),
]


@both
@pytest.mark.parametrize(("what", "run"), REFUSED, ids=range(len(REFUSED)))
def test_a_refusal_of_pytorch_says_what_to_do(what: str, run: Callable[[Tensor], Any], policy: str) -> None:
    def region() -> None:
        with polyamp.autocast("mixed_bfloat16"), polyamp.autocast(policy):
            run(X @ X)

    with pytest.raises(polyamp.errors.FormatError, match=what) as caught:
        polyamp.autocast(policy)(region)()
    assert isinstance(caught.value, RuntimeError)
    assert type(caught.value.__cause__) is RuntimeError
    assert str(caught.value.__cause__).partition("\n")[0] in str(caught.value)
    assert "test_formats.py:" in str(caught.value)
    assert "to do: " in str(caught.value)
    assert not torch.is_autocast_enabled("cpu")


def test_a_missing_kernel_is_an_error_of_the_type_that_pytorch_raises() -> None:
    with pytest.raises(NotImplementedError, match="no kernel in 16 bits") as caught, polyamp.autocast("mixed_float16"):
        functional.rrelu(X @ X, training=True)
    assert isinstance(caught.value, polyamp.errors.FormatError)


@both
@pytest.mark.parametrize("inside", [True, False])
def test_a_backward_pass_without_a_region_is_explained_by_the_optimizer(inside: bool, policy: str) -> None:
    weight = torch.eye(4, requires_grad=True)
    opt = polyamp.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), policy)
    with polyamp.autocast(policy):
        loss = Product.apply(X, weight).float().sum()
    with (
        torch.autocast("cpu", enabled=False) if inside else polyamp.autocast("float32"),
        pytest.raises(polyamp.errors.FormatError, match="custom_fwd"),
    ):
        opt.backward(loss)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected scalar type Long but found Float"),
        RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float"),
        ValueError("expected scalar type Half but found Float"),
        polyamp.errors.UsageError("have the same Half"),
        KeyError("x"),
    ],
)
def test_other_errors_leave_a_region_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, polyamp.autocast("mixed_float16"):
        raise error
    assert caught.value is error
    assert error.__cause__ is None


@both
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_tracing_in_a_region_names_the_two_ways_that_work(policy: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    said = pytest.raises(polyamp.errors.FormatError, match="set_autocast_cache_enabled")
    with said as caught, polyamp.autocast(policy):
        torch.jit.trace(module, X)
    assert "inside the traced function" in str(caught.value)
    with polyamp.autocast(policy):
        torch.set_autocast_cache_enabled(False)
        first = torch.jit.trace(module, X)
    assert torch.is_autocast_cache_enabled()
    second = torch.jit.trace(Within(module, policy), X)
    assert first(X).dtype == second(X).dtype == FORMATS[policy]


class Within(nn.Module):
    def __init__(self, module: nn.Module, policy: str) -> None:
        super().__init__()
        self.module, self.policy = module, policy

    def forward(self, x: Tensor) -> Any:
        with polyamp.autocast(self.policy):
            return self.module(x)
