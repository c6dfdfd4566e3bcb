"""Whatever a member or a stranger says, the core never raises: it answers, or ignores it.

Well-formed messages with unexpected values, in a run that is going on: from a member with a valid
session, in any order. The loop would end with an exception of the core, and the run with it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from stage import CHUNK_ELEMENTS, RUN, Payload, Stage, a_stage

from diloco_broker.events import Received, Tick
from diloco_broker.feed import EventLog, LoopFigures, snapshot
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import (
    KINDS,
    Message,
    Purpose,
    RunConfig,
    Standing,
    encode,
)
from diloco_protocol.version import Counted, Ledger, VersionId

SIZES = [1, 4 * CHUNK_ELEMENTS, 4096]  # of payloads: one of them is right
SESSION = object()  # stands for the member's own token
numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 7, 2**63, 2**64 - 1])
versions = st.builds(VersionId, st.sampled_from([RUN, "", "x"]), numbers, numbers)
ledgers = st.dictionaries(
    st.sampled_from(["a", "b", ""]),
    st.lists(
        st.builds(Counted, numbers, st.sampled_from([None, b"", b"\x01", b"\xff\xff"])), max_size=2
    ).map(tuple),
    max_size=2,
).map(Ledger)
tensors = st.builds(
    TensorEntry,
    st.sampled_from(["weight", "x", ""]),
    st.sampled_from([(12,), (), (0,), (-1,), (2**40, 2**40), (3, 4)]),
    st.sampled_from(["float32", "int64", "complex64", ""]),
    st.sampled_from(Kind),
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    "int": numbers,
    "float": st.floats(),
    "str": st.sampled_from(["a", "b", "", "fp32", "bf16", "status", "manifest", "x" * 500, "\x1b"]),
    "bytes": st.sampled_from([b"", b"\x05", b"\xff", b"x" * 16]),
    "bool": st.booleans(),
    "Purpose": st.sampled_from(Purpose),
    "Standing": st.sampled_from(Standing),
    "VersionId": versions,
    "Ledger": ledgers,
    "Manifest": st.lists(tensors, max_size=2).map(lambda t: Manifest(tuple(t))),
    "RunConfig": st.just(RunConfig("sync", 1)),
    "Mapping[str, Any]": st.dictionaries(
        st.sampled_from(["sync_every", "__class__", ""]), st.none() | numbers | st.floats()
    ),
    "tuple[int, ...]": st.lists(numbers, max_size=3).map(tuple),
    "tuple[VersionId | None, ...]": st.lists(st.none() | versions, max_size=2).map(tuple),
}


def field_values(annotation: str) -> st.SearchStrategy[Any]:
    if annotation in BY_TYPE:
        return BY_TYPE[annotation]
    return st.none() | BY_TYPE[annotation.removesuffix(" | None")]


def messages() -> st.SearchStrategy[Message]:
    strategies = []
    for record in KINDS.values():
        fields = {f.name: field_values(str(f.type)) for f in dataclasses.fields(record)}
        if "session" in fields:  # mostly a member: strangers get no further than `rejoin`
            fields["session"] = st.just(SESSION) | fields["session"]
        strategies.append(st.builds(record, **fields))
    return st.one_of(strategies)


def a_run() -> Stage:
    """A run with two members: a is half-way through a push, b has not begun."""
    stage = a_stage(workers=2)
    a, _ = stage.joined("a", "b")
    a.begins(1)
    a.delivers([0])
    return stage


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(messages(), st.booleans(), st.sampled_from(SIZES)), max_size=12),
    st.booleans(),
)
def test_no_message_makes_the_core_raise(
    said: list[tuple[Message, bool, int]], has_parameters: bool
) -> None:
    stage = a_run() if has_parameters else a_stage(workers=1)
    member = stage.worker("a") if not has_parameters else None
    if member is not None:
        member.joins()
    known = stage.state.members.named("a")
    assert known is not None
    for drawn, on_bulk, size in said:
        here = stage.state.members.named("a") or known
        fields = vars(drawn)
        if fields.get("session") is SESSION:
            fields = {**fields, "session": here.session}
        message = type(drawn)(**fields)
        route = (here.bulk if on_bulk else here.control) or stage.route()
        stage.happens(Received(route, message, Payload(size)))
    stage.now += 0.5
    stage.happens(Tick())
    for inbox in stage.inbox.values():
        for answer in inbox:
            encode(answer)
    figures = LoopFigures("tcp://127.0.0.1:1", 0.0, 0.0, 0)
    shown = snapshot(stage.state, EventLog(), figures, 1, stage.now)
    json.dumps(shown, allow_nan=False)
    assert len(json.dumps(shown)) < 20_000, "a message swamps the displays"
