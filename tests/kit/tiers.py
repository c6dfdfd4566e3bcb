"""What each tier of the tests may cost: CI and the limits of the workflows follow from these figures."""

import os
import sys
import time
from pathlib import Path

# Seconds of CPU of one test without a mark, and of all of them: two cores for five minutes.
TEST_CPU_S = 1.5
QUICK_CPU_S = 2 * 300
# The first test of its kind in a process pays for imports, and what shares a core slows it down: the
# same test has cost 1.4 s and 3.5 s within a day. So a test fails at this many times its limit.
MARGIN = 2.5
# Marks of what is not in `make test`.
OTHER_TIERS = {"slow", "nightly", "browser", "engine", "integration", "cuda"}
# At most, on two idle cores; a job of a workflow may take twice as long.
MINUTES = {"make test": 5, ".ci/run": 30, "make nightly": 150, "make release": 5, "docker build": 5}

# CPU seconds of the loop below on the machine that the limits were set on, with nothing beside it.
LOOP_S = 0.075


def slowness() -> float:
    """How much slower this machine is at this moment than the one of the limits; at least 1."""
    began = time.process_time()
    for _ in range(5_000_000):
        pass
    return max(1.0, (time.process_time() - began) / LOOP_S)


def cpu_seconds() -> float:
    """Of this process, of its ended children, and of those of its fork server."""
    used = sum(os.times()[:4])
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    stat = Path(f"/proc/{getattr(server, '_forkserver_pid', None)}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        used += (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return used


def faults(costs: dict[str, float]) -> list[str]:
    """What is wrong with these CPU seconds of tests without a mark, the dearest first."""
    found = [
        f"{name} takes {cost:.1f} s of CPU, at most {TEST_CPU_S} without a mark: make it cheaper, "
        "or mark it slow (make test-all) or nightly (make nightly)"
        for name, cost in sorted(costs.items(), key=lambda item: -item[1])
        if cost > MARGIN * TEST_CPU_S
    ]
    if (whole := sum(costs.values())) > QUICK_CPU_S:
        found.append(
            f"make test takes {whole:.0f} s of CPU, at most {QUICK_CPU_S}: make tests cheaper or mark "
            "the dearest slow; `TEST_COSTS=1 make test` lists them"
        )
    return found
