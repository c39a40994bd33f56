"""The traps, in all frameworks: `TRAPS`, the `words` that they are written in, and the `engines` that run them."""

from support.traps import chances, data, differences, products, ranges, readers, similarities, squares
from support.traps.trap import Trap

TRAPS: dict[str, Trap] = {
    value.name: value
    for module in (squares, chances, data, ranges, readers, products, differences, similarities)
    for value in vars(module).values()
    if isinstance(value, Trap)
}
