"""Would this command be understood? Its program, subcommand, options and values, without running it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from kit.page_commands import Command, commands_of
from kit.paths import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
# Commands that this project installs, by name: module and the name of the app in it.
OURS = dict(re.findall(r'^(diloco[\w-]*) = "([\w.]+:\w+)"$', PROJECT, re.MULTILINE))
_EXTRAS = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
EXTRAS = set(re.findall(r"^(\w+) = \[", _EXTRAS, re.M))
MARKERS = set(re.findall(r'^    "(\w+): ', PROJECT, re.MULTILINE))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# What environments of `make` leave when they are there: to `make -n` they are.
STAMPS = (".venv/.ready", ".venv/.book", ".venv/.integrations", ".venv-ray/.ready")


class NotUnderstood(AssertionError):
    """What is wrong with a command, with its place."""


def check(command: Command) -> None:
    """Every word of it is known.

    Raises:
        NotUnderstood: one is not, or nothing here knows the program.
    """
    program, *words = command.words
    try:
        if program in OURS:
            parse(app_of(OURS[program]), program, words)
        elif program == "make":
            _check_make(command, words)
        elif program in ("python", "python3") and words[:1] == ["-m"]:
            _check_module(words[1], words[2:])
        elif Path(program).name == "pip" and words[:1] == ["install"]:
            _check_extras(words[1:])
        else:
            raise NotUnderstood(f"nothing knows {program}")
    except NotUnderstood as error:
        raise NotUnderstood(f"{command}: {error}") from None
    except Exception as error:  # typer brings a click of its own, or has that which is installed
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        raise NotUnderstood(f"{command}: {said()}") from None


def check_names(command: Command) -> None:
    """Of a command in a sentence: there is the program, the subcommand, and each option that it names.

    Raises:
        NotUnderstood: one of them is not there.
    """
    program, *words = command.words
    if program == "make":
        known = TARGETS | {word for word in words if "=" in word}
    elif program in OURS:
        known = _names(typer.main.get_command(app_of(OURS[program])), words)
    elif program == "python" and words[:1] == ["-m"]:
        known = _options_of_module(words[1])
    else:
        raise NotUnderstood(f"{command}: there is no {program}")
    asked = words if program == "make" else [word for word in words if word.startswith("--")]
    own = asked[: asked.index("--")] if "--" in asked else asked
    if unknown := [
        word for word in own if word.partition("=")[0] not in known and word not in known
    ]:
        raise NotUnderstood(f"{command}: {program} knows no {', '.join(unknown)}")


def app_of(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def parse(app: typer.Typer, program: str, words: Sequence[str]) -> None:
    """Take these words as the command line does, and carry nothing out."""
    command: Any = typer.main.get_command(app)
    context: Any = command.make_context(program, list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not rest and command.invoke_without_command:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def _names(command: Any, words: Sequence[str]) -> set[str]:
    """Its options, and those of the subcommand that the words begin with."""
    found = {"--help", "--install-completion", "--show-completion"}
    found |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    subcommands = getattr(command, "commands", {})
    if subcommands and words and re.fullmatch(r"[a-z][a-z-]+", words[0]):
        if words[0] in subcommands:
            return found | _names(subcommands[words[0]], words[1:])
        if not any(each.param_type_name == "argument" for each in command.params):
            raise NotUnderstood(f"there is no command {words[0]}")
    return found


def _check_make(command: Command, words: Sequence[str]) -> None:
    """The target is there, and the commands of ours that it would run are understood."""
    stamps = [part for stamp in STAMPS for part in ("-o", stamp)]
    asked = ["make", "--no-print-directory", "-n", *stamps, *words]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise NotUnderstood(done.stderr.strip())
    for line in done.stdout.splitlines():
        if re.match(r"(PYTHONPATH=\S+ )?\.venv/bin/(python -m|diloco)", line):
            for each in commands_of(command.page, command.line, line):
                check(each)


def _check_module(module: str, words: Sequence[str]) -> None:
    """A module that a page runs by `python -m`: that it is there, and its options."""
    if module == "pytest":
        _check_pytest(words)
    elif module == "venv":
        return
    elif (app := _typer_app(module)) is not None:
        parse(app, module, words)
    else:
        known = _options_of_module(module)
        if unknown := [word for word in words if word.startswith("--") and word not in known]:
            raise NotUnderstood(f"{module} knows no {', '.join(unknown)}")


def _source(module: str) -> Path:
    """The file that `python -m` runs.

    Raises:
        NotUnderstood: there is none.
    """
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise NotUnderstood(f"there is no module {module}")
    return Path(spec.origin)


def _typer_app(module: str) -> typer.Typer | None:
    """What a module gives typer when it is run, if it does."""
    source = _source(module)
    run = re.search(r"^    (?:typer\.run\((\w+)\)|app\()", source.read_text(), re.MULTILINE)
    if run is None:
        return None
    name = f"{module}.__main__" if source.name == "__main__.py" else module
    loaded = importlib.import_module(name)
    if run[1] is None:
        app: typer.Typer = loaded.app
        return app
    made = typer.Typer()
    made.command()(getattr(loaded, run[1]))
    return made


def _options_of_module(module: str) -> set[str]:
    """Every option of a module's source, of argparse or read by hand; of typer, those that it makes."""
    if module == "build":  # no module of ours
        return set()
    if (app := _typer_app(module)) is not None:
        return _names(typer.main.get_command(app), [])
    return set(re.findall(r'"(--[a-z-]+)"', _source(module).read_text()))


def _check_pytest(words: Sequence[str]) -> None:
    values = {"-m": "", "-k": "", **dict(pairwise(words))}
    if unknown := set(re.findall(r"\w+", values["-m"])) - MARKERS - {"not", "and", "or"}:
        raise NotUnderstood(f"there is no marker {unknown}")
    places = [ROOT / word for word in words if word.startswith("tests")]
    if missing := [place for place in places if not place.exists()]:
        raise NotUnderstood(f"{missing} is not there")
    files = [
        path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))
    ]
    if places and not any(f"_{values['-k']}" in path.read_text() for path in files):
        raise NotUnderstood(f"no test there has {values['-k']} in its name")


def _check_extras(words: Sequence[str]) -> None:
    asked = {extra for word in words for extra in re.findall(r"\[([\w,-]+)\]", word)}
    wanted = {name for extra in asked for name in extra.split(",")}
    if wanted - EXTRAS:
        raise NotUnderstood(f"there is no extra {wanted - EXTRAS}")
