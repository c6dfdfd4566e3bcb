"""`python -m diloco_worker.auto SCRIPT ...`, or `-m MODULE ...`: an unmodified script joins a run.

`__main__`, `sys.argv`, `sys.path` and the exit code are those of the script. torch is not imported
before the script imports it, since it may set variables for it first. Child processes are not part of
the run: a launcher is refused, and a script that succeeds without training in its own process exits
with code 2 if it made an optimizer or started a process.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import resource
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from diloco_protocol import UsageError
from diloco_worker.launching import WRONG_USAGE

if TYPE_CHECKING:
    from diloco_worker.attachment import Attachment

AUTO = ("-m", "diloco_worker.auto")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*(t|d)?(\.exe)?")
# Options of the interpreter that take the next word as their value.
_WITH_A_WORD = ("-X", "-W", "--check-hash-based-pycs")
# Programs and modules that start the script in other processes.
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "fabric", "mpirun", "horovodrun"})
_LAUNCHING = re.compile(
    r"torch\.distributed\.(run|launch)|accelerate(\.commands\..*)?|deepspeed(\.launcher\..*)?|"
    r"lightning\.fabric(\.cli)?"
)
TORCH = "torch"
# A number that is added to the script's seeds; `diloco-worker run --own-seed` sets it.
SEED_OFFSET = "DILOCO_SEED_OFFSET"
USAGE = "diloco-worker: give a script or -m MODULE: python -m diloco_worker.auto train.py"


class _AfterTorch(MetaPathFinder):
    """Attaches as soon as torch is imported."""

    def __init__(self) -> None:
        self.attachment: Attachment | None = None

    def attach(self) -> None:
        from diloco_worker.attachment import Attachment, shift_seeds

        self.attachment = Attachment()
        shift_seeds(_seed_offset())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TORCH or self.attachment is not None:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_attach(module: ModuleType) -> None:
            load(module)
            if self.attachment is None:
                self.attach()

        setattr(spec.loader, "exec_module", load_and_attach)  # noqa: B010  a method, to mypy
        return spec


def _seed_offset() -> int:
    given = os.environ.get(SEED_OFFSET, "").strip() or "0"
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"{SEED_OFFSET} is {given!r:.40}; it must be a whole number.") from None


def _fail(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(WRONG_USAGE)


def main() -> None:
    """Run what the command line names."""
    words = sys.argv[1:]
    if not words or words == ["-m"] or (words[0].startswith("-") and words[0] != "-m"):
        _fail(USAGE)
    if words[0] != "-m" and not os.path.exists(words[0]):
        _fail(f"diloco-worker: the script {words[0]!r:.200} was not found.")
    try:
        refuse_launcher(words)
        _seed_offset()
    except UsageError as error:
        _fail(f"diloco-worker: {error}")
    watch, failure, pid, children = _AfterTorch(), None, os.getpid(), _children()
    if TORCH in sys.modules:
        watch.attach()
    else:
        sys.meta_path.insert(0, watch)
    try:
        _run(words)
    except BaseException as error:
        failure = error
        raise
    finally:
        if watch.attachment is not None:
            watch.attachment.leave(failure)
        has_ended_well = failure is None or (
            isinstance(failure, SystemExit) and failure.code in (None, 0)
        )
        found = watch.attachment
        if has_ended_well and os.getpid() == pid and not (found is not None and found.is_settled):
            has_optimizer = found is not None and found.has_seen_an_optimizer
            _end_without_training(may_have_trained=has_optimizer or _children() != children)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _children() -> tuple[int, bool]:
    """Page faults of the children that were waited for, and whether there are others.

    Each process has page faults, so the pair changes with every child, however it was started.
    """
    faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    if not hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
        return faults, False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return faults, False
    return faults, True


def _end_without_training(*, may_have_trained: bool) -> None:
    """Report that nothing was trained here; fail where the script may have trained elsewhere."""
    sentence = (
        "diloco-worker: This script did not take part in the run: in its own process no torch optimizer "
        "made a step, or several made one and no second. Child processes are not part of the run; put a "
        "DiLoCoWorker into the script where it trains (docs/training-script.md)."
    )
    if may_have_trained:
        _fail(sentence)
    print(sentence, file=sys.stderr)


def with_auto(command: Sequence[str]) -> list[str]:
    """`python [OPTIONS] SCRIPT ...` or `python [OPTIONS] -m MODULE ...`, run by `diloco_worker.auto`.

    Raises:
        UsageError: another program, or no script.
    """
    refuse_launcher(command)
    if not _PYTHON.fullmatch(PurePath(command[0]).name):
        raise UsageError(
            f"--auto needs a command like python train.py, but it begins with {command[0]!r:.200}; put "
            f"`{' '.join(AUTO)}` in front of the script where that program starts it."
        )
    place = 1
    while place < len(command) and command[place].startswith("-") and command[place] != "-m":
        if command[place] in ("-", "-c") or command[place].startswith(("-c", "-m")):
            break
        place += 2 if command[place] in _WITH_A_WORD else 1
    rest = list(command[place:])
    if not rest or rest == ["-m"] or (rest[0].startswith("-") and rest[0] != "-m"):
        raise UsageError(
            "--auto needs a script or -m MODULE after python; code from -c or standard input has no "
            "file to run."
        )
    refuse_launcher(rest)
    return [*command[:place], *AUTO, *rest]


def refuse_launcher(words: Sequence[str]) -> None:
    """Raise UsageError where `PROGRAM ...`, `SCRIPT ...` or `-m MODULE ...` launches processes."""
    module = words[1] if words[0] == "-m" and len(words) > 1 else ""
    name = module or PurePath(words[0]).name
    if name in LAUNCHERS or _LAUNCHING.fullmatch(module):
        raise UsageError(
            f"{name} starts the script in other processes, which --auto does not reach. Start a single "
            "process by python train.py; for several use a DiLoCoWorker with "
            'process_group="world" in the script (docs/frameworks.md).'
        )


if __name__ == "__main__":
    main()
