"""The log's line for pushes that have counted, and the warning where nothing is learnt."""

from __future__ import annotations

from diloco_protocol import Ledger, RunConfig
from diloco_protocol.messages import Push, Released
from diloco_worker.core.sync.metrics import SyncLines
from diloco_worker.core.sync.news import Arrival
from kit.boundary_harness import Trainer
from kit.session_harness import version


def push(push_id: int, steps: int) -> Push:
    return Push(b"", push_id, 0, 1, "fp32", version(0), steps=steps, norm=0.5)


def arrival(counter: int) -> Arrival:
    return Arrival(Released(0, version(counter), Ledger(), round=counter - 1), frozenset(), None)


def test_at_a_fast_pace_a_line_tells_of_all_syncs_of_a_second() -> None:
    now = 0.0
    told = SyncLines(lambda: now, 100.0)
    said = []
    for counter in range(1, 31):
        told.counted(push(counter, 5), arrival(counter), 2, 2)
        said.append(told.line(100.0 + counter))
        now += 0.125
    lines = [line for line in said if line is not None]
    assert len(lines) == 4
    assert "waited 1.0 s." in lines[0], "what a previous life has waited is no part of it"
    assert "version 9 (round 8)" in lines[1]
    assert lines[1].endswith("waited 8.0 s; and 7 more since the last line.")
    assert "version 30" in str(told.line(130.0, at_once=True))
    assert told.line(140.0, at_once=True) is None, "nothing is said twice"


def test_fragment_that_does_not_move_is_named_until_it_does() -> None:
    training = Trainer(RunConfig(mode="sync", sync_every=4, num_fragments=2, chunk_elements=10))
    training.begins()
    # Of fragments 0 and 1 in turn, the norm of the push, and the warnings up to then.
    norms = [1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1, None]
    warned = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    for counter, (norm, warnings) in enumerate(zip(norms, warned, strict=True), start=1):
        training.norm = norm
        training.steps(2)
        sent = training.pushes[-1]
        training.receives(counter, fragment=sent.fragment, counted=sent)
        assert training.said.count("was all zeros twice in a row") == warnings
    assert "of fragment 1 was all zeros" in training.said
