"""Releases: known vulnerabilities fail, a missing network does not; files come out equal twice."""

import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from diloco_lab.release import packages, vulnerabilities
from kit.paths import PACKAGES, ROOT

FOUND = "Name Version ID Fix Versions\nbad  2.0  PYSEC-1 2.1"


def stub(folder: Path, code: int, stdout: str = "", stderr: str = "") -> list[str]:
    """A command in the place of pip-audit; it keeps what it was asked."""
    script = folder / "stub.py"
    script.write_text(
        "import pathlib, sys\n"
        "listed = pathlib.Path(sys.argv[sys.argv.index('--requirement') + 1])\n"
        f"pathlib.Path({str(folder / 'asked.txt')!r}).write_text(listed.read_text())\n"
        f"print({stdout!r})\nprint({stderr!r}, file=sys.stderr)\nsys.exit({code})\n"
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "is_sound", "says"),
    [
        (1, FOUND, "Found 1 known vulnerability", False, "PYSEC-1"),
        (0, "", "No known vulnerabilities found", True, "No known"),
        # No network, or one that answers something else.
        (1, "", "Traceback\nConnectionError: no route", True, "skipped"),
        (1, "", "ERROR: Tip: your network may be blocking this service.", True, "skipped"),
        (1, "", "Traceback\nrequests.exceptions.ReadTimeout: HTTPS", True, "skipped"),
        (1, "", "Traceback\nHTTPError: 503 Server Error", True, "skipped"),
        # pip-audit itself is not what it was taken for.
        (2, "", "unrecognized arguments: --no-deps", False, "make setup"),
        (1, "", "WARNING: http://x\nTraceback\n  connect()\nKeyError: 'y'", False, "KeyError"),
        (1, "", "python: No module named pip_audit", False, "make setup"),
    ],
)
def test_findings_fail_and_data_that_cannot_be_reached_does_not(
    tmp_path: Path, code: int, stdout: str, stderr: str, is_sound: bool, says: str
) -> None:
    found, text = vulnerabilities.look(stub(tmp_path, code, stdout, stderr))
    assert found is is_sound
    assert says in text


def test_pip_audit_that_hangs_is_given_up_and_one_that_is_not_there_fails() -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(100)"]
    assert vulnerabilities.look(hangs, within_s=0.5)[0]
    assert not vulnerabilities.look(["/no/such/pip-audit"])[0]


def test_build_for_one_machine_is_looked_up_as_its_release(tmp_path: Path) -> None:
    info = tmp_path / "torch-2.4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0+cpu\n")
    remains = tmp_path / "gone-1.0.dist-info"
    remains.mkdir()
    found = [Distribution.at(each) for each in (info, remains)]
    assert vulnerabilities.pinned(found) == ["torch==2.4.0"]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="releases are made of a commit")
def test_wheel_and_source_archive_come_out_equal_twice(tmp_path: Path) -> None:
    digests = packages.make(ROOT, tmp_path)
    assert sorted(Path(name).suffix for name in digests) == [".gz", ".whl"]
    (wheel,) = tmp_path.glob("*.whl")
    assert "diloco_broker/core/machine.py" in zipfile.ZipFile(wheel).namelist()


def test_wheel_has_every_module_that_users_need_and_nothing_of_the_lab(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    packages_in_it = {name.partition("/")[0] for name in names}
    assert ("kernels.so" in {Path(name).name for name in names}) == (not wheel.stem.endswith("any"))
    assert packages_in_it == {"diloco_protocol", "diloco_broker", "diloco_worker", "diloco_tools"}
    sources = {
        str(source.relative_to(folder.parent))
        for name, folder in PACKAGES.items()
        for source in folder.rglob("*.py")
        if name in packages_in_it
    }
    assert {name for name in names if name.endswith(".py")} == sources
