"""Options that parts of the benchmark have on the command line, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from diloco_lab.bench.sizes import SIZES
from diloco_tools import terminal

COMMAND = "python -m diloco_lab.bench"


refuse = partial(terminal.fail, COMMAND, code=2)  # ends with a sentence


def words(text: str) -> list[str]:
    """Those between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def whole_numbers(text: str) -> list[int]:
    return [int(each) for each in words(text)]


def numbers(help_text: str, most: int) -> Any:
    """An option of numbers from 1 to `most` with commas between them."""

    def check(param: typer.CallbackParam, text: str) -> str:
        found = words(text)
        if not found or not all(each.isdecimal() and 1 <= int(each) <= most for each in found):
            sentence = f"should be numbers from 1 to {most}, with commas between them"
            refuse(f"{param.opts[0]} {text!r} {sentence}")
        return text

    return typer.Option(help=help_text, callback=check)


def choice(name: str, known: Sequence[str], several: str = "") -> Any:
    """An option that is one of these names; where help for `several` is given, some with commas."""

    def check(text: str) -> str:
        for each in words(text) if several else [text]:
            if each not in known:
                refuse(f"{name} {each!r} is unknown here; choose from {', '.join(known)}")
        return text

    help_text = f"{several or 'Model'}: {', '.join(known)}."
    return typer.Option(name, help=help_text, callback=check)


Size = Annotated[str, choice("--parameters", list(SIZES))]
Sizes = Annotated[str, choice("--parameters", list(SIZES), "Models, with commas")]
ReplyDtypes = Annotated[
    str, choice("--reply-dtype", ("fp32", "bf16", "fp16"), "On the way down, with commas")
]
Workers = Annotated[str, numbers("Numbers of workers, with commas.", 64)]
Repeats = Annotated[
    int, typer.Option(min=1, help="Measurements of each figure, in turn with its limit.")
]
