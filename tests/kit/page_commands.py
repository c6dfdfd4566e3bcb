"""The commands and the Python that the pages show, as they stand there.

An indented block of a page is commands, one to a line; a fence has a language. Nothing here runs any.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_tools.command import SUBCOMMANDS
from kit.paths import ROOT

FOLDERS = ("protocol", "broker", "worker", "tools", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
# Words that a shell takes for itself, between two commands of a line.
BETWEEN = {"&&", "|", ";"}
# The programs of this project, by the app of each.
PROGRAMS = {
    app: name
    for name, app in re.findall(
        r'^(diloco\S*) = "(\S+:app)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
# `diloco-top --once`, `make demo`: in the middle of a sentence.
SPAN = re.compile(r"`((?:[A-Z]+=\S+ )?(?:diloco(?:-[a-z]+)?|make|python -m)(?: [^`]*)?)`")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: from the root of the repository.
        line: of the page, from 1; that of its first word.
        text: as a shell reads it, without the comment behind it.
        words: of it, without variables in front; `.venv/bin/` is left out, and no `~` or `$` is read.
        variables: what stands in front of it: `DILOCO_SERVER=... python train.py`.
    """

    page: str
    line: int
    text: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page; `line` is that of its first fence."""

    page: str
    line: int
    language: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> Iterator[Fence]:
    found: Fence | None = None
    for number, line in enumerate(page.read_text().splitlines(keepends=True), 1):
        if line.startswith("```"):
            if found is None:
                found = Fence(name_of(page), number, line[3:].strip(), "")
            else:
                yield found
                found = None
        elif found is not None:
            found = Fence(found.page, found.line, found.language, found.text + line)
    assert found is None, f"{name_of(page)}:{found and found.line}: this fence has no end"


def commands(page: Path) -> list[Command]:
    """The commands of its indented blocks, in their order; several of one line apart."""
    found: list[Command] = []
    for number, text in _lines(page):
        found += commands_of(name_of(page), number, text)
    return found


def commands_of(page: str, line: int, text: str) -> Iterator[Command]:
    """Those of one line of a shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    part: list[str] = []
    for word in [*lexer, ";"]:
        if word not in BETWEEN:
            part.append(word)
        elif part:
            variables = []
            while part and ASSIGNMENT.match(part[0]):
                name, _, value = part.pop(0).partition("=")
                variables.append((name, value))
            words = (part[0].removeprefix(".venv/bin/"), *part[1:]) if part else ()
            yield Command(page, line, text, by_own_name(words), tuple(variables))
            part = []


def by_own_name(words: tuple[str, ...]) -> tuple[str, ...]:
    """`diloco broker serve` as `diloco-broker serve`: the words of the program behind the subcommand."""
    if words[:1] != ("diloco",) or not words[1:] or words[1] not in SUBCOMMANDS:
        return words
    module, app, *within = SUBCOMMANDS[words[1]][0].split(":")
    return (PROGRAMS[f"{module}:{app}"], *within, *words[2:])


def spans(page: Path) -> Iterator[Command]:
    """Commands of ours within its sentences and tables. They may have placeholders and gaps."""
    text = re.sub(
        r"^```.*?^```|^ {4}.*?$", _blank, page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    for found in SPAN.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield from commands_of(name_of(page), line, re.sub(r"[\[\]\n]", " ", found[1]))


def _blank(found: re.Match[str]) -> str:
    """Nothing in its place, on as many lines."""
    return "\n" * found[0].count("\n")


def _lines(page: Path) -> Iterator[tuple[int, str]]:
    """Each line of an indented block, with what a backslash continues, without its comment."""
    in_fence, before, at, text = False, "", 0, ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_fence ^= line.startswith("```")
        is_code = line.startswith("    ") and not in_fence
        # Behind a line of text an indented line continues that.
        if is_code and (not before.strip() or before.startswith("    ")):
            at = at or number
            text += re.sub(r"\s+#\s.*$", "", line).strip()
            if text.endswith("\\"):
                text = text[:-1]
            else:
                yield at, text
                at, text = 0, ""
        before = line if is_code or not line.startswith("    ") else "text"
    assert not text, f"{name_of(page)}:{at}: the last line of this command is missing"
