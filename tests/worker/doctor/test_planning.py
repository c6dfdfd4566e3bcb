"""What the doctor asks the planner, and what it makes of the answer."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.feed import Counts, Snapshot, parse_snapshot
from diloco_worker.doctor.examination import Findings
from diloco_worker.doctor.planning import plan, words
from diloco_worker.doctor.report import Estimate
from diloco_worker.doctor.round_cost import Exchange, Line, fragment_seconds
from kit.feed_snapshots import frame, status

RATE = 118.75e6  # bytes a second of ours, on a line of 1 Gb/s


def a_run(alive: int, **fields: Any) -> tuple[Findings, Estimate]:
    """A run of a million parameters in two chunks, and a line of 1 Gb/s both ways, 10 ms."""
    snapshot: Snapshot = parse_snapshot(frame(status(**fields)))
    findings = Findings("tcp://10.0.0.1:8512", status=replace(snapshot, counts=Counts(alive)))
    exchange = Exchange(2 * CHUNK_ELEMENTS, 2.0, 4.0, CHUNK_ELEMENTS)
    return findings, Estimate(exchange, Line(RATE, RATE, 0.01), "bf16", "fp32", 500, 0.5)


def asked(findings: Findings, found: Estimate, **more: Any) -> dict[str, str]:
    assert findings.status is not None
    said = iter(words(found, findings.status, findings.status.counts.alive, **more)[1:])
    return {word: next(said, "") for word in said}


def test_the_run_is_asked_for_as_it_is() -> None:
    options = asked(*a_run(5))
    assert options["--link"] == "1000000000/1000000000"
    assert options["--broker-link"] == "1000000000"
    assert options["--parameters"] == str(2 * CHUNK_ELEMENTS)
    assert (options["--workers"], options["--sync-every"]) == ("5", "500")
    assert (options["--wire-dtype"], options["--reply-dtype"]) == ("bf16", "fp32")
    assert (options["--step-time"], options["--delay"]) == ("0.500000s", "0.010000s")


def test_lines_that_are_other_ones_down_and_keys_are_asked_for() -> None:
    findings, found = a_run(2)
    found = replace(found, line=replace(found.line, up=RATE / 10))
    assert findings.status is not None
    said = words(found, findings.status, 2, with_keys=True)
    assert "100000000/1000000000" in said and said[-1] == "--keys"
    # The broker's may be as lopsided, the other way round.
    assert said[said.index("--broker-link") + 1] == "100000000"


def test_planner_answers_and_a_worker_alone_takes_what_the_closed_formula_says() -> None:
    """One worker of two waits as long as for both: their line is twice as busy."""
    findings, found = a_run(2)
    planned = plan(findings, found)
    assert planned is not None and planned.workers == 2
    alone = fragment_seconds(found.exchange, found.line)
    assert 1.3 * alone < planned.seconds < 2.5 * alone
    assert planned.utilisation is not None and 0.99 < planned.utilisation < 1.0


def test_nothing_is_asked_where_there_is_one_worker_or_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the planner was started")

    monkeypatch.setattr(subprocess, "run", never)
    findings, found = a_run(1)
    assert plan(findings, found) is None
    assert plan(a_run(5)[0], None) is None
