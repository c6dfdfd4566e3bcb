"""Every command and every piece of Python in the pages does what it is there for.

A command of a page is run in a folder of its own, with brokers on free ports (`kit.page_place`). What
cannot be run here stands in NOT_RUN with the reason and, where there is one, the test that runs it; its
options are checked all the same. A command that is in neither fails.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.page_commands import PAGES, Command, Fence, commands, fences, name_of, spans
from kit.page_options import NotUnderstood, check, check_names
from kit.page_place import Place
from kit.paths import ROOT
from kit.process_kit import Processes

pytest_plugins = ("kit.process_fixtures",)


@dataclass(frozen=True)
class NotRun:
    """Commands that begin like this are not run here.

    Attributes:
        begins: what they begin with, without variables.
        why: what they would need.
        by: the test that runs them, or what they stand for, by file and perhaps name.
        is_ours: their options can be checked.
    """

    begins: str
    why: str
    by: str = ""
    is_ours: bool = True


NOT_RUN = (
    NotRun("make ", "minutes to hours, or it is this suite; .ci/run runs most of them"),
    NotRun("python -m pytest", "it is this suite"),
    NotRun("python -m simulation", "minutes", "tests/simulation/test_simulation.py"),
    NotRun("python -m diloco_lab.chaos", "the logs of a drill", "tests/lab/test_chaos_drill.py"),
    NotRun(
        "diloco-plan",
        "it searches: up to a minute on a busy machine",
        "tests/tools/plan/test_command.py::test_table_fits_80_columns_and_names_what_was_asked",
    ),
    NotRun(
        "python -m diloco_lab.evidence page",
        "it reads what is committed",
        "tests/lab/evidence/test_page.py::test_page_is_what_the_program_writes_from_the_committed_results",
    ),
    NotRun(
        "python -m diloco_lab.evidence",
        "minutes to hours",
        "tests/lab/evidence/test_claims.py::test_killed_command_leaves_no_process_behind",
    ),
    NotRun("python -m diloco_lab.network lan", "minutes, as root", "tests/lab/network/test_lan.py"),
    NotRun(
        "python -m diloco_lab.network sites", "minutes, as root", "tests/lab/network/test_sites.py"
    ),
    NotRun("python -m diloco_lab.bench", "minutes to half an hour", "tests/lab/test_bench.py"),
    NotRun("diloco-top --json --follow", "it has no end", "tests/tools/test_top_follow.py"),
    NotRun(
        "diloco-launch local",
        "a broker and two workers",
        "tests/tools/test_launch_local.py::test_workers_of_a_script_train_one_model",
    ),
    NotRun("diloco-launch slurm status", "Slurm", "tests/engines/test_slurm.py"),
    NotRun("diloco-launch slurm stop", "Slurm", "tests/engines/test_slurm.py"),
    NotRun("pip install", "minutes, and a network", "tests/whole_runs/test_fresh_install.py"),
    NotRun("/opt/diloco/bin/pip install", "the same", "tests/whole_runs/test_fresh_install.py"),
    NotRun("python3 -m venv", "the same", "tests/whole_runs/test_fresh_install.py"),
    NotRun(
        "python train.py",
        "the reader's own script",
        "tests/test_page_commands.py::test_first_run_of_the_front_page_trains",
        is_ours=False,
    ),
    NotRun("ssh ", "another machine", is_ours=False),
    NotRun("kubectl ", "a cluster", "tests/tools/test_launch_kubernetes.py", is_ours=False),
    NotRun("docker ", "Docker", "tests/tools/test_services.py", is_ours=False),
    NotRun("systemctl ", "systemd as root", "tests/tools/test_services.py", is_ours=False),
    NotRun("journalctl ", "systemd", is_ours=False),
    NotRun("useradd ", "root: it would change this machine", is_ours=False),
    NotRun("chown ", "root, and a user that useradd made", is_ours=False),
)
# Python that is complete and yet not run, by a line of it.
PYTHON_NOT_RUN = {"broker.run()": "it serves until somebody ends it"}
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


@pytest.fixture
def place(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    for name in ("DILOCO_SERVER", "DILOCO_FEED", "DILOCO_KEYS"):
        monkeypatch.delenv(name, raising=False)
    made = Place(tmp_path, processes)
    yield made
    made.close()


def why_not_run(command: Command) -> NotRun | None:
    text = " ".join(command.words) + " "
    return next((each for each in NOT_RUN if text.startswith(each.begins)), None)


@pytest.mark.timeout(300)  # on a busy machine each process of them takes long to begin
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_of_the_page_run(page: Path, place: Place) -> None:
    for command in commands(page):
        reason = why_not_run(command)
        if reason is None:
            place.run(command)
        elif reason.is_ours:
            check(command)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_have_their_options(page: Path) -> None:
    for command in spans(page) if page.name != "CHANGELOG.md" else ():  # which names what is gone
        check_names(command)


@pytest.mark.parametrize("reason", NOT_RUN, ids=lambda reason: str(reason.begins).strip())
def test_reason_is_needed_and_names_what_there_is(reason: NotRun) -> None:
    mine = [each for page in PAGES for each in commands(page) if why_not_run(each) is reason]
    assert mine, "no page has such a command any more"
    path, _, name = reason.by.partition("::")
    assert not path or f"def {name}" in (ROOT / path).read_text()


def test_blocks_of_pages_say_what_they_are() -> None:
    """What is indented is commands, so all else has a fence and its language."""
    assert not [each for page in PAGES for each in fences(page) if not each.language]
    assert {"text", "python"} <= {each.language for page in PAGES for each in fences(page)}


def written(folder: Path, text: str) -> list[Command]:
    page = folder / "tests" / "PAGE.md"
    page.parent.mkdir()
    page.write_text(text)
    return commands(page)


def test_commands_are_read_as_a_shell_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.page_commands.ROOT", tmp_path)
    text = (
        "# Page\n\n    A=b .venv/bin/diloco-top 'x y'  # look\n    make a && make b | cat\n\n"
        "```text\n\n    diloco-broker of a picture\n```\n\nrun\n    no command\n\n"
        "    diloco-broker \\\n      serve\n"
    )
    found = written(tmp_path, text)
    assert [each.words for each in found] == [
        ("diloco-top", "x y"),
        ("make", "a"),
        ("make", "b"),
        ("cat",),
        ("diloco-broker", "serve"),
    ]
    assert found[0].variables == (("A", "b"),)
    assert [each.line for each in found] == [3, 4, 4, 4, 14]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("diloco-broker serve --no-such", "No such option"),
        ("diloco-broker serve --workers two", "two"),
        ("python -m diloco_lab.bench rounds", "rounds"),
        ("make no-such", "no-such"),
        ("python -m diloco_tools.nothing", "no module"),
        ("python -m simulation.digests --no-such", "knows no --no-such"),
        ("python -m pytest tests/nowhere", "not there"),
        ("pip install '.[no-such]'", "extra"),
        ("rm -rf /", "nothing knows rm"),
    ],
)
def test_command_that_cannot_work_is_found(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kit.page_commands.ROOT", tmp_path)
    (command,) = written(tmp_path, f"# Page\n\n    {text}\n")
    with pytest.raises(NotUnderstood, match=re.escape(fault)):
        check(command)


def test_command_that_nothing_runs_fails(place: Place) -> None:
    with pytest.raises(AssertionError, match="nothing here runs forget"):
        place.run(Command("x.md", 1, "forget it", ("forget", "it")))


def test_command_that_fails_is_found(place: Place) -> None:
    words = ("diloco-broker", "serve", "--quorum", "3", "--workers", "2")
    with pytest.raises(AssertionError, match="exit code 2"):
        place.run(Command("x.md", 1, " ".join(words), words))


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
    block: Fence, place: Place
) -> None:
    tree = ast.parse(block.text, block.page)
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diloco_")
    ]
    needs = {"diloco_worker.transformers", "diloco_worker.lightning", "diloco_tools.ray"}
    names: dict[str, object] = {}
    for node in ours:
        if node.module not in needs:
            exec(compile(ast.Module([node], []), block.page, "exec"), names)
    is_complete = not free_names(tree) and not any(part in block.text for part in PYTHON_NOT_RUN)
    if is_complete and not any(node.module in needs for node in ours):
        code = compile(block.text, block.page, "exec")
        exec(code, names)
        for name, made in list(names.items()):
            if name.startswith("test_") and callable(made):
                made()


def test_some_python_of_the_pages_is_complete() -> None:
    complete = [each.page for each in PYTHON if not free_names(ast.parse(each.text))]
    assert {"CONCEPTS.md", "broker/README.md", "worker/TESTING.md"} <= set(complete)
    assert all(any(part in each.text for each in PYTHON) for part in PYTHON_NOT_RUN)


@pytest.mark.slow
def test_first_run_of_the_front_page_trains(processes: Processes, place: Place) -> None:
    page = ROOT / "README.md"
    script = next(each.text for each in fences(page) if each.language == "python")
    script = script.replace(
        ', server="tcp://10.0.0.1:8512"', ""
    )  # DILOCO_SERVER has it, as the page says
    (place.folder / "train.py").write_text(HEAD_OF_A_SCRIPT + script)
    serve = next(each for each in commands(page) if each.words[:2] == ("diloco-broker", "serve"))
    train = next(each for each in commands(page) if each.words[0] == "python")
    broker, address = processes.serve(*serve.words[2:])
    assert train.variables[0][0] == "DILOCO_SERVER"
    workers = [
        processes.run(
            str(place.folder / train.words[1]), DILOCO_SERVER=address, DILOCO_WORKER_ID=name
        )
        for name in "ab"
    ]
    broker.says("Round 1 closed")  # 100 steps, and 50 to a round
    assert [worker.ends() for worker in workers] == [0, 0]
