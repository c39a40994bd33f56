"""Values for the tests of the flow rule, and short functions that call it."""

import itertools

from polyamp.flow import Decision, Value, decide, flow

COMPUTE = ["float16", "bfloat16"]
TOO_LARGE = "constant 1e+30 is beyond it"

WEAK = Value()
INPUT = Value("input")
LOW = Value("low", "matmul")
STRONG = Value("strong", "exp")
OTHER = Value("other", "float64")
UNFIT = Value(unfit=TOO_LARGE)

# Every state, with and without a part that the compute format cannot represent; in every order, up to three.
KNOWN = [value._replace(unfit=unfit) for value in (WEAK, LOW, STRONG, OTHER) for unfit in ("", TOO_LARGE)] + [INPUT]
Mix = tuple[Value, ...]
MIXES: list[Mix] = [mix for count in range(4) for mix in itertools.product(KNOWN, repeat=count)]


def of_class(op_class: str, inputs: Mix | list[Value], compute: str = "float16") -> Decision:
    return flow(Decision("anything", op_class, "rule 'anything'"), inputs, compute)


def by_table(operation: str, *inputs: Value, compute: str = "float16") -> Decision:
    return flow(decide((), operation), inputs, compute)


def states(mix: Mix) -> set[str]:
    return {value.state for value in mix}


def any_unfit(mix: Mix) -> bool:
    return any(value.unfit for value in mix)
