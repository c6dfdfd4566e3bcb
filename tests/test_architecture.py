"""Who may import whom, by folder and by every path: read from the source, not from memory."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from functools import cache

import pytest

from kit.paths import MODULES, PACKAGES

# Of each package, its storeys from the ground up: a module imports from its own and from those below.
# What is not named belongs to the top. A storey is a folder or a module.
STOREYS: dict[str, list[set[str]]] = {
    "diloco_broker": [
        {"config"},
        {"core.state", "core.events", "core.effects"},
        {"core.rules"},
        {"core"},
        {"relay.commands", "relay.first_model", "relay.report", "relay.terms", "relay.unsettled"},
        {"relay.core", "standby.core"},
        {"tensors"},
        {"storage"},
        {"shell"},
        {"relay"},
        {"standby"},
        {"cli"},
    ],
    "diloco_worker": [{"core", "model"}, {"shell"}, {"training"}],
    "diloco_protocol": [],
    "diloco_tools": [],
    "diloco_lab": [],
}
# Neighbours on one storey that do not know each other.
STRANGERS = [("diloco_worker.core", "diloco_worker.model")]
# What a package may import of ours besides itself; of the broker and the worker, only public names.
ALLOWED = {
    "diloco_protocol": set(),
    "diloco_broker": {"diloco_protocol"},
    "diloco_worker": {"diloco_protocol"},
    "diloco_tools": {"diloco_protocol"},
    "diloco_lab": {"diloco_protocol", "diloco_tools"},
}
# A relay is a broker to its site and a worker to its parent, made of the two cores and their shells: it
# alone imports from these parts of the worker. Nothing of the broker but its command line imports it.
RELAY, OF_THE_WORKER = (
    "diloco_broker.relay",
    (
        "diloco_worker.core",
        "diloco_worker.model",
        "diloco_worker.shell",
    ),
)
# Both cores with what they are driven by, for who simulates a whole run; nothing else imports them.
CORES_FOR_OTHERS = ("diloco_broker.pure", "diloco_worker.pure")
MAY_USE_CORES = ("plan",)
# How a script ends and when it is started again, for the programs that start scripts.
FOR_LAUNCHERS, MAY_LAUNCH = "diloco_worker.launching", ("launch",)
# Measures a part of the broker by itself, which no public name shows.
OF_PARTS = "diloco_lab.bench.roles.tensor_work"
MAY_USE_BOTH = ("demo", "ray")
# A whole run for users' tests: it has a broker, by its public name. Nothing else imports it.
WHOLE_RUN = "diloco_worker.testing"
# What no module of these reaches, by any path: everything there can be run in a test with a fake clock.
NO_SHELL = {
    "torch",
    "numpy",
    "zmq",
    "time",
    "threading",
    "os",
    "asyncio",
    "socket",
    "random",
    "secrets",
    "subprocess",
    "logging",
}
PURE = {
    "diloco_protocol": NO_SHELL,
    "diloco_broker.core": NO_SHELL,
    "diloco_broker.relay.commands": NO_SHELL,
    "diloco_broker.relay.core": NO_SHELL,
    "diloco_broker.standby.core": NO_SHELL,
    "diloco_broker.relay.report": NO_SHELL,
    "diloco_worker.core": NO_SHELL,
    **dict.fromkeys(CORES_FOR_OTHERS, NO_SHELL - {"time", "threading"}),  # what is read has a lock
    # A pool of memory, `diloco_protocol.tensors.tensor_pool`, has a lock.
    "diloco_worker.model": NO_SHELL - {"torch", "numpy", "threading"},
    "diloco_broker.tensors": NO_SHELL - {"torch", "numpy", "threading"},
}
# Modules and built-in functions that no module of these names itself. (The options, which a core reads,
# have paths among their types.)
UNTOUCHED = {"pathlib", "io", "importlib", "open", "__import__", "exec", "eval", "print", "input"}
CORES = (
    "diloco_broker.core",
    "diloco_worker.core",
    "diloco_broker.relay.core",
    "diloco_broker.standby.core",
    "diloco_broker.relay.report",
)
# What is not pure within those, and must not be reached from the rest of them.
NOT_PURE = ("diloco_protocol.clients", "diloco_protocol.tensors")
# What no file of ours ever imports: a file or a message must never run code.
BANNED = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
# Of the broker's state, the one module of `core` that changes each of these: whoever looks for what may
# have happened to it need not look anywhere else.
CHANGED_BY = {
    "is_void": "state.uploads",  # of an upload: what still comes of it is ignored
    "window": "state.uploads",
    "deferred": "state.members",  # pushes whose round is not open yet
    "last_seen": "state.members",
    "disconnected_at": "state.members",
    "contested_at": "state.members",
    "beat_at": "state.members",
    "moved_at": "state.members",
    "is_stalled": "state.members",
    "told_at": "state.members",
    "current": "state.versions.fragment",
    "in_progress": "state.versions.store",
    "old": "state.versions.store",
    "tags": "state.versions.fragment",
    "expected": "state.update",  # workers that an open round waits for
    "donation": "state.model_source",  # the first parameters, on their way in
    "manifest": "state.model_source",
    "came_as": "state.model_source",
    "checkpoint": "state.model_source",
    "is_done": "state.model_source",
    "lots": "state.data_sets",  # units of the work queue that count with pushes under way
    "free": "state.data_sets",
    "owners": "state.shards",
    "absent": "state.shards",
    "unreleased": "rules.rounds",
    "is_asked": "rules.checkpoints",  # a checkpoint
    "retry_at": "rules.checkpoints",
    "to_probe": "rules.liveness",
    "departed": "rules.joining.admission",
    "config": "rules.settings",
    "paused_at": "rules.operator",
    "stopping": "rules.stopping",
    "is_over": "rules.ending",
    "orders": "rules.orders",
}
CHANGES = {"add", "append", "clear", "discard", "extend", "pop", "popitem", "remove", "update"}


def nodes(tree: ast.AST, *, with_types: bool) -> Iterator[ast.AST]:
    """Everything in it, but for what only a type checker reads."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not with_types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield from nodes(child, with_types=with_types)


@cache
def imports(module: str, *, with_types: bool = True) -> frozenset[str]:
    """Dotted names of the modules that a module imports, wherever in it; of others, whole names."""
    found = set()
    for node in nodes(ast.parse(MODULES[module].read_text()), with_types=with_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return frozenset(found)


def loads(module: str) -> frozenset[str]:
    """What is loaded with a module: what it imports, and what its packages and theirs import."""
    found = set(imports(module))
    for name in [module, *found]:
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            if package in MODULES:
                found |= imports(package, with_types=False)
    return frozenset(found)


def way(module: str, to: set[str]) -> list[str]:
    """The shortest way of imports from a module to one of these packages; empty if there is none."""
    ways = deque([[module]])
    seen = {module}
    while ways:
        so_far = ways.popleft()
        for name in sorted(loads(so_far[-1])):
            if name.split(".")[0] in to:
                return [*so_far, name]
            if name in MODULES and name not in seen:
                seen.add(name)
                ways.append([*so_far, name])
    return []


def is_in(module: str, folder: str) -> bool:
    return module == folder or module.startswith(folder + ".")


def storey(module: str) -> int:
    """The deepest named place that a module belongs to."""
    package = module.split(".", maxsplit=1)[0]
    places = [
        (len(place), number)
        for number, storey in enumerate(STOREYS[package])
        for place in storey
        if is_in(module, f"{package}.{place}")
    ]
    return max(places)[1] if places else len(STOREYS[package])


@pytest.mark.parametrize("module", MODULES)
def test_imports_keep_to_the_house(module: str) -> None:
    package = module.split(".", maxsplit=1)[0]
    for name in sorted(imports(module)):
        of = name.split(".")[0]
        if of not in PACKAGES:
            continue
        if of != package:
            is_public = of in ("diloco_broker", "diloco_worker") and name == of
            is_tool = package == "diloco_tools" and module.split(".")[1] in MAY_USE_BOTH
            both = is_tool or package == "diloco_lab" or module == WHOLE_RUN
            of_relay = is_in(module, RELAY) and any(is_in(name, part) for part in OF_THE_WORKER)
            simulates = package == "diloco_tools" and module.split(".")[1] in MAY_USE_CORES
            is_core = simulates and name in CORES_FOR_OTHERS
            launches = package == "diloco_tools" and module.split(".")[1] in MAY_LAUNCH
            of_both = (both and is_public) or is_core or of_relay
            of_both = of_both or (launches and name == FOR_LAUNCHERS)
            may = of in ALLOWED[package] or of_both or module == OF_PARTS
            assert may, f"{module} imports {name}"
        else:
            assert name != WHOLE_RUN, f"{module} imports what is for tests"
            assert name not in CORES_FOR_OTHERS, f"{module} imports what is for others"
        if of == package and module != package:  # a package's own face shows what is above
            assert storey(name) <= storey(module), f"{module} imports {name}, which is above it"
    for one, other in (*STRANGERS, *(pair[::-1] for pair in STRANGERS)):
        if is_in(module, one):
            assert not [n for n in imports(module) if is_in(n, other)], f"{module} knows {other}"


@pytest.mark.parametrize("folder", PURE)
def test_pure_modules_reach_no_clock_socket_or_thread_by_any_path(folder: str) -> None:
    for module in MODULES:
        if is_in(module, folder) and not any(is_in(module, each) for each in NOT_PURE):
            found = way(module, PURE[folder])
            assert not found, " -> ".join(found)


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(CORES)])
def test_a_core_opens_no_file_and_loads_no_code(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    named = {name.split(".")[0] for name in imports(module)}
    named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not named & UNTOUCHED, module


def rounds_of_imports() -> list[set[str]]:
    """Circles: sets of modules that import each other, types included."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(module: str, graph: dict[str, set[str]], into: list[str]) -> None:
        stack = [(module, iter(sorted(graph[module])))]
        seen.add(module)
        while stack:
            at, rest = stack[-1]
            following = next((name for name in rest if name not in seen), None)
            if following is None:
                into.append(at)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(graph[following]))))

    graph = {m: {n for n in imports(m) if n in MODULES and m.count(".")} for m in MODULES}
    for module in graph:
        if module not in seen:
            visit(module, graph, order)
    back: dict[str, set[str]] = {m: set() for m in graph}
    for module, names in graph.items():
        for name in names:
            back[name].add(module)
    seen.clear()
    circles = []
    for module in reversed(order):
        if module not in seen:
            circle: list[str] = []
            visit(module, back, circle)
            circles.append(set(circle))
    return [circle for circle in circles if len(circle) > 1]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert rounds_of_imports() == []


def changed(module: str) -> set[str]:
    """Attributes that a module assigns, deletes from, or calls a method on that changes them."""
    found = set()

    def note(target: ast.AST) -> None:
        if isinstance(target, ast.Tuple):
            for each in target.elts:
                note(each)
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            found.add(target.attr)

    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                for target in targets:
                    note(target)
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                note(target)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in CHANGES:
                note(value)
    return found


def test_state_is_changed_in_one_place_for_each_thing() -> None:
    found: dict[str, list[str]] = {name: [] for name in CHANGED_BY}
    for module in MODULES:
        if is_in(module, "diloco_broker.core"):
            for name in changed(module) & CHANGED_BY.keys():
                found[name].append(module.removeprefix("diloco_broker.core."))
    assert found == {name: [module] for name, module in CHANGED_BY.items()}


def test_nothing_is_ever_unpickled() -> None:
    for module, path in MODULES.items():
        assert not imports(module) & BANNED, module
        assert "weights_only=False" not in path.read_text(), module


@pytest.mark.parametrize("module", MODULES)
def test_modules_have_a_docstring_and_a_name_of_their_own(module: str) -> None:
    text = MODULES[module].read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
    assert module.rsplit(".", maxsplit=1)[-1] not in {
        "utils",
        "helpers",
        "manager",
        "misc",
        "common",
    }


def test_every_package_is_typed() -> None:
    for folder in PACKAGES.values():
        assert (folder / "py.typed").exists()
