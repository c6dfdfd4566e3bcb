"""What the import contracts in pyproject.toml (`make lint`) cannot say of the structure."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

from kit.paths import MODULES, PACKAGES, ROOT

CORES = (
    "diloco_broker.core",
    "diloco_worker.session",
    "diloco_broker.standby.core",
    "diloco_broker.standby.fence",
    "diloco_broker.standby.lease",
)
# Importing these loads none of the packages below, also not by way of the packages that they are in: the
# contracts do not follow those.
PURE = (*CORES, "diloco_protocol.messages", "diloco_broker.pure", "diloco_worker.pure")
HEAVY = {"asyncio", "numpy", "torch", "zmq"}
# Built-in functions that no core calls; the contracts name the modules.
UNTOUCHED = {"open", "__import__", "exec", "eval", "print", "input"}
# What may write the broker's state: its core, with the hub's end of the lease.
OF_THE_CORE = ("diloco_broker.core.", "diloco_broker.standby.fence")
# Of the broker's state, the one module of `core` that changes each of these: whoever looks for what may
# have happened to it need not look anywhere else.
CHANGED_BY = {
    "is_void": "rounds.uploads",  # of an upload: what still comes of it is ignored
    "window": "rounds.uploads",
    "deferred": "members.members",  # pushes whose round is not open yet
    "last_seen": "members.members",
    "disconnected_at": "members.members",
    "contested_at": "members.members",
    "beat_at": "members.members",
    "moved_at": "members.members",
    "is_stalled": "members.members",
    "told_at": "members.members",
    "current": "versions.fragment",
    "in_progress": "versions.store",
    "old": "versions.store",
    "tags": "versions.fragment",
    "expected": "rounds.round",  # workers that an open round waits for
    "start": "members.seeding",
    "seeding": "members.seeding",  # the first parameters, in transfer
    "manifest": "members.run_model",
    "came_as": "members.run_model",
    "checkpoint": "members.run_model",
    "lots": "data.data_sets",  # units of the work queue that count with pushes under way
    "free": "data.data_sets",
    "owners": "members.shards",
    "absent": "members.shards",
    "unreleased": "rounds.sequence",
    "is_asked": "versions.checkpoints",  # a checkpoint
    "retry_at": "versions.checkpoints",
    "to_probe": "members.liveness",
    "departed": "members.admission",
    "config": "operations.settings",
    "paused_at": "operations.commands",
    "stopping": "operations.ending",
    "is_over": "operations.ending",
}
CHANGES = {"add", "append", "clear", "discard", "extend", "pop", "popitem", "remove", "update"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES)
    inner = {module for module in graph.modules if "." in module}
    TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) & inner for module in inner}
    ).prepare()  # it raises CycleError, which names the circle


def test_pure_modules_load_no_tensors_or_sockets() -> None:
    code = f"import sys, {', '.join(PURE)}; print(*{HEAVY} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_help_of_a_command_loads_no_torch() -> None:
    """It takes seconds, and so would the shell's completion."""
    ours = set(
        re.findall(r'^diloco[\w-]* = "([\w.]+):app"', (ROOT / "pyproject.toml").read_text(), re.M)
    )
    modules = ", ".join(sorted(ours))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


def test_a_core_opens_no_file_and_loads_no_code() -> None:
    for module, path in MODULES.items():
        if module.startswith(CORES):
            nodes = ast.walk(ast.parse(path.read_text()))
            named = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert not named & UNTOUCHED, module


def changed(module: str) -> set[str]:
    """Attributes that a module assigns, deletes from, or calls a method on that changes them."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        for place in _changed(node):
            inner = place
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            if isinstance(inner, ast.Attribute):
                found.add(inner.attr)
    return found


def test_state_is_changed_in_one_place_for_each_thing() -> None:
    found: dict[str, list[str]] = {name: [] for name in CHANGED_BY}
    for module in MODULES:
        if module.startswith(OF_THE_CORE):
            for name in changed(module) & CHANGED_BY.keys():
                found[name].append(module.removeprefix("diloco_broker.core."))
    assert found == {name: [module] for name, module in CHANGED_BY.items()}


def test_nothing_is_ever_unpickled() -> None:
    for module, path in MODULES.items():
        assert "weights_only=False" not in path.read_text(), module


def test_every_package_is_typed() -> None:
    for folder in PACKAGES.values():
        assert (folder / "py.typed").exists()


def test_only_the_core_writes_its_state() -> None:
    """Every change from outside is an event; otherwise a tape would miss it."""
    broker = [name for name in MODULES if name.startswith("diloco_broker.")]
    outside = [name for name in broker if not name.startswith(OF_THE_CORE)]
    sources = {name: MODULES[name].read_text("utf-8") for name in outside}
    assert not {name: found for name in sources if (found := written_in_state(sources[name]))}


@pytest.mark.parametrize(
    "source",
    [
        "self.core.state.config = 3",
        "state = self.core.state; state.round.number += 1",
        "a, members = 1, self.site.state.members; members.clear()",
        "del core.state.orders['a']",
        "core.state.model.known['a'], b = 1, 2",
        "state: RunState; self._state.term += 1",
        "core.state.members.named('a').workers = 3",
        "for member in core.state.members: member.workers = 3",
    ],
)
def test_writes_of_the_state_are_found(source: str) -> None:
    assert written_in_state(source)


def written_in_state(source: str) -> list[str]:
    """The statements that change something reached by way of a core's `state`."""
    nodes = list(ast.walk(ast.parse(source)))
    # Names of the state, or of something in it.
    aliases = {"state"} if "RunState" in source else set()
    for node in nodes:
        for name, value in _assigned(node):
            if isinstance(name, ast.Name) and value and _reaches_state(value, aliases):
                aliases.add(name.id)
    return [
        ast.unparse(node)
        for node in nodes
        for place in _changed(node)
        if _reaches_state(getattr(place, "value", place), aliases)  # not the state itself
    ]


def _changed(node: ast.AST) -> list[ast.expr]:
    """Whatever a statement assigns to, deletes, or calls a method on that changes it; no plain names."""
    if isinstance(node, ast.Delete):
        return node.targets
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr in CHANGES else []
    return [t for t, _ in _assigned(node) if isinstance(t, ast.Attribute | ast.Subscript)]


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """Targets of an assignment, with what each gets, as far as that stands there."""
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [(node.target, node.value if isinstance(node, ast.AnnAssign) else None)]
    if isinstance(node, ast.For | ast.comprehension):
        return [(node.target, node.iter)]
    if isinstance(node, ast.NamedExpr):
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    found: list[tuple[ast.expr, ast.expr | None]] = []
    for target in node.targets:
        if not isinstance(target, ast.Tuple):
            found.append((target, node.value))
        elif isinstance(node.value, ast.Tuple):
            found += zip(target.elts, node.value.elts, strict=False)
        else:
            found += [(each, None) for each in target.elts]
    return found


def _reaches_state(node: ast.expr, aliases: set[str]) -> bool:
    """Is this something of a core's state: `core.state.round`, `state.orders[name]`?"""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute):
            is_own = node.attr == "_state" and "state" in aliases
            if is_own or (node.attr == "state" and _is_core(node.value)):
                return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in aliases


def _is_core(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_") in {"core", "site", "before"}
