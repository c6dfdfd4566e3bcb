"""Mutation testing: how many faults, put in one at a time, do the tests notice?

    make mutants                                    # about 300 faults
    PYTHONPATH=tests python -m mutation.drill --mutants 100 --seed 1 2 3
    PYTHONPATH=tests python -m mutation.drill --only diloco_broker.core.rounds.pushes --mutants 0

First every test is run once, and it is noted which lines it reaches and how long it takes. Then, for
each fault, the tests that reach its line are run until one fails, the quickest first. A fault that no
test notices has *survived*: either a test is missing, or the fault changes nothing that matters.

Each run is a forked process that has loaded torch and pytest already and none of our modules.
"""

import argparse
import contextlib
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import coverage
import hypothesis  # noqa: F401  loaded once, for all forks
import pytest
import torch
from mutation.operators import Mutant, mutants, mutated

from kit.paths import MODULES, ROOT

# Where faults are put in, and the tests that are asked.
PLACES = (
    "diloco_broker.core",
    "diloco_broker.tensors",
    "diloco_worker.session",
    *(f"diloco_worker.sync.{each}" for each in ("boundary", "fragment", "metrics", "patience")),
    *(f"diloco_worker.sync.{each}" for each in ("schedule", "state")),
)
TESTS = (
    *("tests/broker/core", "tests/broker/tensors", "tests/worker/session", "tests/worker/sync"),
    "tests/simulation",
)
# Seconds are those of the processor, so that a busy machine notices as many faults as a quiet one.
# Those of tests that a fault is given, by how long they take without it; then it has survived.
BUDGET_S = 12.0
# A fault may make a run endless, or wait in vain. It is then given up, and the fault is noticed.
HANG_S = 60
WAIT_S = 600.0
# All the tests without a fault, on one core.
MEASURE_S = 1200
PROCESSES = os.cpu_count() or 1


@dataclass
class Reach:
    """What the tests reach without a fault.

    Attributes:
        seconds: of each test, by its name for pytest.
        tests: of each module, the names of the tests that reach a line.
    """

    seconds: dict[str, float]
    tests: dict[str, dict[int, list[str]]]

    def chosen(self, mutant: Mutant) -> list[str]:
        """The tests for a fault, the quickest first, as many as its budget has room for."""
        lines = self.tests.get(mutant.module, {})
        reaching = {*lines.get(mutant.line, ()), *lines.get(mutant.statement, ())}
        names = sorted(reaching, key=lambda name: (self.seconds[name], name))
        chosen: list[str] = []
        spent = 0.0
        for name in names:
            spent += self.seconds[name]
            if chosen and spent > BUDGET_S:
                break
            chosen.append(name)
        return chosen


class Notes:
    """A plugin of pytest that runs a share of the tests, and notes what each takes and reaches."""

    def __init__(self, cover: coverage.Coverage, share: int) -> None:
        self.seconds: dict[str, float] = {}
        self._cover = cover
        self._share = share

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._share :: PROCESSES]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began = time.process_time()
        self._cover.switch_context(item.nodeid)
        result = yield
        self.seconds[item.nodeid] = time.process_time() - began
        return result


class Faulty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module with its fault; the others as they are."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._path = MODULES[mutant.module]

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        tree = mutated(self._path.read_text(), self._mutant.number)
        exec(compile(tree, str(self._path), "exec"), module.__dict__)


def run_tests(names: Sequence[str], *plugins: object) -> int:
    """Run these tests in this process, silently; returns pytest's exit status."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not nightly"]
    options += ["--assert=plain", "--timeout=0"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return int(pytest.main([*options, "--no-header", *names], plugins=list(plugins)))


def reach_of(names: Sequence[str], share: int) -> Reach:
    """Run a share of the tests without a fault; raises AssertionError if one of them fails."""
    cover = coverage.Coverage(data_file=None, source=list(PLACES))
    cover.set_option("run:disable_warnings", ["module-not-imported"])
    notes = Notes(cover, share)
    cover.start()
    status = run_tests(names, notes)
    cover.stop()
    assert status == 0, f"the tests fail without any fault: {' '.join(names)}"
    data = cover.get_data()
    tests = {}
    for module, path in MODULES.items():
        lines = data.contexts_by_lineno(str(path))
        tests[module] = {line: [name for name in by if name] for line, by in lines.items()}
    return Reach(notes.seconds, {module: lines for module, lines in tests.items() if lines})


def is_noticed(mutant: Mutant, names: Sequence[str]) -> bool:
    """Does a test fail with the fault?"""
    sys.meta_path.insert(0, Faulty(mutant))
    return run_tests(names) != 0


def in_a_fork(
    work: Callable[..., Any], *given: Any, limit_s: int, wait_s: float | None = None
) -> Any:
    """What a function returns in a process of its own; None where it does not return in time.

    Args:
        limit_s: seconds of the processor.
        wait_s: seconds in all; None: as long as it takes.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def act() -> None:
        os.chdir(ROOT)
        os.setpgrp()
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        theirs.send(work(*given))

    process = context.Process(target=act)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(wait_s) else None
    except EOFError:
        return None  # it ended without a result
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, 9)
        process.join()


def measure(names: Sequence[str]) -> Reach:
    """Run all tests of these folders once, spread over the cores."""

    def measured(share: int) -> Any:
        return in_a_fork(reach_of, names, share, limit_s=MEASURE_S)

    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = list(pool.map(measured, range(PROCESSES)))
    whole = Reach({}, {})
    for part in parts:
        if part is None:
            raise SystemExit("The tests fail without any fault; mend them first.")
        whole.seconds |= part.seconds
        for module, lines in part.tests.items():
            known = whole.tests.setdefault(module, {})
            for line, by in lines.items():
                known.setdefault(line, []).extend(by)
    return whole


def choose(count: int, seed: int, only: str | None) -> list[Mutant]:
    """So many faults, of all or of one package; the same for the same seed and sources. 0: all."""
    found = [
        mutant
        for module, path in MODULES.items()
        if any(f"{module}.".startswith(f"{place}.") for place in PLACES)
        and (only is None or f"{module}.".startswith(f"{only}."))
        for mutant in mutants(module, path.read_text())
    ]
    if count and count < len(found):
        found = random.Random(seed).sample(found, count)
    if not found:
        raise SystemExit(
            f"No fault is put into {only}: name one of {', '.join(PLACES)}, or a part."
        )
    return sorted(found, key=lambda mutant: (mutant.module, mutant.number))


def try_one(reach: Reach, mutant: Mutant) -> bool:
    names = reach.chosen(mutant)
    if not names:
        return False
    noticed = in_a_fork(is_noticed, mutant, names, limit_s=HANG_S, wait_s=WAIT_S)
    return noticed is None or bool(noticed)


def drill(reach: Reach, chosen: list[Mutant]) -> list[Mutant]:
    """Put the faults in and see; returns those that survived."""
    survived = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        outcomes = pool.map(lambda mutant: try_one(reach, mutant), chosen)
        for mutant, noticed in zip(chosen, outcomes, strict=True):
            if not noticed:
                survived.append(mutant)
                path = MODULES[mutant.module].relative_to(ROOT)
                print(f"survived  {path}:{mutant.line}  {mutant.what}", flush=True)
    return survived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--mutants", type=int, default=300, help="how many of a seed; 0: all there are"
    )
    parser.add_argument("--seed", type=int, default=[1], nargs="+", dest="seeds")
    parser.add_argument("--only", help="faults in one package or module, by its dotted name")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--at-least", type=float, default=0.0, help="share, or it fails")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    reach = measure(given.tests)
    took = time.monotonic() - began
    print(f"{len(reach.seconds)} tests without a fault: {took:.0f} s", flush=True)
    found = []
    for seed in given.seeds:
        began = time.monotonic()
        chosen = choose(given.mutants, seed, given.only)
        survived = drill(reach, chosen)
        caught, took = len(chosen) - len(survived), round(time.monotonic() - began)
        share = caught / max(1, len(chosen))
        print(
            f"{caught} of {len(chosen)} faults noticed ({share:.1%}), seed {seed}, {took} s",
            flush=True,
        )
        figures = {"seed": seed, "mutants": len(chosen), "caught": caught, "seconds": took}
        found.append({**figures, "survived": [asdict(mutant) for mutant in survived]})
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))
    if any(each["caught"] < given.at_least * each["mutants"] for each in found):
        raise SystemExit(f"Fewer than {given.at_least:.0%} of the faults were noticed.")


if __name__ == "__main__":
    main()
