"""Fuzzing: inputs that are changed again and again towards code not reached yet, and what they break.

    make fuzz                                         # nearly the same inputs each time
    make fuzz SECONDS=3600 SEED=7                     # others, for an hour
    PYTHONPATH=tests python -m fuzz machine --inputs 100000 --seed 7    # drawn by the seed alone
    PYTHONPATH=tests python -m fuzz machine --replay FILE               # one that failed

Without a time the inputs are nearly the same as long as the code is, so that CI fails for
changes, and hardly ever for old faults that were not found before. A time looks for those.

Where atheris is installed (Linux, Python 3.11 and later) it guides the changes by what they reach, each
target in a process of its own. Elsewhere, and with `--inputs`, they are drawn by the seed alone. A
failing input is written to a file, and the command that replays it is printed; the exit code is then 1.
"""

import argparse
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

TARGETS = ("decoding", "machine", "session", "files")
# How many of each without a time: a quarter of a minute.
INPUTS = {"decoding": 60_000, "machine": 400, "session": 3000, "files": 9000}
CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("runs/fuzz")  # where failing inputs are written
LONGEST_INPUT = 4000  # bytes; each choice takes one or two
LONGEST_REPORT = 20_000  # characters of what a target that fails has to say
LONGEST_ACT_S = 20  # of one input
MOST_MEMORY_MB = 3000
INSTRUMENTED = ["diloco_protocol", "diloco_broker.core", "diloco_worker.session"]

Run = Callable[[bytes], int]
"""Has one input done; returns how many messages it was. Whatever it raises is a fault."""


def corpus(target: str) -> list[bytes]:
    """The inputs that are kept of a target."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def drawn(target: str, seed: int, number: int, known: list[bytes]) -> bytes:
    """Input `number` of a seed: random bytes, or one of the corpus with changes."""
    dice = random.Random(f"{target} {seed} {number}")
    if number < len(known):
        return known[number]
    if not known or dice.random() < 0.5:
        return dice.randbytes(dice.randrange(dice.choice([20, 200, 600])))
    changed = bytearray(dice.choice(known))
    for _ in range(dice.randrange(1, 8)):
        place = dice.randrange(len(changed) + 1)
        changed[place : place + dice.randrange(4)] = dice.randbytes(dice.randrange(4))
    return bytes(changed)


def write_down(target: str, data: bytes) -> Path:
    """A failing input."""
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{target}-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    return path


def replay_of(target: str, path: Path) -> str:
    return f"PYTHONPATH=tests python -m fuzz {target} --replay {path}"


def draw(target: str, run: Run, seed: int, inputs: float, seconds: float) -> bool:
    """Inputs by the seed alone, until there were enough or time is up. Returns whether all went well."""
    known, messages, number, began = corpus(target), 0, 0, time.monotonic()
    while number < inputs and time.monotonic() < began + seconds:
        data = drawn(target, seed, number, known)
        try:
            messages += run(data)
        except Exception:  # noqa: BLE001  whatever it is, it is what is looked for
            traceback.print_exc()
            path = write_down(target, data)
            print(
                f"{target}: input {number} fails; look at it again with\n  {replay_of(target, path)}"
            )
            return False
        number += 1
    say(target, messages, number, time.monotonic() - began, f"seed {seed}")
    return True


def say(target: str, messages: int, inputs: int, seconds: float, how: str) -> None:
    print(
        f"{target}: {messages} messages in {inputs} inputs, {seconds:.0f} s, {how}: no fault",
        flush=True,
    )


def guided(target: str, seed: int, most: float, seconds: float) -> None:
    """Until there were `most` inputs or time is up. In a process of its own: atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        run: Run = import_module(f"fuzz.{target}").run
    messages = inputs = 0
    began = time.monotonic()

    def one(data: bytes) -> None:
        nonlocal messages, inputs
        messages += run(data)
        inputs += 1
        if inputs >= most or time.monotonic() > began + seconds:
            say(
                target,
                messages,
                inputs,
                time.monotonic() - began,
                f"seed {seed}, guided by coverage",
            )
            sys.stdout.flush()
            os._exit(0)

    FOUND.mkdir(parents=True, exist_ok=True)
    limits = [f"-seed={seed}", f"-max_len={LONGEST_INPUT}", f"-timeout={LONGEST_ACT_S}"]
    limits += [
        f"-rss_limit_mb={MOST_MEMORY_MB}",
        f"-artifact_prefix={FOUND}/{target}-",
        "-verbosity=0",
    ]
    reached = tempfile.mkdtemp()  # what it finds is written into the first folder
    atheris.Setup([sys.argv[0], *limits, reached, str(CORPUS / target)], one)
    atheris.Fuzz()


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def all_targets(targets: tuple[str, ...], seed: int, seconds: float | None) -> bool:
    """Each target in a process of its own, for its share of the time. Returns whether all went well."""
    if not has_atheris():
        print(
            "atheris is not installed (it has wheels for Linux and Python 3.11 to 3.14): inputs are"
        )
        print("drawn by the seed alone, and nothing guides them.")
    is_well = True
    bound = [] if seconds is None else ["--seconds", str(seconds / len(targets))]
    for target in targets:
        before = set(FOUND.glob(f"{target}-*"))
        command = [sys.executable, "-m", "fuzz", target, "--seed", str(seed), "--alone"]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*command, *bound],
                # With another hash seed the same input reaches the same places in another order.
                env={**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
                check=False,
                capture_output=True,
                text=True,
            )
        is_well &= done.returncode == 0
        print(done.stdout, end="", flush=True)
        if done.returncode:
            print(done.stderr[-LONGEST_REPORT:])
        for path in sorted(set(FOUND.glob(f"{target}-*")) - before):
            print(f"{target}: an input fails; look at it again with\n  {replay_of(target, path)}")
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("target", nargs="*", default=list(TARGETS))
    parser.add_argument(
        "--seconds", type=float, help="in all; without it, a fixed number of inputs"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, help="draw this number by the seed alone")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (first, *_) = options.target
    most = float("inf") if options.seconds else INPUTS.get(first, float("inf"))
    seconds = options.seconds or float("inf")
    if options.replay:
        import_module(f"fuzz.{first}").run(options.replay.read_bytes())
        print(f"{first}: {options.replay} does no harm")
        return 0
    if options.inputs:
        runs = [(name, import_module(f"fuzz.{name}").run) for name in options.target]
        done = [draw(name, run, options.seed, options.inputs, float("inf")) for name, run in runs]
        return 0 if all(done) else 1
    if not options.alone:
        return 0 if all_targets(tuple(options.target), options.seed, options.seconds) else 1
    if has_atheris():
        guided(first, options.seed, most, seconds)
    run = import_module(f"fuzz.{first}").run
    return 0 if draw(first, run, options.seed, most, seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
