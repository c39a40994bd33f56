"""Choose the suites that run, and prepare every test.

A suite is a folder: ``tests/core`` is ``core``, ``tests/on_torch`` is ``torch``. ``--suite=core,torch`` runs those two;
without the option all run except ``works_with``, the suite of other people's models and trainers. A requested suite
whose framework does not load fails the run.

On a GPU machine nothing can be installed: with ``--gpu``, a module that imports a missing package of tests is reported
as skipped. Everywhere else that fails the run.

Rules and state are tested by hypothesis with few examples by default, and with many under
``--hypothesis-profile=nightly``.
"""

import gc
import os
import re
import signal
from collections.abc import Generator, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from polyamp import adapters
from polyamp.errors import PolyampError, forget_warnings

NEEDS = {
    "core": [],
    "torch": ["torch"],
    "jax": ["jax"],
    "tensorflow": ["tensorflow"],
    "keras": ["keras"],
    "parity": ["torch", "jax", "tensorflow", "keras"],
    "works_with": [],
}
SUITES = {f"on_{name}" if NEEDS[name] == [name] else name: name for name in NEEDS}  # no folder has a framework's name
BY_DEFAULT = [name for name in NEEDS if name != "works_with"]  # its libraries are a gigabyte
HERE = Path(__file__).parent
pytest.register_assert_rewrite("support.conformance")

EXAMPLES = {"ci": 25, "nightly": 300}  # for each property; without deadlines, since first calls trace and compile

OLD = ("apex", "cuda_amp", ".compat.")  # modules of old interfaces, which warn, and document it
NEEDS_OPTION = ("gpu", "compilers", "long")  # markers; the option of the same name runs these tests

TESTS_ONLY = ("equinox", "expecttest", "flax", "haiku", "jmp", "ml_dtypes", "orbax")
ABSENT = re.compile(rf"ModuleNotFoundError: No module named '({'|'.join(TESTS_ONLY)})[.']")

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",  # hide TensorFlow's start-up notices
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # three frameworks share one GPU
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a second process would import PyTorch, for few programs
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # headers take longer than the programs
    "TORCHINDUCTOR_VEC_ISA_OK": "0",  # to ask the C++ compiler for each of a CPU's vector units takes 15 seconds
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

# With these flags XLA compiles for CPUs in a third of the time, into slower code; most programs of tests run once.
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK_XLA_BEFORE_JAX_0_11 = "--xla_cpu_use_fusion_emitters=false"  # an unknown flag would end the process


def pytest_addoption(parser: pytest.Parser) -> None:
    every = f"comma list of {', '.join(NEEDS)}; all but works_with by default"
    parser.addoption("--suite", default=",".join(BY_DEFAULT), help=every)
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU; they are left out by default")
    parser.addoption(
        "--compilers", action="store_true", help="run the tests that need a compiler for GPUs, or sanitizers"
    )
    parser.addoption("--long", action="store_true", help="run the tests that take minutes, as the nightly run does")
    parser.addoption("--keras-backend", help="tensorflow, jax or torch; else KERAS_BACKEND, else tensorflow")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; processes of tests inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--keras-backend"):
        os.environ["KERAS_BACKEND"] = config.getoption("--keras-backend")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, examples in EXAMPLES.items():
        settings.register_profile(name, deadline=None, max_examples=examples)
    settings.load_profile("ci")  # hypothesis reads its own option, --hypothesis-profile, after this
    unknown = _suites(config) - NEEDS.keys()
    if unknown:
        raise pytest.UsageError(f"unknown suites {', '.join(sorted(unknown))}; there are {', '.join(NEEDS)}")
    runs_jax = "jax" in (*_frameworks(config), os.environ.get("KERAS_BACKEND"))
    if runs_jax and find_spec("jax") and not config.getoption("--gpu"):
        os.environ.setdefault("XLA_FLAGS", _quick_xla())
    for name in _frameworks(config):
        try:
            adapters.adapter_named(name)
        except PolyampError as error:
            raise pytest.UsageError(f"the suite needs {name}, which does not load: {error}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    loaded = map(adapters.adapter_named, _frameworks(config))
    return [f"{adapter.name}: {adapter.describe()['version']}" for adapter in loaded]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    suite = _suite_of(collection_path)
    return True if suite and suite not in _suites(config) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed and collector.config.getoption("--gpu") and (absent := ABSENT.search(report.longreprtext)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: this machine has no {absent[1]}")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for name in NEEDS_OPTION if not config.getoption(f"--{name}") for item in _marked(items, name)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    for item in items:
        if isinstance(item, pytest.DoctestItem) and any(old in item.name for old in OLD):
            item.add_marker(pytest.mark.filterwarnings("ignore::polyamp.errors.PolyampWarning"))


def pytest_collection_finish() -> None:
    # Keras collects garbage whenever a session is cleared, and looks at a million objects of the imported frameworks
    # for half a second. They stay anyway.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _warnings_are_shown_again() -> Iterator[None]:
    forget_warnings()
    yield
    forget_warnings()


def _quick_xla() -> str:
    is_older = tuple(map(int, version("jax").split(".")[:2])) < (0, 11)
    return f"{QUICK_XLA} {QUICK_XLA_BEFORE_JAX_0_11}" if is_older else QUICK_XLA


def _marked(items: list[pytest.Item], name: str) -> list[pytest.Item]:
    return [item for item in items if item.get_closest_marker(name)]


def _suites(config: pytest.Config) -> set[str]:
    return set(filter(None, config.getoption("--suite").split(",")))


def _frameworks(config: pytest.Config) -> list[str]:
    return sorted({name for suite in _suites(config) for name in NEEDS[suite]})


def _suite_of(path: Path) -> str | None:
    """Return the suite of a path in tests/; None for other paths."""
    return SUITES.get(path.relative_to(HERE).parts[0]) if path != HERE and path.is_relative_to(HERE) else None


@pytest.fixture
def module_hooks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the hooks of PyTorch's autocast on modules, which may stay for good, for one test."""
    from polyamp.backends.torch.autocast import path_rules

    hooks = path_rules.ModuleHooks(path_rules._before, path_rules._after)
    monkeypatch.setattr(path_rules, "HOOKS", hooks)
    yield
    hooks.remove()
