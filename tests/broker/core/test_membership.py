"""Joining, donating, reading and coming back, in the core alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_broker.core.events import Malformed, Received
from diloco_broker.core.state.model_source import InitialModel
from diloco_broker.core.state.uploads import first_window, upload_window
from diloco_broker.core.state.versions import MAX_OBSERVERS
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import (
    Chunk,
    Control,
    Credit,
    Error,
    Heartbeat,
    Join,
    Notice,
    Pull,
    Purpose,
    Push,
    Rejoin,
    Released,
    Result,
    Standing,
    Welcome,
)
from diloco_protocol.version import Counted, Ledger, VersionId
from kit.core_harness import RUN, Stage, a_config, a_manifest, a_stage
from kit.noted_tensors import CHUNK_ELEMENTS, Payload


def test_welcome_hands_out_the_configuration() -> None:
    stage = a_stage(workers=2, sync_every=40)
    a = stage.worker("a").joins()
    welcome = a.got(Welcome)
    assert welcome.config.sync_every == 40
    assert welcome.epoch == stage.state.epoch


def test_first_worker_is_asked_for_its_parameters() -> None:
    stage = a_stage()
    a = stage.worker("a").joins()
    b = stage.worker("b").joins()
    assert [n.what for n in a.all(Notice)] == ["donate"]
    assert not b.all(Notice)
    stage.provide()
    assert stage.version().counter == 0


def test_next_worker_is_asked_when_the_donor_dies_half_way() -> None:
    stage = a_stage()
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    b.pulls()
    push = Push(a.token(), 7, 0, 3, "fp32", purpose=Purpose.DONATION)
    a.sends(push)
    a.push_id = 7
    a.delivers([0, 1])
    a.dies()
    assert [n.what for n in b.all(Notice) if n.what != "alive"] == ["donate"]
    stage.provide()
    assert b.holds() == stage.version()
    assert stage.expected == {"b"}


def test_donor_that_reconnects_resumes_its_donation() -> None:
    stage = a_stage()
    a = stage.worker("a").joins()
    push = Push(a.token(), 7, 0, 3, "fp32", purpose=Purpose.DONATION)
    a.sends(push)
    a.push_id = 7
    a.delivers([0, 1])
    a.loses_connection()
    a.joins()
    a.sends(replace(push, session=a.token()))
    a.delivers([2])
    assert stage.version().counter == 0


def test_parameters_of_a_newcomer_are_never_taken_once_there_are_some() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    before = stage.version()
    b = stage.worker("b").joins()
    assert not b.all(Notice)
    b.sends(Push(b.token(), 7, 0, 3, "fp32", purpose=Purpose.DONATION))
    assert b.error().code == "not_allowed"
    assert stage.version() == before
    assert not a.all(Error)


def test_broker_that_lost_everything_takes_up_the_run_of_a_worker() -> None:
    stage = a_stage(workers=1)
    held = VersionId(RUN, 12, 99)
    a = stage.worker("a").joins()  # a fresh worker is here first, but does not donate yet
    a.leaves()
    b = stage.worker("b").joins(run=RUN, versions=(held,))
    ledger = Ledger().with_push("b", 5, Bitmap.full(3))
    b.sends(Push(b.token(), 7, 0, 3, "fp32", base=held, ledger=ledger, purpose=Purpose.DONATION))
    b.push_id = 7
    b.delivers([0, 1, 2])
    assert stage.version() == held
    assert stage.round.number == 12
    assert b.offers(5, base=VersionId(RUN, 11, 98)).standing is Standing.COUNTED


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base": VersionId("not hex", 1, 1)}, "no valid name"),
        ({"base": VersionId(RUN, -1, 1)}, "no valid name"),
        ({"base": VersionId(RUN, 2**63, 1)}, "no valid name"),
        ({"ledger": Ledger({"a": (Counted(1, b"too long"),)})}, "does not fit 3 chunks"),
        ({"chunks": 4}, "has 4 chunks, fragment 0 has 3"),
        ({"wire_dtype": "bf16"}, "must be in fp32"),
    ],
)
def test_donation_that_is_unsound_is_refused_and_another_worker_asked(
    fields: dict[str, Any], words: str
) -> None:
    stage = a_stage(workers=1)
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    push = Push(a.token(), 7, 0, 3, "fp32", purpose=Purpose.DONATION)
    a.sends(replace(push, **fields))
    assert words in a.error().text
    assert [n.what for n in b.all(Notice)] == ["donate"]
    stage.provide()
    assert stage.version().counter == 0


def test_donor_that_delivers_nothing_is_given_up() -> None:
    stage = a_stage(workers=1)
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    for _ in range(8):
        stage.passes(5.0)
        a.beats()
        b.beats()
    assert "donate" in {n.what for n in b.all(Notice)}
    assert "a" in stage.state.members


FROZEN = TensorEntry("table", (3 * CHUNK_ELEMENTS,), "float32", Kind.FROZEN)


def test_nobody_sees_parameters_of_a_donor_that_dies_between_two_fragments() -> None:
    stage = Stage(a_config(1), a_manifest(3, table=FROZEN))
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    for fragment in (0, 1):
        b.sends(Pull(fragment, -1, b.token()))
    a.sends(Push(a.token(), 7, 1, 3, "fp32", purpose=Purpose.DONATION))
    for index in range(3):
        chunk = Chunk(1, index, session=a.session, push_id=7)
        a.sends(chunk, Payload(4 * CHUNK_ELEMENTS), on=a.bulk)
    assert not b.chunks
    a.leaves()
    stage.provide()
    assert len(b.chunks) == 6
    assert {m.version.run for m in b.all(Released)} == {stage.state.model.run}


def test_chunks_of_a_donor_that_left_are_never_placed() -> None:
    stage = a_stage(workers=1, chunks=6, by_hand=True)
    a = stage.worker("a").joins()
    a.sends(Push(a.token(), 7, 0, 6, "fp32", purpose=Purpose.DONATION))
    a.push_id = 7
    a.delivers([0, 1, 2])
    a.leaves()
    smaller = a_manifest(1)
    stage.manifest = smaller
    b = stage.worker("b").joins()
    assert not stage.tensors.queue
    stage.provide()
    assert stage.state.model.manifest == smaller
    b.pulls()
    assert b.holds() == stage.version()


def test_donor_that_returns_with_the_same_push_begins_anew() -> None:
    stage = a_stage(workers=1, by_hand=True)
    a = stage.worker("a").joins()
    push = Push(a.token(), 7, 0, 3, "fp32", purpose=Purpose.DONATION)
    a.push_id = 7
    for _ in range(2):
        a.sends(replace(push, session=a.token()))
        a.delivers([0, 1])
        a.leaves()
        a.joins(session=None)
    a.sends(replace(push, session=a.token()))
    a.delivers([0, 1, 2])
    stage.work()
    assert stage.version().counter == 0


def test_version_that_a_worker_holds_comes_before_the_model_file() -> None:
    stage = Stage(a_config(1), initial=InitialModel({"weight": (12,)}))
    held = VersionId(RUN, 5, 3)
    a = stage.worker("a").joins(run=RUN, versions=(held,))
    a.sends(Push(a.token(), 7, 0, 3, "fp32", held, purpose=Purpose.DONATION))
    a.push_id = 7
    a.delivers([0, 1, 2])
    assert stage.version() == held
    assert stage.said("not the model file's")


def test_restarted_broker_waits_for_all_and_takes_the_newest_version() -> None:
    stage = a_stage(workers=2)
    a = stage.worker("a").joins(run=RUN, versions=(VersionId(RUN, 3, 1),))
    assert not a.all(Notice)
    b = stage.worker("b").joins(run=RUN, versions=(VersionId(RUN, 4, 2),))
    assert [n.what for n in b.all(Notice)] == ["donate"]
    assert not a.all(Notice)


def test_restarted_broker_waits_no_longer_than_recover_wait() -> None:
    stage = a_stage(workers=2, recover_wait=4.0)
    a = stage.worker("a").joins(run=RUN, versions=(VersionId(RUN, 3, 1),))
    stage.passes(3.5)
    assert "donate" not in {n.what for n in a.all(Notice)}
    stage.passes(1.0)
    assert "donate" in {n.what for n in a.all(Notice)}


def test_worker_of_another_run_is_refused() -> None:
    stage = a_stage()
    stage.joined("a")
    b = stage.worker("b").joins(run="ffffffffffffffff")
    assert (b.error().code, b.error().retry) == ("run_differs", False)


def test_model_that_differs_is_refused_with_the_differences() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    other = Manifest(
        (
            TensorEntry("weight", (5, 2), "float32", Kind.TRAINABLE),
            TensorEntry("bias", (3,), "float32", Kind.TRAINABLE),
        )
    )
    b = stage.worker("b").joins(manifest=other)
    assert b.error().code == "model_differs"
    assert "weight is shaped [5, 2] instead of [12]" in b.error().text
    assert "an extra bias float32[3] trainable" in b.error().text
    a.pushes(1)
    stage.joined("c")[0].pushes(2)
    assert stage.version().counter == 1


def test_model_file_is_compared_with_the_first_worker() -> None:
    stage = Stage(a_config(1), initial=InitialModel({"weight": (12,), "other": (1,)}))
    a = stage.worker("a").joins()
    assert "the file has an extra other" in a.error().text
    stage = Stage(a_config(1), initial=InitialModel({"weight": (12,)}))
    a = stage.worker("a").joins()
    assert not a.all(Notice), "nobody is asked for parameters"
    assert stage.version().counter == 0


def test_worker_that_asks_for_another_configuration_is_refused_naming_both() -> None:
    stage = a_stage(sync_every=100)
    a = stage.worker("a").joins(wants={"fragment_sync_delay": 5})
    assert "fragment_sync_delay=5, the run has fragment_sync_delay=0" in a.error().text
    assert len(stage.state.members) == 0
    assert not stage.worker("b").joins(wants={"sync_every": 100}).all(Error)


def test_second_worker_with_the_same_id_is_refused_once_the_first_shows_life() -> None:
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    twin = stage.worker("a").joins()
    assert (twin.error().code, twin.error().retry) == ("id_taken", True)
    assert a.got(Notice).what == "ping"
    stage.passes(0.1)
    a.beats()
    twin.joins()
    assert (twin.error().code, twin.error().retry) == ("id_taken", False)
    a.pushes(1)
    assert stage.version().counter == 1


def test_restarted_worker_takes_its_place_when_the_first_is_gone() -> None:
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    stage.gone |= {a.control, a.bulk}  # killed: nobody knows yet
    twin = stage.worker("a").joins()
    assert twin.error().retry
    stage.passes(1.2)
    twin.joins()
    assert twin.last(Welcome) is not None
    assert len(stage.state.members) == 1


def test_heartbeat_is_answered_and_its_figures_are_kept() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    a.sends(Heartbeat(a.token(), step=17, inner_step=3, loss=2.5, steps_per_s=4.0))
    assert a.got(Notice).what == "alive"
    figures = stage.state.members.named("a").figures
    assert (figures.step, figures.inner_step, figures.loss, figures.steps_per_s) == (
        17,
        3,
        2.5,
        4.0,
    )


def test_message_on_another_connection_than_the_session_s_is_answered_with_rejoin() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    elsewhere = stage.route()
    a.sends(Heartbeat(a.token(), 1), on=elsewhere)
    assert [type(m) for m in stage.inbox[elsewhere]] == [Rejoin]


def test_unreadable_message_costs_its_sender_an_error_and_a_counter() -> None:
    stage = a_stage()
    route = stage.route()
    stage.happens(Malformed(route, "bad_header", "The header is not a msgpack map."))
    assert stage.state.totals.malformed == 1
    assert stage.inbox[route] == [Error("bad_header", "The header is not a msgpack map.")]


def test_reader_gets_no_more_chunks_than_it_has_credit_for() -> None:
    stage = a_stage(chunks=10)
    stage.joined("a")
    eye = stage.route()
    stage.happens(Received(eye, Pull(0, credit=3)))
    assert len(stage.received[eye]) == 3
    stage.happens(Received(eye, Credit(2)))
    assert [chunk.index for chunk, _ in stage.received[eye]] == [0, 1, 2, 3, 4]


def test_pull_that_overtakes_the_first_credit_is_served_after_it() -> None:
    stage = a_stage()
    stage.joined("a")
    b = stage.worker("b")
    b.control, b.bulk = stage.route(), stage.route()
    b.sends(Join("b", stage.manifest))
    welcome = b.got(Welcome)
    b.session = welcome.session
    b.pulls()
    assert not b.chunks
    b.sends(Credit(8, b.token()), on=b.bulk)
    assert b.holds() == stage.version()


def test_observer_that_waits_gets_the_next_version() -> None:
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    eye = stage.route()
    stage.happens(Received(eye, Pull(0, after=0, credit=100)))
    assert eye not in stage.received
    a.pushes(1)
    assert [
        m.version.counter for m in [m for m in stage.inbox[eye] if isinstance(m, Released)]
    ] == [1]
    assert len(stage.received[eye]) == 3


def versions_read(stage: Stage, route: bytes) -> list[int]:
    """Counters of the versions that the chunks are of which came to this reader."""
    return [chunk.version.counter for chunk, _ in stage.received[route] if chunk.version]


def kept(stage: Stage) -> list[int]:
    return [each.version.counter for each in stage.core.state.versions[0].old]


def test_reader_that_has_begun_gets_its_version_whole_however_many_are_released() -> None:
    """A link that is slower than the rounds would have none otherwise."""
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    eye = stage.route()
    stage.happens(Received(eye, Pull(0, credit=1)))
    for number in range(1, 6):
        a.pushes(number)
    assert kept(stage) == [0]
    stage.happens(Received(eye, Credit(8)))
    assert versions_read(stage, eye) == [0, 0, 0]
    assert kept(stage) == [], "nobody reads it any more"
    stage.happens(Received(eye, Pull(0, after=0, credit=8)))
    assert versions_read(stage, eye)[3:] == [5, 5, 5]


def test_reader_that_has_not_begun_is_moved_to_the_newer_version() -> None:
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    eye = stage.route()
    stage.happens(Received(eye, Pull(0)))
    a.pushes(1)
    assert kept(stage) == []
    stage.happens(Received(eye, Credit(8)))
    assert versions_read(stage, eye) == [1, 1, 1]


def test_slow_readers_keep_no_more_than_two_old_versions_alive() -> None:
    """Whoever is slower still is moved, until it is their turn."""
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    eyes = [stage.route() for _ in range(4)]
    for number, eye in enumerate(eyes, start=1):
        stage.happens(Received(eye, Pull(0, credit=1)))
        a.pushes(number)
    assert kept(stage) == [0, 1]
    stage.happens(Received(eyes[0], Credit(8)))
    assert kept(stage) == [1]
    stage.core.state.versions.forget(eyes[1])
    assert kept(stage) == []
    for eye in eyes[2:]:
        stage.happens(Received(eye, Credit(1)))
    a.pushes(5)
    assert kept(stage) == [4], "both that were moved have begun with it"
    for eye in eyes[2:]:
        stage.happens(Received(eye, Credit(8)))
        assert versions_read(stage, eye)[-3:] == [4, 4, 4]


def test_broken_download_resumes_where_it_stopped() -> None:
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    a.loses_connection()
    a.joins()
    held = bytes([0b011])
    a.sends(Pull(0, -1, a.token(), held_version=stage.version(), held=held))
    assert [chunk.index for chunk, _ in a.chunks] == [2]


def test_observers_that_are_gone_make_room() -> None:
    stage = a_stage(workers=1)
    (a,) = stage.joined("a")
    for _ in range(MAX_OBSERVERS):
        route = stage.route()
        stage.happens(Received(route, Pull(0, credit=8)))
        stage.gone.add(route)
    stage.passes(11.0)
    a.beats()
    late = stage.route()
    stage.happens(Received(late, Pull(0, credit=8)))
    assert len(stage.received[late]) == 3


def test_too_many_observers_are_refused() -> None:
    stage = a_stage()
    stage.joined("a")
    routes = [stage.route() for _ in range(MAX_OBSERVERS + 1)]
    for route in routes:
        stage.happens(Received(route, Pull(0, after=0)))
    assert isinstance(stage.inbox[routes[-1]][-1], Error)
    assert routes[-2] not in stage.inbox


def test_manifest_is_open_to_observers() -> None:
    stage = a_stage()
    eye = stage.route()
    stage.happens(Received(eye, Control("manifest", 4)))
    assert stage.inbox[eye][-1] == Result(
        4, False, "The broker has no model yet; the first worker that joins brings it."
    )
    stage.joined("a")
    stage.happens(Received(eye, Control("manifest", 5)))
    result = stage.inbox[eye][-1]
    assert isinstance(result, Result)
    assert result.data["manifest"]["entries"][0]["name"] == "weight"


def test_frozen_parameters_and_buffers_have_their_places() -> None:
    manifest = a_manifest(
        2,
        mean=TensorEntry("mean", (3,), "float32", Kind.BUFFER),
        count=TensorEntry("count", (), "int64", Kind.BUFFER),
        table=TensorEntry("table", (CHUNK_ELEMENTS + 1,), "bfloat16", Kind.FROZEN),
    )
    stage = Stage(a_config(1), manifest)
    stage.joined("a")
    trained, frozen = (each.layout for each in stage.state.versions.fragments)
    assert [span.segment.value for span in trained.spans] == [
        "parameters",
        "parameters",
        "buffers",
        "integers",
    ]
    assert [span.elements for span in frozen.spans] == [CHUNK_ELEMENTS, 1]
    assert stage.version(1).counter == 0


@pytest.mark.parametrize("field", ["extra", "wants"])
def test_nested_values_where_displays_show_them_are_refused(field: str) -> None:
    nested: Any = 1
    for _ in range(900):
        nested = (nested,)
    stage = a_stage()
    a = stage.worker("a").joins(**{field: {"x": nested}})
    assert "texts, numbers" in a.error().text


def test_window_is_shared_among_many_workers() -> None:
    workers = (0, 1, 2, 4, 8, 16, 32, 500)
    assert [first_window(n) for n in workers] == [6, 6, 6, 4, 2, 2, 2, 2]
    assert [upload_window(n) for n in workers] == [16, 16, 16, 16, 8, 4, 2, 2]
