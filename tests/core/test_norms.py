"""Norms that programs write out: low and held in float32 from the mean to the end of the affine part, then rounded."""

from collections.abc import Mapping

import pytest

from polyamp.flow import Decision, Value, constant, decide, flow
from polyamp.rules import Rule
from support.flow_cases import COMPUTE, INPUT, LOW, STRONG, WEAK, by_table

# Programs, a line for each operation: the name of its result, the operation, and the names of its operands. ``x`` and
# ``dy`` are low, ``w`` and ``b`` are parameters, ``t`` is an input, ``eps`` and ``n`` are constants.
GIVEN = {"x": LOW, "dy": LOW, "w": WEAK, "b": WEAK, "t": INPUT, "n": WEAK}

LAYER_NORM = """
m = mean x
q = square x
v = mean q
mm = square m
var = sub v mm
e = add var eps
r = rsqrt e
c = sub x m
y = mul c r
s = mul y w
z = add s b
"""
PROGRAMS = {
    "layer norm": LAYER_NORM,
    "layer norm, the scale before the product": LAYER_NORM.replace("y = mul c r", "k = mul r w").replace(
        "s = mul y w", "s = mul c k"
    ),
    "layer norm, by deviations": """
m = mean x
c = sub x m
q = square c
v = mean q
e = add v eps
r = rsqrt e
z = mul c r
""",
    "a mean by a sum and a number": """
a = sum x
m = div a n
c = sub x m
q = square c
a2 = sum q
v = mul a2 n
r = rsqrt v
z = mul c r
""",
    "batch norm as TensorFlow writes it": """
m = mean x
d = squared_difference x m
v = mean d
e = add v eps
r = rsqrt e
i = mul r w
xi = mul x i
mi = mul m i
o = sub b mi
z = add xi o
""",
    "batch norm of an inference": """
e = add w n
r = rsqrt e
k = mul r w
y = mul x k
z = sub y b
""",
    "RMS norm": """
q = square x
v = mean q
e = add v eps
r = rsqrt e
y = mul x r
z = mul y w
""",
    "a quotient by a deviation": """
m = mean x
c = sub x m
q = square c
v = mean q
d = sqrt v
e = add d eps
z = div c e
""",
    "a reciprocal of a deviation": """
v = variance x
d = sqrt v
r = reciprocal d
m = mean x
c = sub x m
z = mul c r
""",
    "L2 norm": """
d = norm x
e = maximum d eps
z = div x e
""",
    "group norm": """
g = reshape x
m = mean g
c = sub g m
v = variance g
r = rsqrt v
y = mul c r
f = reshape y
z = mul f w
""",
}


def run(program: str, compute: str = "float16", gradient: bool = False) -> Mapping[str, Decision]:
    """Return what the flow rule decides of each line."""
    known = {**GIVEN, "eps": constant([1e-8], compute)}
    found = dict[str, Decision]()
    for line in filter(None, program.splitlines()):
        name, _, operation, *operands = line.split()
        inputs = [known[operand] for operand in operands]
        found[name] = flow(decide((), operation), inputs, compute, gradient=gradient)
        known[name] = found[name].output
    return found


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_norm_is_float32_inside_and_low_outside(program: str, compute: str) -> None:
    found = run(program, compute)
    assert {name for name, one in found.items() if one.format != "float32"} <= {"g"}
    assert (found["z"].output.state, found["z"].output.role) == ("low", "normalized")
    assert found["z"].reason == "inside a norm"


@pytest.mark.parametrize("after", ["relu z", "matmul z w", "add z x", "transpose z", "add x z"])
def test_what_takes_a_norm_is_low(after: str) -> None:
    outcome = run(f"{LAYER_NORM}out = {after}\n")["out"]
    assert (outcome.format, outcome.output.state) == ("float16", "low")
    assert outcome.output.role != "normalized"


def test_full_work_takes_a_norm_before_it_is_rounded() -> None:
    outcome = run(f"{LAYER_NORM}out = softmax z\n")["out"]
    assert (outcome.format, outcome.output.state, outcome.anew) == ("float32", "strong", ())


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("m = mean x\nz = mul x m", id="a product with a mean"),
        pytest.param("v = variance x\nd = sqrt v\nz = mul x d", id="what undoes a norm"),
        pytest.param(f"{LAYER_NORM}d = sqrt var\nu = mul y d\nz = add u m", id="a norm, undone"),
        pytest.param("a = sum x\nz = sub x a", id="less a sum"),
        pytest.param("e = exp x\na = sum e\nl = log a\nz = sub x l", id="cross entropy by hand"),
        pytest.param("l = logsumexp x\nz = sub x l", id="less logsumexp"),
        pytest.param("m = mean x\nz = add x m", id="plus a mean"),
        pytest.param("e = exp x\na = sum e\nz = div e a", id="softmax by hand"),
        pytest.param("m = mean t\nr = rsqrt m\ny = mul x r\nz = add y t", id="next to an input"),
        pytest.param("m = mean x\ne = exp m\nz = sub x e", id="an exponential of a mean"),
    ],
)
def test_what_is_no_norm_stays_float32(program: str) -> None:
    assert run(program)["z"].output.state == "strong"
    assert run(program)["z"].output.role != "normalized"


def test_a_norm_of_the_user_s_data_is_the_user_s_data_no_more() -> None:
    found = run("m = mean t\nc = sub t m\nq = square c\nv = mean q\nr = rsqrt v\nz = mul c r")
    assert found["z"].format == "float32"


BACKWARD = """
q = square x
v = mean q
r = rsqrt v
dn = mul dy w
a = mul dn r
p = mul dn x
sp = sum p
mp = mul sp n
k = mul mp r
xk = mul x k
z = sub a xk
"""


def test_in_a_backward_pass_any_statistic_multiplies() -> None:
    """The range of gradients is the loss scale's; what a norm's gradient multiplies would keep a network in float32."""
    assert run(BACKWARD, gradient=True)["z"].output == Value("low", "matmul", role="normalized")
    assert run(BACKWARD)["z"].output.state == "strong"


def test_rules_reach_the_operations_of_a_norm() -> None:
    mean = Value("strong", "mean", role="statistic")
    ruled = decide([Rule("norm/*", "full")], "sub", "net/norm")
    assert flow(ruled, [LOW, mean], "float16").output == Value("strong", "sub")


# --- what full work reads unrounded -----------------------------------------------------------------------------------

EPS = constant([1e-12], "float16")
SIGMOID = by_table("sigmoid", LOW).output
LESS = by_table("sub", WEAK, SIGMOID).output
ABS = by_table("abs", LOW).output


@pytest.mark.parametrize(
    ("operation", "inputs", "anew"),
    [
        ("log", [SIGMOID], ("saturated",)),
        ("log", [LESS], ("saturated",)),
        ("sum", [SIGMOID], ("saturated",)),
        ("log", [ABS], ()),
        ("add", [SIGMOID, EPS], ("saturated",)),
        ("add", [ABS, EPS], ("pointwise",)),
        ("mul", [INPUT, SIGMOID], ("saturated",)),
        ("mul", [STRONG, SIGMOID], ()),
        ("mul", [LOW, SIGMOID], ()),
        ("matmul", [SIGMOID], ()),
    ],
)
def test_full_and_guarded_work_reads_unrounded_what_saturates(
    operation: str, inputs: list[Value], anew: tuple[str, ...]
) -> None:
    assert by_table(operation, *inputs).anew == anew


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("operation", ["minimum", "clip", "sub", "add", "maximum", "mul"])
def test_a_constant_next_to_1_is_not_1(operation: str, compute: str) -> None:
    outcome = by_table(operation, LOW, constant([1 - 1e-7], compute), compute=compute)
    assert (outcome.format, outcome.reason) == ("float32", f"constant 0.9999999 is 1 in {compute}")
    assert by_table(operation, LOW, constant([1.0], compute), compute=compute).format == compute
