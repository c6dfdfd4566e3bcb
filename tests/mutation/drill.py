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
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
CHOSEN = ["--hypothesis-seed=0", "-m", "not nightly"]
# Seconds of tests that a fault is given, by how long they take without it; then it has survived.
BUDGET_S = 12.0
# A fault may make a run endless, or wait in vain. It is then given up after these seconds of the
# processor, or in all, and the fault is noticed.
HANG_S = 60
WAIT_S = 600.0
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


def run_tests(names: Sequence[str]) -> int:
    """Run these tests in this process, silently; returns pytest's exit status."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--timeout=0", "--no-header"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return int(pytest.main([*CHOSEN, *options, *names]))


def is_noticed(mutant: Mutant, names: Sequence[str]) -> bool:
    """Does a test fail with the fault?"""
    sys.meta_path.insert(0, Faulty(mutant))
    return run_tests(names) != 0


def in_a_fork(work: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own; None where it does not return in time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def act() -> None:
        os.chdir(ROOT)
        os.setpgrp()
        resource.setrlimit(resource.RLIMIT_CPU, (HANG_S, HANG_S))
        theirs.send(work(*given))

    process = context.Process(target=act)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(WAIT_S) else None
    except EOFError:
        return None  # it ended without a result
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, 9)
        process.join()


def measure(names: Sequence[str]) -> Reach:
    """Run all tests of these folders once, spread over the cores; exits if one of them fails."""
    options = ["-n", str(PROCESSES), "-vv", "--durations=0"]
    options += ["--cov-context=test", "--cov-report=", *(f"--cov={place}" for place in PLACES)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *CHOSEN, *options, *names],
            env={**os.environ, "COVERAGE_FILE": f"{folder}/data"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout[-5000:]}\nThe tests fail without any fault.")
        data = coverage.CoverageData(f"{folder}/data")
        data.read()
        tests = {
            module: {
                line: [name.removesuffix("|run") for name in by if name.endswith("|run")]
                for line, by in data.contexts_by_lineno(str(path)).items()
            }
            for module, path in MODULES.items()
        }
    took = re.findall(r"^([\d.]+)s call +(.+)$", done.stdout, re.MULTILINE)
    return Reach({name: float(seconds) for seconds, name in took}, tests)


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
    noticed = in_a_fork(is_noticed, mutant, names)
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
