"""Loading the kernels: in the background, from a cache, and never to anybody's harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.kernel_paths import needs_kernels
from kit.paths import ROOT

pytestmark = pytest.mark.timeout(400)
PACKAGES = os.pathsep.join(str(ROOT / name) for name in ("protocol", "broker", "worker"))
ENCODE = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stdout)
from diloco_protocol import kernels
from diloco_protocol.tensors.codecs import ENCODERS
is_ready = kernels.wait(300)
assert ENCODERS["int4"](torch.full((300,), 7.0)).read().tolist() == [7.0] * 300
print("ready" if is_ready else "torch")
"""


def said(script: str, **environment: str) -> list[str]:
    """The lines that a fresh process prints."""
    kept = {name: value for name, value in os.environ.items() if name != "DILOCO_KERNELS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, "PYTHONPATH": PACKAGES, **environment},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow  # a process that loads torch
def test_without_numba_torch_does_the_work_and_one_line_says_so() -> None:
    first, last = said(f"import sys; sys.modules['numba'] = None\n{ENCODE}")
    assert "diloco_protocol.kernels" in first
    assert "numba" in first
    assert last == "torch"


@pytest.mark.slow  # a process that loads torch
def test_only_loading_the_kernels_imports_numba_and_that_can_be_turned_off() -> None:
    modules = "diloco_worker, diloco_broker.tensors.parameters"
    script = f"import sys, {modules}\n{ENCODE}\nprint('numba' in sys.modules)"
    assert said(script, DILOCO_KERNELS="torch") == ["torch", "False"]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the package whose folder for compiled files cannot be made."""
    package = tmp_path / "packages"
    shutil.copytree(
        ROOT / "protocol", package, ignore=shutil.ignore_patterns("__pycache__", "*.md")
    )
    (package / "diloco_protocol" / "kernels" / "__pycache__").touch()
    return package


@needs_kernels
@pytest.mark.slow
def test_where_nothing_can_be_cached_torch_does_the_work(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    home = str(tmp_path / "home")
    *lines, last = said(ENCODE, PYTHONPATH=str(installed), HOME=home, XDG_CACHE_HOME=home)
    assert len(lines) == 1
    assert last == "torch"


@needs_kernels
@pytest.mark.slow  # compiles all kernels
def test_package_that_cannot_be_written_to_is_cached_for_the_user(
    installed: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    found = said(ENCODE, PYTHONPATH=str(installed), HOME=str(home), XDG_CACHE_HOME=str(home))
    assert found == ["ready"]
    assert list(home.rglob("*.nbi"))


@needs_kernels
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_child_that_is_forked_while_they_load_can_import_numba_itself() -> None:
    script = """
import os, signal, time
from diloco_protocol import kernels
kernels.start()
for wait in (0.0, 0.05, 0.2):
    time.sleep(wait)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        import numba
        assert numba.njit(lambda x: x + 1)(1) == 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(kernels.wait(300))
"""
    assert said(script) == ["True"]
