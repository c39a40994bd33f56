"""What does entering and leaving a region cost, against torch.autocast? By a word, by a policy, nested, with a rule.

In a program that compiles code a region is also marked for Dynamo's guards; ``--compiling`` measures that.

    python benchmarks/region_entry.py [--compiling] [--small]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from interleave import Timing, interleave
from keeping import publish

import polyamp

SMALL = "--small" in sys.argv  # a check that this program runs, not a result
COMPILING = "--compiling" in sys.argv
ROUNDS, CALLS = (2, 20) if SMALL else (2000, 50)
FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def entering(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    def enter() -> None:
        with context():
            pass

    return enter


def nested(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    def enter() -> None:
        with context(), context():
            pass

    return enter


def questions(low: str) -> list[Timing]:
    dtype, word = FORMATS[low], f"mixed_{low}"
    policy, rules = polyamp.policy(word), polyamp.policy(word, rules={"softmax": "lower"})
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "torch.autocast": lambda: torch.autocast("cpu", dtype),
        "polyamp, a word": lambda: polyamp.autocast(word),
        "polyamp, a policy": lambda: polyamp.autocast(policy),
        "polyamp, a policy with a rule": lambda: polyamp.autocast(rules),
    }
    timings = []
    for question, enter in {"a region": entering, "a region in another": nested}.items():
        variants = {name: enter(context) for name, context in contexts.items()}
        timings += interleave(f"{question}, {low}", variants, ROUNDS, CALLS)
    return timings


if __name__ == "__main__":
    torch.set_num_threads(1)
    if COMPILING:
        torch.compile(lambda x: x, backend="eager")(torch.ones(1))
    words = ["region_entry", *(["compiling"] if COMPILING else []), *(["small"] if SMALL else [])]
    versions = {"torch": torch.__version__, "polyamp": polyamp.__version__}
    publish("_".join(words), questions("float16") + questions("bfloat16"), versions)
