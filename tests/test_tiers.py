"""Is a test that is too expensive for its tier found, whatever process spends the time?"""

import subprocess
import sys
from pathlib import Path

from kit import tiers
from kit.process_kit import Processes

BUSY = "import time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass"


def test_time_of_ended_processes_counts(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    processes.run(str(tmp_path / "busy.py")).ends()  # it starts the fork server
    at_first = tiers.cpu_seconds()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    with_child = tiers.cpu_seconds()
    assert with_child - at_first >= 0.3
    assert processes.run(str(tmp_path / "busy.py")).ends() == 0
    assert tiers.cpu_seconds() - with_child >= 0.3


def test_dear_tests_are_named_the_dearest_first() -> None:
    limit = tiers.MARGIN * tiers.TEST_CPU_S
    found = tiers.faults({"cheap": limit - 0.1, "dear": limit + 0.1, "dearer": 9.0})
    assert [each.split()[0] for each in found] == ["dearer", "dear"]


def test_all_together_may_not_take_longer_than_their_tier() -> None:
    most = int(tiers.QUICK_CPU_S)
    assert tiers.faults({str(number): 1.0 for number in range(most)}) == []
    (fault,) = tiers.faults({str(number): 1.0 for number in range(most + 1)})
    assert str(most + 1) in fault
