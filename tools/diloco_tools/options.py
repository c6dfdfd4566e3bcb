"""Options of a command, declared once as the fields of a record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")
_KEY = "option"


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]  # as typed; empty: derived from the field's name
    default: Any  # as text if it is parsed
    settings: dict[str, Any]  # for typer
    parse: Callable[[str], Any] | None


def option(
    default: Any,
    help: str,
    *names: str,
    value: str | None = None,
    panel: str | None = None,
    parse: Callable[[str], Any] | None = None,
    **settings: Any,
) -> Any:
    """Declare a field as an option.

    Args:
        default: of the field, as text if it is parsed; MISSING: the field has no default.
        value: the placeholder of its value in the help.
        panel: the heading that the help lists it under.
        parse: reads its text, or raises ValueError with a sentence.
        settings: further settings of `typer.Option`, such as `min`.
    """
    placeholder = value or ("TEXT" if parse else None)
    settings |= {"help": help, "metavar": placeholder, "rich_help_panel": panel}
    declared = _Option(names, None if default is MISSING else default, settings, parse)
    usual = parse(default) if parse is not None and isinstance(default, str) else default
    return field(default=usual, metadata={_KEY: declared})


def options_of(record: Any) -> Iterator[Parameter]:
    """The options of a record as parameters of a command, for `with_options`."""
    kinds = get_type_hints(record)
    for each in fields(record):
        if (declared := each.metadata.get(_KEY)) is not None:
            settings, kind = dict(declared.settings), kinds[each.name]
            if declared.parse is not None:
                settings["parser"], kind = reads(declared.parse), Any
            annotated: Any = Annotated[kind, typer.Option(*declared.names, **settings)]
            yield Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=declared.default, annotation=annotated
            )


def reads(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """The parser of an option: reports an error as a sentence, and passes defaults through."""

    def read(text: Any) -> T:
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return]  # a default
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def matching(pattern: str, what: str) -> Callable[[str], str]:
    """A parser that accepts text of this form; `what` describes it in the error."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r:.80} is invalid; expected {what}.")
        return text

    return parse
