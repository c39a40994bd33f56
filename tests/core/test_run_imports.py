"""The finder of `polyamp run`, with modules and frameworks that only these tests have."""

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from polyamp import policy
from polyamp import run as running_scripts
from polyamp.errors import PolyampWarning, forget_warnings
from polyamp.run import Finder, Refused, Session, current, note_own_precision

BEGUN: list[Session] = []


def begin(session: Session) -> None:
    BEGUN.append(session)
    assert hasattr(sys.modules["framework_of_tests"], "complete")


def begin_refusing(session: Session) -> None:
    session.refuse("this framework is not supported", fix="use another")


GROUP = "polyamp.scripts"
ENTRIES = [
    EntryPoint("framework_of_tests", f"{__name__}:begin", GROUP),
    EntryPoint("refused_of_tests", f"{__name__}:begin_refusing", GROUP),
    EntryPoint("unsupported_of_tests", "nothing_of_tests:begin", GROUP),
]
FILES = {
    "framework_of_tests/__init__.py": "import framework_of_tests.inner\n"
    "try:\n import framework_of_tests.absent\nexcept ImportError:\n pass\ncomplete = True",
    "framework_of_tests/inner.py": "",
    "refused_of_tests.py": "",
    "unsupported_of_tests.py": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(running_scripts, "entry_points", lambda group: ENTRIES)
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(tmp_path)
    BEGUN.clear()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    importlib.invalidate_caches()


def run(code: str, session: Session | None = None, file: str = "/script/train.py") -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    with session or Session() as current_session:
        Finder(current_session).install()
        exec(compile(code, file, "exec"), names)
    return names


@pytest.mark.parametrize("code", ["import framework_of_tests", "from framework_of_tests.inner import __name__ as n"])
def test_begin_is_called_once_when_the_framework_was_imported(code: str) -> None:
    session = Session()
    run(f"{code}\nimport importlib, framework_of_tests\nimportlib.reload(framework_of_tests)", session)
    assert [session] == BEGUN
    loader = sys.modules["framework_of_tests"].__spec__.loader  # type: ignore[union-attr]
    assert type(loader).__name__ == "SourceFileLoader"


def test_begin_is_called_if_the_framework_was_only_looked_for_before() -> None:
    run("import importlib.util\nimportlib.util.find_spec('framework_of_tests')\nimport framework_of_tests")
    assert len(BEGUN) == 1


def test_begin_is_called_for_what_was_imported_before_and_for_nothing_else() -> None:
    run("import json")
    assert not BEGUN
    importlib.import_module("framework_of_tests")
    run("")
    assert len(BEGUN) == 1


def test_a_framework_that_is_missing_stays_missing(folder: Path) -> None:
    for name in ("__init__.py", "inner.py"):
        (folder / "framework_of_tests" / name).unlink()
    (folder / "unsupported_of_tests.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="unsupported_of_tests"):
        run("import unsupported_of_tests", Session(policy("mixed_float16")))


def test_a_refusal_passes_every_except_of_errors_and_stays() -> None:
    session = Session()
    with pytest.raises(Refused, match="not supported"):
        run("try:\n import refused_of_tests\nexcept Exception:\n pass", session)
    assert "not supported" in str(session.refusal)


def test_an_adapter_that_does_not_load_is_reported() -> None:
    forget_warnings()
    with pytest.warns(PolyampWarning, match="unsupported_of_tests"):
        run("import unsupported_of_tests")


def test_mixed_precision_of_its_own_is_refused_under_a_policy_alone() -> None:
    note_own_precision("nobody listens")
    with Session():
        note_own_precision("gone.amp.start")
    code = "from polyamp.run import note_own_precision\n\n\nnote_own_precision('gone.amp.start')\n"
    with Session(policy("mixed_float16")) as session, pytest.raises(Refused, match="of its own"):
        exec(compile(code, "/script/train.py", "exec"), {})
    assert "/script/train.py:4" in str(session.refusal)
    assert current() is None


def test_what_a_session_replaces_is_put_back() -> None:
    class Base:
        first = 1

    class Library(Base):
        second = 2

    with Session() as session:
        for name in ("first", "second", "third"):
            session.replace(Library, name, "ours")
        assert (Library.first, Library.second, Library.third) == ("ours",) * 3  # type: ignore[attr-defined]
    assert (Library.first, Library.second) == (1, 2)
    assert not {"first", "third"} & vars(Library).keys()
