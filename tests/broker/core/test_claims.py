"""Claimed sizes are checked before anything is allocated, and forgotten with their worker."""

from typing import Any

import pytest

from diloco_broker.core.events import Surroundings
from diloco_broker.core.members import run_model
from diloco_broker.core.members.room import bytes_per_parameter
from diloco_broker.core.rounds.streaming import MOST_PUSHES
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import Join, Result, Welcome, decode, encode
from diloco_protocol.records import from_plain
from diloco_protocol.version import Counted, Ledger, VersionId
from kit.core_harness import Puppet, Stage, a_config, a_manifest, a_run, a_stage, alone
from kit.noted_tensors import CHUNK_ELEMENTS


def is_taken(stage: Stage, chunks: int) -> bool:
    return stage.worker("a").joins(manifest=a_manifest(chunks)).last(Welcome) is not None


def test_model_that_is_larger_than_allowed_is_refused_with_both_numbers() -> None:
    stage = a_stage(max_parameters=3 * CHUNK_ELEMENTS)
    assert not is_taken(stage, 4)
    text = stage.puppets["a"].error().text
    assert f"{4 * CHUNK_ELEMENTS:,}" in text and f"{3 * CHUNK_ELEMENTS:,}" in text
    assert "--max-parameters" in text
    assert is_taken(stage, 3)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 12),  # value, momentum, sum
        ({"outer": "sgd"}, 8),
        ({"outer": "dn"}, 16),
        ({"reply_dtype": "bf16"}, 14),
        ({"reply_dtype": "int8"}, 24),  # the copy that workers hold, codes of eight versions
        ({"num_fragments": 4}, 9),  # the sum of one fragment at a time
        ({"workers": 5, "deterministic": True}, 18),  # 5 submissions in bf16 instead of the sum
        ({"workers": 5, "deterministic": True, "wire_dtype": "fp32"}, 28),
        ({"mode": "async", "staging_slots": 3, "outer": "nesterov"}, 14),
    ],
)
def test_bytes_of_a_parameter_follow_from_the_options(options: dict[str, Any], each: int) -> None:
    config = a_config(**{"wire_dtype": "bf16", **options})
    assert bytes_per_parameter(config) == pytest.approx(each, rel=0.01)


def test_model_may_be_as_large_as_there_is_memory_for_and_is_not_measured_again() -> None:
    stage = a_stage(reply_dtype="bf16")
    stage.happens(Surroundings(memory_bytes=8 * CHUNK_ELEMENTS * 14))
    assert not is_taken(stage, 9)
    assert "14.0 bytes" in stage.puppets["a"].error().text
    frozen = TensorEntry("base", (7 * CHUNK_ELEMENTS,), "float32", Kind.FROZEN)
    manifest = a_manifest(5, base=frozen)  # of the frozen ones only the values, 6 bytes each
    assert stage.worker("a").joins(manifest=manifest).last(Welcome) is not None
    stage.happens(Surroundings(memory_bytes=1))
    assert stage.worker("b").joins(manifest=manifest).last(Welcome) is not None


@pytest.mark.parametrize("memory", [None, 1])
def test_model_of_any_size_is_accepted_without_a_bound(memory: int | None) -> None:
    stage = a_stage(max_parameters=None if memory is None else 0)
    stage.happens(Surroundings(memory_bytes=memory))
    assert is_taken(stage, 500)


def test_claim_of_a_dead_worker_is_forgotten() -> None:
    stage = a_stage(1)
    claimant = stage.worker("claimant").joins(manifest=a_manifest(500))
    claimant.seeds(indexes=[0])
    assert stage.tensors.chunks
    claimant.dies()
    stage.passes(2.0)
    shown = stage.shown()
    assert (shown["model"], shown["run"]) == (None, None)
    assert not stage.tensors.chunks and not stage.state.versions.fragments
    (a,) = stage.joined("a")  # brings another model
    a.pushes(1)
    assert stage.version().counter == 1
    assert len(stage.counted()) == 3


def test_workers_are_refused_past_the_number_that_may_be_here() -> None:
    stage = a_stage(2, max_workers=2)
    a, _ = stage.joined("a", "b")
    c = stage.worker("c").joins()
    assert c.last(Welcome) is None
    a.joins()  # back on a new connection
    assert len(stage.here) == 2
    a.leaves()
    assert stage.worker("c").joins().last(Welcome) is not None


def test_long_wants_are_quoted_in_part() -> None:
    stage = a_stage()
    worker = Puppet(stage, "a", control=stage.route())
    wants = {"wire_dtype": "x" * 50_000, "y" * 50_000: 1}
    worker.sends(Join("a", a_manifest(), wants=wants))
    assert len(worker.error().text) < 300
    assert len(stage.logs[-1]) < 400


def test_manifest_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not a_stage().asks("manifest").ok, "no worker has brought one"
    stage, _ = alone()
    stage.asks("manifest")
    monkeypatch.setattr(run_model, "describe", pytest.fail)
    results = [stage.asks("manifest") for _ in range(3)]
    for result in results:
        assert from_plain(Manifest, result.data["manifest"], "manifest") == stage.manifest
        answer = decode(encode(result))
        assert isinstance(answer, Result)
        assert answer.text == result.text
        assert from_plain(Manifest, answer.data["manifest"], "manifest") == stage.manifest
        assert answer.data.keys() == {"manifest", "config", "plan", "pattern"}


def test_pushes_that_a_worker_begins_in_one_round_are_bounded() -> None:
    stage = a_stage(2)
    a, b = stage.joined("a", "b")
    for number in range(3 * MOST_PUSHES):
        a.begins(100 + number)
    assert str(MOST_PUSHES) in a.error().text
    assert len(stage.round.contributions) == MOST_PUSHES
    b.pushes(1)
    a.leaves()
    assert stage.version().counter == 1


def test_ledger_of_a_push_is_not_kept_with_it() -> None:
    stage, (_, b) = a_run("a", "b", rounds=0)
    b.offers(5, ledger=Ledger({f"w{n}": (Counted(n),) for n in range(100)}))
    (contribution,) = stage.round.contributions.values()
    assert contribution.push.ledger is None


def test_versions_of_unknown_fragments_are_ignored() -> None:
    stage = a_stage(1)
    many = tuple(VersionId("00000000000000aa", 2**40, tag) for tag in range(1000))
    worker = stage.worker("a").joins(run="00000000000000aa", versions=many)
    stage.passes(11.0)
    assert len(stage.state.members.named("a").versions) == 2
    assert set(worker.asked_for) <= {0, 1}
