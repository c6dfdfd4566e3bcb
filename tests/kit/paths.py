"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tests" / "kit"
LAB = ROOT / "tools" / "lab"
PACKAGES = {
    "diloco_protocol": ROOT / "protocol" / "diloco_protocol",
    "diloco_broker": ROOT / "broker" / "diloco_broker",
    "diloco_worker": ROOT / "worker" / "diloco_worker",
    "diloco_tools": ROOT / "tools" / "diloco_tools",
    "diloco_lab": LAB / "diloco_lab",
}


def modules() -> dict[str, Path]:
    """All modules of ours, by dotted name; a package by its own."""
    found = {}
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
