"""Reproduce the two tables that mixed precision became known by, and the figure of the LSTM that needs a loss scale.

    python benchmarks/founding_tables.py accuracy                       # the published rows, on a CPU
    python benchmarks/founding_tables.py accuracy --all                 # and the models of the speed table
    python benchmarks/founding_tables.py accuracy --framework jax --model resnet50 --first-seed 10 --seeds 20
    python benchmarks/founding_tables.py figure                         # the big LSTM by loss scale
    python benchmarks/founding_tables.py page                           # write tables and pictures into the documents

``python benchmarks/gpu.py tables`` times the models of the speed table, on a GPU. Every row is kept as soon as it is
measured, and is not measured again on the same machine by the same versions unless ``--again`` is given: a run that was
stopped goes on where it was. Models and published numbers: examples/models; docs/explain/founding_tables.md explains.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import keeping
import typer
from interleave import console
from keeping import Row, machine
from rich.progress import track
from whole_steps import chosen

import polyamp
from models import founding
from polyamp import LossScale

PAGE = Path(__file__).parents[1] / "docs" / "explain" / "founding_tables.md"
IMAGES = PAGE.parents[1] / "images"
ACCURACY, LSTM, SPEED = "founding_accuracy", "founding_lstm", "end_to_end_cuda"
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "keras": "Keras on TensorFlow"}
PACKAGES = {
    "torch": ("torch", "transformers"),
    "jax": ("jax", "jaxlib", "optax", "flax"),
    "keras": ("keras", "tensorflow", "tensorflow-cpu"),
}
COLOURS = {"mixed_float16": "#1f5fa8", "mixed_bfloat16": "#c06c1f"}
CURVES = {
    "float32": polyamp.policy("float32"),
    "float16, scale 1": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(1)),
    "float16, scale 128": polyamp.policy("mixed_float16", loss_scale=LossScale.fixed(128)),
    "float16, dynamic": polyamp.policy("mixed_float16"),
}
STYLES: dict[str, dict[str, Any]] = {
    "float32": {"color": "black", "linewidth": 3.2, "alpha": 0.35},
    "float16, scale 1": {"color": "#c0392b"},
    "float16, scale 128": {"color": "#1f5fa8"},
    "float16, dynamic": {"color": "#2e7d5b", "linestyle": "--"},
}
STEPS, LAST = 20, 3  # of a curve, more than the accuracy table trains; and those whose mean loss stands for its end
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC")  # of PyTorch, TensorFlow and XLA
NONE = "–"


def module_of(framework: str, name: str) -> str:
    return f"models.on_{framework}.{name}"


def versions(framework: str) -> dict[str, str]:
    """Return the versions of polyamp and of what a framework's models run on, without importing it."""
    found = {}
    for name in ("polyamp", "numpy", *PACKAGES[framework]):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def rows(name: str) -> list[Row]:
    return keeping.read(name).get("rows", [])


def key(row: Row) -> tuple[Any, ...]:
    return row["framework"], row["name"], row.get("first_seed", 0)


def keep(name: str, row: Row) -> Row:
    """Keep a row, which replaces an earlier one of its key, with the machine and the time; each is one line."""
    whole = row | {"machine": machine(), "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
    last = {key(one): one for one in [*rows(name), whole]}
    lines = ",\n".join(json.dumps(last[one]) for one in sorted(last))
    keeping.replace(name, f'{{"rows": [\n{lines}\n]}}\n')
    return whole


# ---- accuracy


def measure(framework: str, model: founding.Row, seeds: range) -> Row:
    """Train a model with all its seeds under every policy, compare, and return the row.

    Until the row is kept its runs are in a file, from which a row that was interrupted goes on.
    """
    keeping.RESULTS.mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    train = import_module(module_of(framework, model.name)).train

    @functools.wraps(train)
    def timed(policy: polyamp.Policy, seed: int) -> dict[str, float]:
        start = time.perf_counter()
        return train(policy, seed) | {"seconds": round(time.perf_counter() - start, 3)}

    compared = polyamp.parity(
        timed,
        list(COLOURS),
        first_seed=seeds.start,
        seeds=len(seeds),
        margin=founding.margin_of(model.metric),
        metric=model.metric,
        controls=False,
        stop_early=False,
        keep=runs_of(framework, model, seeds),
        progress=False,
    ).as_dict()
    for way in (compared["float32"], *compared["comparisons"]):
        seconds += sum(run["metrics"].get("seconds", 0.0) for run in way["runs"])
        way["values"] = [run["value"] for run in way["runs"]]
    shown = ("policy", "verdict", "reason", "difference", "interval", "margin", "more_seeds", "values")
    return {
        **{"framework": framework, "name": model.name, "first_seed": seeds.start, "seeds": compared["seeds"]},
        **{"metric": model.metric, "minutes": round(seconds / 60, 3), "float32": compared["float32"]["values"]},
        "comparisons": [{name: way[name] for name in shown} for way in compared["comparisons"]],
        "versions": versions(framework),
    }


def runs_of(framework: str, model: founding.Row, seeds: range) -> Path:
    """Return the file of the runs of a row that is not finished."""
    return keeping.RESULTS / f"founding_{framework}_{model.name}_{seeds.start}.part"


def earlier(framework: str, model: founding.Row, seeds: range) -> Row | None:
    """Return the kept row, if it has at least as many seeds and is of this machine and the same versions."""
    asked = (framework, model.name, seeds.start, machine(), versions(framework))
    for row in rows(ACCURACY):
        if (*key(row), row["machine"], row["versions"]) == asked and row["seeds"] >= len(seeds):
            return row
    return None


def measured(*, new_seeds: bool = False) -> list[Row]:
    """Return the kept rows by framework in the order of the table; or those that have other seeds."""
    order = [model.name for model in founding.ROWS]
    found = [row for row in rows(ACCURACY) if bool(row["first_seed"]) == new_seeds]
    return sorted(found, key=lambda row: (list(FRAMEWORKS).index(row["framework"]), order.index(row["name"])))


def limit_threads(threads: int) -> None:
    """Set the variables, unless they are set, before a framework reads them."""
    for name in THREADS:
        os.environ.setdefault(name, str(threads))


app = typer.Typer(add_completion=False, help=__doc__.replace("\n\n", "\n\n\b\n"), rich_markup_mode=None)
Frameworks = Annotated[list[str] | None, typer.Option("--framework", help=f"Of {', '.join(FRAMEWORKS)}; repeatable.")]


@app.command("accuracy")
def accuracy_command(
    framework: Frameworks = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="The name of a module; repeatable.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also models of which a speed-up alone was published.")] = False,
    seeds: Annotated[int, typer.Option(min=3, help="Seeds of each row.")] = 10,
    first_seed: Annotated[int, typer.Option(min=0, help="Above 0 the rows are kept as of new seeds.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Rows at a time, each in a process of its own.")] = 2,
) -> None:
    """Train the models over seeds in float32 and in 16 bits, and compare them by `polyamp.parity`."""
    known = {row.name: row for row in (founding.ROWS if model or every else founding.accuracy_rows())}
    drawn, failed = range(first_seed, first_seed + seeds), []
    cases = list(missing(chosen(framework, FRAMEWORKS), [known[name] for name in chosen(model, known)], drawn, again))
    pool = ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        initializer=limit_threads,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
        max_tasks_per_child=1,
    )
    with pool:
        works = {pool.submit(measure, *case, drawn): case for case in cases}
        for done in track(as_completed(works), "rows", total=len(works), console=console()):
            name, row = works[done]
            try:
                kept = keep(ACCURACY, done.result())
            except Exception:
                traceback.print_exc()
                failed.append(f"{row.title} in {name}")
            else:
                runs_of(name, row, drawn).unlink()
                console().print(" | ".join([name, *accuracy_cells(kept)]))
    if failed:
        console().print(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def missing(
    frameworks: Iterable[str], models: Iterable[founding.Row], seeds: range, again: bool
) -> Iterator[tuple[str, founding.Row]]:
    """Yield the rows that are to be measured, and print which are not, and why."""
    for name, row in itertools.product(frameworks, models):
        if find_spec(name) is None or find_spec(module_of(name, row.name)) is None:
            console().print(f"{row.title}: not in {FRAMEWORKS[name]} here")
        elif not again and (kept := earlier(name, row, seeds)):
            console().print(
                f"{row.title} in {FRAMEWORKS[name]}: trained on {kept['finished']}; --again trains it again"
            )
        else:
            yield name, row


# ---- the figure


@app.command("figure")
def figure_command(
    framework: Frameworks = None,
    steps: Annotated[int, typer.Option(min=LAST, help="Steps of a curve.")] = STEPS,
    seed: int = 0,
) -> None:
    """Train the big LSTM in float32, and in float16 with scale 1, scale 128 and a dynamic scale."""
    for name, (curve, policy) in itertools.product(chosen(framework, FRAMEWORKS), CURVES.items()):
        train = import_module(module_of(name, "big_lstm")).curve
        losses = [loss if abs(loss) < float("inf") else None for loss in map(float, train(policy, seed, steps))]
        about = {"framework": name, "name": curve, "policy": str(policy), "seed": seed, "versions": versions(name)}
        console().print(f"{FRAMEWORKS[name]}, {curve}: {last_loss(keep(LSTM, about | {'losses': losses}))}")


def curves(framework: str) -> dict[str, Row]:
    """Return the kept curves of a framework, in the order of the figure."""
    found = {row["name"]: row for row in rows(LSTM) if row["framework"] == framework}
    return {name: found[name] for name in CURVES if name in found}


def last_loss(row: Row) -> str:
    """Return the mean loss of the last steps."""
    last = row["losses"][-LAST:]
    return "not finite" if None in last else f"{statistics.mean(last):.4f}"


# ---- pictures


def panels(number: int, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes, next to each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * number + 1, height), layout="constrained")
    return figure, figure.subplots(1, number, sharey=True, squeeze=False, **options)[0]


def draw_accuracy(file: Path) -> None:
    """Draw the interval of every comparison, in margins, in a panel for each framework."""
    names, titles = [model.name for model in founding.ROWS], [model.title for model in founding.ROWS]
    frameworks = [name for name in FRAMEWORKS if any(row["framework"] == name for row in measured())]
    figure, axes = panels(len(frameworks), 0.42 * len(names) + 1.6, sharex=True)
    for axis, framework in zip(axes, frameworks, strict=True):
        axis.axvspan(-1, 1, color="#2e7d5b", alpha=0.12, linewidth=0, label="margin")
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set(title=FRAMEWORKS[framework], xlabel="difference from float32, in margins", xlim=(-3, 3))
        for row in (row for row in measured() if row["framework"] == framework):
            for shift, way in zip((-0.15, 0.15), row["comparisons"], strict=True):
                draw_way(axis, names.index(row["name"]) + shift, way)
    axes[0].set_yticks(range(len(names)), titles)
    axes[0].invert_yaxis()
    known = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=len(known), frameon=False)
    figure.savefig(file, dpi=110)


def draw_way(axis: Any, place: float, way: Row) -> None:
    """Draw one comparison; what lies outside of the panel is drawn at its edge, as an arrow."""
    name = way["policy"].partition(" ")[0]
    if way["difference"] is None:
        axis.annotate("diverged", (1.2, place), color=COLOURS[name], fontsize=7, va="center")
        return
    mean, *ends = (value / way["margin"] for value in (way["difference"], *way["interval"]))
    axis.plot(ends, [place] * 2, color=COLOURS[name])
    marker = "<>"[mean > 0] if abs(mean) > 3 else "o"
    axis.plot(max(-2.9, min(2.9, mean)), place, marker, color=COLOURS[name], markersize=4, label=name)


def draw_lstm(file: Path) -> None:
    """Draw a panel for each framework that has curves."""
    frameworks = [name for name in FRAMEWORKS if curves(name)]
    figure, axes = panels(len(frameworks), 3.8)
    for axis, framework in zip(axes, frameworks, strict=True):
        for name, row in curves(framework).items():
            losses = [float("nan") if loss is None else loss for loss in row["losses"]]
            axis.plot(range(1, len(losses) + 1), losses, label=name, **STYLES[name])
        axis.set(title=FRAMEWORKS[framework], xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("training loss, nats a word")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(CURVES), frameon=False)
    figure.savefig(file, dpi=110)


# ---- the page

HEADINGS = (
    *("model", "published: float32, mixed", "here", "float32", "float16", "bfloat16"),
    *("float16 − float32", "verdict", "bfloat16 − float32", "verdict", "minutes"),
)


def accuracy_cells(row: Row) -> list[str]:
    """Return a row of the accuracy table: points for fractions, nats for losses."""
    model, is_loss = founding.row_of(row["name"]), row["metric"] == "loss"

    def number(value: float, sign: str = "") -> str:
        return f"{value:{sign}.4f}" if is_loss else f"{100 * value:{sign}.2f}"

    def level(values: list[float | None]) -> str:
        real = [value for value in values if value is not None]
        if len(real) < len(values):
            return f"{len(values) - len(real)} of {len(values)} diverged"
        return f"{number(statistics.mean(real))} ± {number(statistics.stdev(real))}"

    def difference(way: Row) -> str:
        if way["difference"] is None:
            return NONE
        low, high = (number(end, "+") for end in way["interval"])
        return f"{number(way['difference'], '+')} [{low}, {high}]"

    def verdict(way: Row) -> str:
        more = f"about {way['more_seeds']} seeds would tell" if way["more_seeds"] else way["reason"]
        return f"{way['verdict']}: {more}" if more else way["verdict"]

    said = model.accuracy
    return [
        model.title,
        f"{said.float32:.2f}, {said.mixed:.2f}" if said else NONE,
        f"{row['metric'].replace('_', ' ')}, {'nats' if is_loss else '%'}",
        *map(level, (row["float32"], *(way["values"] for way in row["comparisons"]))),
        *(cell for way in row["comparisons"] for cell in (difference(way), verdict(way))),
        f"{row['minutes']:.1f}",
    ]


def markdown(headings: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    lines = [list(headings), *map(list, cells)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def trained_on(found: list[Row]) -> str:
    places = {
        f"{row['machine']['processor']}, {', '.join(f'{name} {one}' for name, one in row['versions'].items())}"
        for row in found
    }
    return f"Trained on {'; '.join(sorted(places))}."


def accuracy_part() -> Iterator[str]:
    """Yield the accuracy table of each framework, what it lacks, and how long all of it took."""
    found, again = measured(), measured(new_seeds=True)
    verdicts = [way["verdict"] for row in found for way in row["comparisons"]]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in sorted(set(verdicts)))
    yield "![Differences from float32 with their intervals, in margins](../images/founding_accuracy.png)"
    yield f"Rows: {len(found)}. Comparisons: {counts}."
    taken = sum(row["minutes"] for row in found if founding.row_of(row["name"]) in founding.accuracy_rows())
    whole = sum(row["minutes"] for row in found)
    yield f"The trainings of the published rows and the LSTM took {taken:.0f} minutes, and all of them {whole:.0f}."
    for framework, title in FRAMEWORKS.items():
        own = [row for row in found if row["framework"] == framework]
        yield f"### {title}"
        yield markdown(HEADINGS, map(accuracy_cells, own))
        yield f"{max(row['seeds'] for row in own)} seeds. {trained_on(own)}"
        if rest := [model.title for model in founding.ROWS if model.name not in {row["name"] for row in own}]:
            yield f"Without a row: {', '.join(rest)}."
    yield "### The same rows, with new seeds"
    headings = ("framework", HEADINGS[0], "seeds", *HEADINGS[2:])
    yield markdown(headings, map(new_seeds_cells, again))
    yield trained_on(again)


def new_seeds_cells(row: Row) -> list[str]:
    title, _, *rest = accuracy_cells(row)
    drawn = f"{row['first_seed']} to {row['first_seed'] + row['seeds'] - 1}"
    return [FRAMEWORKS[row["framework"]], title, drawn, *rest]


def lstm_part() -> Iterator[str]:
    """Yield the last losses of every curve."""
    cells = [[title, *map(last_loss, curves(name).values())] for name, title in FRAMEWORKS.items() if curves(name)]
    row = rows(LSTM)[0]
    yield "![Training losses of the big LSTM, by loss scale](../images/founding_lstm.png)"
    yield f"Mean training loss of the last {LAST} of {len(row['losses'])} steps, nats a word, seed {row['seed']}:"
    yield markdown(("", *CURVES), cells)


def speed_part() -> Iterator[str]:
    """Yield the speed table, of what ``end_to_end.py`` kept on a GPU; without results, the published numbers alone."""
    found, cells = rows(SPEED), []
    for model in (model for model in founding.ROWS if model.speed_up):
        low, high, _ = model.speed_up or (0, 0, "")
        published = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        ways = dict.fromkeys((row["model"], row["way"]) for row in found if row["model"] in model.timed_as)
        none = [["not measured yet: needs a GPU"]] if not ways else []
        cells += [[model.title, published, ", ".join(model.timed_as), *text] for text in none]
        for task, way in ways:
            times = {row["variant"]: row for row in found if (row["model"], row["way"]) == (task, way)}
            cells.append([model.title, published, f"{task}, {way}", "; ".join(speed_ups(times))])
    yield markdown(("model", "published", "timed as", "measured"), cells)


def speed_ups(times: dict[str, Row]) -> Iterator[str]:
    """Yield polyamp's speed-up and native mixed precision's, for each format and each base."""
    for low, (base, column) in itertools.product(
        ("float16", "bfloat16"), {"float32": "times_float32", "TF32": "times_tf32"}.items()
    ):
        ours, native = (times.get(f"{by} {low}", {}).get(column) for by in ("polyamp", "native"))
        if ours is not None:
            yield f"{low}, x {base}: {ours:.2f} / {NONE if native is None else f'{native:.2f}'}"


PARTS: dict[str, Callable[[], Iterator[str]]] = {"accuracy": accuracy_part, "lstm": lstm_part, "speed": speed_part}


def filled(page: str) -> str:
    """Return the page with the parts that the kept results decide, between two comments each."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        text = "\n\n".join(part())
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


@app.command("page")
def page_command() -> None:
    """Write the kept results into docs/explain/founding_tables.md, and draw its pictures."""
    PAGE.write_text(filled(PAGE.read_text()))
    draw_accuracy(IMAGES / "founding_accuracy.png")
    draw_lstm(IMAGES / "founding_lstm.png")


if __name__ == "__main__":
    app()
