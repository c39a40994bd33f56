"""Runs that are killed at any moment, even while they save, continue to the same bits as a run that is not."""

import random
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from support.forked_ranks import outputs
from support.killed_runs import RANKS, STEPS, Kill, Line, launch, logs

pytestmark = pytest.mark.slow

SEEDS = range(settings().max_examples // 25)  # one by default, twelve under --hypothesis-profile=nightly
KINDS = [kind for kind in RANKS if len(SEEDS) > 1 or kind != "fsdp"]  # saving in the background asks for more


def kills_of(kind: str, seed: int) -> list[Kill]:
    """With seed 0 one kill in the middle of a window, and one while the last rank that writes is saving."""
    if seed == 0:
        return [Kill(3, "accumulating"), Kill(6, "saving", RANKS[kind] - 1 if kind.startswith("fsdp") else 0)]
    chance = random.Random(seed)
    kills = []
    for place in chance.choices(("accumulating", "stepped", "saving"), k=3):
        only_first = place == "saving" and kind == "ddp"  # which writes the files
        kills.append(Kill(chance.randrange(STEPS), place, 0 if only_first else chance.randrange(RANKS[kind])))
    return kills


@pytest.fixture(scope="module", params=KINDS)
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[Line]]]:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    assert launch(kind, folder) == [0] * RANKS[kind], outputs(folder)
    made = logs(kind, folder)
    assert [line.step for line in made[0]] == [*range(STEPS)]
    for steps in (slice(0, 3), slice(3, STEPS)):  # skips before and after the first kill of seed 0
        assert {line.applied for line in made[0][steps]} == {True, False}
    return kind, made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_run_continues_bit_for_bit(unbroken: tuple[str, list[list[Line]]], seed: int, tmp_path: Path) -> None:
    kind, expected = unbroken
    for kill in (*kills_of(kind, seed), None):
        codes = launch(kind, tmp_path, kill)
        if kill is None:
            assert codes == [0] * RANKS[kind], outputs(tmp_path)
        elif seed == 0:  # other kills may come too late: the step was made before
            assert codes[kill.rank] == -signal.SIGKILL, outputs(tmp_path)
    for made, whole in zip(logs(kind, tmp_path), expected, strict=True):
        assert set(made) == set(whole)
