"""Options that parts of the benchmark have on the command line, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from diloco_tools import terminal
from diloco_tools.bench.sizes import SIZES

COMMAND = "diloco-bench"


def refuse(sentence: str) -> NoReturn:
    """End with a sentence and exit code 2."""
    terminal.fail(COMMAND, sentence, 2)


def names(text: str) -> list[str]:
    """The parts between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def check_size(size: str) -> str:
    """The same; ends with a sentence where there is no model of this size."""
    if size not in SIZES:
        known = ", ".join(SIZES)
        refuse(f"--parameters {size!r} is no model of the benchmark; choose from {known}")
    return size


def check_reply(reply: str) -> str:
    """The same; ends with a sentence where it is no dtype of a reply."""
    if reply not in ("fp32", "bf16", "fp16"):
        refuse(f"--reply-dtype {reply!r} is none; choose from fp32, bf16, fp16")
    return reply


def numbers(help_text: str, most: int) -> Any:
    """An option of numbers from 1 to `most` with commas between them; its part gets a list."""

    def read(param: typer.CallbackParam, text: str) -> list[int]:
        found = names(text)
        if not found or not all(each.isdecimal() and 1 <= int(each) <= most for each in found):
            sentence = f"should be numbers from 1 to {most}, with commas between them"
            refuse(f"{param.opts[0]} {text!r} {sentence}")
        return [int(each) for each in found]

    return typer.Option(help=help_text, callback=read)


def words(name: str, help_text: str, check: Callable[[str], str]) -> Any:
    """The same with words, each of them checked."""
    return typer.Option(
        name, help=help_text, callback=lambda text: [check(each) for each in names(text)]
    )


Size = Annotated[
    str, typer.Option("--parameters", help=f"Model: {', '.join(SIZES)}.", callback=check_size)
]
Repeats = Annotated[
    int, typer.Option(min=1, help="Measurements of each figure, in turn with its limit.")
]
