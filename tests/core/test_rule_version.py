"""Published numbers are of today's rule, or marked: results carry its version, and the version moves with the rule."""

import itertools
import json
from hashlib import sha256
from pathlib import Path

import pytest

from polyamp.flow import (
    ACCUMULATES,
    IN_DISTANCE,
    IN_QUOTIENT,
    READ_IN_FULL,
    READ_IN_NORMS,
    SMALL_STEPS,
    SOLVED,
    Value,
    decide,
    flow,
)
from polyamp.operations import OPERATIONS, RULE_VERSION
from support.flow_cases import COMPUTE, LOW, MIXES, STRONG, WEAK

ROOT = Path(__file__).parents[2]
DEPENDING = ("traps_cpu", "torch_rewrite_cpu", "jax_autocast_cpu", "jax_gpu_compiled_h200", "tensorflow_rewrite_cpu")
# Never change one: a rule that decides differently is a new version.
DIGESTS = {5: "c5a90c1eaacb46eb", 6: "e4e437f7fc92bef4"}

pytestmark = pytest.mark.once

ROLES: dict[Value, tuple[str, ...]] = {
    LOW: ("normalized", "saturated", "pointwise", "average"),
    STRONG: ("sum", "statistic", "root", "reciprocal root"),
    WEAK: ("table", "weights"),
}
WITH_ROLES = [value._replace(role=role) for value, roles in ROLES.items() for role in roles]


def digest() -> str:
    mixes = [*(mix for mix in MIXES if len(mix) < 3), *itertools.product([*WITH_ROLES, WEAK, LOW, STRONG], repeat=2)]
    of_readers = (READ_IN_FULL, READ_IN_NORMS, IN_DISTANCE, IN_QUOTIENT, SMALL_STEPS, SOLVED, ACCUMULATES)
    found = sha256()
    for operation, compute in itertools.product(sorted(OPERATIONS), COMPUTE):
        decision = decide((), operation)
        for mix, asked in itertools.product(mixes, ("", *of_readers)):
            done = flow(decision, mix, compute, asked=asked)
            found.update(repr((done.format, done.output, done.reason, done.anew)).encode())
    return found.hexdigest()[:16]


def test_a_rule_that_decides_differently_has_a_new_version() -> None:
    assert DIGESTS[RULE_VERSION] == digest(), "raise RULE_VERSION and measure again what depends on the rule"


@pytest.mark.parametrize("name", DEPENDING)
def test_results_are_of_this_version_or_marked(name: str) -> None:
    versions = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["versions"]
    is_marked = (
        f"`{name}.json` is of an earlier version of the flow rule" in (ROOT / "docs" / "benchmarks.md").read_text()
    )
    assert is_marked != (versions.get("flow rule") == RULE_VERSION)
