"""Fixtures that several files use, and what holds for each test."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from kit import tiers
from kit.paths import ROOT
from kit.session_harness import FROZEN, Desk, desk, version

if TYPE_CHECKING:
    from kit.process_kit import Processes

# With more threads torch spends the time of small models waking them: three times as much of it. Before
# torch is loaded, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples of each property. No deadlines, since a busy machine pauses tests; and CI draws the same
# examples each time, so that it fails only for what was changed.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Set by CI: a test that is too expensive for its tier fails the run.
CHECKS_COSTS = "TEST_COSTS" in os.environ
LAB_TESTS = ROOT / "tests" / "lab"
CPU_BEFORE = pytest.StashKey[float]()
costs: dict[str, float] = {}  # CPU seconds of each test without a mark


def pytest_sessionstart() -> None:
    if CHECKS_COSTS:
        # Or the first tests with a screen and with an optimizer would pay for these.
        import torch._dynamo  # noqa: F401

        import diloco_tools.monitor.terminal.application  # noqa: F401


def pytest_collection_finish() -> None:
    # A full collection would traverse all modules. `gc.get_objects` and `gc.get_referrers` skip frozen
    # objects, too.
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    for item in items:
        if LAB_TESTS in item.path.parents:
            item.add_marker("nightly")
    yield  # tests are chosen by their marks
    items[:] = in_blocks(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def in_blocks(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Order tests for processes that begin with equal blocks of the list, and then steal from others.

    Each block has some of the slow modules at its beginning, those with the longest timeout first: one
    of minutes that came last would keep one process busy, and all others would wait for it.
    """
    slow: dict[Path, list[pytest.Item]] = {}
    quick: list[pytest.Item] = []
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        (slow.setdefault(item.path, []) if is_slow else quick).append(item)
    blocks: list[list[pytest.Item]] = [[] for _ in range(count)]
    for number, module in enumerate(sorted(slow.values(), key=_timeout, reverse=True)):
        blocks[number % count] += module
    size = -(-len(items) // count)
    for block in blocks:
        missing = max(0, size - len(block))
        block.extend(quick[:missing])
        del quick[:missing]
    return [item for block in blocks for item in block] + quick


def _timeout(module: list[pytest.Item]) -> float:
    marks = [item.get_closest_marker("timeout") for item in module]
    return max(mark.args[0] if mark is not None else 0.0 for mark in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if CHECKS_COSTS:
        item.stash[CPU_BEFORE] = tiers.cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_quick = not tiers.OTHER_TIERS & report.keywords.keys()
    if CHECKS_COSTS and is_quick and call.when == "teardown" and CPU_BEFORE in item.stash:
        cost = tiers.cpu_seconds() - item.stash[CPU_BEFORE]
        cost /= tiers.slowness() if cost > tiers.TEST_CPU_S else 1.0
        report.user_properties.append(("cpu_s", cost))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cost = dict(report.user_properties).get("cpu_s")
    if cost is not None:
        costs[report.nodeid] = float(str(cost))


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_whole = not hasattr(session.config, "workerinput")  # not one of xdist's processes
    if is_whole and not session.exitstatus and tiers.faults(costs):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if costs:
        dearest = max(costs, key=lambda name: costs[name])
        terminalreporter.write_line(
            f"Tests of make test: {sum(costs.values()):.0f} s of CPU; the dearest took "
            f"{costs[dearest]:.1f} s: {dearest}"
        )
    for fault in tiers.faults(costs):
        terminalreporter.write_line(fault, red=True)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same from torch's generator, alone and behind any others."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _signals_come_back() -> Iterator[None]:
    """Commands that a test runs in this process have handlers of their own, the next test has not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def processes(tmp_path: Path) -> "Iterator[Processes]":
    """Processes of one test; those that are left end with it."""
    from kit.process_kit import Processes  # it loads torch

    made = Processes(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fresh() -> Desk:
    return desk()


@pytest.fixture
def ready() -> Desk:
    """A worker that has joined and holds version 0."""
    made = desk().connects().is_welcomed(version(0))
    made.receives(version(0))
    made.receives(version(0), fragment=FROZEN, chunks=1)
    made.holds(version(0))
    made.holds(version(0), fragment=FROZEN)
    made.effects = []
    return made
