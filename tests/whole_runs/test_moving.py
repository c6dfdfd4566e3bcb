"""A broker behind a name that comes to mean another address is found there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.paths import KIT


def may_make_namespaces() -> bool:
    words = ["unshare", "--mount", "--net", "true"]
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, check=False, capture_output=True, timeout=20).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_make_namespaces(), reason="no namespaces can be made here")
def test_name_is_looked_up_anew_with_each_connection(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    own = f"ip link set lo up && mount --bind {hosts} /etc/hosts && exec"
    script = f"{own} {sys.executable} {KIT / 'moving_name.py'}"
    words = ["unshare", "--mount", "--net", "sh", "-c", script]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = ["answers at tcp://127.0.0.2:18777", "answers at tcp://127.0.0.3:18777"]
    assert done.stdout.splitlines() == told
