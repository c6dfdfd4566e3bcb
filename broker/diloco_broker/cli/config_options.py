"""Turns the declared options of the configuration into options of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from dataclasses import fields
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import RUN
from diloco_broker.config.option import option_of
from diloco_broker.config.presets import PRESETS

# Options of several commands.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Check = Annotated[bool, typer.Option("--check", help="Check the options and exit.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more.")]

DECLARED = {each.name: option for each in fields(BrokerConfig) if (option := option_of(each)).panel}
DEFAULTS = {each.name: each.default for each in fields(BrokerConfig)}
_TYPES = get_type_hints(BrokerConfig)


def as_number(text: Any) -> Any:
    """The number that a text stands for; other values unchanged: BrokerConfig rejects wrong words."""
    with contextlib.suppress(TypeError, ValueError):
        return float(text)
    return text


def parameter(name: str, default: Any, text: str, panel: str | None = None) -> Parameter:
    """An option of the configuration as a parameter of a typer command."""
    declared = DECLARED[name]
    kind = declared.reads or _TYPES[name]
    # Without an explicit name typer adds --no-NAME, which is useful only if the default is on.
    names = ["--" + name.replace("_", "-")] if default is False else []
    shown = typer.Option(*names, metavar=declared.rule.word, help=text, rich_help_panel=panel)
    kind = Annotated[kind | None if default is None else kind, shown]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


# Options that most runs need, in the order of `--help`, which lists them first; `serve` adds two.
MOST_USED = ("workers", "sync_every", "mode", "max_rounds", "save_dir", "fresh", "bind", "keys")
MOST_USED_PANEL = "Most used"


def as_declared(name: str, default: Any) -> Parameter:
    """An option with its declared help, in its own panel or that of the most used options."""
    option = DECLARED[name]
    text = f"{option.help} Default: {option.if_none}." if option.if_none else option.help
    panel = MOST_USED_PANEL if name in MOST_USED else option.panel
    return parameter(name, default, text, panel)


def all_declared(defaults: Mapping[str, Any], without: Container[str] = ()) -> Iterator[Parameter]:
    """All options of the configuration, the most used first, and `--preset`."""
    for name in dict.fromkeys((*MOST_USED, *DECLARED)):
        if name not in without:
            yield as_declared(name, defaults[name])
    shown = typer.Option(
        metavar="NAME",
        help=f"Named group of options: {', '.join(PRESETS)}. Explicit options override those of the "
        "preset; the start prints both.",
        rich_help_panel=RUN.title,
    )
    kind = Annotated[str | None, shown]
    yield Parameter("preset", Parameter.KEYWORD_ONLY, default=None, annotation=kind)
