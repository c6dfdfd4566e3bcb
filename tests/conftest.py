"""Fixtures that several files use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.paths import ROOT
from kit.session_harness import FROZEN, Desk, desk, version

# With more threads torch spends the time of small models waking them: three times as much of it. Before
# torch is loaded, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing lines doubles the time of Python code. So it is off in what runs long, is about time, or runs
# in processes of its own.
UNMEASURED = [
    ROOT / "tests" / name
    for name in ("broker/shell", "mutation", "simulation", "tools", "lab", "whole_runs")
]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    # In each process of xdist pytest-cov starts a measurement that it never reads, then its own. While
    # its own is paused, which is what `no_cover` asks for, the first would go on, at the same cost.
    plugin = session.config.pluginmanager.getplugin("_cov")
    if plugin is not None and hasattr(session.config, "workerinput") and plugin.cov_controller:
        plugin.cov_controller.pause()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test of minutes that comes last keeps one process busy, and all the others wait for it.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.pluginmanager.hasplugin("_cov"):
        for item in items:
            if any(Path(item.path).is_relative_to(folder) for folder in UNMEASURED):
                item.add_marker("no_cover")


@pytest.fixture(autouse=True)
def _signals_come_back() -> Iterator[None]:
    """Commands that a test runs in this process have handlers of their own, the next test has not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
