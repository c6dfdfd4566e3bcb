"""What a round takes of all workers of the run together: `diloco-plan` knows, on the line measured here.

`round_cost` is for this worker alone. Other workers' links and the broker's are not
measured: they are taken to be like this one, and the broker's to be as fast as the slower way of this
one. A planner that cannot be run, or takes too long, is left out: the link was the question.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from diloco_protocol import feed
from diloco_protocol.quantities import estimate_s
from diloco_worker.doctor.examination import Findings
from diloco_worker.doctor.report import Estimate

WITHIN_S = 60.0
USABLE = 0.95  # of a line, that a plan leaves for what is in the frames: that was measured here
STEP_S = 1.0  # where it is not known: what a round takes does not depend on it
COMMAND = "diloco_tools.plan"  # a tool, which a worker does not import


@dataclass(frozen=True)
class Planned:
    """Seconds from a push to the new parameters, and the share of time that training has, if known."""

    workers: int
    seconds: float
    utilisation: float | None

    @property
    def sentence(self) -> str:
        trains = ""
        if self.utilisation is not None:
            trains = f", and training has {self.utilisation:.0%} of the time"
        return (
            f"If the lines of the broker and of all {self.workers} workers are like this one, a round "
            f"takes about {estimate_s(self.seconds)}{trains} (diloco-plan)."
        )


def words(
    found: Estimate, status: feed.Snapshot, workers: int, *, with_keys: bool = False
) -> list[str]:
    """The options of `diloco-plan` for the run as it is, on the line that was measured."""
    line, exchange = found.line, found.exchange
    up, down = round(8 * line.up / USABLE), round(8 * line.down / USABLE)
    tau = "auto" if status.fragment_delay_auto else str(status.fragment_sync_delay or 0)
    options = {
        "parameters": exchange.parameters,
        "workers": workers,
        "broker-link": min(up, down),
        "link": f"{up}/{down}",
        "delay": f"{line.round_trip:.6f}s",
        "step-time": f"{max(found.step_time or STEP_S, 1e-6):.6f}s",
        "sync-every": found.sync_every,
        "num-fragments": exchange.fragments,
        "fragment-sync-delay": tau,
        "wire-dtype": found.wire_dtype,
        "reply-dtype": found.reply_dtype,
        "mode": "sync" if status.asynchronous is None else "async",
    }
    said = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    is_whole = exchange.is_whole and status.asynchronous is None
    switches = {"--whole": is_whole, "--keys": with_keys}
    return ["--json", *said, *(name for name, is_on in switches.items() if is_on)]


def plan(findings: Findings, found: Estimate | None) -> Planned | None:
    """Ask the planner. None where there is one worker, or no answer."""
    status = findings.status
    workers = 0 if status is None else status.counts.alive
    if found is None or status is None or workers < 2:
        return None
    asked = words(found, status, workers, with_keys=bool(findings.with_keys))
    command = [sys.executable, "-m", COMMAND, *asked]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True)
        answer = json.loads(run.stdout)
        seconds, share = float(answer["exchange_s"]), float(answer["utilisation"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None
    return Planned(workers, seconds, share if found.step_time is not None else None)
