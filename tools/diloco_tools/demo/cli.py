"""`diloco-demo`: one broker, two workers and a small GPT, compared with single workers."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from diloco_protocol.clients.command_line import App, with_options
from diloco_protocol.errors import DilocoError
from diloco_tools.demo.display import Display
from diloco_tools.demo.plot import draw
from diloco_tools.demo.results import Record, table, traffic
from diloco_tools.demo.settings import Settings
from diloco_tools.options import options_of
from diloco_tools.processes import ChildFailed, end_like_an_error_on_signals
from diloco_tools.terminal import console, fail

COMMAND = "diloco-demo"
app = App()


@app.command()
@with_options(options_of(Settings))
def main(
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="Text file or folder to train on; default: Python's standard library."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")] = Path("runs/demo"),
    **given: Any,
) -> None:
    """Train a small GPT with one broker and some workers, then with one worker, and compare.

    The one worker trains twice: for as many steps as each DiLoCo worker, and on
    as many tokens as all of them together.

    Everything runs on this machine, in separate processes that talk over TCP.
    Writes summary.json, log.jsonl and loss.png to the folder of results; a few
    minutes on two cores.
    """
    # Imported here: it takes seconds, which --help does not need.
    import torch

    from diloco_tools.demo.data import DataError
    from diloco_tools.demo.experiment import run

    settings = Settings(**given, data=None if data is None else str(data.resolve()))
    if complaint := settings.complaint():
        fail(COMMAND, complaint, 2)
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stale in ("summary.json", "log.jsonl", "loss.png"):
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        fail(
            COMMAND, f"cannot write to {out} ({error.strerror}); name another folder with --out", 2
        )

    end_like_an_error_on_signals()
    # The observer's log lines go to a file, not between the progress bars.
    logging.basicConfig(filename=out / "demo.log", filemode="w", force=True)
    torch.set_num_threads(1)
    shown = console()
    try:
        with Display(shown) as display:
            summary = run(settings, out, display)
    except DataError as error:
        fail(COMMAND, str(error), 2)
    except (ChildFailed, DilocoError) as error:
        fail(COMMAND, str(error), 1)
    except KeyboardInterrupt:
        fail(COMMAND, "interrupted; the broker and the workers have been ended", 130)
    write(summary, out, shown)


def write(summary: Record, out: Path, shown: Console) -> None:
    """Print the table; write summary.json and loss.png to `out`."""
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    shown.print()
    shown.print(table(summary))
    # A terminal may wrap these lines; a file keeps them whole.
    for sentence in (traffic(summary), summary["bytes"]["data_parallel_formula"]):
        shown.print(sentence, soft_wrap=not shown.is_terminal)
    written = "summary.json, log.jsonl"
    try:
        draw(summary, out / "loss.png")
    except ImportError:
        missing = "no loss.png: matplotlib is missing (pip install 'diloco-broker[plot]')"
        shown.print(missing, soft_wrap=True)
    else:
        written += ", loss.png"
    shown.print(f"{written} are in {out}", soft_wrap=True)
