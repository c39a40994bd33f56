"""The part that the word LSTMs of three frameworks share: text (Python's manual), weights, batches and the table."""

import argparse
import collections
import json
import pydoc_data.topics
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from polyamp import LossScale, policy

VOCABULARY, HIDDEN, LEARNING_RATE = 2048, 16, 0.1
MICRO_BATCHES, ROWS, WORDS = 24, 64, 16  # the micro-batches' gradients are added up in float32 for one update
TOKENS = MICRO_BATCHES * ROWS * WORDS  # a loss is the sum over its words, divided by the number of words in an update
POLICIES = {
    "float32": policy("float32"),
    "float16, scale 1": policy("mixed_float16", loss_scale=LossScale.fixed(1)),
    "float16, dynamic": policy("mixed_float16"),
}


def make_task(steps: int = 10, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    words = re.findall(r"\w+|[^\w\s]", "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    common = enumerate(collections.Counter(words).most_common(VOCABULARY - 1), start=1)
    number_of = {word: number for number, (word, _) in common}  # 0 means any other word
    numbers, random = np.array([number_of.get(word, 0) for word in words], np.int32), np.random.default_rng(seed)
    starts = random.integers(len(words) - WORDS, size=(steps, MICRO_BATCHES, ROWS, 1))
    shapes = {"embedding": (VOCABULARY, HIDDEN), "gates": (4 * HIDDEN, 2 * HIDDEN), "head": (VOCABULARY, HIDDEN)}
    weights = {f"{name}.weight": random.standard_normal(shape) for name, shape in shapes.items()}
    for name in ("gates", "head"):
        weights[f"{name}.weight"] /= HIDDEN**0.5
        weights[f"{name}.bias"] = np.zeros(shapes[name][0])
    return {name: x.astype(np.float32) for name, x in weights.items()}, numbers[starts + np.arange(WORDS + 1)]


def summary(updates: Iterable[tuple[float, bool]]) -> tuple[float, int]:
    losses, applied = zip(*updates, strict=True)
    return float(np.mean(losses[-3:])), applied.count(False)


def main(updates: Callable) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    asked, table = parser.parse_args(), {}
    print(f"{'training':<18}{'loss':>8}{'skipped':>9}")
    for name, chosen in POLICIES.items():
        steps = updates(chosen, *make_task(asked.steps, asked.seed))
        loss, skipped = summary(track(steps, name, asked.steps, console=Console(stderr=True)))
        table[name] = {"loss": loss, "skipped": skipped}
        print(f"{name:<18}{loss:>8.4f}{skipped:>9}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=2) + "\n")
