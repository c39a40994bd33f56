"""JAX' own harnesses and public functions, each on 16-bit values that are read again: values, gradients and types."""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn
from jax._src.internal_test_util.test_harnesses import all_harnesses
from jax.extend.core import Literal
from jax.scipy import linalg, special
from jax.scipy.stats import norm

import polyamp
from support.jax_scenarios import POLICIES, described
from support.jax_scenarios import quickly_compiled as quickly_compiled

pytestmark = pytest.mark.slow

# Of one, two or three arrays, and each where this JAX has it.
FUNCTIONS = {
    jnp: """angle average around cbrt ceil clip column_stack corrcoef cov cumprod cumsum deg2rad diag diagflat diff
        ediff1d exp2 fabs flip fliplr frexp gradient i0 kron log10 log1p log2 logaddexp logaddexp2 matmul median mean
        modf nan_to_num nancumsum nanmax nanmean nanmedian nanstd nansum nanvar outer poly polyadd polysub polyval prod
        ptp reciprocal rint rot90 sinc sort square std tensordot trace trapezoid tril unwrap var vdot vecdot matvec
        arctan2 copysign divmod dot float_power floor_divide fmax fmod heaviside histogram hypot inner linspace logspace
        maximum mod power geomspace subtract true_divide where""",
    jnp.linalg: "cholesky cond det eigh eigvalsh inv lstsq matrix_norm norm pinv qr slogdet solve svd svdvals",
    jnp.fft: "fft fft2 fftn fftshift hfft ifft ifft2 ihfft irfft irfft2 rfft rfft2 rfftn",
    nn: """celu elu gelu glu hard_sigmoid hard_silu hard_tanh leaky_relu log1mexp log_sigmoid log_softmax logmeanexp
        logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus
        standardize""",
    linalg: """block_diag cho_factor circulant companion expm expm_frechet fiedler hankel hessenberg lu lu_factor polar
        schur solve_sylvester solve_triangular sqrtm toeplitz""",
    special: """beta betainc betaln boxcox boxcox1p comb dawsn digamma entr erf erfc erfcx erfinv exp1 expi
        expit factorial fresnel gamma gammainc gammaincc gammaln gammasgn hyp1f1 i0 i0e i1 i1e kl_div log_ndtr logit
        ndtr ndtri owens_t poch rel_entr sici spence wofz xlog1py xlogy zeta""",
    norm: "cdf isf logcdf logpdf logsf pdf ppf sf",
}
OTHERS: dict[str, Callable[..., Any]] = {
    "astype": lambda x: x.astype(jnp.bfloat16) * 2,
    "at": lambda x, y: x.at[jnp.array([0, 2, 2])].add(y[:3]).at[1].multiply(2.0),
    "convolve": lambda x, y: jnp.convolve(x[0], y[0]),
    "cross": lambda x, y: jnp.cross(x[:, :3], y[:, :3]),
    "einsum": lambda x, y, z: jnp.einsum("ab,bc,cd->da", x, y, z),
    "expn": lambda x: special.expn(2, x),  # the gradient of a compiled one with a computed order fails in JAX itself
    "hyp2f1": lambda x, y, z: special.hyp2f1(x, 1.5, y, z * 0.5),
    "interp": lambda x, y: jnp.interp(x, jnp.linspace(0, 1, 4), y[0]),
    "matrix_power": lambda x: jnp.linalg.matrix_power(x, 3),
    "multi_dot": lambda x, y, z: jnp.linalg.multi_dot([x, y, z]),
    "pad": lambda x: jnp.pad(x, 2, mode="reflect"),
    "percentile": lambda x: jnp.percentile(x, jnp.array([20.0, 50.0]), axis=0),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0.4, x > 0.7], [jnp.exp, jnp.sqrt, 0.5]),
    "polygamma": lambda x: special.polygamma(1, x),
    "searchsorted": lambda x: x[0][jnp.searchsorted(jnp.linspace(0, 1, 4), x[1])],
    "take": lambda x: jnp.take(x, jnp.array([3, 0, 0]), axis=1),
}
UNIT = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}  # half the distance of 1 and the next number
LARGEST = {"mixed_bfloat16": 1e37, "mixed_float16": 2.0**15}  # that a value or gradient may be
SMALLEST = {"mixed_bfloat16": 0.0, "mixed_float16": 2.0**-25}  # half of it
APART = {"approx_top_k"}  # any of equal numbers may be the one
INLINE = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")


class Case(NamedTuple):
    name: str
    op: Callable[..., Any]
    args: list[Any]


def is_float(array: Any) -> bool:
    return getattr(array, "dtype", None) == np.float32


def cases() -> Iterator[Case]:
    """Yield, in a random order, two harnesses of each primitive, and every function with as few arrays as it takes."""
    numbers = np.random.RandomState(0).uniform(0.2, 0.9, (3, 4, 4)).astype(np.float32)
    numbers[0] += np.eye(4, dtype=np.float32)  # for factorizations
    named = {name: getattr(module, name, None) for module, names in FUNCTIONS.items() for name in names.split()}
    tries: list[list[Case]] = [
        [Case(name, op, [*numbers[:count]]) for count in (1, 2, 3)] for name, op in (named | OTHERS).items() if op
    ]
    for one in all_harnesses:
        if one.dtype == np.float32 and one.filter("cpu") and one.group_name not in APART:
            tries.append([Case(one.group_name, one.dyn_fun, one.dyn_args_maker(np.random.RandomState(0)))])
    random.Random(0).shuffle(tries)
    done = Counter[str]()
    for some in tries:
        if done[some[0].name] < 2 and (case := next(filter(takes, some), None)):
            done[case.name] += 1
            yield case._replace(args=[exact(arg) if is_float(arg) else arg for arg in case.args])


def exact(array: Any) -> jax.Array:
    """Return numbers that both formats hold."""
    return jnp.float32(jnp.float16(jnp.bfloat16(array)))


def takes(case: Case) -> bool:
    if not any(is_float(arg) and 1 < np.size(arg) <= 4000 for arg in case.args):
        return False
    try:
        return bool(jax.tree.leaves(jax.eval_shape(case.op, *case.args)))
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return False


def low(x: jax.Array) -> jax.Array:
    """Return the same numbers out of a product that sums two of them."""
    return (jnp.stack([x.ravel(), x.ravel()], 1) @ jnp.full((2, 1), 0.5)).reshape(x.shape)


def program(case: Case, make: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """Return a loss of the operation's results and of its operands, which are read again; and the results."""

    def loss(floats: list[Any]) -> Any:
        own = iter(floats)
        values = [make(next(own)) if is_float(arg) else arg for arg in case.args]
        results = case.op(*values), [value * 2 for value in values if is_float(value)]
        total = jnp.float32(0)
        for leaf in jax.tree.leaves(results):
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                factors = np.random.RandomState(1).uniform(0.5, 1.5, (2, *jnp.shape(leaf))).astype(np.float32)
                total += (jnp.real(leaf) * factors[0]).sum() + (jnp.imag(leaf) * factors[1]).sum()
        return total, results

    return loss


def with_errors(jaxpr: Any, consts: Any, args: Any, size: Any, seed: Any) -> tuple[list[Any], jax.Array]:
    """Run a jaxpr with a relative error of this size in every value; return its results and the largest value."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    largest = jnp.float32(0)
    for place, equation in enumerate(jaxpr.eqns):
        inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
        if equation.primitive.name in INLINE:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            results, inside = with_errors(inner.jaxpr, inner.consts, inputs, size, seed + place)
            largest = jnp.maximum(largest, inside)
        else:
            made = equation.primitive.bind(*inputs, **equation.params)
            results = list(made) if equation.primitive.multiple_results else [made]
            for at, value in enumerate(results):
                if jnp.issubdtype(value.dtype, jnp.inexact):
                    known = jnp.where(jnp.isfinite(value), value, 0)
                    largest = jnp.maximum(largest, jnp.abs(known).max(initial=0))
                    waves = jnp.sin((seed + 1.7 * place) * (2.39996 * jnp.arange(value.size).reshape(value.shape) + 1))
                    results[at] = (value + known * size * waves).astype(value.dtype)
        values |= zip(equation.outvars, results, strict=True)
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars], largest


def distances(ours: Any, theirs: Any) -> np.ndarray[Any, Any]:
    """Return the distance of each leaf of two trees in norm; numbers that are not finite are numbers like others."""

    def wide(leaf: Any) -> np.ndarray[Any, Any]:
        return np.nan_to_num(np.asarray(leaf).astype(np.complex128), nan=7, posinf=7, neginf=-7).ravel()

    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return np.array([np.linalg.norm(wide(one) - wide(other)) for one, other in pairs])


def judged(case: Case, ways: dict[str, bool]) -> list[str]:
    """Return what is wrong by more than rounding; ``ways`` has by policy whether autocast sees the derivative."""
    floats = [arg for arg in case.args if is_float(arg)]
    plain, mixed = program(case, lambda x: x), program(case, low)
    derivative = functools.partial(jax.value_and_grad, has_aux=True)
    try:
        closed = jax.make_jaxpr(derivative(plain))(floats)
    except (NotImplementedError, TypeError, ValueError):  # it has no derivative
        closed, derivative = jax.make_jaxpr(plain)(floats), lambda fn: fn

    def ours(policy: str) -> Callable[..., Any]:
        if ways[policy]:
            return polyamp.autocast(derivative(mixed), policy)
        return derivative(polyamp.autocast(mixed, policy))

    all_of_them = jax.jit(lambda floats: [derivative(plain)(floats), *(ours(policy)(floats) for policy in ways)])
    wanted, *found = all_of_them(floats)
    wrong = []
    for policy, one in zip(ways, found, strict=True):
        rounding = UNIT[policy] * distances(wanted, jax.tree.map(jnp.zeros_like, wanted)) + SMALLEST[policy]
        error = distances(one, wanted)
        if described(one) != described(wanted):
            wrong.append(f"{policy}: {described(one)} for {described(wanted)}")
        elif (error > 4 * rounding).any():
            runs = jax.jit(jax.vmap(functools.partial(with_errors, closed.jaxpr, closed.consts, floats, UNIT[policy])))
            many, largest = runs(jnp.arange(8.0))
            most = np.max([distances([leaf[at] for leaf in many], wanted) for at in range(8)], 0)
            if largest.max() < LARGEST[policy] and (error > 4 * (rounding + most)).any():
                wrong.append(f"{policy}: {error} of {most}")
    return wrong


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # JAX' own, of some functions
@pytest.mark.filterwarnings("ignore:autocast to .* changed nothing")
@pytest.mark.parametrize("count", [60, pytest.param(None, marks=pytest.mark.long)])
def test_every_function_and_its_gradient_are_right(count: int | None) -> None:
    wrong = {}
    for place, case in enumerate(itertools.islice(cases(), count)):
        if found := judged(case, {policy: (place + at) % 2 == 0 for at, policy in enumerate(POLICIES)}):
            wrong[case.name] = found
    assert wrong == {}
    assert place + 1 == count or place > 350


def test_a_small_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("tanh", jnp.tanh, [jnp.float32([[0.5, -0.25]])])
    assert judged(case, dict.fromkeys(POLICIES, False)) == []
    monkeypatch.setitem(globals(), "low", lambda x, low=low: low(x) * 1.0625)
    assert len(judged(case, dict.fromkeys(POLICIES, False))) == 2
