"""The look at readers before the flow rule, and the numbers of values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp.flow import (
    ACCUMULATES,
    IN_DISTANCE,
    IN_QUOTIENT,
    READ_IN_FULL,
    READ_IN_NORMS,
    SMALL_STEPS,
    SOLVED,
    Decision,
    Value,
    decide,
    flow,
    parameter,
    table,
)
from polyamp.numbering import Numbering, sizes_of_einsum, terms_of_einsum
from polyamp.readers import DIVIDES, Read, factor, look
from polyamp.rules import parse_rules

LOW, WEAK, STRONG, WEIGHTS = Value("low", "matmul"), Value(), Value("strong", "square"), Value(role="weights")


def reads(*lines: str) -> list[Read]:
    """Return the operations of a program: ``"c = mul a b"``."""
    found = []
    for line in lines:
        output, right = line.split(" = ")
        operation, *inputs = right.split()
        found.append(Read(operation, decide((), operation).op_class, inputs, [output]))
    return found


DOT = ("p = mul a b", "s = sum p")
DETERMINANT = ("p = mul a d", "q = mul b c", "r = sub p q")
IOU = ("p = mul a b", "q = mul c d", "i = mul e f", "s = add p q", "u = sub s i", "r = div i u")
COVARIANCE = ("p = mul x y", "e = avg_pool p", "q = mul m n", "r = sub e q", "z = matmul r w")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (DOT, "p"),
        (("p = mul a b", "v = reshape p", "n = neg v", "s = mean n"), "p v n"),
        (("p = mul a b", "k = add p c", "s = sum k"), "p k c"),
        (("p = mul a b", "k = add p c", "s = sqrt k"), "p k"),  # as in a norm
        (("p = mul a b", "y = matmul p w"), ""),
        (("p = mul a b", "s = sum p", "y = matmul p w"), ""),
        (("p = mul a b", "c = compare p d", "s = sum p"), "p"),
        (("p = mul a b", "n = layer_norm p w"), ""),
        (("p = mul a b", "q = mul c d", "r = add p q", "y = matmul r w"), ""),
        (DETERMINANT, "p q"),
        (IOU, "p q i s u"),
        (COVARIANCE, "p e q"),
        (("p = mul a b", "r = sub p", "y = matmul r w"), ""),  # less a number, which is not a product
        ((*DETERMINANT, "s = mul e f", "m = matmul r s", "y = matmul m w"), "p q"),
        (("p = mul a b", "q = mul c d", "e = add p x", "r = sub e q", "y = matmul r w"), ""),
        (("p = mul a b", "q = mul c d", "e = relu p", "f = relu q", "r = sub e f", "y = matmul r w"), ""),
    ],
)
def test_a_product_is_found_that_full_work_alone_reads(program: tuple[str, ...], found: str) -> None:
    results = program[-1].split()[0]
    looked = look(reads(*program), results=[results], constants=["w"], written={})
    assert {value for value, reason in looked.items() if reason == READ_IN_FULL} - {"a", "b"} >= set(found.split())
    products = {line.split()[0] for line in program if " = mul " in line}
    assert products & set(looked) == products & set(found.split())


def test_a_product_that_is_returned_is_not_held() -> None:
    assert look(reads(*DOT), results=["s", "p"], constants=[], written={}) == {}


@pytest.mark.parametrize(
    ("program", "between"),
    [
        (("o = mul k s", "n = mul k y", "e = add o n"), "o e"),
        (("d = sub y s", "n = mul k d", "e = add s n"), "d n e"),
        (("o = mul k s", "c = clip o", "e = scatter c y"), "o c e"),
        (("o = exp s", "e = add o y"), ""),
        (("e = mul k y",), ""),
    ],
)
def test_what_is_between_a_state_and_what_is_written_to_it_accumulates(program: tuple[str, ...], between: str) -> None:
    found = look(reads(*program), results=[], constants=["k"], written={"s": ["e"]})
    assert {value for value, reason in found.items() if reason == ACCUMULATES} == set(between.split())


MEAN = ("m = mean y", "d = sub y m", "z = mul d g")
VALUES = ("y = add a k", "u = mul y k", "v = add b k", "d = sub u v", "q = square d")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (("y = add a k", *MEAN), "y"),
        (("y = add a b", *MEAN), "y"),  # only the flow rule knows which is a parameter
        (("y = mul a b", *MEAN), ""),
        (("y = add a k", "s = sum y", "d = sub y s", "z = mul d g"), ""),
        (("y = add a k", "s = sum y", "t = mul s k", "d = sub y t", "z = mul d g"), "y"),
        (("y = add a k", *MEAN, "n = add y z"), ""),  # a residual
        (("y = add a k", "e = softmax y"), ""),
        (("u = sigmoid a", "y = sub u k", "e = log y"), ""),  # 1 - p: a number, which is not a mean or an equal term
        (VALUES, "y u v"),
        ((*VALUES, "z = matmul v w"), "u y"),
        (("y = add a k", "n = add y b", "m = mean n", "d = sub n m", "z = mul d g"), ""),
        (("y = add a k", "m = mean y", "v = sub y m"), "y"),  # what is returned is not held
        (("y = add a k", "u = neg y", "m = mean u", "d = sub u m", "z = mul d g"), "y u"),
    ],
)
def test_a_sum_is_found_of_which_full_work_and_norms_alone_read_differences(
    program: tuple[str, ...], found: str
) -> None:
    looked = look(reads(*program), results=[program[-1].split()[0]], constants=["k"], written={})
    assert {value for value, reason in looked.items() if reason == READ_IN_NORMS}.intersection("yuv") == set(
        found.split()
    )


def test_a_constant_that_cancels_is_added_in_float32_and_the_sum_stays_low() -> None:
    held = LOW._replace(role="normalized")
    for other in (WEAK, None):
        inputs = (LOW, other) if other else (LOW,)
        decision = by_table("add", *inputs, asked=READ_IN_NORMS)
        assert (decision.format, decision.output) == ("float32", held)
    for inputs in ((LOW, LOW), (LOW, held)):
        assert by_table("add", *inputs, asked=READ_IN_NORMS) == by_table("add", *inputs)
    for name, inputs in (("slice", (held,)), ("sub", (held, held))):
        assert by_table(name, *inputs, asked=READ_IN_NORMS).output == held
    assert by_table("slice", held).format == "float16"


@pytest.mark.parametrize(
    ("program", "factor", "found"),
    [
        (("h = mul f", "e = add y h"), 2.0**-5, "e"),
        (("h = mul f", "n = neg h", "e = sub y n"), -0.005, "e"),
        (("h = div f", "i = mul h g", "e = add y i"), 1 / 64, "e"),
        (("e = lerp y f",), 0.01, "e"),
        (("h = mul f", "e = add y h"), 0.1, ""),
        (("h = mul f", "e = mul y h"), 0.005, ""),
        (("h = mul f", "i = add h h"), 0.005, ""),
        (("h = mul f", "i = exp h", "e = add y i"), 0.005, ""),
    ],
)
def test_small_steps_are_found(program: tuple[str, ...], factor: float, found: str) -> None:
    first, *others = reads(*program)
    looked = look([first._replace(factor=factor), *others], results=[], constants=[], written={})
    assert {value for value, reason in looked.items() if reason == SMALL_STEPS} == set(found.split())
    assert by_table("add", LOW, LOW, asked=SMALL_STEPS).output == Value("strong", "add")
    assert by_table("add", LOW, WEAK, asked=SMALL_STEPS).format == "float16"


@pytest.mark.parametrize(
    ("operation", "numbers", "expected"),
    [
        ("mul", [3.0], 3.0),
        ("lerp", [0.1], 0.1),
        ("div", [4.0], 0.25),
        ("div", [0.0], 1.0),
        ("mul", [0.0], 1.0),
        ("mul", [2.0, 3.0], 1.0),
        ("mul", [], 1.0),
        ("add", [2.0], 1.0),
    ],
)
def test_the_factor_of_an_operation_is_the_number_it_multiplies_by(
    operation: str, numbers: list[float], expected: float
) -> None:
    assert factor(operation, numbers) == expected


GRAM = ("g = matmul t y", "d = div g", "e = sub d k", "q = square e")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (GRAM, "g"),
        (("g = matmul a b", "s = mul g", "p = softmax s", "z = matmul p c"), ""),  # attention
        (("g = matmul a b", "e = exp g", "s = sum g", "r = add e s"), ""),
        (("g = matmul a b", "r = relu g", "z = matmul r c"), ""),
        (("g = matmul a b", "m = mean g", "d = sub g m", "q = square d"), "g"),
    ],
)
def test_a_product_of_matrices_is_found_that_is_not_a_score(program: tuple[str, ...], found: str) -> None:
    looked = look(reads(*program), results=[program[-1].split()[0]], constants=["k"], written={})
    assert {value for value, reason in looked.items() if reason == READ_IN_FULL}.intersection("g") == set(found)


def test_a_product_of_two_low_values_that_is_not_a_score_is_float32() -> None:
    assert by_table("matmul", LOW, LOW, asked=READ_IN_FULL).output == Value("strong", "matmul")
    for inputs in ((LOW, WEAK), (WEAK, LOW), (LOW, STRONG)):
        assert by_table("matmul", *inputs, asked=READ_IN_FULL) == by_table("matmul", *inputs)
    gradient = flow(decide((), "matmul"), (LOW, STRONG), "float16", gradient=True, asked=READ_IN_FULL)
    assert gradient.format == "float32"


ATTENTION = ("kv = matmul u v", "n = matmul q kv", "z = matmul q t")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ((*ATTENTION, "r = div n z"), "kv n z"),
        ((*ATTENTION, "c = add z", "i = reciprocal c", "r = mul n i"), "kv n z"),
        ((*ATTENTION, "i = reciprocal z", "r = matmul n i"), "kv n z r"),
        (("kv = matmul u v", "n = matmul q kv", "p = mul q t", "z = sum p", "r = div n z"), "kv n"),
        (("n = matmul p v", "z = sum p", "r = div n z"), ""),  # a softmax that is written out
        (("n = matmul p v", "r = div n"), ""),
        ((*ATTENTION, "e = exp z", "r = div n e"), ""),
        ((*ATTENTION, "c = add z u", "r = div n c"), "kv n z"),
        ((*ATTENTION, "c = mul z", "r = div n c"), "kv n z"),
        ((*ATTENTION, "c = mul z", "r = mul n c"), ""),
        ((*ATTENTION, "i = reciprocal z", "m = mul i", "r = mul n m"), "kv n z"),
        ((*ATTENTION, "i = reciprocal z", "e = exp i", "r = mul n e"), "z"),
        ((*ATTENTION, "i = reciprocal z", "m = mul i u", "r = mul n m"), "z"),
        (("n = matmul p v", "c = div k k", "r = mul n c"), ""),
        (("n = matmul p v", "i = reciprocal z", "r = mul n i"), ""),
    ],
)
def test_products_in_quotients_are_found(program: tuple[str, ...], found: str) -> None:
    looked = look(reads(*program), results=["r"], constants=["k"], written={})
    products = {line.split()[0] for line in program if " = matmul " in line}
    assert {value for value, reason in looked.items() if reason == IN_QUOTIENT} & products == set(found.split())


def test_a_product_with_a_parameter_stays_low_in_quotients() -> None:
    assert by_table("matmul", LOW, STRONG, asked=IN_QUOTIENT).output == Value("strong", "matmul")
    assert by_table("matmul", LOW, WEAK, asked=IN_QUOTIENT) == by_table("matmul", LOW, WEAK)


def test_a_product_of_two_strong_values_is_strong() -> None:
    assert by_table("matmul", STRONG, STRONG).output == Value("strong", "square")
    assert by_table("matmul", STRONG, LOW).output == LOW
    assert flow(decide((), "matmul"), (STRONG, STRONG), "float16", gradient=True).output == LOW
    ruled = decide(parse_rules({"matmul": "lower"}), "matmul")
    assert flow(ruled, (STRONG, STRONG), "float16").output == LOW


def test_a_constant_is_a_divisor_also_behind_a_move() -> None:
    found = look(reads("t = reshape k", "q = div y t", "p = mul y k"), results=["q"], constants=["k", "t"], written={})
    assert found == {"k": DIVIDES, "t": DIVIDES}
    found = look(reads("t = gather k", "q = div y t"), results=["q"], constants=["k"], written={})
    assert found == {"k": DIVIDES}  # also if what is gathered depends on data
    assert look(reads("t = exp k", "q = div y t"), results=["q"], constants=["k"], written={}) == {}
    assert look(reads("t = reshape k", "q = mul y t"), results=["q"], constants=["k"], written={}) == {}
    decays = 10.0 ** -np.arange(8.0)
    assert table(decays, "float16").unfit == ""
    assert table(decays, "float16", divides=True).unfit == "constant 1e-07 is lost in float16"
    assert table([0.0, 1.0, np.inf], "float16", divides=True) == WEIGHTS._replace(role="table")
    assert table([-1.0, 2.0], "float16") == table(3.0, "float16") == WEAK
    assert table([], "float16").unfit == table([np.inf, np.nan], "float16").unfit == ""


def by_table(name: str, *inputs: Value, asked: str = "") -> Decision:
    return flow(decide((), name), inputs, "float16", asked=asked)


def test_a_held_product_of_two_lows_is_float32_and_no_other_is() -> None:
    assert by_table("mul", LOW, LOW, asked=READ_IN_FULL).output == Value("strong", "mul")
    for name, inputs in (("mul", (LOW, WEAK)), ("add", (LOW, LOW))):
        assert by_table(name, *inputs, asked=READ_IN_FULL) == by_table(name, *inputs)
    assert by_table("add", WEAK, LOW, asked=ACCUMULATES).output == Value("strong", "add")
    ruled = decide(parse_rules({"mul": "follow"}), "mul")
    assert flow(ruled, (LOW, LOW), "float16", asked=READ_IN_FULL).format == "float16"


@pytest.mark.parametrize(
    ("name", "weights"), [("avg_pool", ()), ("matmul", (WEIGHTS,)), ("conv", (Value(role="table"),))]
)
def test_full_work_reads_averages_unrounded(name: str, weights: tuple[Value, ...]) -> None:
    average = by_table(name, LOW, *weights)
    assert (average.format, average.output.role) == ("float16", "average")
    assert by_table("square", average.output).anew == by_table("sub", STRONG, average.output).anew == ("average",)
    assert by_table("mul", average.output, average.output, asked=READ_IN_FULL).anew == ("average",)
    assert by_table("matmul", average.output, WEAK).anew == ()
    assert by_table(name, STRONG, *weights).format == "float32"
    assert by_table("matmul", LOW, STRONG._replace(role="weights")).format == "float16"


def test_a_product_of_computed_weights_alone_stays_as_declared() -> None:
    alone = by_table("matmul", WEIGHTS, WEIGHTS)
    assert (alone.format, alone.output) == ("float32", WEAK)
    assert by_table("matmul", Value(role="table"), Value(role="table")).format == "float16"


def test_of_a_parameter_only_its_range_counts() -> None:
    assert parameter(7e4, "float16").unfit == "constant 7e+04 is beyond float16"
    assert parameter(7e4, "bfloat16") == parameter(1e-9, "float16") == parameter(np.inf, "float16") == WEAK


def test_what_is_scaled_by_a_parameter_that_is_not_seen_is_rounded_at_the_end_of_the_chain() -> None:
    unseen = parameter(None, "float16")
    assert parameter(None, "bfloat16") == WEAK != unseen
    assert (
        flow(decide((), "add"), [flow(decide((), "reshape"), [unseen], "float16").output, WEAK], "float16").output
        == unseen
    )
    held = flow(decide((), "mul"), [LOW, unseen], "float16")
    assert (held.format, held.output.state, held.rounds) == ("float32", "low", False)
    for operation, operand in (("add", unseen), ("mul", WEAK), ("div", unseen)):
        assert not flow(decide((), operation), [held.output, operand], "float16").rounds
    assert flow(decide((), "add"), [held.output, LOW], "float16").format == "float16"
    assert flow(decide((), "add"), [LOW, unseen], "float16").format == "float16"  # a bias
    assert flow(decide((), "matmul"), [held.output, unseen], "float16").format == "float16"
    assert flow(decide((), "sub"), [held.output, Value("input")], "float16").format == "float32"


NAMES = st.sampled_from(["neg", "abs", "relu", "exp", "stop_gradient"])


@given(st.lists(NAMES, max_size=4), st.lists(NAMES, max_size=4))
def test_values_have_equal_numbers_where_the_same_was_done(first: list[str], second: list[str]) -> None:
    numbering = Numbering()
    start = numbering.new((2, 3))
    ends = []
    for steps in (first, second):
        value = start
        for name in steps:
            value = numbering.of(name, [value], shape=(2, 3))
        ends.append(value)
    assert (ends[0] == ends[1]) == (first == second)
    cores = [[*steps] for steps in (first, second)]
    for steps in cores:
        while steps and steps[-1] in ("neg", "abs", "stop_gradient"):
            steps.pop()
    assert (numbering.specific("mul", *ends) == "square") == (cores[0] == cores[1])


def test_reshapes_count_by_the_shape_they_end_in() -> None:
    numbering = Numbering()
    value = numbering.new((8, 8))
    flat = numbering.of("reshape", [value], -1, (64,))
    assert flat == numbering.of("reshape", [value], 64, (64,)) != value
    assert numbering.of("reshape", [flat], (8, 8), (8, 8)) == value
    assert numbering.of("reshape", [numbering.of("reshape", [flat], 0, (4, 16))], 0, (64,)) == flat
    assert numbering.of("reshape", [value], -1) != numbering.of("reshape", [value], 64)
    assert numbering.of("identity", [value]) == value


def test_a_constant_over_another_value_is_a_reciprocal() -> None:
    numbering = Numbering()
    one, value = numbering.new(is_constant=True), numbering.new()
    both = numbering.of("add", [one, one])
    assert numbering.is_constant(both)
    assert not numbering.is_constant(numbering.of("add", [one, value]))
    assert numbering.specific("div", both, value) == "reciprocal"
    assert numbering.specific("div", both, one) == numbering.specific("div", value, one) == "div"
    assert numbering.specific("div", value, numbering.new()) == "div"
    assert numbering.specific("add", value, value) == "add"
    assert numbering.specific("mul", value, one) == "mul"
    assert numbering.specific("sub", both, value) == "sub"


@pytest.mark.parametrize(
    ("equation", "shapes", "terms"),
    [
        ("i,j->ij", [(2,), (3,)], 1),
        ("bi, bj -> bij", [(4, 2), (4, 3)], 1),
        ("ik,kj->ij", [(2, 1), (1, 3)], 1),
        ("ik,kj", [(2, 5), (5, 3)], 5),
        ("...k,kj->...j", [(7, 2, 5), (5, 3)], 5),
        ("...i,...j->...ij", [(7, 2), (7, 3)], 1),
        ("...i,...i->", [(7, 2), (7, 2)], 4),
        ("i,j,k->ijk", [(2,), (3,), (4,)], 1),
        ("ab->ba", [(2, 3)], 1),
        ("ab->a", [(2, 3)], 3),
        ("bi,bi->b", [(4, 2), (4, 2)], 2),
        ("...i,...i", [(7, 2), (7, 2)], 2),
    ],
)
def test_the_terms_of_an_einsum_are_counted(equation: str, shapes: list[tuple[int, ...]], terms: int) -> None:
    assert terms_of_einsum(equation, shapes) == terms


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("ab,bc->ac", (2, 3, 4)),
        ("ab,bc", (2, 3, 4)),
        ("ab,bc->c", (2, 3, 4)),
        ("ab,bc->abc", (2, 1, 4)),
        ("...ab,...bc->ac", (2, 3, 4)),
    ],
)
def test_an_einsum_is_a_product_of_rows_terms_and_columns(equation: str, sizes: tuple[int, ...]) -> None:
    assert sizes_of_einsum(equation, [(2, 3), (3, 4)]) == sizes


def test_a_product_that_sums_nothing_is_a_mul_and_dot_products_of_equal_rows_are_squares() -> None:
    numbering = Numbering()
    rows, others = numbering.new((8, 4)), numbering.new((8, 4))
    wide, tall = (numbering.of("reshape", [rows], 0, shape) for shape in ((8, 1, 4), (8, 4, 1)))
    assert numbering.product([rows, others], 1, is_aligned=True) == numbering.product([rows, rows], 1, is_aligned=False)
    assert numbering.product([rows, others], 1, is_aligned=False) == "mul"
    assert numbering.product([rows, others], 4, is_aligned=True) == "matmul"
    assert numbering.product([rows, rows], 4, is_aligned=False) == "matmul"
    assert numbering.product([rows, rows], 4, is_aligned=True) == numbering.product([wide, tall], 4, is_aligned=True)
    assert numbering.product([wide, tall], 4, is_aligned=True) == "square"
    made = numbering.of("exp", [rows]), numbering.of("relu", [others])
    assert numbering.product(made, 4, is_aligned=True) == "matmul"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (("g = matmul t a", "c = cholesky g"), "g"),
        (("g = matmul t a", "k = mul g s", "r = add k i", "c = solve r b"), "g k r"),
        (("g = matmul t a", "r = matmul t b", "c = cholesky g", "x = triangular_solve c r"), "g r"),
        (("g = matmul t a", "c = cholesky g", "y = matmul g b"), "g"),  # whatever else reads it
        (("d = sub a b", "q = square d", "k = exp q", "r = add k i", "c = solve r b"), "d k r"),
        (("g = matmul t a", "k = exp g", "c = cholesky k"), "k"),  # `g` is read in full
        (("d = sub a b", "g = matmul d a", "c = cholesky g"), "g"),
        (("g = matmul t a", "r = relu g", "s = sum r"), ""),
    ],
)
def test_what_solvers_read_is_found(program: tuple[str, ...], found: str) -> None:
    asked = look(reads(*program), results=[program[-1].split()[0]], constants=[], written={})
    assert {value for value, what in asked.items() if what == SOLVED} - set("abist") - {"c"} == set(found.split())


def test_a_score_that_solvers_read_is_read_in_full() -> None:
    found = look(reads("g = matmul t a", "k = exp g", "c = cholesky k"), results=["c"], constants=[], written={})
    assert found["g"] == READ_IN_FULL


def test_a_product_that_solvers_read_is_float32_unless_a_rule_says_otherwise() -> None:
    decided = flow(decide((), "matmul"), [LOW, LOW], "float16", asked=SOLVED)
    assert (decided.format, decided.output.state, decided.reason) == ("float32", "strong", SOLVED)
    ruled = decide(parse_rules({"matmul": "lower"}), "matmul")
    assert flow(ruled, [LOW, LOW], "float16", asked=SOLVED).format == "float16"
    assert by_table("sub", LOW, LOW, asked=SOLVED).output == Value("strong", "sub")
    assert by_table("sub", LOW, WEAK, asked=SOLVED) == by_table("sub", LOW, WEAK)


@pytest.mark.parametrize(("operand", "format_name"), [(STRONG, "float32"), (LOW, "float16")])
def test_the_gradient_of_a_solver_is_float32(operand: Value, format_name: str) -> None:
    inputs = (Value("strong", "solve"), operand)
    assert flow(decide((), "matmul"), inputs, "float16", gradient=True).format == format_name


def test_a_low_value_that_is_joined_to_a_constant_is_not_a_parameter() -> None:
    joined = by_table("concat", LOW, WEAK)
    moved = by_table("transpose", joined.output).output
    assert (joined.format, joined.output.state, moved) == ("float32", "weak", joined.output)
    assert by_table("matmul", LOW, moved, asked=IN_QUOTIENT).format == "float32"


DISTANCE = ("s = square a", "a2 = sum s", "t = square b", "b2 = sum t", "p = matmul a b", "k = mul p two")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ((*DISTANCE, "m = sub a2 k", "d = add m b2"), "p"),
        ((*DISTANCE, "m = add a2 b2", "d = sub m k"), "p"),
        ((*DISTANCE, "m = sub b2 k", "d = add a2 m"), "p"),
        ((*DISTANCE, "m = sub b2 k"), "p"),
        ((*DISTANCE, "c = mul a2 two", "d = sub p c"), "p"),
        ((*DISTANCE, "n = neg p", "d = add n a2"), "p"),
        ((*DISTANCE, "r = reshape b2", "m = sub r k", "e = exp m"), "p"),
        (("s = mul a two", "p = matmul s b", "t = square a", "q = sum t", "d = sub q p"), "p"),
        (("n = norm a", "q = square n", "p = matmul a b", "d = sub q p"), "p"),
        (("q = square a", "p = mul a b", "d = sub q p"), "p"),
        (("t = square b", "q = sum t", "p = matmul q a b"), "p"),  # addmm
        (("g = matmul a t", "t = transpose a", "q = diagonal g", "d = sub q g"), ""),  # t comes later
        (("t = transpose a", "g = matmul a t", "q = diagonal g", "d = sub q g"), "g"),
        ((*DISTANCE, "d = sub a2 e"), ""),
        ((*DISTANCE, "d = add p a2"), ""),
        ((*DISTANCE, "m = exp k", "d = sub a2 m"), ""),
        (("s = square c", "q = sum s", "p = matmul a b", "d = sub q p"), ""),
    ],
)
def test_a_product_is_found_that_is_subtracted_from_squares_of_its_operands(
    program: tuple[str, ...], found: str
) -> None:
    asked = look(reads(*program), results=[], constants=["two"], written={})
    assert {value for value, what in asked.items() if what == IN_DISTANCE} == set(found.split())


def test_the_product_in_a_distance_is_float32_and_reads_what_the_squares_read() -> None:
    rounded = LOW._replace(role="saturated")
    for operation in ("matmul", "mul"):
        decided = flow(decide((), operation), [rounded, WEAK], "float16", asked=IN_DISTANCE)
        assert (decided.format, decided.reason, decided.anew) == ("float32", IN_DISTANCE, ("saturated",))
    assert flow(decide((), "add"), [LOW, WEAK], "float16", asked=IN_DISTANCE).format == "float16"
    ruled = decide(parse_rules({"matmul": "lower"}), "matmul")
    assert flow(ruled, [LOW, WEAK], "float16", asked=IN_DISTANCE).format == "float16"
