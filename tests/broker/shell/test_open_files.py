"""Room for connections, in processes of their own: the limit is a process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from diloco_broker.shell.open_files import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(allow_connections(100), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(300, 4000, 2312), (300, 500, 500), (3000, 4000, 3000)],
    ids=["what is needed", "no more than may be", "never less than there was"],
)
def test_limit_is_raised_for_the_workers_that_may_come(soft: int, hard: int, expected: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert [int(each) for each in said.split()] == [expected, expected, hard]
