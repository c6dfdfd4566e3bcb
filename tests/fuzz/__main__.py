"""Fuzzing: inputs that are changed again and again towards code not reached yet, and what they break.

    make fuzz                                         # nearly the same inputs each time
    make fuzz SECONDS=3600 SEED=7                     # others, for an hour
    PYTHONPATH=tests python -m fuzz machine --inputs 100000 --seed 7    # drawn by the seed alone
    PYTHONPATH=tests python -m fuzz machine --replay FILE               # one that failed

Without a time the inputs are nearly the same as long as the code is, so that CI fails for
changes, and hardly ever for old faults that were not found before. A time looks for those.

Each target has a process of its own. Where atheris is installed (Linux, Python 3.11 and later) it
guides the changes by what they reach; elsewhere, and with `--inputs`, they are drawn by the seed alone.
A failing input is written to a file, the command that replays it is printed, and the exit code is 1.
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


def say(target: str, messages: int, inputs: int, began: float, how: str) -> None:
    seconds = time.monotonic() - began
    print(f"{target}: {messages} messages in {inputs} inputs, {seconds:.0f} s, {how}: no fault")


def draw(target: str, seed: int, most: float, seconds: float) -> int:
    """Inputs by the seed alone, until there were `most` or time is up. Returns the exit code."""
    run: Run = import_module(f"fuzz.{target}").run
    known, messages, number, began = corpus(target), 0, 0, time.monotonic()
    while number < most and time.monotonic() < began + seconds:
        data = drawn(target, seed, number, known)
        try:
            messages += run(data)
        except Exception:  # noqa: BLE001  whatever it is, it is what is looked for
            traceback.print_exc()
            (FOUND / f"{target}-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            return 1
        number += 1
    say(target, messages, number, began, f"seed {seed}")
    return 0


def guided(target: str, seed: int, most: float, seconds: float) -> None:
    """The same by what inputs reach. It ends this process."""
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
            say(target, messages, inputs, began, f"seed {seed}, guided by coverage")
            sys.stdout.flush()
            os._exit(0)

    limits = [f"-seed={seed}", f"-max_len={LONGEST_INPUT}", f"-timeout={LONGEST_ACT_S}"]
    limits += [f"-rss_limit_mb={MOST_MEMORY_MB}", f"-artifact_prefix={FOUND}/{target}-"]
    reached = tempfile.mkdtemp()  # what it finds is written into the first folder
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", reached, str(CORPUS / target)], one)
    atheris.Fuzz()


def in_a_process(target: str, *options: str) -> bool:
    """Whether all went well; a failing input is named with the command that replays it."""
    before = set(FOUND.glob(f"{target}-*"))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "fuzz", target, "--alone", *options],
            # With another hash seed the same input reaches the same places in another order.
            env={**os.environ, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            check=False,
            capture_output=True,
            text=True,
        )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(done.stderr[-LONGEST_REPORT:])
    for path in sorted(set(FOUND.glob(f"{target}-*")) - before):
        replay = f"PYTHONPATH=tests python -m fuzz {target} --replay {path}"
        print(f"{target}: an input fails; look at it again with\n  {replay}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("target", nargs="*", default=list(TARGETS))
    parser.add_argument("--seconds", type=float, help="in all; default: a fixed number of inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, help="draw this number by the seed alone")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    (first, *_) = given.target
    if given.replay:
        import_module(f"fuzz.{first}").run(given.replay.read_bytes())
        print(f"{first}: {given.replay} does no harm")
        return 0
    FOUND.mkdir(parents=True, exist_ok=True)
    has_atheris = importlib.util.find_spec("atheris") is not None
    if given.alone:
        usual = float("inf") if given.seconds else INPUTS[first]
        bounds = given.seed, given.inputs or usual, given.seconds or float("inf")
        if has_atheris and not given.inputs:
            guided(first, *bounds)
        return draw(first, *bounds)
    if not has_atheris:
        print("atheris is not installed (it has wheels for Linux and Python 3.11 to 3.14):")
        print("nothing guides the inputs.")
    options = ["--seed", str(given.seed)]
    if given.seconds:
        options += ["--seconds", str(given.seconds / len(given.target))]
    if given.inputs:
        options += ["--inputs", str(given.inputs)]
    done = [in_a_process(target, *options) for target in given.target]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
