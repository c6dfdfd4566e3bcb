"""Joining, seeding and coming back, in the core alone."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_broker.core.rounds.uploads import first_window, upload_window
from diloco_broker.core.versions.record import InitialModel
from diloco_protocol import messages
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.version import Counted, Ledger, VersionId
from kit.core_harness import RUN, Stage, a_config, a_manifest, a_run, a_stage, alone, layered
from kit.noted_tensors import CHUNK_ELEMENTS


def test_next_worker_is_asked_when_the_seed_worker_dies_half_way() -> None:
    stage = a_stage()
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    b.pulls()
    a.seeds(indexes=[0, 1])
    a.dies()
    assert b.asked_for == [0]
    stage.provide()
    assert b.holds() == stage.version()
    assert stage.expected == {"b"}


def test_parameters_of_a_newcomer_are_never_taken_once_there_are_some() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    before = stage.version()
    b = stage.worker("b").joins()
    assert not b.all(messages.Notice)
    b.seeds(indexes=[])
    assert b.error().code == "not_allowed"
    assert stage.version() == before
    assert not a.all(messages.Error)


@pytest.mark.parametrize(
    "fields",
    [
        {"base": VersionId("not hex", 1, 1)},
        {"base": VersionId(RUN, -1, 1)},
        {"base": VersionId(RUN, 2**63, 1)},
        {"ledger": Ledger({"a": (Counted(1, b"too long"),)})},
        {"chunks": 4},
        {"wire_dtype": "bf16"},
    ],
)
def test_invalid_seeding_is_refused_and_another_worker_asked(fields: dict[str, Any]) -> None:
    stage = a_stage(workers=1)
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    push = messages.Push(a.token(), 7, 0, 3, "fp32", purpose=messages.Purpose.SEEDING)
    a.sends(replace(push, **fields))
    assert a.error().push_id == 7
    assert b.asked_for == [0]
    stage.provide()
    assert stage.version().counter == 0


FROZEN = TensorEntry("table", (3 * CHUNK_ELEMENTS,), "float32", Kind.FROZEN)


def test_parameters_of_a_seed_worker_that_dies_between_fragments_are_not_sent() -> None:
    stage = Stage(a_config(1), a_manifest(3, table=FROZEN))
    a, b = stage.worker("a").joins(), stage.worker("b").joins()
    for fragment in (0, 1):
        b.sends(messages.Pull(fragment, -1, b.token()))
    a.seeds(1)
    assert not b.chunks
    a.leaves()
    stage.provide()
    assert len(b.chunks) == 6
    assert {m.version.run for m in b.all(messages.Released)} == {stage.version().run}


def test_chunks_of_a_seed_worker_that_left_are_never_placed() -> None:
    stage = a_stage(workers=1, chunks=6, by_hand=True)
    a = stage.worker("a").joins()
    a.seeds(indexes=[0, 1, 2])
    a.leaves()
    smaller = a_manifest(1)
    stage.manifest = smaller
    b = stage.worker("b").joins()
    assert not stage.tensors.queue
    stage.provide()
    assert len(stage.counted()) == 1
    b.pulls()
    assert b.holds() == stage.version()


def test_seed_worker_that_returns_with_the_same_push_starts_again() -> None:
    stage = a_stage(workers=1, by_hand=True)
    a = stage.worker("a").joins()
    for _ in range(2):
        a.seeds(indexes=[0, 1])
        a.leaves()
        a.joins(session=None)
    a.seeds()
    stage.work()
    assert stage.version().counter == 0


def test_model_that_differs_is_refused_with_the_differences() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    shapes = {"weight": (5, 2), "bias": (3,)}
    entries = (TensorEntry(name, at, "float32", Kind.TRAINABLE) for name, at in shapes.items())
    other = Manifest(tuple(entries))
    b = stage.worker("b").joins(manifest=other)
    assert b.error().code == "model_differs"
    assert "weight" in b.error().text and "bias" in b.error().text
    a.pushes(1)
    stage.joined("c")[0].pushes(2)
    assert stage.version().counter == 1


def test_model_file_is_compared_with_the_first_worker() -> None:
    stage = Stage(a_config(1), initial=InitialModel({"weight": (12,), "other": (1,)}))
    a = stage.worker("a").joins()
    assert a.error().code == "model_differs"
    stage = Stage(a_config(1), initial=InitialModel({"weight": (12,)}))
    a = stage.worker("a").joins()
    assert not a.all(messages.Notice), "no worker is asked for parameters"
    assert stage.version().counter == 0


def test_second_worker_with_the_same_id_is_refused_once_the_first_shows_life() -> None:
    stage, a = alone()
    twin = stage.worker("a").joins()
    assert (twin.error().code, twin.error().retry) == ("id_taken", True)
    assert a.got(messages.Notice).what == "ping"
    stage.passes(0.1)
    a.beats()
    twin.joins()
    assert (twin.error().code, twin.error().retry) == ("id_taken", False)
    a.pushes(1)
    assert stage.version().counter == 1


@pytest.mark.parametrize("is_noticed", [True, False])
def test_worker_whose_welcome_was_lost_is_welcomed_again_at_once(is_noticed: bool) -> None:
    """It has no session token; whether or not the broker has noticed that its connection broke."""
    stage = a_stage(workers=1, disconnect_grace=30.0)
    a = stage.worker("a").joins(voter=7)
    lost = a.session
    if is_noticed:
        a.loses_connection()
    a.joins(session=None, voter=7)
    assert a.session != lost
    stage.provide()
    a.pushes(1)
    assert stage.version().counter == 1


def test_process_with_another_voter_number_has_to_wait_until_the_first_is_gone() -> None:
    stage = a_stage(workers=1, disconnect_grace=30.0)
    a = stage.worker("a").joins(voter=7)
    a.loses_connection()
    twin = stage.worker("a").joins(voter=8)
    assert (twin.error().code, twin.error().retry) == ("id_taken", True)
    stage.passes(30.1)
    assert twin.joins(voter=8).last(messages.Welcome) is not None


def test_heartbeat_is_answered_and_its_figures_are_kept() -> None:
    stage = a_stage()
    (a,) = stage.joined("a")
    told: dict[str, Any] = {"step": 17, "inner_step": 3, "loss": 2.5, "steps_per_s": 4.0}
    a.sends(messages.Heartbeat(a.token(), **told))
    assert a.got(messages.Notice).what == "alive"
    assert stage.row("a").items() >= told.items()


def test_message_of_no_session_or_on_another_connection_than_its_own_only_gets_rejoin() -> None:
    stage, a = alone()
    for session in (a.token(), b"x" * 16):
        for message in (
            messages.Heartbeat(session, 1),
            messages.Push(session, 1, 0, 3, "fp32", a.base),
        ):
            elsewhere = stage.route()
            a.sends(message, on=elsewhere)
            assert [type(m) for m in stage.inbox[elsewhere]] == [messages.Rejoin]
    assert not stage.round.contributions


NESTED: Any = 1
for _ in range(900):
    NESTED = (NESTED,)


@pytest.mark.parametrize(
    ("field", "value"), [("extra", NESTED), ("wants", NESTED), ("extra", "y" * 5000)]
)
def test_values_that_displays_cannot_show_are_refused(field: str, value: Any) -> None:
    a = a_stage().worker("a").joins(**{field: {"x": value}})
    assert a.last(messages.Welcome) is None and field in a.error().text


def test_window_is_shared_among_many_workers() -> None:
    workers = (0, 1, 2, 4, 8, 16, 32, 500)
    assert [first_window(n) for n in workers] == [6, 6, 6, 4, 2, 2, 2, 2]
    assert [upload_window(n) for n in workers] == [16, 16, 16, 16, 8, 4, 2, 2]


# The share of the data that a worker keeps while others come and go.


def share(stage: Stage, worker_id: str) -> tuple[int | None, int | None]:
    welcome = stage.puppets[worker_id].got(messages.Welcome)
    return welcome.shard, welcome.num_shards


def test_workers_get_the_lowest_free_slots_of_as_many_as_the_run_is_planned_for() -> None:
    stage = a_stage(3)
    stage.joined("a", "b")
    assert [share(stage, "a"), share(stage, "b")] == [(0, 3), (1, 3)]
    stage.joined("c", "one more")
    assert [share(stage, "c"), share(stage, "one more")] == [(2, 3), (3, 4)]


def test_returning_worker_gets_its_slot_back_and_a_newcomer_the_one_that_was_free_longest() -> None:
    stage, (a, b, _) = a_run("a", "b", "c", min_workers=1)
    a.dies()
    (a,) = stage.joined("a")
    assert share(stage, "a") == (0, 3)
    b.dies()
    a.dies()
    stage.joined("d", "e")
    assert [share(stage, "d"), share(stage, "e")] == [(1, 3), (0, 3)]


def test_slots_survive_a_restart_in_any_order_of_joins() -> None:
    stage, _ = a_run("a", "b", save_dir="run")
    held = stage.holdings()
    later = stage.restarted()
    later.worker("b").comes_with(held)
    later.worker("a").comes_with(held)
    assert [share(later, "a"), share(later, "b")] == [(0, 2), (1, 2)]


# What a worker may have for itself, and what it is refused.


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worker_may_have_a_smaller_h_of_its_own(mode: str) -> None:
    fields: dict[str, Any] = {"num_fragments": 2, "fragment_sync_delay": 3}
    stage = a_stage(workers=2, mode=mode, sync_every=100, **fields)
    a = stage.worker("a").joins(wants={"sync_every": 8})
    assert a.last(messages.Welcome) is not None
    stage.worker("b").joins()
    assert stage.column("sync_every") == {"a": 8, "b": 100}
    c = stage.worker("c").joins(wants={"sync_every": 7})
    assert c.error().code == "config_differs"


def test_larger_h_is_refused_where_the_others_would_wait() -> None:
    stage = a_stage(workers=2, sync_every=100)
    a = stage.worker("a").joins(wants={"sync_every": 101})
    assert a.error().code == "config_differs"
    assert "101" in a.error().text and "100" in a.error().text
    free = a_stage(workers=2, mode="async", sync_every=100)
    assert free.worker("a").joins(wants={"sync_every": 101}).last(messages.Welcome) is not None
    assert free.column("sync_every") == {"a": 101}


@pytest.mark.parametrize("asked", [0, -1, 2.5, True, "8", 1e300, 2**62])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_h_that_is_not_a_number_of_steps_is_refused(mode: str, asked: Any) -> None:
    stage = a_stage(workers=2, mode=mode, sync_every=100)
    assert stage.worker("a").joins(wants={"sync_every": asked}).error().code == "config_differs"


def test_shorter_cycle_of_equal_weight_is_warned_of() -> None:
    stage = a_stage(workers=2, sync_every=100)
    a = stage.worker("a").joins(wants={"sync_every": 40})
    (said,) = stage.said("--weight-by")
    assert "40" in said and "100" in said
    a.loses_connection()
    a.joins(wants={"sync_every": 40}, session=a.session)
    assert len(stage.said("--weight-by")) == 1
    weighed = a_stage(workers=2, sync_every=100, weight_by="tokens")
    weighed.worker("a").joins(wants={"sync_every": 40})
    assert not weighed.said("--weight-by")


def test_names_of_wrappers_make_no_other_model() -> None:
    """A run whose first workers were of an earlier release, which kept them, goes on with newer ones."""
    plain = layered(2)
    named = [replace(each, name=f"module.{each.name}") for each in plain.entries]
    stage = a_stage(workers=2)
    stage.worker("a").joins(manifest=Manifest(tuple(named)))
    stage.worker("b").joins(manifest=plain)
    assert stage.here == {"a", "b"}
    other = Manifest(tuple(reversed(plain.entries)))
    assert stage.worker("c").joins(manifest=other).error().code == "model_differs"
