"""Pages: commands have their options, pieces of Python run, links and named files and tests are there.

An indented block of a page is commands, one to a line; a fence has a language. The front
page has a first run, which is trained as it stands; what other commands do is tested beside them.
"""

import ast
import builtins
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco_tools.command import SUBCOMMANDS, load
from kit.paths import ROOT
from kit.process_kit import Processes

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for name in ("docs", ".github") for page in (ROOT / name).rglob("*.md")),
    ]
)
PROJECT = (ROOT / "pyproject.toml").read_text()
# Commands that this project installs, by name: module and the name of the app in it.
OURS = dict(re.findall(r'^(diloco[\w-]*) = "([\w.]+:\w+)"$', PROJECT, re.MULTILINE))
EXTRAS = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# What pages use of the reader's machine: commands of others.
OTHERS = {
    *("chown", "cp", "curl", "docker", "echo", "export", "journalctl", "kubectl", "mkdir"),
    *("printf", "scp", "sh", "ssh", "systemctl", "useradd"),
}
# `diloco-top --once`, `make demo`: in the middle of a sentence.
SPAN = re.compile(r"`((?:[A-Z]+=\S+ )?(?:diloco(?:-[a-z]+)?|make|python -m)(?: [^`]*)?)`")
# Python that is complete and yet not run, by a line of it.
PYTHON_NOT_RUN = {"broker.run()": "it serves until it is stopped"}
OPTIONAL = {"diloco_worker.transformers", "diloco_worker.lightning", "diloco_tools.ray"}

# What the script of the front page leaves to its reader.
HEAD_OF_A_SCRIPT = """
from types import SimpleNamespace
import torch

class Model(torch.nn.Linear):
    def forward(self, batch):
        return SimpleNamespace(loss=super().forward(batch).pow(2).mean())

model = Model(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(1600, 8)  # of which each of two workers has a half, 100 batches
"""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def lines_of_blocks(text: str) -> Iterator[str]:
    """Each line of an indented block, with what a backslash continues, without its comment."""
    in_fence, before, command = False, "", ""
    for line in text.splitlines():
        in_fence ^= line.startswith("```")
        is_code = line.startswith("    ") and not in_fence
        # Behind a line of text an indented line continues that.
        if is_code and (not before.strip() or before.startswith("    ")):
            command += re.sub(r"\s+#\s.*$", "", line).strip()
            if not command.endswith("\\"):
                yield command
                command = ""
            command = command.removesuffix("\\")
        before = line if is_code or not line.startswith("    ") else "text"


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each command in a line of a shell, without variables before them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in {"&&", "|", ";"}:
            if words or not re.match(r"[A-Z_]+=", word):
                words.append(word.rpartition("/bin/")[2] if not words else word)
        elif words:
            yield words
            words = []


def commands(page: Path) -> list[list[str]]:
    return [words for line in lines_of_blocks(page.read_text()) for words in commands_of(line)]


def spans(page: Path) -> list[list[str]]:
    """Commands of ours within sentences and tables, which may have placeholders and gaps."""
    text = re.sub(r"^```.*?^```|^ {4}.*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = (re.sub(r"[\[\]\n]", " ", each) for each in SPAN.findall(text))
    return [words for line in found for words in commands_of(line)]


@dataclass(frozen=True)
class Python:
    """A fenced block of Python."""

    page: str
    line: int
    text: str


def python_of(page: Path) -> Iterator[Python]:
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if found[1] == "python":
            yield Python(name_of(page), text.count("\n", 0, found.start()) + 1, found[2])


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """A command of ours, and the words for it."""
    if words[0] == "diloco" and len(words) > 1 and words[1] in SUBCOMMANDS:
        return load(words[1]), words[2:]
    module, _, name = OURS[words[0]].partition(":")
    return typer.main.get_command(getattr(import_module(module), name)), words[1:]


def parse(command: Any, words: list[str]) -> None:
    """Take these words as the command line does, and carry nothing out."""
    context: Any = command.make_context("page", words)
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not rest and command.invoke_without_command:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def options_of(command: Any) -> set[str]:
    """Its options, and those of all commands within it."""
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


def check_others(words: list[str]) -> None:
    """What is no command of ours: a target, a module or an extra that there is, or a known program."""
    match words:
        case ["make", *targets]:
            assert {each for each in targets if "=" not in each} <= TARGETS, words
        case ["python" | "python3", "-m", module, *rest]:
            assert find_spec(module), words
            assert all((ROOT / each).exists() for each in rest if each.startswith("tests")), words
        case ["pip", "install", *rest]:
            asked = set(re.findall(r"(?<=[\[,])\w+(?=[\],])", " ".join(rest)))
            assert asked <= set(re.findall(r"^(\w+) = \[", EXTRAS, re.MULTILINE)), words
        case [program, *_]:
            assert program in OTHERS | {"python"}, words


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_of_the_page_are_understood(page: Path) -> None:
    for words in commands(page):
        if words[0] in OURS:
            parse(*command_of(words))
        else:
            check_others(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_have_their_options(page: Path) -> None:
    for words in spans(page) if page.name != "CHANGELOG.md" else ():  # which names what is gone
        if words[0] in OURS:
            command, rest = command_of(words)
            own = rest[: rest.index("--")] if "--" in rest else rest
            named = {word.partition("=")[0] for word in own if word.startswith("--")}
            assert named <= options_of(command) | {"--help", "--install-completion"}, words
        else:
            check_others(words)


def free_names(tree: ast.Module) -> set[str]:
    """Names that a piece of Python takes from its reader."""
    loaded: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return loaded - bound


@pytest.mark.parametrize(
    "block",
    [each for page in PAGES for each in python_of(page)],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_python_of_pages_is_python_and_runs_where_it_is_complete(
    block: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = ast.parse(block.text, block.page)
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diloco_")
    ]
    names: dict[str, object] = {}
    for node in ours:
        if node.module not in OPTIONAL:
            exec(compile(ast.Module([node], []), block.page, "exec"), names)
    is_complete = not free_names(tree) and not any(part in block.text for part in PYTHON_NOT_RUN)
    if is_complete and not any(node.module in OPTIONAL for node in ours):
        exec(compile(block.text, block.page, "exec"), names)
        for name, made in list(names.items()):
            if name.startswith("test_") and callable(made):
                made()


@pytest.mark.slow
def test_first_run_of_the_front_page_trains(processes: Processes, tmp_path: Path) -> None:
    page = ROOT / "docs" / "first-run.md"
    script = next(python_of(ROOT / "README.md")).text
    # DILOCO_SERVER has it, as the page says
    script = script.replace(', server="tcp://10.0.0.1:8512"', "")
    (tmp_path / "train.py").write_text(HEAD_OF_A_SCRIPT + script)
    serve = next(each for each in commands(page) if each[:3] == ["diloco", "broker", "serve"])
    assert re.search(r"^    DILOCO_SERVER=\S+ python train\.py", page.read_text(), re.MULTILINE)
    broker, address = processes.serve(*serve[3:])
    workers = [
        processes.run("train.py", DILOCO_SERVER=address, DILOCO_WORKER_ID=name) for name in "ab"
    ]
    broker.says("Round 1 closed")  # 100 steps, and 50 to a round
    assert [worker.ends() for worker in workers] == [0, 0]


# A path of ours in backticks: `broker/diloco_broker/core/machine.py`, `tests/kit`.
NAMED = re.compile(r"`((?:protocol|broker|worker|tools|tests)/[\w/.-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_named_files_are_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    for path in NAMED.findall(text):
        places = (ROOT / path, page.parent / f"{path}.py")  # a test, by its place beside the page
        missing += [path] * (not any(place.exists() for place in places))
    assert not missing


def test_tests_that_pages_name_are_there() -> None:
    modules = list((ROOT / "tests").rglob("*.py"))
    known = {path.stem for path in modules}
    for path in modules:
        known |= set(re.findall(r"def (test_\w+)", path.read_text()))
    named = {
        name for page in PAGES for name in re.findall(r"`(?:\w+/)*(test_\w+)", page.read_text())
    }
    assert named and named <= known
