"""What does XLA compile a training step to, for a GPU that is not present? Four models, two formats, two ways to cast.

XLA compiles for an H200 on any Linux machine: targets/h200.txtpb describes the GPU. The compiled program's text has
every kernel, what it reads and writes, and the formats of the products; hlo.py counts them. It needs XLA's
compiler for CUDA (400 MB), and no driver, no CUDA and no GPU:

    pip install jax flax optax jmp
    pip install --no-deps jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2  # of JAX's own version

    python benchmarks/jax_gpu_compiled.py [--small] [--model MLP] [--format float16]

It counts a gradient, and a whole step: forward, backward, AdamW, and in float16 the loss scale with its test and its
selection of results, by hand as in the guides of jmp and flax.

These are counts, not times. They do not show whether a kernel is fast, the cost of launches, hits in the cache,
traffic inside cuBLAS and cuDNN, or the kernels that XLA would choose by timing: without a device it uses defaults.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ["JAX_PLATFORMS"] = "cpu"  # for everything not compiled for the GPU; before JAX is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns at each compilation that it has no device

import flax
import hlo
import jax
import jax.numpy as jnp
import jmp
import optax
import typer
from flax.training.dynamic_scale import DynamicScale
from interleave import console
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_models import MODELS, Loss, Task, Tree, loss_of, variants
from keeping import keep
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

import polyamp

TARGET = Path(__file__).parent / "targets" / "h200.txtpb"
INSTALL = "pip install --no-deps jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0}"
FORMATS = ("bfloat16", "float16")
WAYS = ("float32", "jmp", "flax dtype=", "polyamp")
BY_HAND = ("jmp", "flax dtype=")
WHAT = ("gradient", "step")
LIBRARIES = ("cuBLAS", "cuDNN", "CUB")
FLAGS: dict[str, dict[str, Any]] = {
    # the second flag makes compilation faster, not the counts
    "triton": {"xla_gpu_autotune_level": 0, "xla_llvm_disable_expensive_passes": True},
    "cublas": {
        "xla_gpu_autotune_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_gpu_enable_triton_gemm": False,
    },
}
LOSS_SCALES = {"bfloat16": 1.0, "float16": 1024.0}  # of a gradient alone
Row = dict[str, Any]
Step = Callable[..., Any]  # parameters, optimizer's state, model's state, batch: the new ones, and the loss


@dataclass(frozen=True)
class Size:
    """The size of a model; ``scale`` multiplies its widths, as in `jax_models`."""

    scale: int
    inputs: tuple[int, ...]
    labels: tuple[int, ...]


SIZES = {
    "MLP": Size(8, (8192, 8, 8, 1), (8192,)),  # four layers of 4096
    "transformer": Size(8, (16, 512), (16, 512)),  # width 1024, 32 heads
    "CNN": Size(4, (128, 56, 56, 64), (128,)),  # 64 to 256 channels
    "LSTM": Size(8, (128, 64), (128, 64)),  # 1024 units, 64 steps
}
SMALL = {
    "MLP": Size(1, (256, 8, 8, 1), (256,)),
    "transformer": Size(1, (4, 64), (4, 64)),
    "CNN": Size(1, (16, 8, 8, 1), (16,)),
    "LSTM": Size(1, (16, 8), (16, 8)),
}


def device() -> Any:
    """Return the description of the GPU, which is not present."""
    jax.devices()  # finds the plugins
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    except (RuntimeError, NotImplementedError, ValueError) as error:
        wanted = INSTALL.format(jax.__version__)
        raise typer.BadParameter(f"JAX {jax.__version__} has no CUDA compiler here; {wanted} ({error})") from error
    return found.devices[0]


def shapes_of(name: str, size: Size) -> Task:
    """Return one of `MODELS` with shapes in place of arrays: nothing is allocated."""
    model = MODELS[name][0]
    images = len(size.inputs) == 4
    inputs = jax.ShapeDtypeStruct(size.inputs, jnp.float32 if images else jnp.int32)
    labels = jax.ShapeDtypeStruct(size.labels, jnp.int32)
    made = jax.eval_shape(model(size.scale).init, jax.random.key(0), inputs)
    state = {key: value for key, value in made.items() if key != "params"}
    return Task(lambda dtype=None: model(size.scale, dtype), made["params"], state, (inputs, labels))


# -------------------------------------------------------------------------------------------------------- whole steps


def step_of(way: str, task: Task, low: str) -> tuple[Step, Tree]:
    """Return a whole training step in one of the `WAYS`, and the shapes of its optimizer and loss-scale state."""
    if way == "polyamp":
        return ours(loss_of(task.make()), f"mixed_{low}", task.params)
    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=jnp.dtype(low), output_dtype=jnp.float32)
    losses = {
        "float32": lambda: loss_of(task.make()),
        "jmp": lambda: loss_of(task.make(), policy.cast_to_compute),
        "flax dtype=": lambda: loss_of(task.make(jnp.dtype(low))),
    }
    scaled = {"jmp": by_jmp, "flax dtype=": by_flax} if low == "float16" else {}
    return scaled.get(way, plain)(losses[way](), task.params)


def plain(loss: Loss, params: Tree) -> tuple[Step, Tree]:
    """Return a step without a loss scale."""
    optimizer = optax.adamw(1e-3)

    def step(params: Tree, carried: Tree, state: Tree, batch: Tree) -> Tree:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch)
        params, carried = applied(optimizer, grads, carried, params)
        return params, carried, state, value

    return step, jax.eval_shape(optimizer.init, params)


def ours(loss: Loss, policy: str, params: Tree) -> tuple[Step, Tree]:
    """Return the step of polyamp's README."""
    optimizer = polyamp.wrap_optimizer(optax.adamw(1e-3), policy)

    def step(params: Tree, carried: Tree, state: Tree, batch: Tree) -> Tree:
        found = polyamp.value_and_grad(loss, policy, has_aux=True)(carried, params, state, batch)
        (value, state), grads = found
        params, carried = applied(optimizer, grads, carried, params)
        return params, carried, state, value

    return step, jax.eval_shape(optimizer.init, params)


def by_jmp(loss: Loss, params: Tree) -> tuple[Step, Tree]:
    """Return the step of jmp's README. The scale is passed as its fields: jmp's own class cannot be lowered."""
    optimizer = optax.adamw(1e-3)

    def step(params: Tree, carried: Tree, state: Tree, batch: Tree) -> Tree:
        inner, fields = carried
        scale = jmp.DynamicLossScale(**fields)

        def scaled(params: Tree) -> Any:
            value, new = loss(params, state, batch)
            return scale.scale(value), (value, new)

        grads, (value, new) = jax.grad(scaled, has_aux=True)(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        scale = scale.adjust(finite)
        params, inner = jmp.select_tree(finite, applied(optimizer, grads, inner, params), (params, inner))
        return params, (inner, {"loss_scale": scale.loss_scale, "counter": scale.counter}), new, value

    fields = {"loss_scale": jax.ShapeDtypeStruct((), jnp.float32), "counter": jax.ShapeDtypeStruct((), jnp.int32)}
    return step, (jax.eval_shape(optimizer.init, params), fields)


def by_flax(loss: Loss, params: Tree) -> tuple[Step, Tree]:
    """Return the step of flax's ImageNet example."""
    optimizer = optax.adamw(1e-3)

    def step(params: Tree, carried: Tree, state: Tree, batch: Tree) -> Tree:
        inner, scale = carried
        found = scale.value_and_grad(loss, has_aux=True)(params, state, batch)
        scale, finite, (value, state), grads = found
        new = applied(optimizer, grads, inner, params)
        params, inner = jax.tree.map(functools.partial(jnp.where, finite), new, (params, inner))
        return params, (inner, scale), state, value

    started = lambda params: (optimizer.init(params), DynamicScale(scale=jnp.float32(65536)))  # noqa: E731
    return step, jax.eval_shape(started, params)


def applied(optimizer: Any, grads: Tree, carried: Tree, params: Tree) -> tuple[Tree, Tree]:
    updates, carried = optimizer.update(grads, carried, params)
    return optax.apply_updates(params, updates), carried


# ----------------------------------------------------------------------------------------------------------- counting


@dataclass(frozen=True)
class Counted:
    """One compiled program: a row of the results, its kernels and its text."""

    row: Row
    kernels: list[hlo.Kernel]
    text: str


def counted(what: str, way: str, task: Task, low: str, products: str, target: Any) -> Counted:
    """Compile a gradient or a step, and count its kernels."""
    if what == "gradient":
        fn, arguments, donated = variants(task, low, LOSS_SCALES[low])[way].gradient, (task.params, task.state), ()
    else:
        fn, carried = step_of(way, task, low)
        arguments, donated = (task.params, carried, task.state), (0, 1, 2)
    place = SingleDeviceSharding(target)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), (*arguments, task.batch)
    )
    lowered = jax.jit(fn, donate_argnums=donated).lower(*placed)
    compiled = lowered.compile(compiler_options=FLAGS[products])
    module = hlo.parse(text := compiled.as_text())
    kernels = hlo.kernels(module)
    row = totals(kernels) | {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "workspace_bytes": hlo.workspace(module),
        "xla_bytes": xla_bytes(compiled),
    }
    return Counted(row, kernels, text)


def totals(kernels: list[hlo.Kernel]) -> Row:
    """Return the launches, reads and writes of one run of the program."""
    products, kinds, read, written = (Counter[str]() for _ in range(4))
    for kernel in kernels:
        kinds[kernel.kind] += kernel.times
        for product in kernel.products:
            products[f"{kernel.kind} {product}"] += kernel.times
        for total, own in ((read, kernel.reads), (written, kernel.writes)):
            total.update({form: size * kernel.times for form, size in own.items()})
    return {
        "products": dict(sorted(products.items())),
        "kernels": kinds.total(),
        "kernels_by_kind": dict(sorted(kinds.items())),
        "kernels_in_loops_of_unknown_turns": sum(not kernel.known for kernel in kernels),
        "bytes_read": read.total(),
        "bytes_written": written.total(),
        "bytes": read.total() + written.total(),
        "bytes_by_format": dict((read + written).most_common()),
        "bytes_like_xla": sum(kernel.bytes // kernel.times for kernel in kernels if kernel.kind not in LIBRARIES),
    }


def xla_bytes(compiled: Any) -> int | None:
    """Return XLA's own count: one turn of each loop, without library calls.

    Its analysis for GPUs needs a device. This is the general one, which treats no update as in place.
    """
    from jaxlib import _jax

    module = compiled.runtime_executable().hlo_modules()[0]
    found = _jax.hlo_module_cost_analysis(jax.local_devices()[0].client, module)
    return int(found["bytes accessed"]) if "bytes accessed" in found else None


def measured(names: list[str], formats: list[str], products: list[str], sizes: dict[str, Size]) -> Iterator[Counted]:
    """Compile and count every program, with a progress bar. float32 is compiled once."""
    target = device()
    jobs = [
        (name, low, way, choice, what)
        for name in names
        for choice in products
        for low in ("float32", *formats)
        for what in WHAT
        for way in WAYS
        if (way == "float32") == (low == "float32")
    ]
    tasks = {name: shapes_of(name, sizes[name]) for name in names}
    with Progress(console=console()) as progress:
        bar = progress.add_task("compiling", total=len(jobs))
        for name, low, way, choice, what in jobs:
            progress.update(bar, description=f"{name} {low} {way}: {what}, {choice}")
            found = counted(what, way, tasks[name], "bfloat16" if low == "float32" else low, choice, target)
            row = {"model": name, "format": low, "variant": way, "gemm": choice, "what": what} | found.row
            yield Counted(row, found.kernels, found.text)
            progress.advance(bar)


def compared(found: list[Counted]) -> None:
    """Add the ratios of bytes: to float32, and to the better way by hand."""
    for each in found:
        row = each.row
        row["to_float32"] = ratio(row, one(found, row, ("float32",), "float32"))
        if row["format"] != "float32":
            row["to_best_by_hand"] = ratio(row, one(found, row, BY_HAND, row["format"]))


def one(found: list[Counted], row: Row, ways: Iterable[str], low: str) -> Counted:
    """Return the way that moves least."""
    same = [each for each in found if all(each.row[key] == row[key] for key in ("model", "gemm", "what"))]
    return min(
        (each for each in same if each.row["variant"] in ways and each.row["format"] == low),
        key=lambda each: each.row["bytes"],
    )


def ratio(row: Row, other: Counted) -> float:
    return round(row["bytes"] / other.row["bytes"], 3)


# ------------------------------------------------------------------------------------------------------------ showing


def table(found: list[Counted], low: str, choice: str) -> Table:
    """Return a table of float32 and one 16-bit format."""
    caption = (
        "read, written, GB (both): gigabytes of all kernels in one run. hand: the better of jmp and flax. temp: peak "
        "temporaries, GB. XLA: its own count to ours, both of one turn of each loop and without library calls. A "
        "product's formats are those of its operands; float32 products are TF32 on Tensor Cores, XLA's default."
    )
    shown = Table(title=f"{low}, H200, products by {choice}", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("model", "what", "variant", "products"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("kernels", "read", "written", "GB", "/ f32", "/ hand", "temp", "XLA"):
        shown.add_column(heading, justify="right", no_wrap=True)
    chosen = [each.row for each in found if each.row["gemm"] == choice and each.row["format"] in ("float32", low)]
    for row in sorted(chosen, key=lambda row: (list(MODELS).index(row["model"]), row["what"])):
        shown.add_row(*cells(row), end_section=row["variant"] == "polyamp")
    return shown


def cells(row: Row) -> list[str]:
    formats: Counter[str] = Counter()
    for name, times in row["products"].items():
        formats[name.partition(" ")[2]] += times
    unknown = "?" if row["kernels_in_loops_of_unknown_turns"] else ""
    return [
        row["model"],
        row["what"],
        row["variant"],
        ", ".join(f"{times} {name}" for name, times in formats.items()),
        f"{row['kernels']}{unknown}",
        *(f"{row[key] / 1e9:.2f}" for key in ("bytes_read", "bytes_written", "bytes")),
        f"{row['to_float32']:.2f}",
        f"{row['to_best_by_hand']:.3f}" if "to_best_by_hand" in row else "",
        f"{row['temporary_bytes'] / 1e9:.2f}",
        f"{row['xla_bytes'] / row['bytes_like_xla']:.3f}" if row["xla_bytes"] else "",
    ]


def versions() -> dict[str, str]:
    from importlib.metadata import version

    named = {"polyamp": polyamp, "jax": jax, "flax": flax, "jmp": jmp, "optax": optax}
    compilers = ("jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    return {name: module.__version__ for name, module in named.items()} | {name: version(name) for name in compilers}


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; may be repeated.")] = None,
    low: Annotated[list[str] | None, typer.Option("--format", help="bfloat16 or float16; may be repeated.")] = None,
    gemm: Annotated[list[str] | None, typer.Option(help="triton (the default) or cublas; may be repeated.")] = None,
    text: Annotated[Path | None, typer.Option(help="Keep the compiled programs' text in this folder.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Small models, to try it; no results are kept.")] = False,
) -> None:
    """Compile, count, print, and keep the numbers in results/jax_gpu_compiled_h200.json."""
    formats, choices = low or list(FORMATS), gemm or ["triton"]
    names = model or (["MLP"] if small else list(MODELS))
    sizes = SMALL if small else SIZES
    found = []
    for each in measured(names, formats, choices, sizes):
        found.append(each)
        if text:
            save(each, text)
    compared(found)
    for choice in choices:
        for each in formats:
            console().print(table(found, each, choice))
    if not small and set(names) == set(MODELS) and set(formats) == set(FORMATS):
        keep("jax_gpu_compiled_h200", versions(), kept(found, choices))


def save(each: Counted, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(each.row[key].strip("=") for key in ("model", "format", "variant", "gemm", "what"))
    (folder / f"{name.replace(' ', '-')}.txt").write_text(each.text)


def kept(found: list[Counted], choices: list[str]) -> Row:
    return {
        "target": {"name": "NVIDIA H200, sm_90a, not present", "description": TARGET.name},
        "flags": {choice: FLAGS[choice] for choice in choices},
        "sizes": {name: vars(size) for name, size in SIZES.items()},
        "rows": [each.row for each in found],
    }


if __name__ == "__main__":
    typer.run(main)
