"""Trials in processes of their own, one on each core, each kept as soon as it is done."""

from __future__ import annotations

import multiprocessing
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch

from diloco_lab.driver.records import Results
from diloco_lab.evidence.driver import baselines
from diloco_lab.evidence.driver.training import DiLoCoRun, Outcome
from diloco_lab.evidence.driver.trial import Trial
from diloco_tools.demo.data import load_text

Result = dict[str, Any]


cached_text = cache(load_text)  # a process trains many


def outcome_of(trial: Trial) -> Outcome:
    """Train it, in this process. Raises DataError."""
    path = None if trial.data is None else Path(trial.data)
    shards = 1 if trial.arm == "alone" else trial.workers
    text = cached_text(path, shards, trial.recipe.context, trial.windows)
    if trial.arm == "diloco":
        return DiLoCoRun(trial, text).go()
    return baselines.train(trial, text)


def measure(trial: Trial) -> Result:
    """Train it; its line in a file of results."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = outcome_of(trial)
    return {
        "trial": trial.plain(),
        "loss": found.curve[-1][2],
        "curve": [[steps, round(seconds, 3), loss] for steps, seconds, loss in found.curve],
        "bytes_up": found.bytes_up,
        "bytes_down": found.bytes_down,
        "pushes": found.pushes,
        "lost": found.lost,
        "rejected": found.rejected,
        "staleness": round(found.staleness, 3),
        "seconds": round(time.perf_counter() - began, 1),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def key_of(result: Mapping[str, Any]) -> str:
    """That of its trial."""
    return Trial.from_plain(result["trial"]).key


def missing_of(results: Results, trials: Iterable[Trial]) -> list[Trial]:
    """The trials without a result, each once, in order."""
    by_key = {trial.key: trial for trial in trials}
    return [by_key[key] for key in results.missing(by_key)]


def begin_process() -> None:
    """Let this process end with its parent, also where that was killed, and its workers only warn."""
    os.environ.setdefault("DILOCO_LOG", "warning")
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_all(
    trials: Sequence[Trial], results: Results, jobs: int, tell: Callable[[str], None]
) -> None:
    """Train what has no result yet.

    Args:
        jobs: processes at a time; 0: one for each core.
        tell: takes a line for each trial that is done.

    Raises whatever a trial fails with; what was done by then is kept.
    """
    missing = missing_of(results, trials)
    if not missing:
        return
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    at_a_time = min(jobs or os.cpu_count() or 1, len(missing))
    with ProcessPoolExecutor(at_a_time, spawn, initializer=begin_process) as pool:
        # The long ones first, so that none of them is alone at the end.
        futures = [pool.submit(measure, trial) for trial in sorted(missing, key=lambda t: -t.work)]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                result = future.result()
                results.add(result)
                left = (time.monotonic() - began) / done * (len(missing) - done)
                tell(f"{done}/{len(missing)} {told(result)}, about {left / 60:.0f} min left")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()  # else they would finish what they are at, for minutes
            raise


def told(result: Result) -> str:
    """A result in a line: what it has of its own, and its loss."""
    usual = Trial().plain()
    plain = {n: v for n, v in result["trial"].items() if usual.get(n) != v and n != "broker"}
    plain |= result["trial"].get("broker", {})
    words = " ".join(f"{name}={value}" for name, value in plain.items())
    loss = "diverged" if result["loss"] is None else f"{result['loss']:.4f}"
    return f"{words or 'as usual'}: {loss} ({result['seconds']:.0f} s)"
