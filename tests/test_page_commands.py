"""Every command of ours in the pages has the options that it has there, and every piece of Python runs.

The front page's first run is trained as it stands there; what other commands do is tested beside them.
"""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

from kit.page_commands import PAGES, Command, Fence, commands, fences, name_of, spans
from kit.page_options import NotUnderstood, check, check_names
from kit.paths import ROOT
from kit.process_kit import Processes

pytest_plugins = ("kit.process_fixtures",)

# What pages use of the reader's machine: commands of others.
OTHERS = {
    *("chown", "cp", "curl", "docker", "echo", "export", "journalctl", "kubectl", "mkdir"),
    *("printf", "scp", "ssh", "systemctl", "useradd"),
}
# Python that is complete and yet not run, by a line of it.
PYTHON_NOT_RUN = {"broker.run()": "it serves until somebody ends it"}
OPTIONAL = {"diloco_worker.transformers", "diloco_worker.lightning", "diloco_tools.ray"}
WITH_COMMANDS = [page for page in PAGES if commands(page)]
PYTHON = [each for page in PAGES for each in fences(page) if each.language == "python"]

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


def is_of_others(command: Command) -> bool:
    program, *words = command.words
    return program in OTHERS or (program == "python" and words[0] != "-m")


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_of_the_page_are_understood(page: Path) -> None:
    for command in commands(page):
        if not is_of_others(command):
            check(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_have_their_options(page: Path) -> None:
    for command in spans(page) if page.name != "CHANGELOG.md" else ():  # which names what is gone
        check_names(command)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("diloco-broker serve --no-such", "No such option"),
        ("diloco-broker serve --workers two", "two"),
        ("make no-such", "no-such"),
        ("python -m diloco_tools.nothing", "no module"),
        ("python -m pytest tests/nowhere", "not there"),
        ("pip install '.[no-such]'", "extra"),
        ("rm -rf /", "nothing knows rm"),
    ],
)
def test_command_that_cannot_work_is_found(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.page_commands.ROOT", tmp_path)
    (tmp_path / "PAGE.md").write_text(f"# Page\n\n    {text}\n")
    (command,) = commands(tmp_path / "PAGE.md")
    with pytest.raises(NotUnderstood, match=re.escape(fault)):
        check(command)


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


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}:{block.line}")
def test_python_of_pages_is_python_and_runs_where_it_is_complete(
    block: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    page = ROOT / "README.md"
    script = next(each.text for each in fences(page) if each.language == "python")
    # DILOCO_SERVER has it, as the page says
    script = script.replace(', server="tcp://10.0.0.1:8512"', "")
    (tmp_path / "train.py").write_text(HEAD_OF_A_SCRIPT + script)
    serve = next(each for each in commands(page) if each.words[:2] == ("diloco-broker", "serve"))
    train = next(each for each in commands(page) if each.words[0] == "python")
    broker, address = processes.serve(*serve.words[2:])
    assert train.variables[0][0] == "DILOCO_SERVER"
    workers = [
        processes.run(str(tmp_path / train.words[1]), DILOCO_SERVER=address, DILOCO_WORKER_ID=name)
        for name in "ab"
    ]
    broker.says("Round 1 closed")  # 100 steps, and 50 to a round
    assert [worker.ends() for worker in workers] == [0, 0]
