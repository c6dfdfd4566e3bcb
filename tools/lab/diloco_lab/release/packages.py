"""The wheel and the source archive of the last commit, made twice: they must be equal, byte by byte.

Each time in another folder, at another time and with another umask, of what git has of the commit
and nothing else. The date in them is that of the commit (SOURCE_DATE_EPOCH). Who has the same commit and
the same hatchling, whose version stands in the wheel, can make the same files again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from diloco_protocol.errors import UsageError

UMASKS = (0o022, 0o077)


def make(repository: Path, to: Path) -> dict[str, str]:
    """Put the files into this folder; returns the SHA-256 of each, by name.

    Raises:
        UsageError: they differ, or cannot be made.
    """
    epoch = _run(["git", "log", "-1", "--format=%ct"], repository).decode().strip()
    commit = _run(["git", "archive", "HEAD"], repository)
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for number, umask in enumerate(UMASKS):
            place = Path(folder, *["deeper"] * number, "source")
            made.append(_build(commit, place, epoch, umask))
        one, other = ({each.name: _digest(each) for each in files} for files in made)
        different = sorted(name for name in one | other if one.get(name) != other.get(name))
        if different:
            raise UsageError(f"Made twice, these differ: {', '.join(different)}.")
        to.mkdir(parents=True, exist_ok=True)
        for file in made[0]:
            shutil.copyfile(file, to / file.name)
    return one


def _build(commit: bytes, place: Path, epoch: str, umask: int) -> list[Path]:
    """The files that `python -m build` makes of these sources."""
    before = os.umask(umask)
    try:
        place.mkdir(parents=True)
        (place.parent / "commit.tar").write_bytes(commit)
        # As if checked out now, with the modes that the umask leaves.
        _run(["tar", "-xmf", "../commit.tar", "--no-same-permissions"], place)
        # Not isolated: it takes the hatchling that is installed, and no network.
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "../made", "."]
        _run(command, place, os.environ | {"SOURCE_DATE_EPOCH": epoch})
    finally:
        os.umask(before)
    return sorted((place.parent / "made").iterdir())


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> bytes:
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, timeout=300, check=False
    )
    if ended.returncode:
        said = (ended.stderr or ended.stdout).decode(errors="replace").strip()[-1000:]
        raise UsageError(f"`{' '.join(command[:4])}` failed: {said}")
    return ended.stdout


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    try:
        digests = make(Path.cwd(), Path("dist"))
    except UsageError as error:
        sys.exit(str(error))
    for name, digest in digests.items():
        print(f"{digest}  dist/{name}")
