"""Who may import whom, and what pure modules never touch: read from the source, not from memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "diloco_protocol": ROOT / "protocol" / "diloco_protocol",
    "diloco_broker": ROOT / "broker" / "diloco_broker",
    "diloco_worker": ROOT / "worker" / "diloco_worker",
    "diloco_tools": ROOT / "tools" / "diloco_tools",
}
ALLOWED = {
    "diloco_protocol": set(),
    "diloco_broker": {"diloco_protocol"},
    "diloco_worker": {"diloco_protocol"},
    "diloco_tools": {"diloco_protocol"},
}
# Folders of diloco_tools that may use the public names of the broker and the worker.
MAY_USE_BOTH = ("demo", "bench", "chaos")
PUBLIC = {"diloco_broker", "diloco_worker"}
PURE = {
    "diloco_broker": {
        "acks", "asynchronous", "bootstrap", "config", "core", "dylu", "events", "feed", "granting",
        "joining", "membership", "providing", "pushing", "round_lines", "rounds", "sequence", "staged",
        "staging", "state", "status_text", "steering", "streaming", "transfer", "work_queue",
    },
    "diloco_worker": {
        "events", "pulls", "pushes", "session", "stillness", "terms", "transfers", "turns",
    },
    "diloco_protocol": {
        "addresses", "chunks", "codecs", "errors", "fragments", "frames", "manifest", "messages",
        "own_split", "packing", "plan_view", "ranges", "version", "__init__",
    },
    "diloco_tools": {
        "dashboard/picture", "estimate", "exporter/catalogue", "exporter/labels", "exporter/metrics",
        "feed", "series", "top/facts", "top/keys", "top/lines", "top/load", "top/notation", "top/panes",
        "top/picture", "top/playing", "top/scene", "top/screen", "top/sentences", "top/table",
        "top/view",
    },
}  # fmt: skip
IMPURE = {"zmq", "time", "threading", "asyncio", "socket", "random", "secrets", "os"}
# What no file of ours ever imports: a file or a message must never run code.
BANNED = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield package, path


def imports(path: Path) -> set[str]:
    """Full dotted names that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize(
    ("package", "path"), list(modules()), ids=lambda v: getattr(v, "name", str(v))
)
def test_imports_keep_to_the_house(package: str, path: Path) -> None:
    ours = {name for name in imports(path) if name.startswith("diloco_")}
    foreign = {name for name in ours if name.split(".")[0] not in ALLOWED[package] | {package}}
    if package == "diloco_tools" and path.parent.name in MAY_USE_BOTH:
        foreign -= PUBLIC
    assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_pure_modules_have_no_clock_socket_or_thread(package: str) -> None:
    for name in PURE[package]:
        path = PACKAGES[package] / f"{name}.py"
        touched = {module.split(".")[0] for module in imports(path)} & IMPURE
        assert not touched, f"{path.relative_to(ROOT)} imports {sorted(touched)}"


def test_nothing_is_ever_unpickled() -> None:
    for _, path in modules():
        assert not imports(path) & BANNED, path
        assert "weights_only=False" not in path.read_text(), path


def test_modules_are_one_idea_long_and_have_a_docstring() -> None:
    for _, path in modules():
        text = path.read_text()
        assert text.count("\n") <= 600, f"{path.relative_to(ROOT)} is two ideas"
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has no docstring"
        assert path.stem not in {"utils", "helpers", "manager", "misc", "common"}, path


def test_every_package_is_typed() -> None:
    for folder in PACKAGES.values():
        assert (folder / "py.typed").exists()
