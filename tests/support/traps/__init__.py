"""The traps, in all frameworks: `TRAPS`, the `words` that they are written in, and the `engines` that run them."""

from support.traps import chances, data, differences, products, ranges, readers, similarities, solvers, squares
from support.traps.trap import Trap

TRAPS: dict[str, Trap] = {
    value.name: value
    for module in (squares, chances, data, ranges, readers, products, differences, similarities, solvers)
    for value in vars(module).values()
    if isinstance(value, Trap)
}
