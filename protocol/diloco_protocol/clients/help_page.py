"""The layout of `--help` for all commands: headings, two columns, the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 100  # columns
GENERAL = "General"
_GENERAL_OPTIONS = frozenset({"version", "install_completion", "show_completion", "help"})
_COMPLETION = frozenset({"install_completion", "show_completion"})
# Placeholders for the value of an option, by its type, as named by typer or by click.
_VALUES = {"int": "N", "integer": "N", "float": "X", "Path": "PATH", "path": "PATH"}


# Any: contexts and parameters are those of click, or of a copy that newer releases of typer have.
class _Page:
    """A mixin for commands of typer."""

    def __init__(self, *arguments: Any, context_settings: Any = None, **settings: Any) -> None:
        settings["context_settings"] = {"max_content_width": WIDEST} | (context_settings or {})
        super().__init__(*arguments, **settings)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [
            (f"{_name(each)}" if each.required else f"[{_name(each)}]")
            + ("..." if each.nargs == -1 else "")
            for each in self.get_params(ctx)  # type: ignore[attr-defined]
            if each.param_type_name == "argument"
        ]
        if isinstance(self, TyperGroup):
            pieces.append("[COMMAND]" if self.invoke_without_command else "COMMAND [ARGS]...")
        return ["[OPTIONS]", *pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}  # the first
        if isinstance(self, TyperGroup):
            found = (self.get_command(ctx, name) for name in self.list_commands(ctx))
            panels["Commands"] = [
                (each.name or "", _first_sentence(each.help or ""))
                for each in found
                if each is not None and not each.hidden
            ]
        for each in self.get_params(ctx):  # type: ignore[attr-defined]
            is_elsewhere = each.name in _COMPLETION and ctx.parent is not None
            if not (getattr(each, "hidden", False) or is_elsewhere):
                panels.setdefault(_panel(each), []).append((_names(each), _text(each)))
        panels[GENERAL] = panels.pop(GENERAL, [])  # the last
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Command(_Page, TyperCommand):
    """A command with this help page."""


class Group(_Page, TyperGroup):
    """A command with subcommands and this help page."""


def _panel(param: Any) -> str:
    if param.name in _GENERAL_OPTIONS:
        return GENERAL
    is_argument = param.param_type_name == "argument"
    return str(param.rich_help_panel or ("Arguments" if is_argument else "Options"))


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[].")


def _names(param: Any) -> str:
    """The short name, the first long one, its negation, and a placeholder for the value.

    Other long names are aliases and are not shown.
    """
    if param.param_type_name == "argument":
        return _name(param)
    names = [each for each in param.opts if not each.startswith("--")]
    names += [each for each in param.opts if each.startswith("--")][:1]
    text = ", ".join(names) + "".join(f" / {each}" for each in param.secondary_opts)
    return text if param.is_flag else f"{text} {param.metavar or _value(param)}"


def _value(param: Any) -> str:
    described = getattr(param, "type_descriptor", None)
    kind = getattr(param.type, "name", "") if described is None else described.annotation.__name__
    return _VALUES.get(kind.removesuffix(" range"), "TEXT")


def _text(param: Any) -> str:
    return "  ".join(filter(None, (param.help, *_notes(param))))


def _notes(param: Any) -> Iterator[str]:
    default = param.default
    is_told = getattr(param, "show_default", True) and not (default is None or callable(default))
    if isinstance(default, bool):
        default = "on" if default else ""
    if is_told and default != "" and not isinstance(default, tuple | list):
        yield f"[default: {default:g}]" if isinstance(default, float) else f"[default: {default}]"
    if param.envvar:
        yield f"[env: {param.envvar}]"
    if param.required:
        yield "[required]"


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    head, stop, _ = paragraph.partition(". ")
    return head + "." if stop else paragraph
