"""Every page of the documentation runs, and prints what it shows.

The Python blocks of a page run in order, in one namespace, those in tabs too. A block without a language, below a block
of Python or a ``polyamp`` command, shows what that prints. The comparison leaves numbers out: they differ between
machines, and the text of the examples between versions of Python. A block of ``py`` is an excerpt of a program in
``examples``.
"""

import contextlib
import importlib
import io
import pkgutil
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

import polyamp
from polyamp import cli

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"^ *```(python|sh)\n(.*?)^ *```\n(?:\n?```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
WIDEST = 76  # columns that a page of the site, and of GitHub on a small screen, shows without a bar to scroll

ELSEWHERE = ["docs/guides/jax_at_scale.md", *(page for page in PAGES if page.startswith("docs/trainers/"))]
"""Pages that another suite runs, since they need more than the frameworks, or several devices."""

ALONE = ("README.md", "docs/start/first_run.md")
"""Pages for newcomers, of which each block is a program."""

FRAMEWORKS = ("torch", "jax", "keras", "tensorflow")


def shown(page: str, language: str) -> list[tuple[str, str]]:
    """Return each block of a page in that language, with what is shown below it."""
    found = SHOWN.findall((ROOT / page).read_text())
    return [(textwrap.dedent(code), output) for kind, code, output in found if kind == language]


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]{3,}", text))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # checkpoints of a single process
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and shown(page, "python")])
def test_python_runs_and_prints_what_is_shown(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lstm"))
    namespace: dict[str, object] = {}
    for code, output in shown(page, "python"):
        namespace = {} if page in ALONE else namespace
        namespace["__name__"] = "__main__"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "train.py", "exec"), namespace)
        assert words(output) <= words(printed.getvalue()), words(output) - words(printed.getvalue())


COMMANDS = [piece for page in PAGES for piece in shown(page, "sh") if piece[1] and piece[0].startswith("polyamp")]


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command.split(" --")[0] for command, _ in COMMANDS])
def test_command_prints_what_is_shown(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lstm"))
    arguments = shlex.split(command, comments=True)
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == (3 if "error:" in output else 0)
    printed = capsys.readouterr().out
    assert words(output) <= words(printed), words(output) - words(printed)
    pictures = re.findall(r"--plot (\S+)", command)
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in pictures)


@pytest.mark.parametrize("page", PAGES)
def test_code_is_not_too_wide(page: str) -> None:
    assert [line for code, _ in shown(page, "python") for line in code.splitlines() if len(line) > WIDEST] == []


@pytest.mark.parametrize("page", PAGES)
def test_excerpts_are_in_the_examples(page: str) -> None:
    programs = [path.read_text() for path in (ROOT / "examples").glob("**/*.py")]
    for excerpt in re.findall(r"^```py\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        assert any(excerpt in program for program in programs), excerpt


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", ".github/SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (here / target).exists(), target


@pytest.mark.parametrize("module", ["polyamp", *(f"polyamp.backends.{name}" for name in FRAMEWORKS)])
def test_the_api_page_has_every_public_name(module: str) -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = {name.split(".")[-1] for name in re.findall(rf"^::: {module}\.([\w.]+)", page, re.MULTILINE)}
    listed |= set(re.findall(r"`(?:polyamp\.)?(\w+)`", page))
    assert set(importlib.import_module(module).__all__) - {"adapter"} <= listed


def test_the_api_page_describes_nothing_twice() -> None:
    names = re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    described = [pkgutil.resolve_name(name) for name in names]
    assert [name for place, name in enumerate(names) if described[place] in described[:place]] == []


def test_the_messages_that_the_errors_page_quotes_are_in_the_sources() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    tables = page[page.index("## Errors of a training step") :]
    quoted = [
        text for row in re.findall(r"^\| (.*?) \|", tables, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)
    ]
    sources = "".join(path.read_text() for top in ("polyamp", "backends") for path in (ROOT / top).rglob("*.py"))
    assert len(quoted) > 10
    assert [message for message in quoted if message not in sources] == []


@pytest.mark.parametrize("name", ["PolyampError", *(kind.__name__ for kind in polyamp.PolyampError.__subclasses__())])
def test_the_errors_page_explains_every_error(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "errors.md").read_text()


def test_the_files_of_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "explain" / "architecture.md").read_text()
    named = re.findall(r"`((?:polyamp|backends|tests)/[\w./]+)`", page)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_claim_of_the_support_page_is_shown_by_a_test_or_was_seen() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    combinations = page[page.index("## Combinations") : page.index("## Other libraries")]
    claims = re.findall(r"^\| .* \| (.+) \| (.*) ?\|$", combinations, re.MULTILINE)
    assert len(claims) > 40
    assert [
        claim for claim, shows in claims if claim not in ("untested", "") and not re.search("tests/|by hand", shows)
    ] == []
    tests = re.findall(r"`(tests/[\w/.]+)::(\w+)`", combinations)
    assert [name for file, name in tests if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_the_readme_is_at_most_130_lines_long() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
