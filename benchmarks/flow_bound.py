"""Count the bytes that the flow rule moves, compared with the best choice of formats.

The graphs are the losses of four models and their gradients, in float32. A choice of formats decides for
each operation whether it runs in 16 bits. It costs the bytes of all inputs and outputs in those formats; a value that
is needed in another format than its own costs one cast, which reads and writes it. Products must be low, and values
that the flow rule calls strong must be float32; the cheapest choice for all others is a minimum cut.

    python benchmarks/flow_bound.py [--check 200] [--why] [--plot FILE]
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import flow_graph
import jax
import numpy as np
import scipy
import typer
from flow_graph import Graph, Operation, Tensor
from interleave import console
from jax_models import MODELS, loss_of, task
from keeping import keep, machine
from rich.box import SIMPLE_HEAD
from rich.progress import track
from rich.table import Table
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

import polyamp
from polyamp.flow import Flow, Value

GOAL = 1.05
FORMATS = ("bfloat16", "float16")
Row = dict[str, Any]
Low = set[Operation]  # a choice of formats: the operations that run in 16 bits


# ---------------------------------------------------------------------------------------------- choices of formats


def by_flow(graph: Graph) -> Low:
    """Choose as polyamp's flow rule does."""
    return {operation for operation in graph.operations if operation.flow.format == graph.compute}


def by_widest(graph: Graph) -> Low:
    """Choose as PyTorch promotes: the widest format of the inputs, without numbers written into the program."""
    low: Low = set()
    for operation in graph.operations:
        makers = {tensor.maker for tensor in operation.inputs if tensor.bytes}
        follows = operation.op_class in ("inner", "follow", "neutral", "promote") and makers and makers <= low
        if operation.fixed == "low" or follows:
            low.add(operation)
    return low


def by_painting(graph: Graph) -> Low:
    """Choose as TensorFlow paints a whole graph (core/grappler/optimizers/auto_mixed_precision.cc), step by step.

    Its lists are allow, deny, infer and clear: here the classes lower, full, follow with inner, and neutral with
    promote, since TensorFlow lists concatenation as clear.
    """
    allow = {operation for operation in graph.operations if operation.fixed == "low"}
    full, infer = _of_class(graph, "full"), _of_class(graph, "inner", "follow")
    clear = _of_class(graph, "neutral", "promote")
    above = _reached(full | infer, lambda operation: operation.makers, clear)
    deny = _reached(full, lambda operation: operation.users, above)
    below = _reached(allow, lambda operation: operation.users, (clear | infer) - deny)
    allow |= _reached(allow, lambda operation: operation.makers, below - deny)
    for operation in graph.operations:
        makers = set(operation.makers)
        if operation in infer - deny and makers & allow and not makers & deny:
            allow.add(operation)
    return _reached(allow, lambda operation: operation.makers + operation.users, clear - deny)


def _of_class(graph: Graph, *classes: str) -> Low:
    return {operation for operation in graph.operations if operation.op_class in classes}


def _reached(starts: Low, neighbours: Callable[[Operation], Iterable[Operation]], through: Low) -> Low:
    """Return the starts, and all that can be reached from them through neighbours in ``through``."""
    found, waiting = set(starts), list(starts)
    while waiting:
        new = (set(neighbours(waiting.pop())) & through) - found
        found |= new
        waiting += new
    return found


# ------------------------------------------------------------------------------------------------ cost and its bound


def cost(graph: Graph, low: Low) -> int:
    """Return the bytes moved under a choice of formats."""
    moved = sum(operation.bytes // 2 if operation in low else operation.bytes for operation in graph.operations)
    return moved + sum(_cast(tensor) for tensor in graph.tensors if _is_cast(tensor, low))


def _cast(tensor: Tensor) -> int:
    """Return the bytes of a cast, which reads a value in one format and writes it in the other."""
    return tensor.bytes + tensor.bytes // 2


def _is_cast(tensor: Tensor, low: Low) -> bool:
    return any((user in low) != (tensor.maker in low) for user in tensor.users)


def cheapest(graph: Graph) -> Low:
    """Return the safe choice with the least cost: the operations on the source's side of a minimum cut.

    Operations that must be low are joined to the source, and those that must be float32 to the sink.
    """
    nodes, node = itertools.count(2), {}
    for operation in graph.operations:
        node[operation] = {"low": 0, "float32": 1}[operation.fixed] if operation.fixed else next(nodes)
    edges: Counter[tuple[int, int]] = Counter()
    for operation in graph.operations:
        edges[0, node[operation]] += operation.bytes // 2  # the cost of running in float32
    for tensor in graph.tensors:
        maker, raised, lowered, weight = node[tensor.maker], next(nodes), next(nodes), _cast(tensor)
        edges[maker, raised] += weight  # one cast serves all users in the other format
        edges[lowered, maker] += weight
        for user in {node[user] for user in tensor.users}:
            edges[raised, user] += weight
            edges[user, lowered] += weight
    cut, kept = minimum_cut(edges, next(nodes))
    low = {operation for operation, place in node.items() if place in kept}
    if cost(graph, low) != cut + sum(operation.bytes // 2 for operation in graph.operations):
        raise ArithmeticError("the costs of the cut and of the graph differ: an error in this file")
    return low


def minimum_cut(edges: Counter[tuple[int, int]], size: int) -> tuple[int, set[int]]:
    """Return the weight of a minimum cut between nodes 0 and 1, and the nodes on the side of 0."""
    useful = {ends: weight for ends, weight in edges.items() if weight and ends[0] != 1 and ends[1] not in (0, ends[0])}
    if not useful:
        return 0, {0}
    unit = math.gcd(*useful.values())
    weights = np.array(list(useful.values())) // unit
    if sum(weight for (start, _), weight in useful.items() if start == 0) // unit > np.iinfo(np.int32).max:
        raise OverflowError("SciPy counts a flow in 32 bits: use a smaller model")
    capacities = csr_array((weights.astype(np.int32), np.array(list(useful)).T), shape=(size, size))
    found = maximum_flow(capacities, 0, 1)
    residual = capacities.astype(np.int64) - found.flow.astype(np.int64)
    residual.eliminate_zeros()
    kept = breadth_first_order(residual, 0, return_predecessors=False)
    return int(found.flow_value) * unit, set(kept.tolist())


def unsafe(low: Low) -> Low:
    """Return the operations of a choice that must be float32."""
    return {operation for operation in low if operation.fixed == "float32"}


# --------------------------------------------------------------------------------------------------------- checks


def check_bound(graphs: int) -> None:
    """Check the cut against the best of all safe choices, on random graphs small enough to try all of them."""
    for seed in track(range(graphs), description="cut against all choices", console=console()):
        graph = random_graph(random.Random(seed))
        fixed = {operation for operation in graph.operations if operation.fixed == "low"}
        free = [operation for operation in graph.operations if operation.fixed is None]
        choices = itertools.chain.from_iterable(itertools.combinations(free, count) for count in range(len(free) + 1))
        least, found = min(cost(graph, fixed | set(choice)) for choice in choices), cost(graph, cheapest(graph))
        if least != found:
            raise ArithmeticError(f"random graph {seed}: the cut found {found} bytes, the best choice {least}")


def random_graph(draw: random.Random) -> Graph:
    """Return a graph with up to 8 free operations, of one to three inputs and one or two outputs."""
    graph = Graph()
    tensors = [Tensor(graph.edge("input"), 4 * draw.randint(1, 9), Value()) for _ in range(2)]
    for fixed in draw.sample([None] * 8 + ["low", "float32"] * 3, draw.randint(4, 14)):
        operation = Operation("random", "follow", Flow("float32", Value(), ""), fixed)
        graph.add(operation, draw.choices(tensors, k=draw.randint(1, 3)))
        made = [Tensor(operation, 4 * draw.randint(1, 9), Value()) for _ in range(draw.randint(1, 2))]
        operation.bytes = sum(tensor.bytes for tensor in operation.inputs + made)
        tensors += made
    graph.edge("output", tensors[-1])
    return graph


def check_graph(graph: Graph, function: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """Check the graph against `polyamp.explain` of the same call, operation by operation."""
    plan = polyamp.explain(function, *arrays, policy=f"mixed_{graph.compute}")
    planned = [(each.native, each.format, each.times) for each in plan.operations]
    ours = [(each.native, each.flow.format, each.times) for each in graph.operations if each.op_class != "edge"]
    if ours != planned:
        raise ArithmeticError("the graph is not the program that polyamp runs: an error in flow_graph.py")


# --------------------------------------------------------------------------------------------------------- report

CHOICES: dict[str, Callable[[Graph], Low]] = {
    "flow": by_flow,
    "painting": by_painting,
    "widest": by_widest,
    "float32": lambda graph: set(),
}


def rows(name: str, compute: str, scale: int, why: bool) -> Iterator[Row]:
    """Return the rows of one model in one format: its loss, and its loss with gradients."""
    model = task(name, scale)
    loss = loss_of(model.make())
    for direction, function in {"loss": loss, "gradient": jax.value_and_grad(loss, has_aux=True)}.items():
        program, arrays = flow_graph.program(function, *model.arguments())
        graph = flow_graph.traced(program, arrays, compute)
        check_graph(graph, program, arrays)
        best = cheapest(graph)
        bound = cost(graph, best)
        row: Row = {"model": name, "direction": direction, "format": compute}
        row["operations"] = sum(operation.bytes > 0 for operation in graph.operations)
        row["bound_bytes"] = bound
        for way, choose in CHOICES.items():
            low = choose(graph)
            put_back = unsafe(low)
            row |= {way: round(cost(graph, low - put_back) / bound, 4), f"{way}_put_back": len(put_back)}
        if why:
            console().print(differences(graph, best, f"{name}, {direction}, {compute}: flow {row['flow']:.3f}"))
        yield row


def differences(graph: Graph, best: Low, title: str) -> Table:
    """Count where the flow rule and the cheapest choice differ, by operation and by the rule's reason."""
    shown = Table("operation", "times", "flow rule", "reason", "MB", title=title, box=SIMPLE_HEAD)
    ours, counts, sizes = by_flow(graph), Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for operation in ours ^ best:
        key = (operation.native, "low" if operation in ours else "float32", operation.flow.reason)
        counts[key] += operation.times
        sizes[key] += operation.bytes
    for key, size in sizes.most_common(8):
        shown.add_row(key[0], str(counts[key]), *key[1:], f"{size / 1e6:.2f}")
    return shown


def table(found: Iterable[Row]) -> Table:
    """Return a table of all rows."""
    known = machine()
    caption = "ratios to the bound; in brackets: operations it would lower that must be float32, and are put back"
    where = f"{known['processor']} ({known['cores']} cores), JAX {jax.__version__}"
    shown = Table(title=f"Bytes moved, on {where}", caption=caption, box=SIMPLE_HEAD)
    for heading in ("model", "of the", "format"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("operations", "bound MB", *CHOICES):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        put_back = {way: row[f"{way}_put_back"] for way in CHOICES}
        cells = [f"{row[way]:.3f}" + (f" ({put_back[way]})" if put_back[way] else "") for way in CHOICES]
        colour = "green" if row["flow"] <= GOAL else "red"
        cells[0] = f"[{colour}]{cells[0]}"
        named = [row["model"], row["direction"], row["format"]]
        shown.add_row(*named, str(row["operations"]), f"{row['bound_bytes'] / 1e6:.2f}", *cells)
    return shown


def draw(found: list[Row], file: Path) -> None:
    """Draw the ratios of every way to choose, one picture for each format."""
    from matplotlib.figure import Figure

    formats = list(dict.fromkeys(row["format"] for row in found))
    figure = Figure(figsize=(10, 3.2 * len(formats)), layout="constrained")
    for axis, compute in zip(figure.subplots(len(formats), squeeze=False)[:, 0], formats, strict=True):
        chosen = [row for row in found if row["format"] == compute]
        for place, way in enumerate(CHOICES):
            axis.bar(np.arange(len(chosen)) + (place - 1.5) * 0.2, [row[way] for row in chosen], 0.19, label=way)
        labels = [f"{row['model']}\n{row['direction']}" for row in chosen]
        axis.axhline(GOAL, color="black", linewidth=0.8, linestyle="--")
        axis.set(
            title=compute, ylabel="bytes moved / bound", xticks=range(len(chosen)), xticklabels=labels, ylim=(0.7, 1.7)
        )
        axis.legend(frameon=False, ncols=len(CHOICES), fontsize="small", loc="upper left")
    figure.suptitle("Bytes moved, ratio to the least that is safe; dashed: the goal")
    figure.savefig(file, dpi=120)


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; may be repeated.")] = None,
    low: Annotated[list[str] | None, typer.Option("--format", help="bfloat16 or float16; may be repeated.")] = None,
    scale: Annotated[int, typer.Option(min=1, help="Multiplies widths and batches.")] = 1,
    check: Annotated[int, typer.Option(min=0, help="Random graphs on which to check the cut.")] = 20,
    why: Annotated[
        bool, typer.Option("--why", help="Show where the flow rule differs from the cheapest choice.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this image.")] = None,
) -> None:
    """Measure, print, and keep the numbers of all models and formats in results/flow_bound.json."""
    check_bound(check)
    pairs = list(itertools.product(model or MODELS, low or FORMATS))
    found: list[Row] = []
    for name, compute in track(pairs, description="graphs", console=console()):
        found += rows(name, compute, scale, why)
    console().print(table(found))
    if not (model or low):
        versions = {module.__name__: module.__version__ for module in (polyamp, jax, scipy)}
        keep("flow_bound", versions, {"scale": scale, "goal": GOAL, "rows": found})
    if plot:
        draw(found, plot)


if __name__ == "__main__":
    typer.run(main)
