"""The founding tables as text: the cells of the printed tables, and the parts of docs/explain/founding_tables.md.

Between two comments of that page, ``<!-- accuracy -->`` and ``<!-- end of accuracy -->``, stands what `PARTS` makes of
the kept results; people write the rest. ``founding_tables.py page`` fills it in.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import founding_accuracy as accuracy
import founding_lstm as lstm
import founding_speed as speed
from founding_results import FRAMEWORKS, NEW_SEEDS
from keeping import Row
from models import founding

PAGE = Path(__file__).parents[1] / "docs" / "explain" / "founding_tables.md"
NONE = "–"
ACCURACY_HEADINGS = (
    *("model", "published: float32, mixed", "here", "float32", "float16", "bfloat16"),
    *("float16 − float32", "verdict", "bfloat16 − float32", "verdict"),
)
SPEED_HEADINGS = ("model", "published", "timed", *(f"{low}, x {base}" for base in speed.BASES for low in speed.FORMATS))


def accuracy_cells(row: Row) -> list[str]:
    """Return a row of the accuracy table."""
    model, metric = founding.row_of(row["name"]), row["metric"]
    said = model.accuracy
    published = f"{said.float32:.2f}, {said.mixed:.2f}" if said else NONE
    ways = [row["float32"], *row["comparisons"]]
    compared = [cell for way in row["comparisons"] for cell in (_difference(way, metric), _verdict(way))]
    return [model.title, published, _unit(metric), *(_level(way["runs"], metric) for way in ways), *compared]


def _unit(metric: str) -> str:
    return f"{metric.replace('_', ' ')}, {'nats' if metric == 'loss' else '%'}"


def _number(value: float, metric: str, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if metric == "loss" else f"{100 * value:{sign}.2f}"


def _level(runs: list[Row], metric: str) -> str:
    """Return the mean over the seeds and the standard deviation."""
    values = [run["value"] for run in runs]
    if None in values:
        return f"{values.count(None)} of {len(values)} diverged"
    return f"{_number(statistics.mean(values), metric)} ± {_number(statistics.stdev(values), metric)}"


def _difference(way: Row, metric: str) -> str:
    if way["difference"] is None:
        return NONE
    low, high = (_number(end, metric, "+") for end in way["interval"])
    return f"{_number(way['difference'], metric, '+')} [{low}, {high}]"


def _verdict(way: Row) -> str:
    """Return the verdict; with the seeds that would tell, or the reason, where there are any."""
    more = f"about {way['more_seeds']} seeds would tell" if way["more_seeds"] else way["reason"]
    return f"{way['verdict']}: {more}" if more else way["verdict"]


def minutes(row: Row) -> float:
    """Return the minutes that all trainings of a row took."""
    runs = (run for way in (row["float32"], *row["comparisons"]) for run in way["runs"])
    return sum(run["metrics"].get("seconds", 0.0) for run in runs) / 60


def markdown(headings: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    lines = [list(headings), *map(list, cells)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracy_part() -> str:
    """Return the accuracy table of each framework, what it lacks, and how long all of it took."""
    found = list(accuracy.measured())
    if not found:
        return "Not trained yet."
    frameworks = dict.fromkeys(row["framework"] for row in found)
    own = (text for name in frameworks for text in _of_framework(name, found))
    return "\n\n".join([*_summary(found), *own, *_of_new_seeds(list(accuracy.measured(NEW_SEEDS)))])


def _summary(found: list[Row]) -> Iterator[str]:
    """Yield the picture, how many comparisons have each verdict, and the time of all trainings one after the other."""
    verdicts = [way["verdict"] for row in found for way in row["comparisons"]]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in sorted(set(verdicts)))
    yield "![Differences from float32 with their intervals, in margins](../images/founding_accuracy.png)"
    yield f"Rows: {len(found)}. Comparisons: {counts}."
    published = {model.name for model in founding.accuracy_rows()}
    taken = sum(minutes(row) for row in found if row["name"] in published)
    whole = sum(map(minutes, found))
    yield f"The trainings of the published rows and the LSTM took {taken:.0f} minutes, and all of them {whole:.0f}."


def _of_framework(framework: str, found: list[Row]) -> Iterator[str]:
    own = [row for row in found if row["framework"] == framework]
    yield f"### {FRAMEWORKS[framework]}"
    yield markdown((*ACCURACY_HEADINGS, "minutes"), ([*accuracy_cells(row), f"{minutes(row):.1f}"] for row in own))
    yield f"{max(row['seeds'] for row in own)} seeds. Trained on {'; '.join(sorted({_where(row) for row in own}))}."
    if rest := [model.title for model in founding.ROWS if model.name not in {row["name"] for row in own}]:
        yield f"Without a row: {', '.join(rest)}."


def _of_new_seeds(found: list[Row]) -> Iterator[str]:
    """Yield the rows that were trained again with seeds that no one had looked at."""
    if not found:
        return
    yield "### The same rows, with new seeds"
    headings = ("framework", ACCURACY_HEADINGS[0], "seeds", *ACCURACY_HEADINGS[2:], "minutes")
    yield markdown(headings, map(_new_seeds_cells, found))
    yield f"Trained on {'; '.join(sorted({_where(row) for row in found}))}."


def _new_seeds_cells(row: Row) -> list[str]:
    title, _, *rest = accuracy_cells(row)
    drawn = f"{row['first_seed']} to {row['first_seed'] + row['seeds'] - 1}"
    return [FRAMEWORKS[row["framework"]], title, drawn, *rest, f"{minutes(row):.1f}"]


def _where(row: Row) -> str:
    machine = row["machine"]
    return f"{machine['processor']}, {', '.join(f'{name} {one}' for name, one in row['versions'].items())}"


def lstm_part() -> str:
    """Return the last losses of every curve."""
    frameworks = {name: found for name in FRAMEWORKS if (found := lstm.measured(name))}
    if not frameworks:
        return "Not trained yet."
    cells = [
        [FRAMEWORKS[framework], *(loss_of(found.get(name)) for name in lstm.CURVES)]
        for framework, found in frameworks.items()
    ]
    row = next(iter(next(iter(frameworks.values())).values()))
    picture = "![Training losses of the big LSTM, by loss scale](../images/founding_lstm.png)"
    caption = f"Mean training loss of the last {lstm.LAST} of {row['steps']} steps, nats a word, seed {row['seed']}:"
    return "\n\n".join([picture, caption, markdown(("", *lstm.CURVES), cells)])


def loss_of(row: Row | None) -> str:
    """Return the last loss of a curve."""
    if row is None:
        return NONE
    loss = lstm.last_loss(row)
    return "not finite" if loss is None else f"{loss:.4f}"


def speed_cells(row: Row) -> list[str]:
    """Return a row of the speed table."""
    model = founding.row_of(row["model"])
    ratios = [speed.ratios(row, low, base) for base in speed.BASES for low in speed.FORMATS]
    return [model.title, speed.published(model), row["name"], *ratios]


def speed_part() -> str:
    """Return the speed table; without results, the published numbers alone."""
    found = speed.measured()
    if found:
        where = {f"{row['machine']['gpu']}, torch {row['versions']['torch']}" for row in found}
        return f"{markdown(SPEED_HEADINGS, map(speed_cells, found))}\n\nMeasured on {'; '.join(sorted(where))}."
    cells = [
        [model.title, speed.published(model), ", ".join(model.timed_as), "not measured yet: needs a GPU"]
        for model in speed.timed_rows()
    ]
    return markdown(("model", "published", "timed as", "measured"), cells)


PARTS = {"accuracy": accuracy_part, "lstm": lstm_part, "speed": speed_part}


def filled(page: str) -> str:
    """Return the page with the parts that the kept results decide."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{part()}\n\n{end}{rest.partition(end)[2]}"
    return page
