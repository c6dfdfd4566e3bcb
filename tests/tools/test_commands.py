"""Every command: as a program of its own and behind `diloco`, its version, its help, its completion."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from diloco_tools.command import SUBCOMMANDS, load
from kit.paths import ROOT

SCRIPTS = dict(
    re.findall(r'^(diloco\S*) = "(\S+:app)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
)


def script(name: str, *words: str, **environment: str) -> Result:
    """What a program of this name would print."""
    module, _, app = SCRIPTS[name].partition(":")
    found = getattr(import_module(module), app)
    return CliRunner().invoke(found, list(words), prog_name=name, env=environment)


def paths(name: str) -> Iterator[tuple[str, ...]]:
    """The words behind `diloco` of each command within a subcommand."""

    def within(words: tuple[str, ...], command: Any) -> Iterator[tuple[str, ...]]:
        yield words
        for each, inner in getattr(command, "commands", {}).items():
            yield from within((*words, each), inner)

    return within((name,), load(name))


def test_diloco_has_every_program_of_a_user() -> None:
    behind = {":".join(place.split(":")[:2]) for place, _ in SUBCOMMANDS.values()}
    assert behind == {SCRIPTS[name] for name in SCRIPTS.keys() - {"diloco"}}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_program_prints_its_version(name: str) -> None:
    done = script(name, "--version")
    assert (done.exit_code, done.output) == (0, f"diloco-broker {version('diloco-broker')}\n")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_prints_its_version_behind_diloco(name: str) -> None:
    for words in paths(name):
        done = script("diloco", *words, "--version")
        assert (done.exit_code, done.output) == (0, f"diloco-broker {version('diloco-broker')}\n")


@pytest.mark.parametrize("name", SUBCOMMANDS)
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal_and_names_the_command(name: str, columns: int) -> None:
    for words in paths(name):
        lines = script("diloco", *words, "--help", COLUMNS=str(columns)).output.splitlines()
        assert " ".join(lines[0].split()).startswith(f"Usage: diloco {' '.join(words)} [OPTIONS]")
        assert max(map(len, lines)) <= columns
        assert not re.search(r"<\w+>|\[\[", "\n".join(lines)), "types of Python are no help"


@pytest.mark.parametrize(
    ("name", "words"),
    [("diloco", ("broker", "serve")), ("diloco-broker", ("serve",)), ("diloco-top", ())],
)
def test_usage_is_in_the_spelling_of_the_caller(name: str, words: tuple[str, ...]) -> None:
    done = script(name, *words, "--no-such-option")
    assert done.exit_code == 2
    assert f"Usage: {' '.join((name, *words))} [OPTIONS]" in done.output


def test_help_of_serve_begins_with_the_ten_options_that_matter_most() -> None:
    text = script("diloco-broker", "serve", "--help").output
    panels = re.findall(r"^(\w[\w ]+):\n((?: .*\n)+)", text, re.MULTILINE)
    titles = [title for title, _ in panels]
    assert titles[0] == "Most used" and titles[-1] == "General"
    assert len(re.findall(r"^  --", panels[0][1], re.MULTILINE)) == 10
    assert len(titles) > 8, "the rest is under headings"


@pytest.mark.parametrize(
    ("words", "meant"), [(("brokr",), "broker"), (("broker", "serv"), "serve"), (("tip",), "top")]
)
def test_misspelt_command_is_answered_with_the_nearest(words: tuple[str, ...], meant: str) -> None:
    done = script("diloco", *words)
    assert done.exit_code == 2 and f"Did you mean '{meant}'" in done.output


def test_help_loads_only_what_it_shows() -> None:
    code = (
        "import sys\nfrom diloco_tools.command import app\n"
        "for words in ([], ['top'], ['export-metrics'], ['plan']):\n"
        "    app([*words, '--help'], standalone_mode=False)\n"
        "    print(sorted({'torch', 'numpy', 'textual', 'diloco_broker'} & set(sys.modules)))\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    loaded = [line for line in said.splitlines() if line.startswith("[")]
    assert loaded == ["[]"] * 3 + ["['diloco_broker']"], "a plan reads the broker's options"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("diloco do", {"doctor"}),
        ("diloco broker se", {"serve", "set"}),
        ("diloco top --on", {"--once"}),
        ("diloco-broker se", {"serve", "set"}),
        ("diloco-top --on", {"--once"}),
        ("diloco-worker d", {"doctor"}),
        *((f"{name} --he", {"--help"}) for name in SCRIPTS),
    ],
)
def test_shell_completes_commands_and_options(words: str, expected: set[str]) -> None:
    name, *rest = words.split()
    asked = {
        f"_{name.upper().replace('-', '_')}_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(rest)),
    }
    assert expected <= set(script(name, **asked).stdout.split())
