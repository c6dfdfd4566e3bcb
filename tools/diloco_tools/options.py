"""Options of a command that are declared once, as the fields of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")
_KEY = "option"


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]  # as typed; empty: that of the field
    default: Any  # as text where it is parsed
    settings: dict[str, Any]  # of typer
    parse: Callable[[str], Any] | None


def option(
    default: Any,
    told: str,
    *names: str,
    value: str | None = None,
    panel: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A field that is an option.

    Args:
        default: of the field, as text where it is parsed; MISSING: the field has none.
        told: its help.
        value: stands for its value in the help.
        panel: the heading that the help shows it under.
        parse: reads its text, or raises ValueError with a sentence.
    """
    settings = {"help": told, "metavar": value, "rich_help_panel": panel}
    declared = _Option(names, None if default is MISSING else default, settings, parse)
    usual = parse(default) if parse is not None and isinstance(default, str) else default
    return field(default=usual, metadata={_KEY: declared})


def options_of(record: Any) -> Iterator[Parameter]:
    """The options of a record as parameters of a command, for `with_options`."""
    for each in fields(record):
        if (declared := each.metadata.get(_KEY)) is not None:
            settings, kind = dict(declared.settings), type(declared.default)
            if declared.parse is not None:
                settings["parser"], kind = reads(declared.parse), Any
            told: Any = Annotated[kind, typer.Option(*declared.names, **settings)]
            yield Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=declared.default, annotation=told
            )


def reads(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """The parser of an option: what is wrong is said as a sentence. Defaults are taken as they are."""

    def read(text: Any) -> T:
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return]  # a default
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read
